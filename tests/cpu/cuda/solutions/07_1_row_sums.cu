__global__ void row_sums(const float *x, float *sums, int columns) {
    float sum = 0;
    for (int column = threadIdx.x; column < columns; column += 32) sum += x[blockIdx.x * columns + column];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, step);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
