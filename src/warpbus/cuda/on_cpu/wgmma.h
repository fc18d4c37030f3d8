// wgmma: a warpgroup multiplies matrices in shared memory (A also in registers) and adds to registers.
//
// A product is made when its group is waited for, no earlier. Until then the accumulators hold NaN, or 0xA5 bytes as
// integers: a program that reads them too early gets a wrong result. Sums are in float32, one product after the other, so
// a GPU, which keeps fewer digits of FP8 products, may differ. Layouts and descriptors: PTX ISA, "Asynchronous Warpgroup
// Level Matrix Instructions".
#pragma once

#include "bulk_copies.h"
#include "cuda_fp8.h"

namespace warpbus {

constexpr unsigned kRows = 64, kBytesOfK = 32;  // of A; and those along k of one instruction

inline unsigned element_size(WgmmaType type) {
    switch (type) {
        case WgmmaType::f16: case WgmmaType::bf16: return 2;
        case WgmmaType::tf32: return 4;
        default: return 1;
    }
}

inline float element_value(WgmmaType type, const void *at) {
    const auto *bytes = static_cast<const unsigned char *>(at);
    const auto half = static_cast<unsigned short>(bytes[0] | bytes[1] << 8);
    uint32_t word;
    switch (type) {
        case WgmmaType::f16: return half_value(half);
        case WgmmaType::bf16: return bfloat16_value(half);
        case WgmmaType::tf32: memcpy(&word, at, sizeof word); return same_bits<float>(word & ~0x1FFFu);
        case WgmmaType::e4m3: return fp8_value(*bytes, __NV_E4M3);
        case WgmmaType::e5m2: return fp8_value(*bytes, __NV_E5M2);
        case WgmmaType::s8: return static_cast<signed char>(*bytes);
        default: return *bytes;
    }
}

// Where a matrix lies in shared memory, as a descriptor says it.
struct MatrixPlace {
    uint64_t start;           // 0: in no array
    uint64_t leading, stride; // bytes
    unsigned swizzle;         // bytes of a row of the pattern; 16: none

    // The address of an element at row `mn`, byte `k` of the row; or, MN-major, of element `mn` of 2 bytes in row `k`.
    uint64_t address(unsigned mn, unsigned k, bool mn_major) const {
        uint64_t offset;
        if (!mn_major)
            offset = swizzle == 16 ? k / 16 * leading + mn / 8 * stride + mn % 8 * 16 + k % 16
                                   : mn / 8 * stride + mn % 8 * swizzle + k;
        else if (swizzle == 16)
            offset = mn / 8 * stride + k / 8 * leading + k % 8 * 16 + mn % 8 * 2;
        else
            offset = mn * 2 / swizzle * leading + k / 8 * stride + k % 8 * swizzle + mn * 2 % swizzle;
        return swizzled(start + offset, swizzle);
    }
};

// The array of this kernel that the 18 bits of an address in a descriptor mean.
inline uint64_t shared_start(uint64_t low) {
    constexpr uint64_t window = 1 << 18;
    for (const SharedArray &each : shared_arrays) {
        if (each.launch != launches && &each != &shared_arrays.front()) continue;
        const auto begin = reinterpret_cast<uint64_t>(each.begin);
        const uint64_t at = begin + (low - begin & window - 1);
        if (at < begin + each.size) return at;
    }
    return 0;
}

inline MatrixPlace place_of(uint64_t descriptor) {
    const auto bytes = [&](unsigned bit) { return (descriptor >> bit & 0x3FFF) << 4; };
    constexpr unsigned swizzles[] = {16, 128, 64, 32};
    return {shared_start(bytes(0)), bytes(16), bytes(32), swizzles[descriptor >> 62]};
}

// Call `visit` with each 16 bytes of an operand.
template <class Visit> void visit_operand(const MatrixPlace &place, unsigned rows, bool mn_major, const Visit &visit) {
    if (mn_major)
        for (unsigned k = 0; k < kBytesOfK / 2; ++k)
            for (unsigned mn = 0; mn < rows; mn += 8) visit(place.address(mn, k, true));
    else
        for (unsigned mn = 0; mn < rows; ++mn)
            for (unsigned k = 0; k < kBytesOfK; k += 16) visit(place.address(mn, k, false));
}

inline void load_operand(std::vector<float> &to, WgmmaType type, const MatrixPlace &place, unsigned rows, bool mn_major) {
    const unsigned size = element_size(type), depth = kBytesOfK / size;
    to.resize(rows * depth);
    for (unsigned mn = 0; mn < rows; ++mn)
        for (unsigned k = 0; k < depth; ++k)
            to[mn * depth + k] = element_value(type, reinterpret_cast<const void *>(place.address(mn, mn_major ? k : k * size, mn_major)));
}

// A from the registers of the warpgroup: of each warp as mma has it.
inline void load_registers(std::vector<float> &to, WgmmaType type, unsigned first) {
    const unsigned size = element_size(type), depth = kBytesOfK / size, count = 4 / size;
    to.resize(kRows * depth);
    for (unsigned row = 0; row < kRows; ++row)
        for (unsigned k = 0; k < depth; ++k) {
            const unsigned lane = row % 8 * 4 + k % (4 * count) / count, word = k / (4 * count) * 2 + row % 16 / 8;
            const uint32_t *registers = fibers[first + row / 16 * kWarp + lane].products.front().of.a;
            to[row * depth + k] = element_value(type, reinterpret_cast<const char *>(registers + word) + k % count * size);
        }
}

// The first product of the queues of a warpgroup.
inline void multiply(unsigned first) {
    static std::vector<float> a, b;
    const Wgmma &of = fibers[first].products.front().of;
    const unsigned depth = kBytesOfK / element_size(of.type_a);
    if (of.a_in_registers) load_registers(a, of.type_a, first);
    else load_operand(a, of.type_a, place_of(of.descriptor_a), kRows, of.mn_major_a);
    load_operand(b, of.type_b, place_of(of.descriptor_b), of.columns, of.mn_major_b);
    for (unsigned row = 0; row < kRows; ++row)
        for (unsigned column = 0; column < of.columns; ++column) {
            Fiber &fiber = fibers[first + row / 16 * kWarp + row % 8 * 4 + column % 8 / 2];
            const Product &product = fiber.products.front();
            std::vector<uint32_t> &sums = fiber.accumulators[product.accumulators].bits;
            const unsigned word = column / 8 * 2 + row % 16 / 8, half = column % 2;
            const float *left = &a[row * depth], *right = &b[column * depth];
            if (of.sums == WgmmaSums::s32) {
                uint32_t &to = sums[2 * word + half];
                int64_t sum = product.of.accumulates ? static_cast<int32_t>(to) : 0;
                for (unsigned k = 0; k < depth; ++k) sum += static_cast<int>(left[k]) * static_cast<int>(right[k]);
                if (of.limited) sum = std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX);
                to = static_cast<uint32_t>(sum);
                continue;
            }
            const bool halves = of.sums == WgmmaSums::f16;
            uint32_t &to = sums[halves ? word : 2 * word + half];
            const auto old = static_cast<unsigned short>(to >> 16 * half);
            float sum = !product.of.accumulates ? 0 : halves ? half_value(old) : same_bits<float>(to);
            const float sign = of.sign_a * of.sign_b;
            for (unsigned k = 0; k < depth; ++k) sum += sign * left[k] * right[k];
            if (halves) to = (to & ~(0xFFFFu << 16 * half)) | static_cast<uint32_t>(half_bits(sum)) << 16 * half;
            else to = same_bits<uint32_t>(sum);
        }
}

[[noreturn]] inline void stop_wgmma(const char *problem, int line, const char *operand = "") {
    stop("wgmma_misused", place(*current) + field("problem", problem) + field("line", line) + field("operand", operand));
}

// Make the products of all groups of a warpgroup but the last ones: a thread does it for all 128.
inline void complete_products(unsigned last, int line) {
    Fiber &own = running();
    const unsigned first = own.number / kWarpgroup * kWarpgroup;
    while (!own.products.empty() && own.products.front().group + last < own.product_groups) {
        const Wgmma &of = own.products.front().of;
        for (unsigned i = first; i < first + kWarpgroup; ++i) {
            const auto &its = fibers[i].products;
            if (its.empty() || fibers[i].product_groups != own.product_groups || its.front().of.columns != of.columns ||
                its.front().of.descriptor_b != of.descriptor_b ||
                (!of.a_in_registers && its.front().of.descriptor_a != of.descriptor_a))
                stop("wgmma_differs", place(*current) + field("other", fibers[i].thread) + field("line", own.products.front().line));
        }
        multiply(first);
        const AsyncAccess access = fibers[first].products.front().access;
        for (unsigned i = first; i < first + kWarpgroup; ++i) {
            Fiber &fiber = fibers[i];
            check_async_end(i, access);
            const auto found = fiber.accumulators.find(fiber.products.front().accumulators);
            fiber.products.pop_front();
            if (--found->second.products) continue;
            for (size_t j = 0; j < found->second.at.size(); ++j) memcpy(found->second.at[j], &found->second.bits[j], sizeof(uint32_t));
            fiber.accumulators.erase(found);
        }
    }
}

// A thread ends: its accumulators are gone.
inline void end_products() {
    if (!running().products.empty()) stop_wgmma("not_awaited", running().products.front().line);
}

namespace ptx {

void wgmma_fence() { running().wgmma_fenced = true; }
void wgmma_commit() { ++running().product_groups; }
void wgmma_wait(uint32_t last, int line) {
    wait_for(Waits::warpgroup, "wgmma.wait_group", line);
    complete_products(last, line);
}

void wgmma(const Wgmma &of, void *const *accumulators, unsigned count, int line) {
    const void *pc = __builtin_return_address(0);
    Fiber &own = running();
    if (own.number / kWarpgroup * kWarpgroup + kWarpgroup > block_threads()) stop_wgmma("no_warpgroup", line);
    if (!own.wgmma_fenced) stop_wgmma("no_fence", line);
    AsyncAccess access{};
    if (own.number % kWarpgroup == 0) {
        access = check_async_begin(AsyncKind::product, own.number / kWarpgroup);
        const auto visit = [&](const char *operand, uint64_t descriptor, unsigned rows, bool mn_major) {
            if (descriptor >> 49 & 7) stop_wgmma("base_offset", line, operand);
            const MatrixPlace place = place_of(descriptor);
            if (!place.start) stop_wgmma("no_array", line, operand);
            visit_operand(place, rows, mn_major, [&](uint64_t at) {
                if (!in_shared_memory(at, kBulk)) stop_wgmma("beyond", line, operand);
                check_async_access(access, reinterpret_cast<const void *>(at), kBulk, false, pc);
            });
        };
        if (!of.a_in_registers) visit("A", of.descriptor_a, kRows, of.mn_major_a);
        visit("B", of.descriptor_b, of.columns, of.mn_major_b);
    }
    Accumulators &to = own.accumulators[accumulators[0]];
    if (to.products++ == 0) {
        to.at.assign(accumulators, accumulators + count);
        to.bits.resize(count);
        to.line = line;
        const uint32_t undefined = of.sums == WgmmaSums::f32 ? 0x7FFFFFFF : of.sums == WgmmaSums::f16 ? 0x7FFF7FFF : 0xA5A5A5A5;
        for (unsigned i = 0; i < count; ++i) {
            memcpy(&to.bits[i], to.at[i], sizeof(uint32_t));
            memcpy(to.at[i], &undefined, sizeof undefined);
        }
    } else if (to.at.size() != count) {
        stop_wgmma("shape", line);
    }
    own.products.push_back({of, accumulators[0], own.product_groups, access, line});
}

}  // namespace ptx

}  // namespace warpbus
