// Chapter 3: multiply n elements by a factor with a grid of fixed size.
// 第 3 章：用固定大小的网格，把 n 个元素乘以一个系数。
//
// The test launches 4 blocks of 64 threads, whatever n is: each thread takes several elements. Neighbouring threads should
// take neighbouring elements in each round, so that a warp's accesses coalesce.
// 不管 n 是多少，测试都只启动 4 个 64 线程的线程块：每个线程处理多个元素。每一轮中，相邻的线程应处理相邻的元素，
// 这样一个线程束的访问才能合并。
//
// Check it with / 检查：  warpbus learn 03.1 --check

__global__ void scale(float *x, float factor, int n) {
    // How far apart are two elements of one thread? 同一个线程的两个元素相距多远？
}
