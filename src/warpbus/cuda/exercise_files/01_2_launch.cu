// Chapter 1: the host's side of a vector addition: how many blocks, and the launch.
// 第 1 章：向量加法的主机一侧：需要多少个线程块，以及怎样启动。
//
// `add_kernel` is finished. `add_on_device` launches it for n elements that are in device memory already, in blocks of
// `threads` threads: with as many blocks as are needed, and no more.
// `add_kernel` 已经写好。`add_on_device` 对已在设备内存中的 n 个元素启动它，每个线程块有 threads 个线程，
// 线程块的个数刚好够用，不多也不少。
//
// Check it with / 检查：  warpbus learn 01.2 --check

__global__ void add_kernel(const float *a, const float *b, float *c, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
    if (threadIdx.x == 0) c[n + blockIdx.x] = 1;  // The test counts the blocks here. 测试用它来数线程块。
}

void add_on_device(const float *a, const float *b, float *c, int n, int threads) {
    // add_kernel<<<blocks, threads>>>(...): n / threads rounds down. n / threads 会向下取整。
}
