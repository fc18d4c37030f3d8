// Chapter 16: a CUDA graph: capture the small kernels of a step once, and launch them as one.
// 第 16 章：CUDA Graph：把一步里的小核函数捕获一次，以后一次启动。
//
// `run_steps` does `steps` steps; each launches `halve` and then `shift` on x, which lies in device memory. Capture one step
// in `stream`, instantiate the graph once, launch it `steps` times, and wait for the stream.
// run_steps 做 steps 步；每一步依次对设备内存中的 x 启动 halve 和 shift。请在 stream 里捕获一步，实例化一次，启动 steps 次，
// 最后等待这个流。
//
// Check it with / 检查：  warpbus learn 16.2 --check

__global__ void halve(float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] /= 2;
}

__global__ void shift(float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1;
}

void run_steps(float *x, int n, int steps, cudaStream_t stream) {
    // cudaStreamBeginCapture, the two launches, cudaStreamEndCapture, cudaGraphInstantiate(&exec, graph, 0), ...
    // What is captured does not run. A launch without the stream is not captured. 捕获时不会执行；没有写明流的启动不会被捕获。
}
