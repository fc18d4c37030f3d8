// out [m, n] = epilogue(norm(x) [m, k] weight [n, k]^T) for up to TOKENS rows of x: quantized weights, 16-bit x.
//
// Macros
//   ELEMENT    __half or __nv_bfloat16: the type of x, of scales, zero points and out
//   BITS       2, 3, 4 or 8: bits of a packed code; kernels/ops/packed.py describes the layout
//   GROUPS     1: a scale covers 64 columns or more; 2: it covers 32
//   TOKENS     8 or 16: the maximum number of rows of x
//   WARPS      number of consumer warps, which multiply
//   SPAN       adjacent chunks of 64 columns that a consumer warp multiplies at a time: 1 or 2
//   ROUNDS     how often a consumer warp does so per stage: 1 or 2. Sums have the same order, so that both give the same bits
//   FINISHERS  number of warps that reduce the consumers' sums. With one producer warp and 16 consumers, up to five warps
//              run on each of the four schedulers, which leaves 96 registers per thread; a sixth would leave 80
//   STAGE_BYTES, OTHER_BYTES  shared memory that the host requests: for one stage without x; for sums, barriers and squares
//   RESIDENT   blocks per multiprocessor
//   EXPERTS    0: one product; 1: the products of a mixture of experts, see wna16/experts.cuh
//
// All values must be finite: the product computes x * code and x * zero point separately, so that an infinite x gives NaN
// where the reference may give infinity.
//
// Prologue: if `norm` is given, RMSNorm of x. Epilogue, in fp32: adds the bias; if `gate_tiles` > 0, computes silu(gate) *
// up, where the first half of the weight's rows is the gate and the second half is up (out has n / 2 columns); adds
// `residual`.
//
// The kernel is limited by memory bandwidth: it reads each weight once and keeps as many bytes in flight as it can. One
// producer warp issues bulk copies, stage by stage and across tile boundaries, and starts before the previous kernel has
// ended. A stage holds two tiles of 16 rows (with a gate, one of the gate and one of up) by WARPS * SPAN * ROUNDS chunks of
// 64 columns, SPAN for each consumer warp and round. Codes become mma fragments in registers. Zero points and scales are
// applied to the fp32 sum of a group, so that no weight is rounded. Finisher warps reduce the sums in a fixed order while the
// consumers multiply the next tiles, so that no block-wide barrier is needed. x is copied to shared memory in parts, so that
// the first chunks are multiplied while later parts arrive. If a block reads x only once, or x is too large, it is streamed
// with the weights. One copy loads all rows of a step of chunks: with one copy per row, the producer thread would be the bottleneck.
// The grid has one block per multiprocessor.
//
// The products of experts are small, so a block may use half the consumer warps and two blocks share a multiprocessor. Blocks
// of the next kernel then load weights while the last blocks of this kernel finish.
#include "wna16/decode_products.cuh"

__device__ __forceinline__ void compute(const ptx::TensorMap& map, const uint4* codes, const ptx::uint32* scales,
                                        const ptx::uint32* zeros, const Weight& offloaded, const ELEMENT* x,
                                        const ELEMENT* norm, const ELEMENT* bias, const ELEMENT* residual, ELEMENT* out,
                                        Items items, const Problem& p) {
    // x of all steps, or of the stages in flight; the stages; sums [WARPS][2][kTokenTiles][32]; then what is declared below.
    extern __shared__ __align__(1024) unsigned char memory[];
    ELEMENT* const staged = reinterpret_cast<ELEMENT*>(memory);
    Stage* const stages = reinterpret_cast<Stage*>(memory + (p.streamed ? p.stages : steps_of(p)) * step_bytes(p));
    float4* const sums = reinterpret_cast<float4*>(stages + p.stages);
    Barriers* const barriers = reinterpret_cast<Barriers*>(sums + kSums);
    float* const squares = reinterpret_cast<float*>(barriers + 1);  // [WARPS][TOKENS]
    const Addresses at = {ptx::shared_address(barriers->full), ptx::shared_address(barriers->empty),
                          ptx::shared_address(barriers->x), ptx::shared_address(&barriers->finished)};
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const bool in_parts = norm == nullptr && !p.streamed;

    if (!EXPERTS) ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == 0) {
        if (norm == nullptr) ptx::prefetch_tensor_map(&map);
        for (int i = 0; i < p.stages; ++i) {
            ptx::mbarrier_init(at.full + 8 * i, 1);
            ptx::mbarrier_init(at.empty + 8 * i, WARPS);
        }
        for (int i = 0; i < kParts; ++i) ptx::mbarrier_init(at.x + 8 * i, 1);
        ptx::mbarrier_init(at.finished, FINISHERS);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp == WARPS) {
        if (lane == 0) {
            produce(stages, ptx::shared_address(staged), at, {codes, scales, zeros}, offloaded, map, in_parts, items, p);
        }
        return;
    }
    const Vector norm_weight =
        load_vector(norm + 8 * threadIdx.x, norm != nullptr && warp < WARPS && 8 * threadIdx.x < p.k);
    ptx::griddepcontrol_wait();
    // After the wait: a kernel that starts once all blocks have reached this point may read what was written before this
    // grid.
    if (EXPERTS) ptx::griddepcontrol_launch_dependents();
    count_items(items);
    if (warp > WARPS) {
        finish(reinterpret_cast<const float*>(sums), at, bias, residual, out, Work(), items, p);
        return;
    }
    Work work;
    if (!work.there(items, p)) return;
    if (norm != nullptr) stage_normed(staged, squares, x, p.k, norm, norm_weight, p);

    const Reader reader = make_reader(stages, staged, p);
    const bool symmetric = zeros == nullptr;
    Progress progress;
    if (SPAN == 2 && GROUPS == 1 && p.shift > 0) {
        if (symmetric) multiply_pairs<true, true>(progress, reader, sums, at, in_parts, work, items, p);
        else multiply_pairs<true, false>(progress, reader, sums, at, in_parts, work, items, p);
    } else {
        if (symmetric) multiply_pairs<false, true>(progress, reader, sums, at, in_parts, work, items, p);
        else multiply_pairs<false, false>(progress, reader, sums, at, in_parts, work, items, p);
    }
}

#if EXPERTS
extern "C" __global__ void __launch_bounds__(kThreads + 32 * (1 + FINISHERS), RESIDENT)
    wna16_decode_experts(const __grid_constant__ ptx::TensorMap map, const uint4* codes, const ptx::uint32* scales,
                         const ptx::uint32* zeros, const uint4* host_codes, const ptx::uint32* host_scales,
                         const ptx::uint32* host_zeros, const ELEMENT* residual, ELEMENT* out, const Items items,
                         const Problem p) {
    compute(map, codes, scales, zeros, {host_codes, host_scales, host_zeros}, nullptr, nullptr, nullptr, residual, out, items, p);
}
#else
extern "C" __global__ void __launch_bounds__(kThreads + 32 * (1 + FINISHERS), RESIDENT)
    wna16_decode(const __grid_constant__ ptx::TensorMap map, const uint4* codes, const ptx::uint32* scales,
                 const ptx::uint32* zeros, const ELEMENT* x, const ELEMENT* norm, const ELEMENT* bias,
                 const ELEMENT* residual, ELEMENT* out, const Problem p) {
    compute(map, codes, scales, zeros, {}, x, norm, bias, residual, out, one_item(), p);
}
#endif
