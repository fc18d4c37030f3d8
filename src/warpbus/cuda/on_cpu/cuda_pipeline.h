// Asynchronous copies from device to shared memory (cp.async) on a CPU, by the intrinsics of CUDA's pipeline.
//
// A copy happens when its thread waits for it: a program that does not wait reads what was there before.
#pragma once

#include "cuda_runtime.h"

namespace warpbus {

template <class T> void copy_piece(const DeferredCopy &copy) {
    T value{};
    if (copy.zeros == 0) value = *static_cast<const T *>(copy.from);
    else memcpy(&value, copy.from, copy.size - copy.zeros);
    *static_cast<T *>(copy.to) = value;
}

}  // namespace warpbus

// Of 4, 8 or 16 bytes, the last `zeros` of which are 0.
__forceinline__ void __pipeline_memcpy_async(void *to, const void *from, size_t size, size_t zeros = 0) {
    using namespace warpbus;
    if ((size != 4 && size != 8 && size != 16) || zeros > size) {
        fprintf(stderr, "__pipeline_memcpy_async copies 4, 8 or 16 bytes, not %zu\n", size);
        abort();
    }
    defer_copy({size == 4 ? copy_piece<int> : size == 8 ? copy_piece<int2> : copy_piece<int4>, to, from, size, zeros, 0});
}
inline void __pipeline_commit() { warpbus::commit_copies(); }
inline void __pipeline_wait_prior(size_t last) { warpbus::wait_for_copies(static_cast<unsigned>(last)); }
