// Chapter 19: all-reduce in one step: each rank adds what all ranks have, so that all get the same bits.
// 第 19 章：一步完成的 all-reduce：每个 rank 把所有 rank 的数相加，且各 rank 得到的每一位都相同。
//
// parts[r] is the address of rank r's n numbers, which this GPU can read. The kernel runs once on each rank, with its
// number in `rank`, and writes sum[i] = (x + the numbers of rank 0, 1, ...)[i]; x is the residual.
// parts[r] 是 rank r 的 n 个数的地址，本 GPU 可以读取。核函数在每个 rank 上各运行一次，rank 是它的编号，
// 写入 sum[i] =（x + rank 0、1、…… 的数）[i]；x 是残差。
//
// Floating-point addition depends on the order: let it not depend on `rank`. 浮点加法与次序有关：次序不要依赖 rank。
//
// Check it with / 检查：  warpbus learn 19.1 --check

__global__ void all_reduce(float *const *parts, const float *x, float *sum, int rank, int ranks, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
}
