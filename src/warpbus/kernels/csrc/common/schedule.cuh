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
};
