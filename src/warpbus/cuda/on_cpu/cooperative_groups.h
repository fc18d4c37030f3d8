// Cooperative groups on a CPU: blocks, tiles of a warp, lanes that run together, and grids of cooperative launches.
//
// Not here: tiles of more than a warp.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

using warpbus::current;

// A block, or a tile of 1 to 32 lanes, whose size is known when the program runs.
class thread_group {
  public:
    thread_group(bool whole, unsigned size) : whole_(whole), size_(size) {}
    unsigned long long size() const { return size_; }
    unsigned long long num_threads() const { return size_; }
    unsigned long long thread_rank() const { return whole_ ? current->number : current->number % size_; }
    void sync(WARPBUS_LINE) const {
        if (whole_) __syncthreads(line);
        else __syncwarp(lanes(), line);
    }

  protected:
    unsigned lanes() const { return (size_ == 32 ? ~0u : (1u << size_) - 1) << warpbus::lane() / size_ * size_; }

    bool whole_;
    unsigned size_;
};

struct thread_block : thread_group {
    thread_block() : thread_group(true, blockDim.x * blockDim.y * blockDim.z) {}
    unsigned size() const { return size_; }
    unsigned num_threads() const { return size_; }
    unsigned thread_rank() const { return current->number; }
    dim3 group_index() const { return blockIdx; }
    dim3 thread_index() const { return threadIdx; }
    dim3 group_dim() const { return blockDim; }
    dim3 dim_threads() const { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned Size> class warp_tile : public thread_group {
    static_assert(Size >= 1 && Size <= 32 && (Size & (Size - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads");

  public:
    warp_tile(unsigned place, unsigned count) : thread_group(false, Size), place_(place), count_(count) {}
    unsigned size() const { return Size; }
    unsigned num_threads() const { return Size; }
    unsigned thread_rank() const { return current->number % Size; }
    unsigned meta_group_rank() const { return place_; }
    unsigned meta_group_size() const { return count_; }
    unsigned lanes() const { return thread_group::lanes(); }

    template <class T> T shfl(T value, int from, WARPBUS_LINE) const { return __shfl_sync(lanes(), value, from, Size, line); }
    template <class T> T shfl_down(T value, unsigned by, WARPBUS_LINE) const {
        return __shfl_down_sync(lanes(), value, by, Size, line);
    }
    template <class T> T shfl_up(T value, unsigned by, WARPBUS_LINE) const {
        return __shfl_up_sync(lanes(), value, by, Size, line);
    }
    template <class T> T shfl_xor(T value, int with, WARPBUS_LINE) const {
        return __shfl_xor_sync(lanes(), value, with, Size, line);
    }
    unsigned ballot(int predicate, WARPBUS_LINE) const {
        return (__ballot_sync(lanes(), predicate, line) & lanes()) >> warpbus::lane() / Size * Size;
    }
    int any(int predicate, WARPBUS_LINE) const { return ballot(predicate, line) != 0; }
    int all(int predicate, WARPBUS_LINE) const { return ballot(!predicate, line) == 0; }
    template <class T> unsigned match_any(T value, WARPBUS_LINE) const {
        return __match_any_sync(lanes(), value, line) >> warpbus::lane() / Size * Size;
    }

  private:
    unsigned place_, count_;  // among the tiles of the group that was divided
};
template <unsigned Size, class Parent = void> struct thread_block_tile : warp_tile<Size> {
    using warp_tile<Size>::warp_tile;
    thread_block_tile(const warp_tile<Size> &of) : warp_tile<Size>(of) {}
};

template <unsigned Size, class Group> thread_block_tile<Size, Group> tiled_partition(const Group &group) {
    return {static_cast<unsigned>(group.thread_rank()) / Size, (static_cast<unsigned>(group.size()) + Size - 1) / Size};
}
template <class Group> thread_group tiled_partition(const Group &, unsigned size) { return {false, size}; }

// The lanes of a warp that execute a line together, numbered from the lowest one.
class coalesced_group {
  public:
    explicit coalesced_group(unsigned lanes) : lanes_(lanes) {}
    unsigned size() const { return static_cast<unsigned>(__popc(lanes_)); }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const { return static_cast<unsigned>(__popc(lanes_ & ((1u << warpbus::lane()) - 1))); }
    unsigned lanes() const { return lanes_; }
    void sync(WARPBUS_LINE) const { __syncwarp(lanes_, line); }

    template <class T> T shfl(T value, unsigned from, WARPBUS_LINE) const {
        return __shfl_sync(lanes_, value, lane_of(from), 32, line);
    }
    template <class T> T shfl_down(T value, unsigned by, WARPBUS_LINE) const {
        const unsigned from = thread_rank() + by;
        return shfl(value, from < size() ? from : thread_rank(), line);
    }
    template <class T> T shfl_up(T value, unsigned by, WARPBUS_LINE) const {
        return shfl(value, by <= thread_rank() ? thread_rank() - by : thread_rank(), line);
    }
    unsigned ballot(int predicate, WARPBUS_LINE) const {
        const unsigned by_lane = __ballot_sync(lanes_, predicate, line);
        unsigned found = 0;
        for (unsigned rank = 0; rank < size(); ++rank) found |= (by_lane >> lane_of(rank) & 1) << rank;
        return found;
    }
    int any(int predicate, WARPBUS_LINE) const { return ballot(predicate, line) != 0; }
    int all(int predicate, WARPBUS_LINE) const { return ballot(!predicate, line) == 0; }

  private:
    int lane_of(unsigned rank) const {
        unsigned rest = lanes_;
        for (; rank; --rank) rest &= rest - 1;
        return __ffs(static_cast<int>(rest)) - 1;
    }

    unsigned lanes_;
};
inline coalesced_group coalesced_threads(WARPBUS_LINE) { return coalesced_group(__activemask(line)); }

struct grid_group {
    bool is_valid() const { return true; }
    void sync(WARPBUS_LINE) const { warpbus::wait_for(warpbus::Waits::grid, "grid.sync()", line); }
    unsigned long long num_blocks() const { return 1ull * gridDim.x * gridDim.y * gridDim.z; }
    unsigned long long block_rank() const { return blockIdx.x + 1ull * gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }
    unsigned long long size() const { return num_blocks() * this_thread_block().size(); }
    unsigned long long num_threads() const { return size(); }
    unsigned long long thread_rank() const { return block_rank() * this_thread_block().size() + current->number; }
    dim3 group_dim() const { return gridDim; }
    dim3 dim_blocks() const { return gridDim; }
    dim3 block_index() const { return blockIdx; }
};
inline grid_group this_grid() { return {}; }

struct cluster_group {
    void sync(WARPBUS_LINE) const {
        warpbus::arrive_cluster(line);
        warpbus::wait_cluster(line);
    }
    void barrier_arrive(WARPBUS_LINE) const { warpbus::arrive_cluster(line); }
    void barrier_wait(WARPBUS_LINE) const { warpbus::wait_cluster(line); }
    unsigned block_rank() const { return warpbus::cluster_place().rank; }
    unsigned num_blocks() const { return warpbus::cluster_place().count; }
    dim3 dim_blocks() const { return warpbus::cluster_place().size; }
    dim3 block_index() const { return warpbus::cluster_place().block; }
    unsigned num_threads() const { return num_blocks() * this_thread_block().size(); }
    unsigned size() const { return num_threads(); }
    unsigned thread_rank() const { return block_rank() * this_thread_block().size() + current->number; }
    template <class T> T *map_shared_rank(T *at, int rank, WARPBUS_LINE) const {
        return reinterpret_cast<T *>(warpbus::map_shared(reinterpret_cast<uint64_t>(at), static_cast<unsigned>(rank), line));
    }
    unsigned query_shared_rank(const void *at) const { return warpbus::rank_of_address(reinterpret_cast<uint64_t>(at)); }
};
inline cluster_group this_cluster() { return {}; }

template <class Group> void sync(const Group &group, WARPBUS_LINE) { group.sync(line); }

template <class T> struct plus { T operator()(T a, T b) const { return a + b; } };
template <class T> struct less { T operator()(T a, T b) const { return b < a ? b : a; } };
template <class T> struct greater { T operator()(T a, T b) const { return a < b ? b : a; } };
template <class T> struct bit_and { T operator()(T a, T b) const { return a & b; } };
template <class T> struct bit_or { T operator()(T a, T b) const { return a | b; } };
template <class T> struct bit_xor { T operator()(T a, T b) const { return a ^ b; } };

}  // namespace cooperative_groups
