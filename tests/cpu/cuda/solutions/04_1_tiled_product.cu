__global__ void product(const float *a, const float *b, float *c, int n) {
    __shared__ float tile_a[16][16];
    __shared__ float tile_b[16][16];
    const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int first = 0; first < n; first += 16) {
        const int k_a = first + threadIdx.x, k_b = first + threadIdx.y;
        tile_a[threadIdx.y][threadIdx.x] = row < n && k_a < n ? a[row * n + k_a] : 0;
        tile_b[threadIdx.y][threadIdx.x] = k_b < n && column < n ? b[k_b * n + column] : 0;
        __syncthreads();  // loaded
        for (int k = 0; k < 16; ++k) sum += tile_a[threadIdx.y][k] * tile_b[k][threadIdx.x];
        __syncthreads();  // used
    }
    if (row < n && column < n) c[row * n + column] = sum;
}
