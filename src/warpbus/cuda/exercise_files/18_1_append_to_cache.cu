// Chapter 18: a KV cache of 8 bits in blocks of 16 tokens: round the vectors of new tokens and write them to their slots.
// 第 18 章：8 比特的 KV 缓存，每块 16 个 token：量化新 token 的向量，写到各自的位置。
//
// One block of 128 threads per token, one thread per number of its vector; block b of the grid has the token at position
// first + b. table[j] is the block of the cache that has positions 16 j to 16 j + 15. scale = max |x| / 127, code =
// rintf(x / scale); a vector of zeros has scale 0 and codes 0.
// 每个 token 一个 128 线程的线程块，每个线程处理向量的一个数；网格的第 b 块处理位置 first + b 的 token。table[j] 是位置
// 16 j 到 16 j + 15 所在的缓存块。scale = max |x| / 127，code = rintf(x / scale)；全零向量的 scale 和编码都是 0。
//
// Check it with / 检查：  warpbus learn 18.1 --check

__global__ void append(const float *vectors, const int *table, int first, signed char *codes, float *scales) {
    __shared__ float largest_of[4];  // of each warp. 每个线程束的最大值。
    const float x = vectors[blockIdx.x * 128 + threadIdx.x];
    // The largest |x| of the block; the slot of the token; code and scale. 求块内最大的 |x|，token 的位置，编码和 scale。
}
