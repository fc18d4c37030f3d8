// Chapter 17: fewer bytes: three kernels that are bound by memory become one.
// 第 17 章：减少字节：把三个受限于显存带宽的核函数合成一个。
//
// The functions below are right: y = max(0, 3 x + 5). But they move 24 bytes per element, where 8 are enough: t is written
// and read, twice. Write one kernel and launch it in `run`; t is not needed then.
// 下面的函数结果正确：y = max(0, 3 x + 5)。但每个元素搬运 24 字节，而 8 字节就够：t 写了两次，又读了两次。
// 请写成一个核函数，在 run 里启动它；这样就用不到 t 了。
//
// Check it with / 检查：  warpbus learn 17.1 --check

__global__ void scale(const float *x, float *t, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) t[i] = x[i] * 3;
}
__global__ void shift(float *t, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) t[i] += 5;
}
__global__ void relu(const float *t, float *y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaxf(t[i], 0);
}

void run(const float *x, float *t, float *y, int n) {
    const int blocks = (n + 255) / 256;
    scale<<<blocks, 256>>>(x, t, n);
    shift<<<blocks, 256>>>(t, n);
    relu<<<blocks, 256>>>(t, y, n);
}
