// Chapter 9: LayerNorm of rows: y = (x - mean) / sqrt(variance + 1e-5), one block of 128 threads per row.
// 第 9 章：对每一行做 LayerNorm：y = (x - 均值) / sqrt(方差 + 1e-5)，每行一个 128 线程的线程块。
//
// `block_sum` needs a barrier that is missing: it is called twice. Compute the variance from x - mean, in a second pass.
// block_sum 会被调用两次，它少了一个同步。方差请在第二遍里用 x - mean 计算。
//
// Check it with / 检查：  warpbus learn 09.1 --check

__device__ float block_sum(float value) {
    __shared__ float part[4];
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    return part[0] + part[1] + part[2] + part[3];
}

__global__ void layer_norm(const float *x, float *y, int columns) {
    // First the mean, then the mean of the squared differences, then y. 先求均值，再求差的平方的均值，最后写 y。
}
