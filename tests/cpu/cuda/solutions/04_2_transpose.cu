__global__ void transpose(const float *x, float *y, int rows, int columns) {
    __shared__ float tile[32][33];
    const int row = blockIdx.y * 32 + threadIdx.y, column = blockIdx.x * 32 + threadIdx.x;
    if (row < rows && column < columns) tile[threadIdx.y][threadIdx.x] = x[row * columns + column];
    __syncthreads();
    const int to_row = blockIdx.x * 32 + threadIdx.y, to_column = blockIdx.y * 32 + threadIdx.x;
    if (to_row < columns && to_column < rows) y[to_row * rows + to_column] = tile[threadIdx.x][threadIdx.y];
}
