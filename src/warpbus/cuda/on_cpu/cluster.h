// Blocks that run together: those of a cooperative launch, and those of a cluster, which can access each other's shared
// memory.
//
// Shared memory is static, so that blocks exchange it when they take turns. While a block does not run, its arrays are in
// memory of its own, below 4 GB: that is what other blocks of its cluster access.
#pragma once

#include "barriers.h"

namespace warpbus {

enum class Ran { ended, at_grid, spinning, waiting };  // `waiting`: for another block of its cluster

struct Resident {
    std::vector<Fiber> fibers;
    std::vector<char *> shared;  // by the numbers of the arrays, nullptr if nothing was kept yet
    BlockBarriers barriers;
    Ran ran;
};

struct ClusterBarrier {
    unsigned arrived, ended;  // threads
    uint64_t phase;
};

inline std::vector<Resident> residents;  // with the stacks of their threads
inline bool whole_grid;                  // all blocks of the grid run together; else those of a cluster, by their ranks
inline uint3 cluster_size{1, 1, 1};
inline std::map<unsigned, ClusterBarrier> cluster_barriers;  // by the number of the cluster

inline unsigned cluster_blocks() { return cluster_size.x * cluster_size.y * cluster_size.z; }
inline uint3 clusters() { return {grid_size.x / cluster_size.x, grid_size.y / cluster_size.y, grid_size.z / cluster_size.z}; }
inline uint3 cluster_at() { return {block_at.x / cluster_size.x, block_at.y / cluster_size.y, block_at.z / cluster_size.z}; }
inline uint3 block_in_cluster() { return {block_at.x % cluster_size.x, block_at.y % cluster_size.y, block_at.z % cluster_size.z}; }
inline unsigned linear(uint3 at, uint3 size) { return at.x + size.x * (at.y + size.y * at.z); }
inline unsigned own_rank() { return linear(block_in_cluster(), cluster_size); }

// The place of a block in the grid by its rank in the cluster whose first block is at `origin`.
inline uint3 block_of_rank(unsigned rank, uint3 origin) {
    return {origin.x + rank % cluster_size.x, origin.y + rank / cluster_size.x % cluster_size.y,
            origin.z + rank / cluster_size.x / cluster_size.y};
}
inline Resident &resident_of(unsigned rank) {
    const uint3 at = cluster_at(), origin{at.x * cluster_size.x, at.y * cluster_size.y, at.z * cluster_size.z};
    return residents[whole_grid ? linear(block_of_rank(rank, origin), grid_size) : rank];
}

// Memory whose addresses fit into 32 bits.
inline char *low_memory(size_t size) {
    static uintptr_t next = 0x20000000;
    const size_t mapped = (size + page() - 1) / page() * page();
    for (; next + mapped < 0x100000000; next += mapped) {
        void *found = mmap(reinterpret_cast<void *>(next), mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == reinterpret_cast<void *>(next)) {
            next += mapped;
            return static_cast<char *>(found);
        }
        if (found != MAP_FAILED) munmap(found, mapped);
    }
    fprintf(stderr, "no memory for the shared memory of a block\n");
    _exit(71);
}

// Where an array of a block is while the block does not run.
inline char *kept_array(Resident &block, size_t number) {
    if (block.shared.size() <= number) block.shared.resize(number + 1);
    char *&found = block.shared[number];
    if (!found) found = low_memory(number ? shared_arrays[number].size : kMostOptIn);
    return found;
}

// The address of the same place in the shared memory of a block of the cluster.
inline uint64_t address_in_block(uint64_t address, unsigned rank) {
    if (rank == own_rank()) return address;
    const char *at = reinterpret_cast<const char *>(address);
    for (size_t i = 0; i < shared_arrays.size(); ++i) {
        const SharedArray &each = shared_arrays[i];
        if (at >= each.begin && at < each.begin + each.size)
            return reinterpret_cast<uint64_t>(kept_array(resident_of(rank), i) + (at - each.begin));
    }
    return 0;
}

// The block of the cluster whose shared memory an address is in, and the address that it has there itself.
struct OwnedAddress {
    unsigned rank;
    uint64_t address;
};
inline OwnedAddress owned_address(uint64_t address) {
    const char *at = reinterpret_cast<const char *>(address);
    const unsigned own = own_rank(), count = cluster_blocks();
    if (count > 1 && !in_shared_memory(address, 1))
        for (unsigned rank = 0; rank < count; ++rank) {
            if (rank == own) continue;
            const auto &kept = resident_of(rank).shared;
            for (size_t i = 0; i < kept.size(); ++i)
                if (kept[i] && at >= kept[i] && at < kept[i] + shared_arrays[i].size)
                    return {rank, reinterpret_cast<uint64_t>(shared_arrays[i].begin + (at - kept[i]))};
        }
    return {own, address};
}
inline BlockBarriers &barriers_of(unsigned rank) { return rank == own_rank() ? barriers : resident_of(rank).barriers; }

// ---- the barrier of a cluster

inline ClusterBarrier &own_cluster_barrier() { return cluster_barriers[linear(cluster_at(), clusters())]; }

inline void complete_cluster_barrier(ClusterBarrier &of) {
    if (of.arrived == 0 || of.arrived + of.ended < block_threads() * cluster_blocks()) return;
    of.arrived = 0;
    ++of.phase;
    ++progress;
}

inline bool release_cluster(unsigned threads) {
    bool released = false;
    const uint64_t phase = own_cluster_barrier().phase;
    for (unsigned i = 0; i < threads; ++i) {
        Fiber &fiber = fibers[i];
        if (fiber.ended || fiber.waits != Waits::cluster || fiber.cluster_phase == phase) continue;
        fiber.waits = Waits::nothing;
        released = true;
    }
    return released;
}

// A thread that ends is not waited for any more.
inline void end_in_cluster() {
    ClusterBarrier &of = own_cluster_barrier();
    if (running().cluster_arrived && running().cluster_phase == of.phase) --of.arrived;
    ++of.ended;
    complete_cluster_barrier(of);
}

void arrive_cluster(int line) {
    Fiber &own = running();
    ClusterBarrier &of = own_cluster_barrier();
    if (own.cluster_arrived) stop("cluster_misused", place(own) + field("problem", "arrived_twice") + field("line", line));
    check_fence(false);
    check_release(&of);
    own.cluster_arrived = true;
    own.cluster_phase = of.phase;
    ++of.arrived;
    ++progress;
    complete_cluster_barrier(of);
}

void wait_cluster(int line) {
    Fiber &own = running();
    ClusterBarrier &of = own_cluster_barrier();
    if (!own.cluster_arrived) stop("cluster_misused", place(own) + field("problem", "not_arrived") + field("line", line));
    if (own.cluster_phase == of.phase) wait_for(Waits::cluster, "barrier.cluster.wait", line);
    own.cluster_arrived = false;
    check_acquire(&of, own.number);
}

ClusterPlace cluster_place() {
    return {block_in_cluster(), cluster_size, cluster_at(), clusters(), own_rank(), cluster_blocks()};
}

uint64_t map_shared(uint64_t address, unsigned rank, int line) {
    const char *problem = rank >= cluster_blocks() ? "no_rank" : in_shared_memory(address, 1) ? nullptr : "not_own";
    if (problem) stop("cluster_misused", place(*current) + field("problem", problem) + field("line", line) +
                      field("rank", rank) + field("count", cluster_blocks()));
    return address_in_block(address, rank);
}

unsigned rank_of_address(uint64_t address) { return owned_address(address).rank; }

}  // namespace warpbus
