__global__ void softmax_sums(const float *x, float *maxima, float *sums, int columns) {
    x += blockIdx.x * columns;
    float largest = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < columns; i += 32) {
        const float larger = fmaxf(largest, x[i]);
        sum = sum * expf(largest - larger) + expf(x[i] - larger);
        largest = larger;
    }
    float of_all = largest;
    for (int step = 16; step > 0; step /= 2) of_all = fmaxf(of_all, __shfl_xor_sync(0xFFFFFFFF, of_all, step));
    sum *= expf(largest - of_all);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    if (threadIdx.x == 0) {
        maxima[blockIdx.x] = of_all;
        sums[blockIdx.x] = sum;
    }
}
