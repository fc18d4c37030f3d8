__global__ void read_mapped(const float *memory, const int *table, float *y, int *faults, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int page = table[i / 64];
    if (page < 0) atomicAdd(faults, 1);
    y[i] = page < 0 ? 0 : memory[page * 64 + i % 64];
}
