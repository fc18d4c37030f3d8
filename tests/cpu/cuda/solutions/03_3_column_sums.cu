__global__ void column_sums(const float *x, float *sums, int rows, int columns) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float sum = 0;
    for (int row = 0; row < rows; ++row) sum += x[row * columns + column];
    sums[column] = sum;
}
