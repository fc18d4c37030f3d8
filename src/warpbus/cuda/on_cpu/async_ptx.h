// Barriers and asynchronous instructions of inline PTX on a CPU: what `warpbus.cuda.ptx` makes calls of.
//
// The functions are in the runtime, see `barriers.h`, `mbarriers.h`, `bulk_copies.h`, `tensor_maps.h` and
// `wgmma.h`.
#pragma once

#include "cuda_runtime.h"

namespace warpbus {

// Where a box begins: its coordinates, the innermost axis first.
struct TilePlace { int32_t at[5]; };

enum class WgmmaType : unsigned char { f16, bf16, tf32, e4m3, e5m2, s8, u8 };
enum class WgmmaSums : unsigned char { f32, f16, s32 };

// A product of a warpgroup: D (64 x columns) = A B, or D += A B if it accumulates.
struct Wgmma {
    unsigned columns;
    WgmmaType type_a, type_b;
    WgmmaSums sums;
    bool a_in_registers, accumulates, mn_major_a, mn_major_b, limited;
    int sign_a, sign_b;
    uint64_t descriptor_a, descriptor_b;
    uint32_t a[4];
};

}  // namespace warpbus

namespace warpbus::ptx {

void named_barrier(unsigned number, unsigned count, bool waits, const char *what, int line);
unsigned elect(unsigned mask, int line);                     // the lane that is the leader
void set_max_registers(unsigned count, int line);
void fence_proxy_async();

void mbarrier_init(uint64_t at, uint32_t count, int line);
void mbarrier_invalidate(uint64_t at, int line);
void mbarrier_expect(uint64_t at, uint32_t bytes, int line);
void mbarrier_complete(uint64_t at, uint32_t bytes, int line);
// They return the state before. `drop`: later phases expect fewer arrivals. `completes`: whether it may end the phase.
uint64_t mbarrier_arrive(uint64_t at, uint32_t count, bool drop, bool completes, const char *what, int line);
uint64_t mbarrier_arrive_expect(uint64_t at, uint32_t bytes, bool drop, const char *what, int line);
// An arrival when the copies of cp.async that this thread has begun are complete; `counted`: it is among those expected.
void mbarrier_arrive_after_copies(uint64_t at, bool counted, int line);
// Whether a phase has ended: that of a parity, or of a state. `blocks`: not before it has (try_wait).
bool mbarrier_wait_parity(uint64_t at, uint32_t parity, bool blocks, const char *what, int line);
bool mbarrier_wait_state(uint64_t at, uint64_t state, bool blocks, const char *what, int line);
inline uint32_t mbarrier_pending(uint64_t state) { return static_cast<uint32_t>(state & 0xFFFFF); }

// Bulk copies: addresses and bytes are multiples of 16. A load reports to an mbarrier, a store belongs to a group of its
// thread. `join` is what a reduction does with the bytes in device memory and those in shared memory.
using Join = void (*)(void *to, const void *from, size_t bytes);
void bulk_load(uint64_t to, uint64_t from, uint32_t bytes, uint64_t mbarrier, int line);
void bulk_store(uint64_t to, uint64_t from, uint32_t bytes, Join join, int line);
void bulk_prefetch(uint64_t from, uint32_t bytes, int line);
void bulk_commit();
void bulk_wait(uint32_t last, bool read);

inline void replace(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
template <class T, class Operation> void reduce_elements(void *to, const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += sizeof(T)) {
        T a, b;
        memcpy(&a, static_cast<const char *>(to) + at, sizeof a);
        memcpy(&b, static_cast<const char *>(from) + at, sizeof b);
        a = Operation{}(a, b);
        memcpy(static_cast<char *>(to) + at, &a, sizeof a);
    }
}
struct Sum { template <class T> T operator()(T a, T b) const { return a + b; } };
struct Least { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Most { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
struct BitAnd { template <class T> T operator()(T a, T b) const { return a & b; } };
struct BitOr { template <class T> T operator()(T a, T b) const { return a | b; } };
struct BitXor { template <class T> T operator()(T a, T b) const { return a ^ b; } };

// Copies of boxes: `map` is the address of a CUtensorMap, `blocks` has a bit for each block of the cluster that gets the
// box, 0: the one that `to` belongs to.
enum class Reduction : unsigned char { none, add, min, max };
void tensor_load(uint64_t to, uint64_t map, const TilePlace &place, unsigned rank, uint64_t mbarrier, unsigned blocks, int line);
void tensor_store(uint64_t map, const TilePlace &place, unsigned rank, uint64_t from, Reduction operation, int line);
void tensor_prefetch(uint64_t map, unsigned rank, int line);

void wgmma_fence();
void wgmma_commit();
void wgmma_wait(uint32_t last, int line);
// The accumulators are the variables of the program: they change when the product is waited for.
void wgmma(const Wgmma &of, void *const *accumulators, unsigned count, int line);

}  // namespace warpbus::ptx
