__global__ void fahrenheit(const float *celsius, float *result, int n, int run) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = 0; k < run; ++k) {
        const int i = k * gridDim.x * blockDim.x + thread;
        if (i < n) result[i] = celsius[i] * 1.8f + 32;
    }
}
