// Chapter 3: this kernel is right, and slow: coalesce its accesses.
// 第 3 章：这个核函数结果正确，但是慢：请让它的访问合并。
//
// Each thread converts `run` elements from Celsius to Fahrenheit, and they are neighbours. So in each round, the 32 threads
// of a warp read elements that are `run` apart: each of them in another sector of 32 bytes. Give the threads of a warp
// neighbouring elements in each round. The grid has as many threads as there are runs; n is a multiple of run.
// 每个线程把相邻的 run 个元素从摄氏度换算成华氏度。于是每一轮里，一个线程束的 32 个线程读取的元素相隔 run 个，
// 每个元素都在不同的 32 字节扇区里。请让一个线程束的线程在每一轮里读取相邻的元素。网格的线程数等于段数；n 是 run 的倍数。
//
// Check it with / 检查：  warpbus learn 03.2 --check

__global__ void fahrenheit(const float *celsius, float *result, int n, int run) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (int k = 0; k < run; ++k) {
        const int i = thread * run + k;
        if (i < n) result[i] = celsius[i] * 1.8f + 32;
    }
}
