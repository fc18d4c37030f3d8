// Keys or values of a sequence, from the blocks of the cache into one piece of memory.
//
// Shapes and layout
//   cache   [blocks, kv_heads, B, size], B = 1 << shift: ELEMENT, or codes of 8 bits; the last stride is 1, the others
//           are given in bytes, multiples of 16, as is the size of a vector
//   scales  float [blocks, kv_heads, B], the last stride 1, the others in elements; null unless `code` has scales
//   table   int: entry i, at i * entry_stride, names the block of the tokens B * i to B * i + B - 1
//   out     ELEMENT [tokens, kv_heads, size], contiguous: elements as they are, codes times their scale in float32
// `code`: 0 ELEMENT, 1 int8, 2 fp8 e4m3.
// Launch: grid (blocks that have tokens, kv_heads). A thread reads 16 bytes at a time, four times before it writes.
//
// `gather_rotated` does the same for codes of 4 bits, [blocks, kv_heads, B, size / 2] bytes with size a multiple of 32 up to
// 1024: codes times their scale, multiplied by the Hadamard matrix, which is its own inverse.
#include "attention/cache.cuh"
#include "common/hadamard.cuh"

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;
constexpr int kCodes = 16;  // per 16 bytes

// Two codes as elements.
template <int First, int Second>
__device__ __forceinline__ void decode_pair(ELEMENT* out, unsigned int codes, int code, float scale) {
    const float2 x = unpack_pair<__half>(code == kInt8 ? attention::dequantize<__half, kInt8, First, Second>(codes)
                                                       : attention::dequantize<__half, kFp8, First, Second>(codes));
    out[0] = from_float<ELEMENT>(x.x * scale);
    out[1] = from_float<ELEMENT>(x.y * scale);
}

// Sixteen codes as elements, to an address that is aligned to 16 bytes.
__device__ __forceinline__ void store_decoded(ELEMENT* out, const uint4& codes, int code, float scale) {
    alignas(16) ELEMENT decoded[kCodes];
    const unsigned int words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        decode_pair<0, 1>(decoded + 4 * i, words[i], code, scale);
        decode_pair<2, 3>(decoded + 4 * i + 2, words[i], code, scale);
    }
    constexpr int kVector = Vector16<ELEMENT>::kSize;
#pragma unroll
    for (int i = 0; i < kCodes / kVector; ++i) {
        reinterpret_cast<Vector16<ELEMENT>*>(out)[i] = reinterpret_cast<const Vector16<ELEMENT>*>(decoded)[i];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gather_cache(const unsigned char* __restrict__ cache, const float* __restrict__ scales,
                 const int* __restrict__ table, ELEMENT* __restrict__ out, long long block_stride,
                 long long head_stride, long long token_stride, long long scale_block_stride,
                 long long scale_head_stride, long long entry_stride, int tokens, int shift, int size, int code) {
    const int head = blockIdx.y;
    const int heads = gridDim.y;
    const int first = static_cast<int>(blockIdx.x) << shift;  // token
    const long long block = table[blockIdx.x * entry_stride];
    const unsigned char* source = cache + block * block_stride + head * head_stride;
    const float* source_scales = scales + block * scale_block_stride + head * scale_head_stride;  // may be null
    const int a_piece = code == kElement ? 16 / static_cast<int>(sizeof(ELEMENT)) : kCodes;
    const int pieces = size / a_piece;  // of a vector
    const int all = min(1 << shift, tokens - first) * pieces;
    for (int begin = threadIdx.x; begin < all; begin += kAtOnce * kThreads) {
        uint4 held[kAtOnce];
        float scale[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = begin + i * kThreads;
            if (at >= all) break;
            const int token = at / pieces;
            held[i] = *reinterpret_cast<const uint4*>(source + token * token_stride + (at - token * pieces) * 16);
            if (code != kElement) scale[i] = source_scales[token];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = begin + i * kThreads;
            if (at >= all) break;
            const int token = at / pieces;
            ELEMENT* to = out + (static_cast<long long>(first + token) * heads + head) * size;
            to += (at - token * pieces) * a_piece;
            if (code == kElement) {
                *reinterpret_cast<uint4*>(to) = held[i];
            } else {
                store_decoded(to, held[i], code, scale[i]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gather_rotated(const unsigned char* __restrict__ cache, const float* __restrict__ scales,
                   const int* __restrict__ table, ELEMENT* __restrict__ out, long long block_stride,
                   long long head_stride, long long token_stride, long long scale_block_stride,
                   long long scale_head_stride, long long entry_stride, int tokens, int shift, int size) {
    constexpr int kPiece = 32;  // codes per 16 bytes
    constexpr int kVector = Vector16<ELEMENT>::kSize;
    const int head = blockIdx.y;
    const int first = static_cast<int>(blockIdx.x) << shift;  // token
    const long long block = table[blockIdx.x * entry_stride];
    const unsigned char* source = cache + block * block_stride + head * head_stride;
    const float* source_scales = scales + block * scale_block_stride + head * scale_head_stride;
    const int pieces = size / kPiece;  // of a vector
    const int all = min(1 << shift, tokens - first) * pieces;
    const int lane = threadIdx.x % 32;
    // Whole warps go on, because lanes exchange elements.
    for (int begin = threadIdx.x - lane; begin < all; begin += kThreads) {
        const int at = min(begin + lane, all - 1);
        const int token = at / pieces;
        const int piece = at - token * pieces;
        const uint4 held = *reinterpret_cast<const uint4*>(source + token * token_stride + piece * 16);
        const float scale = source_scales[token];
        const unsigned int words[4] = {held.x, held.y, held.z, held.w};
        float x[kPiece];
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
            const float code = static_cast<float>(words[i / 8] >> 4 * (i % 8) & 15);
            x[i] = __fmul_rn(code - 7.5f, scale);  // never fused with the first addition, as in the reference
        }
        hadamard::transform(x, hadamard::block_of(size));
        if (begin + lane >= all) continue;
        ELEMENT* to = out + (static_cast<long long>(first + token) * gridDim.y + head) * size + piece * kPiece;
#pragma unroll
        for (int i = 0; i < kPiece / kVector; ++i) {
            Vector16<ELEMENT> vector;
#pragma unroll
            for (int j = 0; j < kVector; ++j) vector.element[j] = from_float<ELEMENT>(x[kVector * i + j]);
            reinterpret_cast<Vector16<ELEMENT>*>(to)[i] = vector;
        }
    }
}
