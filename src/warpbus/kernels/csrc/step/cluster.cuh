// The blocks that share a row: a cluster since sm_90, a single block before.
#pragma once
#include "common/ptx.cuh"

namespace step {

// An object in the shared memory of block `rank` of the cluster, by its place in one's own. A barrier of the
// cluster has to lie between who writes it and who reads it, and that block may not end before another one.
template <typename T>
__device__ __forceinline__ T* of_block(T* own, int rank) {
#if __CUDA_ARCH__ >= 900
    return ptx::of_cluster_block(own, rank);
#else
    return own;
#endif
}

// Barrier among all threads that share the row.
__device__ __forceinline__ void row_sync() {
#if __CUDA_ARCH__ >= 900
    ptx::cluster_sync();
#else
    __syncthreads();
#endif
}

}  // namespace step
