// wgmma: a warpgroup (four warps) multiplies tiles that lie in shared memory (sm_90a).
//
// D (64 x N, fp32, in registers) += A (64 x 16) B (16 x N), both 16-bit, from shared memory by descriptors. Thread t of the
// warpgroup holds in d[4 j + 2 h + i] the element at row 16 (t / 32) + (t % 32) / 4 + 8 h and column 8 j + 2 (t % 4) + i.
// Protocol: wgmma_fence before the first product of a batch, the products, wgmma_commit, wgmma_wait. Until the wait,
// neither accumulators nor operands may be touched. Source: the PTX ISA reference, "asynchronous warpgroup level".
#pragma once
#include "common/ptx.cuh"

namespace ptx {

// Order earlier accesses to the accumulators before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Close the group of products since the last call.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most `Pending` of the newest groups are in flight.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Describe an operand in shared memory with the 128-byte swizzle, as the copy engine writes boxes 64 elements wide.
// K-major (rows of 64 k): `stride` is the distance of groups of 8 rows, 1024; `leading` is not used. The next 16 k lie 32
// bytes on. MN-major (rows of 64 m or n): `stride` is the distance of groups of 8 k, 1024; `leading` the distance of
// blocks of 64 m or n. The next 16 k lie 2048 bytes on. All in bytes.
__device__ __forceinline__ constexpr uint64 wgmma_descriptor(uint32 shared, int leading, int stride) {
    constexpr uint64 kSwizzle128 = 1ull << 62;
    return kSwizzle128 | static_cast<uint64>(stride >> 4) << 32 | static_cast<uint64>(leading >> 4) << 16 |
           ((shared & 0x3FFFF) >> 4);
}

// Bytes per unit of a descriptor's address field.
constexpr int kDescriptorUnit = 16;

// The places of the accumulators in the instruction's text (P) and the operands themselves (D), by their number.
#define WGMMA_P4 "%0, %1, %2, %3"
#define WGMMA_P8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_P12 WGMMA_P8 ", %8, %9, %10, %11"
#define WGMMA_P16 WGMMA_P8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_P24 WGMMA_P16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_P32 WGMMA_P24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_P40 WGMMA_P32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_P48 WGMMA_P40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_P56 WGMMA_P48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_P64 WGMMA_P56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_P72 WGMMA_P64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_P80 WGMMA_P72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_P88 WGMMA_P80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_P96 WGMMA_P88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_P104 WGMMA_P96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_P112 WGMMA_P104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_P120 WGMMA_P112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_P128 WGMMA_P120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// C is the constraint of a register: "+f" for float, "+r" for int.
#define WGMMA_8(C, d, i)                                                                                               \
    C((d)[(i) + 0]), C((d)[(i) + 1]), C((d)[(i) + 2]), C((d)[(i) + 3]),                                                \
    C((d)[(i) + 4]), C((d)[(i) + 5]), C((d)[(i) + 6]), C((d)[(i) + 7])
#define WGMMA_4(C, d, i) C((d)[(i) + 0]), C((d)[(i) + 1]), C((d)[(i) + 2]), C((d)[(i) + 3])
#define WGMMA_D4(C, d) WGMMA_4(C, d, 0)
#define WGMMA_D8(C, d) WGMMA_8(C, d, 0)
#define WGMMA_D12(C, d) WGMMA_D8(C, d), WGMMA_4(C, d, 8)
#define WGMMA_D16(C, d) WGMMA_D8(C, d), WGMMA_8(C, d, 8)
#define WGMMA_D24(C, d) WGMMA_D16(C, d), WGMMA_8(C, d, 16)
#define WGMMA_D32(C, d) WGMMA_D24(C, d), WGMMA_8(C, d, 24)
#define WGMMA_D40(C, d) WGMMA_D32(C, d), WGMMA_8(C, d, 32)
#define WGMMA_D48(C, d) WGMMA_D40(C, d), WGMMA_8(C, d, 40)
#define WGMMA_D56(C, d) WGMMA_D48(C, d), WGMMA_8(C, d, 48)
#define WGMMA_D64(C, d) WGMMA_D56(C, d), WGMMA_8(C, d, 56)
#define WGMMA_D72(C, d) WGMMA_D64(C, d), WGMMA_8(C, d, 64)
#define WGMMA_D80(C, d) WGMMA_D72(C, d), WGMMA_8(C, d, 72)
#define WGMMA_D88(C, d) WGMMA_D80(C, d), WGMMA_8(C, d, 80)
#define WGMMA_D96(C, d) WGMMA_D88(C, d), WGMMA_8(C, d, 88)
#define WGMMA_D104(C, d) WGMMA_D96(C, d), WGMMA_8(C, d, 96)
#define WGMMA_D112(C, d) WGMMA_D104(C, d), WGMMA_8(C, d, 104)
#define WGMMA_D120(C, d) WGMMA_D112(C, d), WGMMA_8(C, d, 112)
#define WGMMA_D128(C, d) WGMMA_D120(C, d), WGMMA_8(C, d, 120)

// One instruction with `R` accumulators a thread; A to TB are the places of what stands behind them.
#define WGMMA(N, TYPE, R, A, B, ACCUMULATE, TA, TB)                                                                    \
    asm volatile(                                                                                                      \
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, " ACCUMULATE ", 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_P##R "}, " A ", " B                 \
        ", keep, 1, 1, " TA ", " TB ";\n}\n"                                                                           \
        : WGMMA_D##R("+f", d)                                                                                          \
        : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB))

template <typename Element>
constexpr bool is_half = false;
template <>
constexpr bool is_half<__half> = true;

// D = A B, or D += A B with `accumulate`. TransA, TransB: 0 for a K-major operand, 1 for an MN-major one.
template <typename Element, int N, int TransA, int TransB>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64 a, uint64 b, int accumulate) {
    if constexpr (N == 8) {
        if constexpr (is_half<Element>) WGMMA(8, "f16", 4, "%4", "%5", "%6", "%7", "%8");
        else WGMMA(8, "bf16", 4, "%4", "%5", "%6", "%7", "%8");
    } else if constexpr (N == 16) {
        if constexpr (is_half<Element>) WGMMA(16, "f16", 8, "%8", "%9", "%10", "%11", "%12");
        else WGMMA(16, "bf16", 8, "%8", "%9", "%10", "%11", "%12");
    } else if constexpr (N == 24) {
        if constexpr (is_half<Element>) WGMMA(24, "f16", 12, "%12", "%13", "%14", "%15", "%16");
        else WGMMA(24, "bf16", 12, "%12", "%13", "%14", "%15", "%16");
    } else if constexpr (N == 32) {
        if constexpr (is_half<Element>) WGMMA(32, "f16", 16, "%16", "%17", "%18", "%19", "%20");
        else WGMMA(32, "bf16", 16, "%16", "%17", "%18", "%19", "%20");
    } else if constexpr (N == 64) {
        if constexpr (is_half<Element>) WGMMA(64, "f16", 32, "%32", "%33", "%34", "%35", "%36");
        else WGMMA(64, "bf16", 32, "%32", "%33", "%34", "%35", "%36");
    } else if constexpr (N == 80) {
        if constexpr (is_half<Element>) WGMMA(80, "f16", 40, "%40", "%41", "%42", "%43", "%44");
        else WGMMA(80, "bf16", 40, "%40", "%41", "%42", "%43", "%44");
    } else if constexpr (N == 96) {
        if constexpr (is_half<Element>) WGMMA(96, "f16", 48, "%48", "%49", "%50", "%51", "%52");
        else WGMMA(96, "bf16", 48, "%48", "%49", "%50", "%51", "%52");
    } else if constexpr (N == 112) {
        if constexpr (is_half<Element>) WGMMA(112, "f16", 56, "%56", "%57", "%58", "%59", "%60");
        else WGMMA(112, "bf16", 56, "%56", "%57", "%58", "%59", "%60");
    } else if constexpr (N == 128) {
        if constexpr (is_half<Element>) WGMMA(128, "f16", 64, "%64", "%65", "%66", "%67", "%68");
        else WGMMA(128, "bf16", 64, "%64", "%65", "%66", "%67", "%68");
    } else if constexpr (N == 144) {
        if constexpr (is_half<Element>) WGMMA(144, "f16", 72, "%72", "%73", "%74", "%75", "%76");
        else WGMMA(144, "bf16", 72, "%72", "%73", "%74", "%75", "%76");
    } else if constexpr (N == 160) {
        if constexpr (is_half<Element>) WGMMA(160, "f16", 80, "%80", "%81", "%82", "%83", "%84");
        else WGMMA(160, "bf16", 80, "%80", "%81", "%82", "%83", "%84");
    } else if constexpr (N == 176) {
        if constexpr (is_half<Element>) WGMMA(176, "f16", 88, "%88", "%89", "%90", "%91", "%92");
        else WGMMA(176, "bf16", 88, "%88", "%89", "%90", "%91", "%92");
    } else if constexpr (N == 192) {
        if constexpr (is_half<Element>) WGMMA(192, "f16", 96, "%96", "%97", "%98", "%99", "%100");
        else WGMMA(192, "bf16", 96, "%96", "%97", "%98", "%99", "%100");
    } else if constexpr (N == 208) {
        if constexpr (is_half<Element>) WGMMA(208, "f16", 104, "%104", "%105", "%106", "%107", "%108");
        else WGMMA(208, "bf16", 104, "%104", "%105", "%106", "%107", "%108");
    } else if constexpr (N == 224) {
        if constexpr (is_half<Element>) WGMMA(224, "f16", 112, "%112", "%113", "%114", "%115", "%116");
        else WGMMA(224, "bf16", 112, "%112", "%113", "%114", "%115", "%116");
    } else if constexpr (N == 240) {
        if constexpr (is_half<Element>) WGMMA(240, "f16", 120, "%120", "%121", "%122", "%123", "%124");
        else WGMMA(240, "bf16", 120, "%120", "%121", "%122", "%123", "%124");
    } else if constexpr (N == 256) {
        if constexpr (is_half<Element>) WGMMA(256, "f16", 128, "%128", "%129", "%130", "%131", "%132");
        else WGMMA(256, "bf16", 128, "%128", "%129", "%130", "%131", "%132");
    } else {
        static_assert(N == 0, "wgmma: N is 8, 16, 24, 32, or a multiple of 16 from 64 to 256");
    }
}

// The same with 8-bit operands, K-major both: D (64 x N) += A (64 x 32) B (32 x N), four elements where two of 16 bits
// would lie, so that the next 32 k lie 32 bytes on in a tile with the 128-byte swizzle (rows of 128 k). The type of the
// accumulators chooses: float for e4m3, which are added up with about 14 bits, so that long sums have to be carried over
// to registers of one's own now and then; int for s8, exact.
#define WGMMA_E4M3(N, R, A, B, ACCUMULATE)                                                                             \
    asm volatile(                                                                                                      \
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, " ACCUMULATE ", 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" WGMMA_P##R "}, " A ", " B ", keep, 1, 1;\n}\n"    \
        : WGMMA_D##R("+f", d)                                                                                          \
        : "l"(a), "l"(b), "r"(accumulate))

#define WGMMA_S8(N, R, A, B, ACCUMULATE)                                                                               \
    asm volatile(                                                                                                      \
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, " ACCUMULATE ", 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" WGMMA_P##R "}, " A ", " B ", keep;\n}\n"              \
        : WGMMA_D##R("+r", d)                                                                                          \
        : "l"(a), "l"(b), "r"(accumulate))

template <int N>
__device__ __forceinline__ void wgmma_k32(float (&d)[N / 2], uint64 a, uint64 b, int accumulate) {
    static_assert(N == 128 || N == 192, "wgmma_k32: of e4m3, with N = 128 or 192");
    if constexpr (N == 128) WGMMA_E4M3(128, 64, "%64", "%65", "%66");
    else WGMMA_E4M3(192, 96, "%96", "%97", "%98");
}

template <int N>
__device__ __forceinline__ void wgmma_k32(int (&d)[N / 2], uint64 a, uint64 b, int accumulate) {
    static_assert(N == 128 || N == 256, "wgmma_k32: of s8, with N = 128 or 256");
    if constexpr (N == 128) WGMMA_S8(128, 64, "%64", "%65", "%66");
    else WGMMA_S8(256, 128, "%128", "%129", "%130");
}

// D (64 x N) += A (64 x 16) B (16 x N) with A in registers, the fragment of mma_m16n8k16 for the 16 rows of each warp, and B
// K-major in shared memory. Until the wait, `a` may not be touched either.
#define WGMMA_RS(N, TYPE, R, A0, A1, A2, A3, B, ACCUMULATE)                                                            \
    asm volatile(                                                                                                      \
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, " ACCUMULATE ", 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" WGMMA_P##R "}, {" A0 ", " A1 ", " A2      \
        ", " A3 "}, " B ", keep, 1, 1, 0;\n}\n"                                                                        \
        : WGMMA_D##R("+f", d)                                                                                          \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

template <typename Element, int N>
__device__ __forceinline__ void wgmma_from_registers(float (&d)[N / 2], const uint32 (&a)[4], uint64 b, int accumulate) {
    static_assert(N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 192 || N == 256, "wgmma_from_registers: N");
    if constexpr (N == 16) {
        if constexpr (is_half<Element>) WGMMA_RS(16, "f16", 8, "%8", "%9", "%10", "%11", "%12", "%13");
        else WGMMA_RS(16, "bf16", 8, "%8", "%9", "%10", "%11", "%12", "%13");
    } else if constexpr (N == 32) {
        if constexpr (is_half<Element>) WGMMA_RS(32, "f16", 16, "%16", "%17", "%18", "%19", "%20", "%21");
        else WGMMA_RS(32, "bf16", 16, "%16", "%17", "%18", "%19", "%20", "%21");
    } else if constexpr (N == 64) {
        if constexpr (is_half<Element>) WGMMA_RS(64, "f16", 32, "%32", "%33", "%34", "%35", "%36", "%37");
        else WGMMA_RS(64, "bf16", 32, "%32", "%33", "%34", "%35", "%36", "%37");
    } else if constexpr (N == 96) {
        if constexpr (is_half<Element>) WGMMA_RS(96, "f16", 48, "%48", "%49", "%50", "%51", "%52", "%53");
        else WGMMA_RS(96, "bf16", 48, "%48", "%49", "%50", "%51", "%52", "%53");
    } else if constexpr (N == 128) {
        if constexpr (is_half<Element>) WGMMA_RS(128, "f16", 64, "%64", "%65", "%66", "%67", "%68", "%69");
        else WGMMA_RS(128, "bf16", 64, "%64", "%65", "%66", "%67", "%68", "%69");
    } else if constexpr (N == 192) {
        if constexpr (is_half<Element>) WGMMA_RS(192, "f16", 96, "%96", "%97", "%98", "%99", "%100", "%101");
        else WGMMA_RS(192, "bf16", 96, "%96", "%97", "%98", "%99", "%100", "%101");
    } else {
        if constexpr (is_half<Element>) WGMMA_RS(256, "f16", 128, "%128", "%129", "%130", "%131", "%132", "%133");
        else WGMMA_RS(256, "bf16", 128, "%128", "%129", "%130", "%131", "%132", "%133");
    }
}

// The same with 8-bit operands (e4m3): D (64 x 64) += A (64 x 32) B (32 x 64), A in registers as for mma_m16n8k32.
__device__ __forceinline__ void wgmma_k32_from_registers(float (&d)[32], const uint32 (&a)[4], uint64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WGMMA_P32 "}, {%32, %33, %34, %35}, %36, keep, 1, 1;\n}\n"
        : WGMMA_D32("+f", d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The same with 32-bit operands of which tf32 is read: D (64 x 64) += A (64 x 8) B (8 x 64). Thread 4 g + t of a warp has in
// a[0] the element (g, t) of the warp's 16 rows, in a[1] (g + 8, t), in a[2] (g, t + 4), in a[3] (g + 8, t + 4).
__device__ __forceinline__ void wgmma_k8_from_registers(float (&d)[32], const uint32 (&a)[4], uint64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {" WGMMA_P32 "}, {%32, %33, %34, %35}, %36, keep, 1, 1;\n}\n"
        : WGMMA_D32("+f", d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The compiler does not know that the products still write `d` after their instruction: behind a wait, this keeps it
// from reading `d` before.
template <int Count>
__device__ __forceinline__ void wgmma_arrived(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int Count>
__device__ __forceinline__ void wgmma_arrived(int (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#undef WGMMA
#undef WGMMA_E4M3
#undef WGMMA_S8
#undef WGMMA_RS
#undef WGMMA_8
#undef WGMMA_4

}  // namespace ptx
