__device__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

__global__ void sigmoid_matrix(const float *x, float *y, int rows, int columns) {
    const int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && column < columns) y[row * columns + column] = sigmoid(x[row * columns + column]);
}
