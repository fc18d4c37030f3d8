__global__ void round_to_4_bits(const float *weights, unsigned char *codes, float *scales, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float largest = fabsf(weights[i]);
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
    const float scale = largest / 7;
    codes[i] = scale > 0 ? static_cast<unsigned char>(static_cast<int>(rintf(weights[i] / scale)) + 8) : 8;
    if (i % 32 == 0) scales[i / 32] = scale;
}
