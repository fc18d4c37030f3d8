// What the consumer and finisher warps of `wna16/decode.cu` and `wna16/chain.cu` do: multiply stages of weights, norm x, add the
// warps' sums and store results. The macros are those of decode.cu.
#pragma once
#include "wna16/decode_stages.cuh"

// Sums over a group, per row: of code * x in the units of Packed::spread, and of x.
struct GroupSums {
    float part[2][kTokenTiles][4] = {};
    float whole[kTokenTiles][4] = {};
};

// What a lane needs in order to read a stage and x, in registers: shared-memory addresses for the first stage, and constants.
struct Reader {
    ptx::uint32 codes;                // of the lane's codes in the warp's first chunk
    ptx::uint32 scales[ROUNDS];       // of the scales of row g in the group of the warp's first chunk, in each round
    ptx::uint32 x[SPAN][kTokenTiles]; // of fragment rows in the first round of the first step, for each chunk
    int round_bytes;                  // from the x of a round to that of the next
    float upper, lower;               // of a symmetric scheme: what the sum of x is multiplied by, without the scale
};

__device__ __forceinline__ Reader make_reader(const Stage* stages, const ELEMENT* staged, const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Reader reader;
    reader.codes = ptx::shared_address(stages->codes[0][warp * SPAN][0]) + lane * (Packed::kLoadWords == 4 ? 16 : 8);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        reader.scales[round] = ptx::shared_address(&stages->scales[0][group_of(round * kRound + warp * SPAN, p)][lane / 4]);
    }
    // Lanes 8 i to 8 i + 7 address the rows of the i-th matrix of 8 columns. Rows beyond m repeat the last one: a column of
    // the product depends only on its own row, and the results of these rows are not stored.
#pragma unroll
    for (int c = 0; c < SPAN; ++c) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
            const int line = (warp * SPAN + c) * p.m + min(8 * t + lane % 8, p.m - 1);
            reader.x[c][t] = ptx::shared_address(staged) + line * kLine + (lane / 8 ^ line % 8) * 16;
        }
    }
    reader.round_bytes = kRound * p.m * kLine;
    reader.upper = (p.middle + Packed::kUpperBase) * -Packed::kUpper;
    reader.lower = (p.middle + Packed::kLowerBase) * -Packed::kLower;
    return reader;
}

constexpr int kTileScales = sizeof(Stage::scales[0]), kAllScales = sizeof(Stage::scales);
constexpr int kTileCodes = sizeof(Stage::codes[0]), kChunkCodes = sizeof(Stage::codes[0][0]);

// Adds the sums of a group times its scales. `scales` is the address of those of row g.
template <bool Symmetric>
__device__ __forceinline__ void add_group(float (&sum)[2][kTokenTiles][4], const GroupSums& own, const Reader& reader,
                                          ptx::uint32 scales) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float2 scale = unpack_pair<ELEMENT>(ptx::load_shared(scales + r * kTileScales));
        float upper = reader.upper * scale.x, lower = reader.lower * scale.y;
        if (!Symmetric) {
            const float2 zero = unpack_pair<ELEMENT>(ptx::load_shared(scales + r * kTileScales + kAllScales));
            upper = (zero.x + Packed::kUpperBase) * -Packed::kUpper * scale.x;
            lower = (zero.y + Packed::kLowerBase) * -Packed::kLower * scale.y;
        }
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[r][t][i] = fmaf(own.whole[t][i], i < 2 ? upper : lower, sum[r][t][i]);
                sum[r][t][i] = fmaf(own.part[r][t][i], i < 2 ? scale.x : scale.y, sum[r][t][i]);
            }
        }
    }
}

// Adds the products of this warp's chunks of a round of a stage; `count` chunks remain.
//   Joint    a group has two chunks or more, so that the chunks of a warp share their scales
//   offset   of the stage from the first one, bytes
//   step     of the x of the step from that of the first one, bytes
template <bool Joint, bool Symmetric>
__device__ __forceinline__ void multiply(float (&sum)[2][kTokenTiles][4], const Reader& reader, ptx::uint32 offset, int step,
                                         int round, int count) {
    const ptx::uint32 one = pack_pair<ELEMENT>(1.0f, 1.0f);
    const ptx::uint32 ones[4] = {one, one, one, one};
    const ptx::uint32 own_codes = reader.codes + offset + round * (kRound * kChunkCodes);
    const ptx::uint32 scales = reader.scales[round] + offset;
    const int x_offset = step + round * reader.round_bytes;
    GroupSums own;
#pragma unroll
    for (int c = 0; c < SPAN; ++c) {
        if (c > 0 && c >= count) break;
        ptx::uint32 codes[2][kLoads][Packed::kLoadWords];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                read_lane_codes(codes[r][i], own_codes + r * kTileCodes + c * kChunkCodes + i * (kChunkCodes / kLoads));
            }
        }
        ptx::uint32 b[kTokenTiles][2][4];
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
            ptx::ldmatrix_x4(b[t][0], reader.x[c][t] + x_offset);
            if (kAtOnce) ptx::ldmatrix_x4(b[t][1], (reader.x[c][t] + x_offset) ^ 64);
        }
#pragma unroll
        for (int h = 0; h < GROUPS; ++h) {
#pragma unroll
            for (int s = 4 * h / GROUPS; s < 4 * (h + 1) / GROUPS; ++s) {
                if (s == 2 && !kAtOnce) {
#pragma unroll
                    for (int t = 0; t < kTokenTiles; ++t) ptx::ldmatrix_x4(b[t][1], (reader.x[c][t] + x_offset) ^ 64);
                }
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) {
                    ptx::mma_m16n8k16<ELEMENT>(own.whole[t], ones, b[t][s / 2][2 * (s % 2)], b[t][s / 2][2 * (s % 2) + 1]);
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    ptx::uint32 a[4];
                    Packed::spread(a, codes[r][s / Packed::kLoadSteps], s % Packed::kLoadSteps);
#pragma unroll
                    for (int t = 0; t < kTokenTiles; ++t) {
                        ptx::mma_m16n8k16<ELEMENT>(own.part[r][t], a, b[t][s / 2][2 * (s % 2)],
                                                   b[t][s / 2][2 * (s % 2) + 1]);
                    }
                }
            }
            if (GROUPS == 2) {
                add_group<Symmetric>(sum, own, reader, scales + (2 * c + h) * 32);
                own = {};
            }
        }
        if (GROUPS == 1 && !Joint) {
            add_group<Symmetric>(sum, own, reader, scales + c * 32);
            own = {};
        }
    }
    if (GROUPS == 1 && Joint) add_group<Symmetric>(sum, own, reader, scales);
}

// Named barriers: kConsumers synchronizes the consumers; at kSummed the consumers arrive and the finishers wait.
constexpr int kConsumers = 1, kSummed = 2;

__device__ __forceinline__ void sync_consumers() { ptx::named_barrier(kConsumers, kThreads); }

using Vector = Vector16<ELEMENT>;

__device__ __forceinline__ Vector load_vector(const ELEMENT* from, bool there) {
    return there ? *reinterpret_cast<const Vector*>(from) : Vector{};
}

// 8 elements of x, past L1: another multiprocessor may have written them while this kernel runs (chain.cu).
__device__ __forceinline__ Vector load_x(const ELEMENT* from, bool there) {
    Vector vector = {};
    if (there) *reinterpret_cast<uint4*>(&vector) = __ldcg(reinterpret_cast<const uint4*>(from));
    return vector;
}

// The shared-memory address of 8 elements of x from column `at` on, in the TMA swizzle of 128 bytes.
__device__ __forceinline__ Vector* vector_at(ELEMENT* staged, int token, int at, const Problem& p) {
    const int line = at / kChunk * p.m + token;
    return reinterpret_cast<Vector*>(staged) + line * 8 + (at % kChunk / 8 ^ line % 8);
}

// Copies up to Count rows of x to shared memory, and writes the sums of squares over this warp's columns to `squares`. Four
// vectors are loaded together, of as many rows or columns, so that their latencies overlap.
template <int Count>
__device__ __forceinline__ void stage_rows(ELEMENT* staged, float* squares, const ELEMENT* x, int stride, int first,
                                           const Problem& p) {
    constexpr int kAhead = 4 / Count;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int end = p.chunks * kChunk;
    float sum[Count] = {};
    for (int begin = 8 * threadIdx.x; begin < end; begin += 8 * kThreads * kAhead) {
        Vector values[kAhead][Count];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int at = begin + j * 8 * kThreads;
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                values[j][i] = load_x(x + static_cast<long long>(first + i) * stride + at, at < p.k && first + i < p.m);
            }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int at = begin + j * 8 * kThreads;
            if (at >= end) break;
#pragma unroll
            for (int i = 0; i < Count; ++i) {
                if (first + i < p.m) *vector_at(staged, first + i, at, p) = values[j][i];
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    sum[i] = fmaf(to_float(values[j][i].element[e]), to_float(values[j][i].element[e]), sum[i]);
                }
            }
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
        for (int i = 0; i < Count; ++i) sum[i] += __shfl_xor_sync(0xffffffff, sum[i], offset);
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        if (lane == i && first + i < p.m) squares[warp * TOKENS + first + i] = sum[i];
    }
}

// Copies x, whose rows are `stride` elements apart, to shared memory for this block's consumers; k is a multiple of 8.
__device__ __forceinline__ void stage_x(ELEMENT* staged, float* squares, const ELEMENT* x, int stride, const Problem& p) {
    if (p.m == 1) stage_rows<1>(staged, squares, x, stride, 0, p);
    else for (int first = 0; first < p.m; first += 4) stage_rows<4>(staged, squares, x, stride, first, p);
    sync_consumers();
}

// Writes RMSNorm(x) to shared memory; k is a multiple of 8. Each thread norms the elements that it has loaded. `weight` is
// this thread's part of the norm's weight for the first 8 kThreads columns, loaded before x was available.
__device__ __forceinline__ void stage_normed(ELEMENT* staged, float* squares, const ELEMENT* x, int stride,
                                             const ELEMENT* norm, const Vector& weight, const Problem& p) {
    stage_x(staged, squares, x, stride, p);
    float square = 0.0f;  // of the token with this lane's number
    const int own = min(static_cast<int>(threadIdx.x % 32), p.m - 1);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) square += squares[w * TOKENS + own];
    const float own_factor = rsqrtf(square / p.k + p.eps);
    for (int first = 0; first < p.k; first += 8 * kThreads) {
        const int at = first + 8 * threadIdx.x;
        const Vector scale = first == 0 ? weight : load_vector(norm + at, at < p.k);
#pragma unroll 4
        for (int token = 0; token < p.m; ++token) {
            const float factor = __shfl_sync(0xffffffff, own_factor, token);
            if (at >= p.k) continue;
            Vector* const place = vector_at(staged, token, at, p);
            Vector values = *place;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                // Rounded before the multiplication by the weight, as the layer defines it.
                const ELEMENT normed = from_float<ELEMENT>(to_float(values.element[i]) * factor);
                values.element[i] = from_float<ELEMENT>(to_float(normed) * to_float(scale.element[i]));
            }
            *place = values;
        }
    }
    sync_consumers();
}

// Positions of a lane's four sums of a tile among those of its warp, and their order, which differs between the two tiles:
// the threads of a finisher warp, which read one token's rows of both tiles, then have no bank conflicts.
__device__ __forceinline__ int place_of(int lane) { return lane ^ lane >> 3; }
__device__ __forceinline__ int order_of(int element, int which) { return element ^ which; }

// The row of the weight that is row `within` of one of the two tiles.
__device__ __forceinline__ int row_of(int pair, int which, int within, const Problem& p) {
    return 16 * (p.gate_tiles > 0 ? pair + which * p.gate_tiles : 2 * pair + which) + within;
}

// What a thread adds to the sum of one weight row and token. Loaded before the sum is ready, the residual as x is.
struct Epilogue {
    ELEMENT bias, residual;
};

__device__ __forceinline__ Epilogue fetch_epilogue(const ELEMENT* bias, const ELEMENT* residual, int row, int token,
                                                   const Problem& p) {
    Epilogue e = {};
    const int rows = p.gate_tiles > 0 ? p.n / 2 : p.n;
    if (bias != nullptr && row < p.n) e.bias = bias[row];
    if (residual != nullptr && row < rows) e.residual = __ldcg(residual + static_cast<long long>(token) * rows + row);
    return e;
}

// Called by all threads of a warp. The lower half-warp has the rows of the first tile: with a gate, the gate's rows.
__device__ __forceinline__ void store(float total, const Epilogue& e, float factor, ELEMENT* out, int row, int token,
                                      const Problem& p) {
    const float value = total + to_float(e.bias);
    if (p.gate_tiles > 0) {
        const float up = __shfl_down_sync(0xffffffff, value, 16);
        ELEMENT* target = out + static_cast<long long>(token) * (p.n / 2);
        const float inner = activate(kSilu, value) * up;
        if (threadIdx.x % 32 < 16) {
            target[row] = from_float<ELEMENT>(EXPERTS ? factor * inner : inner + to_float(e.residual));
        }
        return;
    }
    if (row < p.n) out[static_cast<long long>(token) * p.n + row] = from_float<ELEMENT>(value + to_float(e.residual));
}

// A finisher warp: reduces the consumers' sums while they multiply the next pair of tiles. It takes every FINISHERS-th token,
// with one thread per row of the two tiles.
__device__ __forceinline__ void finish(const float* sums, const Addresses& at, const ELEMENT* bias,
                                       const ELEMENT* residual, ELEMENT* out, Work work, const Items& items,
                                       const Problem& p) {
    const int lane = threadIdx.x % 32;
    const int within = lane % 16, which = lane / 16, first = threadIdx.x / 32 - WARPS - 1;
    for (; work.there(items, p); work.advance()) {
        const int row = row_of(work.pair(p), which, within, p);
        const Rows rows = EXPERTS && !items.dense() ? rows_of_item(items, work.item(p)) : Rows{0, p.m};
        Epilogue next;
        if (first < rows.count) next = fetch_epilogue(bias, residual, row, rows.first + first, p);
        ptx::named_barrier(kSummed, kThreads + FINISHERS * 32);
#pragma unroll 1
        for (int token = first; token < rows.count; token += FINISHERS) {
            const Epilogue epilogue = next;
            if (token + FINISHERS < rows.count) {
                next = fetch_epilogue(bias, residual, row, rows.first + token + FINISHERS, p);
            }
            const float factor = EXPERTS ? factor_of(items, rows.first + token) : 1.0f;
            // The lane and the element that hold this row and column in the fragments of the product.
            const int holder = within % 8 * 4 + token % 8 / 2, element = within / 8 * 2 + token % 2;
            const float* const mine = sums + (which * kTokenTiles + token / 8) * 128 + place_of(holder) * 4 +
                                      order_of(element, which);
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) total += mine[w * 2 * kTokenTiles * 128];
            store(total, epilogue, factor, out, row, rows.first + token, p);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(at.finished);
    }
}

// What the consumers keep from one pair of tiles to the next: the next stage, and the parity of the pair's phase.
struct Progress {
    Ring ring;
    int parity = 0;
};

// All that the consumers do once x is known: the pairs of tiles of this block.
template <bool Joint, bool Symmetric>
__device__ __forceinline__ void multiply_pairs(Progress& progress, const Reader& reader, float4* sums, const Addresses& at,
                                               bool in_parts, Work work, const Items items, const Problem& p) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int x_bytes = step_bytes(p);
    Ring ring = progress.ring;
    int parity = progress.parity;
    for (; work.there(items, p); work.advance(), parity ^= 1) {
        float sum[2][kTokenTiles][4] = {};
        for (int slot = 0; slot < (EXPERTS ? items.slots : 1); ++slot) {
            if (EXPERTS && is_elsewhere(items, work.item(p), slot)) continue;
            // Steps of the rows of x before this one, each of which lies in shared memory alone.
            const int row = EXPERTS && !p.streamed ? row_of_slot(items, work.item(p), slot) : 0;
            const int before = row * steps_of(p);
            for (int first = 0; first < p.chunks; first += kStep) {
                if (in_parts && work.index == blockIdx.x) {
                    ptx::mbarrier_wait(at.x + 8 * min(first / kStep, kParts - 1), 0);
                }
                ptx::mbarrier_wait(at.full + 8 * ring.slot, ring.parity);
                const int step = (p.streamed ? ring.slot : before + first / kStep) * x_bytes;
                const int left = p.chunks - first - warp * SPAN;  // chunks from this warp's first one on
#pragma unroll
                for (int round = 0; round < ROUNDS; ++round) {
                    if (left <= round * kRound) break;
                    multiply<Joint, Symmetric>(sum, reader, ring.slot * sizeof(Stage), step, round, left - round * kRound);
                }
                __syncwarp();
                if (lane == 0) ptx::mbarrier_arrive(at.empty + 8 * ring.slot);
                ring.advance(p);
            }
        }

        ptx::mbarrier_wait(at.finished, parity ^ 1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
                const float(&raw)[4] = sum[r][t];
                const float own[4] = {raw[0] / Packed::kUpper, raw[1] / Packed::kUpper, raw[2] / Packed::kLower,
                                      raw[3] / Packed::kLower};
                sums[((warp * 2 + r) * kTokenTiles + t) * 32 + place_of(lane)] =
                    make_float4(own[order_of(0, r)], own[order_of(1, r)], own[order_of(2, r)], own[order_of(3, r)]);
            }
        }
        ptx::named_barrier_arrive(kSummed, kThreads + FINISHERS * 32);
    }
    progress = {ring, parity};
}
