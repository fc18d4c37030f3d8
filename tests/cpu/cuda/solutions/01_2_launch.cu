__global__ void add_kernel(const float *a, const float *b, float *c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
    if (threadIdx.x == 0) c[n + blockIdx.x] = 1;
}

void add_on_device(const float *a, const float *b, float *c, int n, int threads) {
    add_kernel<<<(n + threads - 1) / threads, threads>>>(a, b, c, n);
}
