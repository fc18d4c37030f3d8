// The shape of a block of decode.cu, by its macros, and its shared memory.
#pragma once
#include "common/cache_codes.cuh"
#include "common/tile.cuh"

#if CODE
using Cache = unsigned char;
#else
using Cache = ELEMENT;
#endif
using Unit = unsigned short;  // the unit of tiles of the cache

constexpr bool kCoded = CODE != 0;
constexpr bool kPacked = CODE == kInt4;  // two codes per byte, of rotated vectors
constexpr bool kStored = STORED;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTile = 16;  // queries per block
constexpr int kResident = HEAD_DIM == 256 ? 2 : 3;  // blocks per multiprocessor, limited by registers: `_REGISTERS` in ops
constexpr int kKeys = HEAD_DIM == 256 ? 32 : 64;  // per chunk
constexpr int kWarpKeys = kKeys / kWarps;
constexpr int kBits = kPacked ? 4 : 8 * sizeof(Cache);  // of an element of the cache
constexpr int kColumns = HEAD_DIM * kBits / 16;         // units per row of the cache
constexpr int kPieces = kColumns / kChunk;              // 16-byte pieces per row of the cache
constexpr int kTileUnits = kKeys * kColumns;
constexpr int kBlockDims = kCoded ? 32 : 16;  // dimensions of values that one ldmatrix loads
static_assert(!kPacked || (kStored && HEAD_DIM >= 128), "packed codes are written by rope_and_cache, and fill tiles");
constexpr int kWarpDims = HEAD_DIM / kWarps < kBlockDims ? kBlockDims : HEAD_DIM / kWarps;
constexpr unsigned int kAll = 0xffffffff;

// A thread's position: its warp's quarter of keys and dimensions, its rows and columns in mma fragments.
struct Place {
    int quarter = threadIdx.x / 32;
    int g = threadIdx.x % 32 / 4;
    int t = threadIdx.x % 4;

    // One of the two queries of a thread.
    __device__ __forceinline__ int row(int r) const { return g + 8 * r; }
    // The first of a pair of keys of a chunk: those of accumulator `j` of the scores.
    __device__ __forceinline__ int key(int j) const { return quarter * kWarpKeys + 8 * j + 2 * t; }
};

// ---- Shared memory: the new token, the queries, the stages ----

// The new token's key and value, and the block's number among the combiners.
struct Fresh {
    Unit rows[2][kColumns];
    float scales[2];
    int rank;
    int unused;
};

// The values that the four warps exchange per chunk: weights in the layout of mma and the order of tile.cuh, of each
// warp's keys relative to its own exponent; the exponents; the sums of the weights.
struct Weighed {
    ELEMENT weights[kTile * kKeys];
    float exponents[kTile * kWarps];
    float sums[kTile * kWarps];
};

// The rotated queries in the order of tile.cuh. Two sets of weights alternate between chunks, so that a warp can start a
// chunk while others still read the weights of the previous one.
struct QueryTile {
    ELEMENT queries[kTile * HEAD_DIM];
    Weighed weighed[2];
};

// A chunk of the cache, in the order of tile.cuh. With codes, the scales of its keys and then of its values follow.
struct Stage {
    Unit keys[kTileUnits];
    Unit values[kTileUnits];

    __device__ __forceinline__ float* scales() { return reinterpret_cast<float*>(this + 1); }
};
constexpr int kStageBytes = sizeof(Stage) + (kCoded ? 2 * kKeys * sizeof(float) : 0);
static_assert(kStageBytes == STAGE_BYTES, "the host asks for stages of another size");
static_assert(sizeof(Fresh) + sizeof(QueryTile) == OTHER_BYTES, "the host asks for other room beside the stages");

static_assert(4 * (HEAD_DIM + 2) * sizeof(float) <= sizeof(QueryTile), "the scratch of combine has room behind Fresh");

struct Memory {
    Fresh* fresh;
    QueryTile* tile;
    unsigned char* stages;

    __device__ __forceinline__ explicit Memory(unsigned char* begin)
        : fresh(reinterpret_cast<Fresh*>(begin)), tile(reinterpret_cast<QueryTile*>(fresh + 1)),
          stages(reinterpret_cast<unsigned char*>(tile + 1)) {}

    __device__ __forceinline__ Stage& stage(int index) const {
        return *reinterpret_cast<Stage*>(stages + index * kStageBytes);
    }
};
