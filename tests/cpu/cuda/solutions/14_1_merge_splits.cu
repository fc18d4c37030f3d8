__global__ void merge(const float *m, const float *l, const float *o, float *out, int splits) {
    const int head = blockIdx.x;
    m += head * splits;
    l += head * splits;
    o += head * splits * 64;
    float largest = -INFINITY, sum = 0, value = 0;
    for (int s = 0; s < splits; ++s) largest = fmaxf(largest, m[s]);
    for (int s = 0; s < splits; ++s) {
        const float scale = expf(m[s] - largest);
        sum += l[s] * scale;
        value += o[s * 64 + threadIdx.x] * scale;
    }
    out[head * 64 + threadIdx.x] = value / sum;
}
