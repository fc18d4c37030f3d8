__global__ void softmax(const float *x, float *y, int columns) {
    __shared__ float values[128];
    const float *row = x + blockIdx.x * columns;
    float most = -INFINITY;
    for (int i = threadIdx.x; i < columns; i += 128) most = fmaxf(most, row[i]);
    values[threadIdx.x] = most;
    __syncthreads();
    for (int step = 64; step > 0; step /= 2) {
        if (threadIdx.x < step) values[threadIdx.x] = fmaxf(values[threadIdx.x], values[threadIdx.x + step]);
        __syncthreads();
    }
    most = values[0];
    __syncthreads();  // read by all
    float sum = 0;
    for (int i = threadIdx.x; i < columns; i += 128) sum += expf(row[i] - most);
    values[threadIdx.x] = sum;
    __syncthreads();
    for (int step = 64; step > 0; step /= 2) {
        if (threadIdx.x < step) values[threadIdx.x] += values[threadIdx.x + step];
        __syncthreads();
    }
    for (int i = threadIdx.x; i < columns; i += 128) y[blockIdx.x * columns + i] = expf(row[i] - most) / values[0];
}
