// Chapter 14: merge what the splits of decode attention have found; one block of 64 threads per head, one thread per number.
// 第 14 章：合并解码注意力各段的结果；每个头一个 64 线程的线程块，每个线程算一个数。
//
// Split s of a head has the maximum m[s] of its scores, the sum l[s] of exp(score - m[s]), and in o[s] the sum of
// exp(score - m[s]) * value, which is not divided by l[s] yet. A split without tokens has m = -INFINITY, l = 0 and zeros in
// o. At least one split has tokens.
// 一个头的第 s 段给出：分数的最大值 m[s]，exp(score - m[s]) 的和 l[s]，以及 o[s]，即 exp(score - m[s]) * value 的和，尚未除以 l[s]。
// 没有 token 的段，m = -INFINITY，l = 0，o 全为 0。至少有一段有 token。
//
// Check it with / 检查：  warpbus learn 14.1 --check

__global__ void merge(const float *m, const float *l, const float *o, float *out, int splits) {
    const int head = blockIdx.x;
    m += head * splits;
    l += head * splits;
    o += head * splits * 64;  // of 64 numbers per split. 每段 64 个数。
    // All splits have to be scaled to one maximum. 各段要先换算到同一个最大值。
}
