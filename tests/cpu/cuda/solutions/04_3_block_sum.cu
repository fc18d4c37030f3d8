__global__ void block_sum(const float *x, float *sum, int n) {
    __shared__ float partial[256];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    partial[threadIdx.x] = i < n ? x[i] : 0;
    __syncthreads();  // loaded
    for (int step = 128; step > 0; step /= 2) {
        if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
        __syncthreads();  // added
    }
    if (threadIdx.x == 0) atomicAdd(sum, partial[0]);
}
