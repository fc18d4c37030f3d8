// The functions of CUDA that compute with the two halves or the four bytes of a word at once.
#pragma once

#include <cstdint>
#include <type_traits>

namespace warpbus {

// Applies a function to the lanes of two words. `Lane` is the type that they are read as.
template <typename Lane, typename Function>
inline unsigned by_lane(unsigned x, unsigned y, Function function) {
    constexpr unsigned kBits = 8 * sizeof(Lane);
    constexpr unsigned kMask = (1u << kBits) - 1;
    unsigned found = 0;
    for (unsigned at = 0; at < 32; at += kBits) {
        const auto lane = function(static_cast<int>(static_cast<Lane>(x >> at)), static_cast<int>(static_cast<Lane>(y >> at)));
        found |= (static_cast<unsigned>(lane) & kMask) << at;
    }
    return found;
}

// Of a comparison: all bits of a lane, or none.
inline int all_bits(bool holds) { return holds ? -1 : 0; }

}  // namespace warpbus

#define WARPBUS_SIMD(name, lane, lanes, expression)                                        \
    inline unsigned name##lanes(unsigned x, unsigned y) {                                  \
        return warpbus::by_lane<lane>(x, y, [](int a, int b) { return (expression); });    \
    }
// For both halves and for all bytes; the expression is of the lanes a and b, as int.
#define WARPBUS_SIMD_SIGNED(name, expression)        \
    WARPBUS_SIMD(name, int16_t, 2, expression)       \
    WARPBUS_SIMD(name, int8_t, 4, expression)
#define WARPBUS_SIMD_UNSIGNED(name, expression)      \
    WARPBUS_SIMD(name, uint16_t, 2, expression)      \
    WARPBUS_SIMD(name, uint8_t, 4, expression)

WARPBUS_SIMD_UNSIGNED(__vadd, a + b)
WARPBUS_SIMD_UNSIGNED(__vsub, a - b)
WARPBUS_SIMD_SIGNED(__vmaxs, a > b ? a : b)
WARPBUS_SIMD_SIGNED(__vmins, a < b ? a : b)
WARPBUS_SIMD_UNSIGNED(__vmaxu, a > b ? a : b)
WARPBUS_SIMD_UNSIGNED(__vminu, a < b ? a : b)
WARPBUS_SIMD_SIGNED(__vabsdiffs, a > b ? a - b : b - a)
WARPBUS_SIMD_UNSIGNED(__vabsdiffu, a > b ? a - b : b - a)
WARPBUS_SIMD_SIGNED(__vavgs, (a + b + (a + b >= 0 ? 1 : 0)) >> 1)
WARPBUS_SIMD_UNSIGNED(__vavgu, (a + b + 1) >> 1)
WARPBUS_SIMD_UNSIGNED(__vhaddu, (a + b) >> 1)
WARPBUS_SIMD_UNSIGNED(__vcmpeq, warpbus::all_bits(a == b))
WARPBUS_SIMD_UNSIGNED(__vcmpne, warpbus::all_bits(a != b))
WARPBUS_SIMD_SIGNED(__vcmpges, warpbus::all_bits(a >= b))
WARPBUS_SIMD_SIGNED(__vcmpgts, warpbus::all_bits(a > b))
WARPBUS_SIMD_SIGNED(__vcmples, warpbus::all_bits(a <= b))
WARPBUS_SIMD_SIGNED(__vcmplts, warpbus::all_bits(a < b))
WARPBUS_SIMD_UNSIGNED(__vcmpgeu, warpbus::all_bits(a >= b))
WARPBUS_SIMD_UNSIGNED(__vcmpgtu, warpbus::all_bits(a > b))
WARPBUS_SIMD_UNSIGNED(__vcmpleu, warpbus::all_bits(a <= b))
WARPBUS_SIMD_UNSIGNED(__vcmpltu, warpbus::all_bits(a < b))

#undef WARPBUS_SIMD_UNSIGNED
#undef WARPBUS_SIMD_SIGNED
#undef WARPBUS_SIMD

// Of one word: negated, and the magnitudes, where that of the least number is itself.
inline unsigned __vneg2(unsigned x) { return __vsub2(0, x); }
inline unsigned __vneg4(unsigned x) { return __vsub4(0, x); }
inline unsigned __vabs2(unsigned x) { return __vabsdiffs2(x, 0); }
inline unsigned __vabs4(unsigned x) { return __vabsdiffs4(x, 0); }

// The sum of the magnitudes of the differences of four bytes.
inline unsigned __vsadu4(unsigned x, unsigned y) {
    const unsigned by = __vabsdiffu4(x, y);
    return (by & 0xFF) + (by >> 8 & 0xFF) + (by >> 16 & 0xFF) + (by >> 24);
}
