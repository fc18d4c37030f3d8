__global__ void product(const float *a, const float *b, float *c, int n) {
    __shared__ float tile_a[8][36], tile_b[8][32];  // tile_a[k][row], tile_b[k][column]
    const int thread = threadIdx.y * 8 + threadIdx.x, row0 = blockIdx.y * 32, column0 = blockIdx.x * 32;
    float sum[4][4] = {};
    for (int first = 0; first < n; first += 8) {
        for (int i = thread; i < 256; i += 64) tile_a[i % 8][i / 8] = a[(row0 + i / 8) * n + first + i % 8];
        for (int i = thread; i < 256; i += 64) tile_b[i / 32][i % 32] = b[(first + i / 32) * n + column0 + i % 32];
        __syncthreads();
        for (int k = 0; k < 8; ++k) {
            float left[4], right[4];
            for (int i = 0; i < 4; ++i) left[i] = tile_a[k][threadIdx.y + i * 8];
            for (int j = 0; j < 4; ++j) right[j] = tile_b[k][threadIdx.x + j * 8];
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 4; ++j) sum[i][j] += left[i] * right[j];
        }
        __syncthreads();  // used
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j)
            c[(row0 + threadIdx.y + i * 8) * n + column0 + threadIdx.x + j * 8] = sum[i][j];
}
