__global__ void mirror(const unsigned char *image, unsigned char *mirrored, int rows, int columns) {
    const int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && column < columns) mirrored[row * columns + column] = image[row * columns + columns - 1 - column];
}
