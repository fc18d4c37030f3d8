__global__ void dequantize(const unsigned *packed, const float *scales, float *weights, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int code = packed[i / 8] >> 4 * (i % 8) & 15;
    weights[i] = (code - 8) * scales[i / 32];
}
