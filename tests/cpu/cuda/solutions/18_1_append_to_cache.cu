__global__ void append(const float *vectors, const int *table, int first, signed char *codes, float *scales) {
    __shared__ float largest_of[4];
    const float x = vectors[blockIdx.x * 128 + threadIdx.x];
    float largest = fabsf(x);
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
    if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < 4; ++warp) largest = fmaxf(largest, largest_of[warp]);
    const int position = first + blockIdx.x, slot = table[position / 16] * 16 + position % 16;
    const float scale = largest / 127;
    codes[slot * 128 + threadIdx.x] = scale > 0 ? static_cast<signed char>(rintf(x / scale)) : 0;
    if (threadIdx.x == 0) scales[slot] = scale;
}
