// Chapter 1: add two vectors, one element per thread.
// 第 1 章：两个向量相加，每个线程算一个元素。
//
// The test launches as many blocks of 256 threads as cover n elements: the last block has more threads than elements.
// 测试启动若干个 256 线程的线程块来覆盖 n 个元素：最后一个线程块的线程比元素多。
//
// Check it with / 检查：  warpbus learn 01.1 --check

__global__ void add(const float *a, const float *b, float *c, int n) {
    // c[i] = a[i] + b[i] for each i below n. Which i is this thread's? 本线程负责哪个 i？
}
