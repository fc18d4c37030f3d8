__global__ void int4_gemv(const unsigned *packed, const float *scales, const float *x, float *y, int rows, int columns) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    float sum = 0;
    for (int word = threadIdx.x; word < columns / 8; word += 32) {
        const unsigned codes = packed[row * (columns / 8) + word];
        const float scale = scales[row * (columns / 32) + word / 4];
        for (int k = 0; k < 8; ++k) sum += (int(codes >> 4 * k & 15) - 8) * scale * x[8 * word + k];
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, step);
    if (threadIdx.x == 0) y[row] = sum;
}
