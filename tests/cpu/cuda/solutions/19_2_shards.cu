__host__ __device__ void shard(int columns, int group, int ranks, int rank, int *begin, int *end) {
    const int groups = columns / group, each = groups / ranks, more = groups % ranks;
    *begin = (rank * each + min(rank, more)) * group;
    *end = *begin + (each + (rank < more)) * group;
}

// y is what this rank adds to the result; one warp per row of w. y 是本 rank 的部分结果；w 的每行一个 warp。
__global__ void partial(const float *w, const float *x, float *y, int columns, int group, int ranks, int rank) {
    int begin, end;
    shard(columns, group, ranks, rank, &begin, &end);
    float sum = 0;
    for (int k = begin + threadIdx.x; k < end; k += 32) sum += w[blockIdx.x * columns + k] * x[k];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    if (threadIdx.x == 0) y[blockIdx.x] = sum;
}
