// Chapter 16: overlap: pieces of an array through two streams: copy in, kernel, copy out.
// 第 16 章：重叠：数组的各段经过两个流：拷入、计算、拷出。
//
// `in` and `out` are pinned and have `pieces` pieces of n numbers; piece p belongs to streams[p % 2]. `device` has room for
// two pieces, one for each stream. When the function returns, all of `out` may be read.
// in 和 out 是锁页内存，各有 pieces 段，每段 n 个数；第 p 段用 streams[p % 2]。device 放得下两段，每个流一段。
// 函数返回时，out 必须已经可以读取。
//
// Check it with / 检查：  warpbus learn 16.1 --check

__global__ void work(float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * x[i] + 1;
}

void process(const float *in, float *out, float *device, int n, int pieces, cudaStream_t *streams) {
    // cudaMemcpyAsync(to, from, bytes, kind, stream); work<<<blocks, 256, 0, stream>>>(...); cudaStreamSynchronize(stream)
}
