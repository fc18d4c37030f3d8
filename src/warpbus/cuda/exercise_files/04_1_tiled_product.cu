// Chapter 4: the product of two n x n matrices, with tiles in shared memory.
// 第 4 章：两个 n x n 矩阵相乘，用共享内存分块。
//
// Blocks are 16 x 16; n need not be a multiple of 16. In each round the threads of a block load a tile of a and a tile of b,
// one element each, and use them 16 times. Two barriers are needed: after loading, and before the next round loads.
// 线程块为 16 x 16；n 不一定是 16 的倍数。每一轮，线程块里的线程各取一个元素，装入 a 和 b 的一块，然后使用 16 次。
// 需要两次同步：装入之后一次，下一轮装入之前一次。
//
// Check it with / 检查：  warpbus learn 04.1 --check

__global__ void product(const float *a, const float *b, float *c, int n) {
    __shared__ float tile_a[16][16];
    __shared__ float tile_b[16][16];
    // No thread may return before the last barrier. 最后一次同步之前，任何线程都不能返回。
}
