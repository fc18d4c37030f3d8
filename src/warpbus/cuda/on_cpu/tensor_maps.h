// Tensor maps, and the copies of the copy engine (TMA) between boxes of a tensor in device memory and shared memory.
//
// A box lies in shared memory without gaps, the innermost axis first, with its bytes permuted as the swizzle says.
// Elements outside of the tensor are zero, or NaN, in shared memory, and are not stored.
#pragma once

#include "bulk_copies.h"
#include "cuda.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace warpbus {

constexpr unsigned kMostAxes = 5, kMapMagic = 0x57415250, kTileAlignment = 128;

// What the 128 bytes of a CUtensorMap hold here.
struct TensorMap {
    uint64_t address, sides[kMostAxes], strides[kMostAxes];  // strides in bytes, the first one is that of an element
    uint16_t box[kMostAxes];
    uint8_t steps[kMostAxes];                                // of elements that are copied
    uint8_t type, rank, swizzle, fills_nan;                  // `swizzle`: bytes, 16 for none
    uint32_t magic;

    size_t element() const { return strides[0]; }
    unsigned count(unsigned axis) const { return (box[axis] + steps[axis] - 1u) / steps[axis]; }
    size_t bytes() const {
        size_t found = element();
        for (unsigned axis = 0; axis < rank; ++axis) found *= count(axis);
        return found;
    }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

// Call `visit` with each element of a box: its bytes from the begin of the box, and its address in device memory, 0 if it
// is outside of the tensor.
template <class Visit> void visit_box(const TensorMap &map, const TilePlace &place, const Visit &visit) {
    unsigned index[kMostAxes] = {};
    size_t offset = 0;
    for (const size_t bytes = map.bytes(); offset < bytes; offset += map.element()) {
        uint64_t address = map.address;
        for (unsigned axis = 0; axis < map.rank && address; ++axis) {
            const int64_t at = place.at[axis] + static_cast<int64_t>(index[axis]) * map.steps[axis];
            address = at < 0 || at >= static_cast<int64_t>(map.sides[axis]) ? 0 : address + static_cast<uint64_t>(at) * map.strides[axis];
        }
        visit(offset, address);
        for (unsigned axis = 0; axis < map.rank && ++index[axis] == map.count(axis); ++axis) index[axis] = 0;
    }
}

inline const TensorMap &require_map(uint64_t at, unsigned rank, const char *what, int line) {
    const auto &map = *reinterpret_cast<const TensorMap *>(at);
    if (at % alignof(CUtensorMap)) stop_copy("map_address", what, at % alignof(CUtensorMap), line);
    if (map.magic != kMapMagic) stop_copy("no_map", what, 0, line);
    if (map.rank != rank) stop_copy("rank", what, map.rank, line);
    return map;
}

inline void require_tile(const TensorMap &map, uint64_t shared, bool writes, const char *what, int line) {
    if (shared % kTileAlignment) stop_copy("tile_address", what, shared % kTileAlignment, line);
    require_shared(shared, map.bytes(), writes, what, line);
}

// The tensor has to be in an allocation where the box is.
inline void check_box(const TensorMap &map, const TilePlace &place, const AsyncAccess &access, bool writes, const void *pc, int line) {
    visit_box(map, place, [&](size_t, uint64_t address) {
        if (!address) return;
        require_device(address, map.element(), writes, line);
        check_async_access(access, reinterpret_cast<const void *>(address), map.element(), writes, pc);
    });
}

inline ptx::Join reduction_of(unsigned type, ptx::Reduction operation) {
    const auto of = [&](auto number) -> ptx::Join {
        using T = decltype(number);
        switch (operation) {
            case ptx::Reduction::add: return ptx::reduce_elements<T, ptx::Sum>;
            case ptx::Reduction::min: return ptx::reduce_elements<T, ptx::Least>;
            case ptx::Reduction::max: return ptx::reduce_elements<T, ptx::Most>;
            default: return ptx::replace;
        }
    };
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT32: return of(uint32_t{});
        case CU_TENSOR_MAP_DATA_TYPE_INT32: return of(int32_t{});
        case CU_TENSOR_MAP_DATA_TYPE_UINT64: return of(uint64_t{});
        case CU_TENSOR_MAP_DATA_TYPE_INT64: return of(int64_t{});
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16: return of(__half{});
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return of(__nv_bfloat16{});
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ: return of(float{});
        default: return nullptr;
    }
}

namespace ptx {

void tensor_load(uint64_t to, uint64_t map_at, const TilePlace &place, unsigned rank, uint64_t mbarrier, unsigned blocks, int line) {
    const char *what = "cp.async.bulk.tensor";
    const void *pc = __builtin_return_address(0);
    const TensorMap &map = require_map(map_at, rank, what, line);
    const LoadTarget target = load_target(to, mbarrier, what, line);
    require_tile(map, target.to, true, what, line);
    if (blocks >> cluster_blocks()) stop_copy("multicast", what, blocks, line);
    const AsyncAccess access = check_async_begin(AsyncKind::copy, target.mbarrier);
    check_box(map, place, access, false, pc, line);
    const auto copy = [map = map, to = target.to, place] {
        const uint64_t fill = !map.fills_nan ? 0 : map.element() == 2 ? 0x7FFF : map.element() == 4 ? 0x7FFFFFFF : ~0ull >> 1;
        visit_box(map, place, [&](size_t offset, uint64_t address) {
            memcpy(reinterpret_cast<void *>(swizzled(to + offset, map.swizzle)),
                   address ? reinterpret_cast<const void *>(address) : &fill, map.element());
        });
    };
    for (unsigned block = 0; block < cluster_blocks(); ++block) {
        if (blocks ? !(blocks >> block & 1) : block != target.rank) continue;
        if (block == own_rank()) check_async_access(access, reinterpret_cast<const void *>(target.to), map.bytes(), true, pc);
        begin_load(block, target.mbarrier, static_cast<int64_t>(map.bytes()), access, copy, line);
    }
}

void tensor_store(uint64_t map_at, const TilePlace &place, unsigned rank, uint64_t from, Reduction operation, int line) {
    const char *what = "cp.async.bulk.tensor";
    const void *pc = __builtin_return_address(0);
    const TensorMap &map = require_map(map_at, rank, what, line);
    require_tile(map, from, false, what, line);
    const Join join = operation == Reduction::none ? replace : reduction_of(map.type, operation);
    if (!join) stop_copy("reduction", what, map.type, line);
    const AsyncAccess access = check_async_begin(AsyncKind::store, current->number);
    check_async_access(access, reinterpret_cast<const void *>(from), map.bytes(), false, pc);
    if (join == replace) check_box(map, place, check_async_begin(AsyncKind::store, current->number), true, pc, line);
    begin_store([=] {
        visit_box(map, place, [&](size_t offset, uint64_t address) {
            if (address) join(reinterpret_cast<void *>(address), reinterpret_cast<const void *>(swizzled(from + offset, map.swizzle)), map.element());
        });
    }, access, line);
}

void tensor_prefetch(uint64_t map_at, unsigned rank, int line) { require_map(map_at, rank, "cp.async.bulk.prefetch.tensor", line); }

}  // namespace ptx

}  // namespace warpbus

// The conditions are those of the driver API. Interleaved layouts are not supported.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sides, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    constexpr unsigned sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) return CUDA_ERROR_NOT_SUPPORTED;
    if (!map || reinterpret_cast<uintptr_t>(map) % alignof(CUtensorMap) || type > CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ ||
        rank < 1 || rank > warpbus::kMostAxes || reinterpret_cast<uintptr_t>(address) % 16 || !address)
        return CUDA_ERROR_INVALID_VALUE;
    warpbus::TensorMap made{};
    const size_t element = sizes[type];
    made.address = reinterpret_cast<uint64_t>(address);
    made.type = static_cast<uint8_t>(type);
    made.rank = static_cast<uint8_t>(rank);
    made.swizzle = static_cast<uint8_t>(16u << swizzle);
    made.fills_nan = fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
    made.magic = warpbus::kMapMagic;
    for (unsigned axis = 0; axis < rank; ++axis) {
        made.sides[axis] = sides[axis];
        made.strides[axis] = axis ? strides[axis - 1] : element;
        made.box[axis] = static_cast<uint16_t>(box[axis]);
        made.steps[axis] = static_cast<uint8_t>(element_strides[axis]);
        if (!sides[axis] || sides[axis] > uint64_t{1} << 32 || !box[axis] || box[axis] > 256 || !element_strides[axis] ||
            element_strides[axis] > 8 || (axis && (strides[axis - 1] % 16 || strides[axis - 1] >= uint64_t{1} << 40)) ||
            (axis == 1 && strides[0] < sides[0] * element))  // further axes may overlap: the driver does not look
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (made.count(0) * element % 16 || (swizzle && made.count(0) * element > made.swizzle) ||
        (made.fills_nan && type < CU_TENSOR_MAP_DATA_TYPE_FLOAT16))
        return CUDA_ERROR_INVALID_VALUE;
    memset(map, 0, sizeof *map);
    memcpy(map, &made, sizeof made);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    const bool found = !strcmp(symbol, "cuTensorMapEncodeTiled"), new_enough = version >= 12000;
    *function = found && new_enough ? reinterpret_cast<void *>(&cuTensorMapEncodeTiled) : nullptr;
    const auto status = !found ? cudaDriverEntryPointSymbolNotFound
                      : new_enough ? cudaDriverEntryPointSuccess : cudaDriverEntryPointVersionNotSufficent;
    if (result) *result = status;
    return found || result ? cudaSuccess : warpbus::remember(cudaErrorSymbolNotFound);
}
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, result);
}
