// Chapter 4: softmax of each row, by one block per row: e^(x - m) / sum of e^(x - m), where m is the row's maximum.
// 第 4 章：对每一行求 softmax，每行一个线程块：e^(x - m) / Σ e^(x - m)，其中 m 是这一行的最大值。
//
// Blocks have 128 threads, rows have any number of columns. Without m, e^x is infinite for x above 88. A value in shared
// memory that one reduction leaves behind must be read by all threads before the next one overwrites it.
// 线程块有 128 个线程，每行的列数任意。不减去 m 的话，x 超过 88 时 e^x 就是无穷大。
// 一次归约留在共享内存里的结果，要等所有线程都读完，下一次归约才能覆盖它。
//
// Check it with / 检查：  warpbus learn 04.4 --check

__global__ void softmax(const float *x, float *y, int columns) {
    __shared__ float values[128];
}
