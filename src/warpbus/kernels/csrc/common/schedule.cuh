// In which order blocks take the tiles of a matrix, and where a ring of buffers stands.
#pragma once

template <typename Index>
struct TilePlace {
    Index row, column;  // of tiles
};

// Where tile number `index` of `rows` by `columns` tiles lies: down a group of `group` rows of tiles, then on to the next
// column. Blocks that run at one time then share rows and columns, which L2 serves to all but the first of them.
template <typename Index>
__device__ __forceinline__ TilePlace<Index> tile_place(Index index, Index rows, Index columns, Index group) {
    const Index first = index / (group * columns) * group;
    const Index height = min(group, rows - first);  // the last group may have less
    const Index within = index % (group * columns);
    return {first + within % height, within / height};
}

// Rows that are there of a tile of `Rows` rows that begins with `first` of `rows`.
template <int Rows>
__device__ __forceinline__ int rows_of(int first, int rows) {
    return max(min(Rows, rows - first), 0);
}

// A position in a ring of `Stages` buffers: the stage, and the parity of the phase its barriers are in.
template <int Stages>
struct Ring {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    // The stage before.
    __device__ __forceinline__ int previous() const { return stage > 0 ? stage - 1 : Stages - 1; }
};
