// One wrapper for each PTX instruction that the kernels use, with its contract.
//
// Source: the PTX ISA reference. The names are the instructions' own. A shared-memory address is the 32-bit address that
// `shared_address` gives. What needs Hopper says so; a kernel that does not call it still compiles for older GPUs.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ptx {

using uint32 = unsigned int;
using uint64 = unsigned long long;

// The address of an object in shared memory within the shared window.
__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// ---- Loads by address in shared memory ----

// A word, and four words from a multiple of 16 bytes on.
__device__ __forceinline__ uint32 load_shared(uint32 address) {
    uint32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}
__device__ __forceinline__ void load_shared_8(uint32* words, uint32 address) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared_16(uint32* words, uint32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
}

// Store 8 or 16 bytes to shared memory.
__device__ __forceinline__ void store_shared_8(uint32 address, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void store_shared_16(uint32 address, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// ---- Copies from global to shared memory by threads (sm_80) ----

// Copy 16 bytes, past L1. Both addresses are multiples of 16. `valid` of the 16 bytes are read and the others are written
// as zero, so that a thread past the edge copies with 0 and a valid address. Complete after cp_async_wait.
__device__ __forceinline__ void cp_async_16(uint32 shared, const void* global, int valid = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}

// Close the group of this thread's copies since the last call. A group may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `Pending` of this thread's newest groups are under way. Other threads' copies need a barrier after.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// The same for a number (0 to 3) that the compiler does not know.
__device__ __forceinline__ void cp_async_wait(int pending) {
    if (pending == 0) cp_async_wait<0>();
    else if (pending == 1) cp_async_wait<1>();
    else if (pending == 2) cp_async_wait<2>();
    else cp_async_wait<3>();
}

// Arrive at a barrier of mbarrier_init when all copies that this thread has begun are complete.
__device__ __forceinline__ void cp_async_arrive(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- Matrix fragments (sm_75, stmatrix sm_90) ----

// Load four 8x8 matrices of 16-bit elements. Lanes 8i to 8i+7 give the addresses of the rows of matrix i, 16 bytes each
// and aligned to 16. Lane l gets elements (l/4, 2(l%4)) and (l/4, 2(l%4)+1) of matrix i in `fragment[i]`.
__device__ __forceinline__ void ldmatrix_x4(uint32 (&fragment)[4], uint32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&fragment)[4], uint32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(shared)
                 : "memory");
}

// Store four 8x8 matrices of 16-bit elements: the inverse of ldmatrix_x4. Needs sm_90.
__device__ __forceinline__ void stmatrix_x4(uint32 shared, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32 shared, uint32 r0, uint32 r1, uint32 r2, uint32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Two matrices, of which lanes 0 to 15 give the addresses, each transposed.
__device__ __forceinline__ void stmatrix_x2_trans(uint32 shared, uint32 r0, uint32 r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared), "r"(r0), "r"(r1) : "memory");
}

// D += A B for a warp: A 16x16 (row-major fragments), B 16x8 (column-major fragments), D 16x8 in fp32. With g = lane/4 and
// t = lane%4, as pairs of columns for A and rows for B: a[0] (g, 2t) a[1] (g+8, 2t) a[2] (g, 2t+8) a[3] (g+8, 2t+8);
// b[0] (2t, g) b[1] (2t+8, g); d[0..1] (g, 2t..2t+1), d[2..3] (g+8, 2t..2t+1). `Element` says how the bits are read.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D += A B for a warp with 8-bit operands: A 16x32, B 32x8, D 16x8. The registers hold four elements where those of
// mma_m16n8k16 hold two: a[0] (g, 4t..4t+3) a[1] (g+8, 4t..) a[2] (g, 4t+16..) a[3] (g+8, 4t+16..); b[0] (4t.., g)
// b[1] (4t+16.., g); d as there. The type of D chooses: int for s8, exact; float for e4m3, which needs sm_89.
__device__ __forceinline__ void mma_m16n8k32(int (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k32(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with tf32 operands, of which a register holds one: A 16x8, B 8x8. a[0] (g, t) a[1] (g+8, t) a[2] (g, t+4)
// a[3] (g+8, t+4); b0 (t, g) b1 (t+4, g).
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Arithmetic ----

// 1 / x within one unit in the last place; x and the result count as zero where they are smaller than a normal number.
__device__ __forceinline__ float reciprocal(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// The bits of x rounded to nearest, ties away from zero, to the 10 bits of mantissa of tf32.
__device__ __forceinline__ uint32 round_tf32(float x) {
    uint32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

// ---- Rounding to 8 bits (e4m3 and e5m2: sm_89) ----

// Two floats rounded to nearest even as e4m3, beyond +-448 to +-448; `low` lies first in memory.
__device__ __forceinline__ unsigned short pack_e4m3(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// The values of two e4m3, the one in the low byte first. Needs sm_89.
__device__ __forceinline__ float2 unpack_e4m3(unsigned int pair) {
    uint32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pair)));
    return __half22float2(*reinterpret_cast<__half2*>(&halves));
}

// The same as e5m2, beyond +-57344 to +-57344.
__device__ __forceinline__ unsigned short pack_e5m2(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// A float rounded to nearest even as an integer of -128 to 127.
__device__ __forceinline__ signed char round_s8(float x) {
    int rounded;
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return static_cast<signed char>(rounded);
}

// ---- Global loads of 16 bytes ----

// Load 16 bytes that another kernel may have written, by way of L1. The compiler keeps the order of these loads and of
// load_streaming: free to move them, it takes more registers for more of them in flight.
__device__ __forceinline__ uint4 load_in_order(const void* global) {
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(global));
    return value;
}

// Load 16 bytes that are read once and not written while the kernel runs: not kept in L1, 256 bytes at a time into L2.
__device__ __forceinline__ uint4 load_streaming(const void* global) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(global));
    return value;
}

// ---- Flags in global memory between blocks (sm_70) ----

// Read a flag; what its writer did before `store_release` is visible to this thread afterwards.
__device__ __forceinline__ int load_acquire(const int* flag) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// Write a flag after all that this thread has written or seen.
__device__ __forceinline__ void store_release(int* flag, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Add to a counter after all that this thread has written or seen.
__device__ __forceinline__ void add_release(int* counter, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// Add to a counter after all that this thread has written or seen, and see what those had written who added before.
__device__ __forceinline__ int add_acquire_release(int* counter, int value) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
    return before;
}

// ---- Barriers in shared memory that count arrivals and bytes (sm_90 for all that follows) ----

// Prepare a barrier for `arrivals` arrivals a phase. One thread calls it; mbarrier_fence_init makes it visible.
__device__ __forceinline__ void mbarrier_init(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Make initialised barriers visible to the cluster and to the copy engine. A block or cluster barrier has to follow.
__device__ __forceinline__ void mbarrier_fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive once and announce `bytes` that asynchronous copies will bring in this phase.
__device__ __forceinline__ void mbarrier_expect(uint32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrive once at a barrier of this block.
__device__ __forceinline__ void mbarrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive once at the barrier that has the same address in block `rank` of the cluster. It says that a buffer was read and
// hands no data over: with the order of the whole cluster asked for (.release.cluster), each arrival would cost a fence.
__device__ __forceinline__ void mbarrier_arrive_at(uint32 barrier, int rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Wait until the phase of parity `parity` has ended. The first phase has parity 0, so a wait for 1 on a fresh barrier
// returns at once.
__device__ __forceinline__ void mbarrier_wait(uint32 barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether the phase of parity `parity` has ended: mbarrier_wait for GPUs before Hopper, which init, arrive and test exist on.
__device__ __forceinline__ bool mbarrier_test(uint32 barrier, int parity) {
    uint32 done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// ---- The copy engine (TMA) ----

// Copy `bytes` contiguous bytes to shared memory and count them at `barrier`. Addresses and size are multiples of 16. One
// thread calls it.
__device__ __forceinline__ void bulk_load(uint32 shared, const void* global, int bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Bring `bytes` contiguous bytes into L2; address and size are multiples of 16. L2 is where all writes meet, so it changes
// nothing that could be seen and may stand before griddepcontrol_wait. One thread calls it.
__device__ __forceinline__ void bulk_prefetch(const void* global, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// The 128 bytes that describe a tensor to the copy engine, encoded on the host; a __grid_constant__ kernel parameter.
struct alignas(64) TensorMap {
    uint64 opaque[16];
};

// Of a matrix that is copied in tiles of `Rows` rows: of whole ones, and of the last one, which may have fewer.
struct TileMaps {
    TensorMap whole, rest;

    template <int Rows>
    __device__ __forceinline__ const TensorMap* of(int rows) const {
        return rows < Rows ? &rest : &whole;
    }
};

// Bring a tensor map into its cache ahead of use.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copy the box at (x, y), x along the contiguous axis, to shared memory (128-byte swizzle: aligned to 1024 bytes) and
// count its bytes at `barrier`. Elements outside the tensor arrive as zero and are counted. One thread calls it.
__device__ __forceinline__ void tma_load(uint32 shared, const TensorMap* map, uint32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared),
        "l"(map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

// The same for the box at (x, y, z) of a map of three axes.
__device__ __forceinline__ void tma_load(uint32 shared, const TensorMap* map, uint32 barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// Bring the box at (x, y) into L2 ahead of its tma_load. It changes nothing that could be seen, so that it may stand
// before griddepcontrol_wait.
__device__ __forceinline__ void tma_prefetch(const TensorMap* map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}

// tma_load of two axes into every block of the cluster whose bit is set in `blocks`, at the same address and barrier in each.
__device__ __forceinline__ void tma_load_multicast(uint32 shared, const TensorMap* map, uint32 barrier, int x, int y,
                                                   unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}

// Copy a box from shared memory to (x, y); what lies outside the tensor is not written. Part of this thread's bulk group.
__device__ __forceinline__ void tma_store(const TensorMap* map, uint32 shared, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(shared),
                 "r"(x), "r"(y)
                 : "memory");
}

// Close the group of this thread's stores since the last call.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until the shared memory of all but the newest `Pending` groups has been read and may be written again.
template <int Pending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Order this thread's ordinary writes to shared memory before what the copy engine or wgmma read afterwards.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Blocks, clusters, warpgroups ----

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads, a multiple of 32.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrive there and do not wait: for threads that others of the `threads` wait for.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The number of this block within its cluster.
__device__ __forceinline__ int cluster_rank() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
}

// Barrier among all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// An object in the shared memory of block `rank` of the cluster, by its place in one's own. A barrier of the cluster
// has to lie between who writes it and who reads it, and that block may not end before another one.
template <typename T>
__device__ __forceinline__ T* of_cluster_block(T* own, int rank) {
    T* other;
    asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(own), "r"(rank));
    return other;
}

// Give registers back, or take more: `Registers` a thread (a multiple of 8), by all warps of a warpgroup. The kernel has
// a register cap (__launch_bounds__), and the sum over the block stays within the register file.
template <int Registers>
__device__ __forceinline__ void setmaxnreg_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void setmaxnreg_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Wait until the previous kernels of the stream have ended and their writes are visible (programmatic dependent launch).
//
// A parameter that points to what those kernels may write must not be `const __restrict__`: that promises memory which
// nobody writes while this kernel runs, this kernel runs while they write, and the compiler loads such memory through the
// read-only path (ld.global.nc), which may hold the old values. A weight may be loaded so, or ahead of this wait: no kernel of
// a step writes it. Where the host has just copied it, it launches with dependent=False.
// tests/cpu/kernels/test_kernels_read_only_loads.py checks the loads.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Let a dependent kernel start once all blocks have called this or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace ptx
