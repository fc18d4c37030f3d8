// Chapter 5: sum the columns of a matrix through shared memory, and copy the next tile while this one is summed. The
// matrix has 128 columns per block and a multiple of 8 rows.
// 第 5 章：经共享内存求矩阵各列的和，在累加当前分块的同时拷贝下一块。每个线程块负责 128 列，行数是 8 的倍数。
//
// The kernel is right, but waits for each tile before it sums. Let it have two tiles: start the copy of the next one, then
// wait with `wait<1>` for all but that newest group. A thread waits for its own copies only; others need a barrier. And a
// tile must not be overwritten while somebody still sums it.
// 这个核函数是对的，但每一块都要等拷贝完才开始累加。请改用两块：先开始拷贝下一块，再用 `wait<1>` 等待除最新一组以外的拷贝。
// 线程只等自己的拷贝，别人的还需要同步；而且还有线程在累加的块不能被覆盖。
//
// Check it with / 检查：  warpbus learn 05.3 --check
#include <cstdint>

// Start to copy 16 bytes. 开始拷贝 16 字节。
__device__ void copy(float *to, const float *from) {
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// The copies since the last commit are a group, which may be empty. 上次 commit 之后的拷贝成为一组，可以是空的。
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `pending` of this thread's newest groups are under way. 等到本线程最多还有最新的 `pending` 组未完成。
template <int pending> __device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

__global__ void sum_columns(const float *x, float *sums, int rows, int columns) {
    __shared__ __align__(16) float tile[8][128];
    const int first_column = blockIdx.x * 128;
    float sum = 0;
    for (int row = 0; row < rows; row += 8) {
        for (int i = threadIdx.x; i < 256; i += 128)
            copy(&tile[i / 32][i % 32 * 4], &x[(row + i / 32) * columns + first_column + i % 32 * 4]);
        commit();
        wait<0>();
        __syncthreads();
        for (int i = 0; i < 8; ++i) sum += tile[i][threadIdx.x];
        __syncthreads();
    }
    sums[first_column + threadIdx.x] = sum;
}
