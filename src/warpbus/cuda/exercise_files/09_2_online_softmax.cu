// Chapter 9: the maximum m and the sum of exp(x - m) of each row, in one pass; one warp per row.
// 第 9 章：对每一行用一遍扫描求最大值 m 以及 exp(x - m) 的和；每行一个线程束。
//
// Each lane reads its elements once. When its maximum grows, its sum so far is too large by exp(new - old). At the end the
// lanes agree on one maximum and add their sums, each scaled to it. A row has at least one element, a lane may have none.
// 每个线程只读一遍自己的元素。最大值变大时，此前的和要换算到新的最大值。最后 32 个线程求出共同的最大值，各自换算后再相加。
// 每行至少有一个元素，但有的线程可能一个也分不到。
//
// Check it with / 检查：  warpbus learn 09.2 --check

__global__ void softmax_sums(const float *x, float *maxima, float *sums, int columns) {
    x += blockIdx.x * columns;
    float largest = -INFINITY, sum = 0;
    // for (int i = threadIdx.x; i < columns; i += 32) ...
}
