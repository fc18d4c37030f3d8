// The shape of a block of decode.cu, as its macros say, and its shared memory.
#pragma once
#include "common/tile.cuh"

#if CODE_BITS == 8
using Cache = unsigned char;
#else
using Cache = ELEMENT;
#endif
using Unit = unsigned short;  // what tiles of the cache are made of

constexpr bool kCoded = CODE_BITS == 8;
constexpr bool kStored = STORED;
constexpr int kWarps = 4;  // that share a tile of queries
constexpr int kTile = 16;  // queries
constexpr int kMaxThreads = HEAD_DIM == 256 ? 256 : 512;
constexpr int kKeys = HEAD_DIM == 256 ? 32 : 64;  // of a chunk
constexpr int kWarpKeys = kKeys / kWarps;
constexpr int kColumns = HEAD_DIM * sizeof(Cache) / 2;  // units in a row of the cache
constexpr int kPieces = kColumns / kChunk;              // of 16 bytes in a row of the cache
constexpr int kTileUnits = kKeys * kColumns;
constexpr int kBlockDims = kCoded ? 32 : 16;  // of values that one ldmatrix brings
constexpr int kWarpDims = HEAD_DIM / kWarps < kBlockDims ? kBlockDims : HEAD_DIM / kWarps;
constexpr unsigned int kAll = 0xffffffff;

// What a thread works on: its warp's tile of queries and quarter of keys and dimensions, its place in fragments of mma.
struct Place {
    int tile = threadIdx.x / (32 * kWarps);
    int quarter = threadIdx.x / 32 % kWarps;
    int g = threadIdx.x % 32 / 4;
    int t = threadIdx.x % 4;

    // One of the two queries that a thread has, within the tile and within the group.
    __device__ __forceinline__ int row(int r) const { return g + 8 * r; }
    __device__ __forceinline__ int query(int r) const { return tile * kTile + row(r); }
    // The first of a pair of keys of a chunk: those of accumulator `j` of the scores.
    __device__ __forceinline__ int key(int j) const { return quarter * kWarpKeys + 8 * j + 2 * t; }
};

// ---- Shared memory: what is new, a tile for each 16 queries, and the stages ----

// The new token's key and value, and the block's number among those that combine.
struct Fresh {
    Unit rows[2][kColumns];
    float scales[2];
    int rank;
    int unused;
};

// What four warps tell each other about a chunk: weights as mma wants them, in the order of tile.cuh, of each warp's
// keys relative to its own exponent; the exponents; the sums of the weights.
struct Weighed {
    ELEMENT weights[kTile * kKeys];
    float exponents[kTile * kWarps];
    float sums[kTile * kWarps];
};

// The rotated queries in the order of tile.cuh. Chunks are weighed into one and the other in turn, so that a warp may
// begin with a chunk while others still read what is said of the last; where queries take most room there is one.
struct QueryTile {
    ELEMENT queries[kTile * HEAD_DIM];
    Weighed weighed[2];
};
__device__ __forceinline__ int count_weighed() { return blockDim.x / (32 * kWarps) * HEAD_DIM < 512 ? 2 : 1; }

// A chunk of the cache, in the order of tile.cuh. With codes, the scales of its keys and then of its values follow.
struct Stage {
    Unit keys[kTileUnits];
    Unit values[kTileUnits];

    __device__ __forceinline__ float* scales() { return reinterpret_cast<float*>(this + 1); }
};
constexpr int kStageBytes = sizeof(Stage) + (kCoded ? 2 * kKeys * sizeof(float) : 0);

// Behind `Fresh`, a block that has used up all else keeps its result for the cluster (or, to combine, less than that).
// Rows of sums are apart by so many floats more, so that the threads of a warp write to different banks.
constexpr int kPartPadding = 8;
constexpr int kMaxTiles = kMaxThreads / (32 * kWarps);
static_assert(kTile * ((HEAD_DIM + kPartPadding) * sizeof(float) + sizeof(float2)) * kMaxTiles <=
                  (sizeof(QueryTile) - sizeof(Weighed)) * kMaxTiles + kStageBytes,
              "a part fits behind Fresh; with fewer tiles all the more");
static_assert(8 * (HEAD_DIM + 2) <= kTile * (HEAD_DIM + kPartPadding), "so does the scratch of combine");

struct Memory {
    Fresh* fresh;
    QueryTile* tile;  // of the thread's warp
    unsigned char* stages;

    __device__ __forceinline__ Memory(unsigned char* begin, const Place& place) {
        fresh = reinterpret_cast<Fresh*>(begin);
        auto* tiles = reinterpret_cast<unsigned char*>(fresh + 1);
        const int bytes = sizeof(QueryTile) - (2 - count_weighed()) * sizeof(Weighed);
        tile = reinterpret_cast<QueryTile*>(tiles + place.tile * bytes);
        stages = tiles + blockDim.x / (32 * kWarps) * bytes;
    }

    __device__ __forceinline__ Stage& stage(int index) const {
        return *reinterpret_cast<Stage*>(stages + index * kStageBytes);
    }
};
