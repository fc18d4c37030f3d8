// Chapter 19: which columns of a matrix with 4-bit weights belong to a rank: whole groups, and as balanced as possible.
// 第 19 章：4 比特权重矩阵的哪些列属于哪个 rank：以整组为单位，并尽量平均。
//
// `columns` is a multiple of `group`. Rank r has the columns from begin to end - 1: whole groups, no column twice, none left
// out; two ranks differ by one group at most, and the lower ranks have more. 13,696 columns in groups of 128 on 2 ranks
// are 54 and 53 groups.
// columns 是 group 的倍数。rank r 拥有 begin 到 end - 1 的列：都是整组，不重不漏；任意两个 rank 最多相差一组，编号小的多。
// 13,696 列按 128 一组分给 2 个 rank，是 54 组和 53 组。
//
// Check it with / 检查：  warpbus learn 19.2 --check

__host__ __device__ void shard(int columns, int group, int ranks, int rank, int *begin, int *end) {
    // columns / ranks is 6,848: 53.5 groups. columns / ranks 是 6,848，即 53.5 组。
    *begin = columns / ranks * rank;
    *end = *begin + columns / ranks;
}

// y is what this rank adds to the result; one warp per row of w. y 是本 rank 的部分结果；w 的每行一个线程束。
__global__ void partial(const float *w, const float *x, float *y, int columns, int group, int ranks, int rank) {
    int begin, end;
    shard(columns, group, ranks, rank, &begin, &end);
    float sum = 0;
    for (int k = begin + threadIdx.x; k < end; k += 32) sum += w[blockIdx.x * columns + k] * x[k];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
