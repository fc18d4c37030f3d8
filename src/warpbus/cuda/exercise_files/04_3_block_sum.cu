// Chapter 4: the sum of a vector: a tree in shared memory within each block, then one atomicAdd per block.
// 第 4 章：向量的和：每个线程块内在共享内存里做树形求和，最后每个线程块做一次 atomicAdd。
//
// Blocks have 256 threads; there are as many threads as elements, rounded up to whole blocks. *sum is 0 at first.
// 线程块有 256 个线程；线程总数等于元素个数，向上取整到整块。*sum 的初值为 0。
//
// Check it with / 检查：  warpbus learn 04.3 --check

__global__ void block_sum(const float *x, float *sum, int n) {
    __shared__ float partial[256];
    // Half of the threads add the other half, then a quarter, ... A barrier belongs between two steps.
    // 先由一半线程加上另一半，然后四分之一……两步之间要有同步。
}
