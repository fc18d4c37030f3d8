// Chapter 10: C = A B of n x n, with 4 x 4 elements of C per thread in registers. n is a multiple of 32.
// 第 10 章：n x n 的 C = A B，每个线程在寄存器里算 C 的 4 x 4 个元素。n 是 32 的倍数。
//
// A block has 8 x 8 threads and computes 32 x 32 elements, in steps of 8 along k. The tiles are loaded already. A thread
// reads 4 numbers of each tile per k, and does 16 multiply-adds. Choose its rows and columns so that shared memory has no
// bank conflicts, and that stores coalesce: y, y + 8, y + 16, y + 24 and x, x + 8, ... do, 4 y to 4 y + 3 do not.
// 线程块有 8 x 8 个线程，算 32 x 32 个元素，沿 k 每步走 8。读入分块的部分已经写好。对每个 k，一个线程从两个分块各读 4 个数，
// 做 16 次乘加。选择行和列时要让共享内存没有 bank 冲突、写回能合并：取 y、y + 8、y + 16、y + 24 和 x、x + 8……，
// 而不是 4 y 到 4 y + 3。
//
// Check it with / 检查：  warpbus learn 10.1 --check

__global__ void product(const float *a, const float *b, float *c, int n) {
    __shared__ float tile_a[8][36], tile_b[8][32];  // tile_a[k][row], tile_b[k][column]
    const int thread = threadIdx.y * 8 + threadIdx.x, row0 = blockIdx.y * 32, column0 = blockIdx.x * 32;
    float sum[4][4] = {};
    for (int first = 0; first < n; first += 8) {
        for (int i = thread; i < 256; i += 64) tile_a[i % 8][i / 8] = a[(row0 + i / 8) * n + first + i % 8];
        for (int i = thread; i < 256; i += 64) tile_b[i / 32][i % 32] = b[(first + i / 32) * n + column0 + i % 32];
        __syncthreads();
        // For each k of the step: 4 numbers of tile_a, 4 of tile_b, 16 multiply-adds. 每个 k：各取 4 个数，16 次乘加。
        __syncthreads();
    }
    // Store the 16 sums. 写回 16 个和。
}
