// Chapter 7: the sum of each row of a matrix, by one warp per row.
// 第 7 章：矩阵每一行的和，每行用一个线程束。
//
// Blocks have 32 threads, and block i computes the sum of row i. Each thread adds up every 32nd element, then
// __shfl_down_sync(0xFFFFFFFF, value, step) hands the sums from lane to lane.
// 线程块有 32 个线程，第 i 个线程块计算第 i 行的和。每个线程先累加相隔 32 的元素，再用
// __shfl_down_sync(0xFFFFFFFF, value, step) 在线程之间传递部分和。
//
// Check it with / 检查：  warpbus learn 07.1 --check

__global__ void row_sums(const float *x, float *sums, int columns) {
    // All 32 lanes have to take part in each shuffle. 每次 shuffle，32 个线程都要参加。
}
