__device__ float block_sum(float value) {
    __shared__ float part[4];
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
    __syncthreads();  // read by all
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    return part[0] + part[1] + part[2] + part[3];
}

__global__ void layer_norm(const float *x, float *y, int columns) {
    x += blockIdx.x * columns;
    y += blockIdx.x * columns;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < columns; i += 128) sum += x[i];
    const float mean = block_sum(sum) / columns;
    for (int i = threadIdx.x; i < columns; i += 128) squares += (x[i] - mean) * (x[i] - mean);
    const float scale = rsqrtf(block_sum(squares) / columns + 1e-5f);
    for (int i = threadIdx.x; i < columns; i += 128) y[i] = (x[i] - mean) * scale;
}
