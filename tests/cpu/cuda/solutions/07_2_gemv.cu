__global__ void gemv(const float *w, const float *x, float *y, int rows, int columns) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    float sum = 0;
    for (int k = threadIdx.x; k < columns; k += 32) sum += w[row * columns + k] * x[k];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
    if (threadIdx.x == 0) y[row] = sum;
}
