__global__ void im2col(const float *image, float *columns, int height, int width) {
    const int p = blockIdx.x * blockDim.x + threadIdx.x, k = blockIdx.y;
    if (p >= height * width) return;
    const int row = p / width + k / 3 - 1, column = p % width + k % 3 - 1;
    const bool inside = row >= 0 && row < height && column >= 0 && column < width;
    columns[k * height * width + p] = inside ? image[row * width + column] : 0;
}
