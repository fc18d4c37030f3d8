// Rows read and written in chunks of eight elements, and the memory fetched ahead of use.
#pragma once
#include "common/numeric.cuh"

namespace step {

constexpr int kChunk = 8;  // elements: 16 bytes of a 16-bit type

template <typename T>
struct alignas(16) Chunk {
    T element[kChunk];
};

// Elements kChunk * chunk to kChunk * chunk + 7 of a row of `width`, with zeros past its end. `vectorised`: the row
// begins at a multiple of 16 bytes and its width is a multiple of kChunk.
template <typename T>
__device__ __forceinline__ Chunk<T> load_chunk(const T* row, int chunk, int width, bool vectorised) {
    if (vectorised) return reinterpret_cast<const Chunk<T>*>(row)[chunk];
    Chunk<T> value;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        const int at = kChunk * chunk + i;
        value.element[i] = at < width ? row[at] : from_float<T>(0.0f);
    }
    return value;
}

// The inverse: nothing is written past the end of the row.
template <typename T>
__device__ __forceinline__ void store_chunk(T* row, int chunk, int width, bool vectorised, const Chunk<T>& value) {
    if (vectorised) {
        reinterpret_cast<Chunk<T>*>(row)[chunk] = value;
        return;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
        const int at = kChunk * chunk + i;
        if (at < width) row[at] = value.element[i];
    }
}

// Bring the line that holds an address into L2 without waiting for it. No kernel may write it meanwhile: for weights,
// ahead of griddepcontrol_wait.
__device__ __forceinline__ void prefetch_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace step
