// Instructions of inline PTX on a CPU: what `warpbus.cuda.ptx` makes calls of.
//
// A register is a number of C++ with as many bits. An instruction takes and gives values of its own type: `as` and `set`
// convert between the two without a change of bits. Layouts of matrices: PTX ISA, "Matrix Fragments". Not as on a GPU:
// small floats are never flushed to zero (.ftz), approximations (.approx) are exact, and tensor cores sum one product
// after the other.
#pragma once

#include "async_ptx.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_fp8.h"
#include "cuda_pipeline.h"

namespace warpbus::ptx {

// ---- registers

// The bits of a register as a value of an instruction. Integers of other sizes are cut, or extended by zeros.
template <class To, class From> To as(From from) {
    if constexpr (std::is_floating_point_v<To> && std::is_floating_point_v<From>) return static_cast<To>(from);  // a constant
    else if constexpr (sizeof(To) == sizeof(From)) return same_bits<To>(from);
    else {
        static_assert(std::is_integral_v<From>, "a PTX register has another size than the instruction");
        using Bits = std::conditional_t<sizeof(To) == 1, uint8_t, std::conditional_t<sizeof(To) == 2, uint16_t,
                     std::conditional_t<sizeof(To) == 4, uint32_t, uint64_t>>>;
        return same_bits<To>(static_cast<Bits>(static_cast<std::make_unsigned_t<From>>(from)));
    }
}
template <class R, class T> void set(R &to, T value) {
    if constexpr (sizeof(R) == sizeof(T)) to = same_bits<R>(value);
    else {
        static_assert(std::is_integral_v<R>, "a PTX register has another size than the instruction");
        if constexpr (std::is_integral_v<T>) to = static_cast<R>(value);
        else set(to, as<uint16_t>(value));  // a float16 in a larger register
    }
}
template <class T> void set(bool &to, T value) { to = value; }

// An expression of the program as a register.
template <class R, class T> R load_operand(T value) {
    static_assert(std::is_floating_point_v<R> ? std::is_floating_point_v<T> : std::is_integral_v<T> || std::is_enum_v<T> ||
                  std::is_pointer_v<T>, "the constraint of an asm operand does not fit its type: f and d for floats, h, r and l for integers");
    if constexpr (std::is_pointer_v<T>) return static_cast<R>(reinterpret_cast<uintptr_t>(value));
    else return static_cast<R>(value);
}
// A register as the variable of the program that it belongs to.
template <class T, class R> void store_operand(T &to, R from) {
    static_assert(std::is_floating_point_v<R> == std::is_floating_point_v<T> && (std::is_scalar_v<T>),
                  "the constraint of an asm operand does not fit its type: f and d for floats, h, r and l for integers");
    if constexpr (std::is_pointer_v<T>) to = reinterpret_cast<T>(static_cast<uintptr_t>(from));
    else to = static_cast<T>(from);
}

template <class T> T *address(uint64_t at) { return reinterpret_cast<T *>(static_cast<uintptr_t>(at)); }

template <class To, class... Parts> To pack(Parts... parts) {
    To joined = 0;
    unsigned at = 0;
    ((joined |= static_cast<To>(static_cast<To>(parts) << at), at += 8 * sizeof(parts)), ...);
    return joined;
}
template <class Part, class From> Part unpack(From from, unsigned index) {
    return static_cast<Part>(from >> 8 * sizeof(Part) * index);
}

// ---- memory

template <class T, int N> struct alignas(N * sizeof(T)) Vector { T x[N]; };

// A value that other blocks may wait for.
template <class T> __forceinline__ T load_atomic(T *at) { return change(at, [](T old) { return old; }); }
template <class T> __forceinline__ void store_atomic(T *at, T value) { change(at, [&](T) { return value; }); }

__forceinline__ void copy_async(uint64_t to, uint64_t from, int size, int taken) {
    __pipeline_memcpy_async(address<void>(to), address<void>(from), static_cast<size_t>(size),
                            static_cast<size_t>(size - min(taken, size)));
}
inline void wait_for_all_copies() {
    commit_copies();
    wait_for_copies(0);
}

// ---- arithmetic

template <class T> using Wide = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                                                   std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
template <class T> using Unsigned = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>, std::decay<T>>::type;

// Integers wrap around.
#define WARPBUS_PTX(name, operation) \
    template <class T> T name(T a, T b) { return static_cast<T>(static_cast<Unsigned<T>>(a) operation static_cast<Unsigned<T>>(b)); } \
    inline __half2 name(__half2 a, __half2 b) { return {a.x operation b.x, a.y operation b.y}; } \
    inline __nv_bfloat162 name(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x operation b.x, a.y operation b.y}; }
WARPBUS_PTX(add, +)
WARPBUS_PTX(sub, -)
WARPBUS_PTX(mul, *)
#undef WARPBUS_PTX
template <class T> Wide<T> mul_wide(T a, T b) { return static_cast<Wide<T>>(a) * b; }
template <class T> T mul_hi(T a, T b) {
    if constexpr (sizeof(T) == 8) {
        using Product = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
        return static_cast<T>(static_cast<Product>(a) * b >> 64);
    } else return static_cast<T>(mul_wide(a, b) >> 8 * sizeof(T));
}
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return ::fma(a, b, c); }
inline __half fma(__half a, __half b, __half c) { return __hfma(a, b, c); }
inline __half2 fma(__half2 a, __half2 b, __half2 c) { return __hfma2(a, b, c); }
inline __nv_bfloat16 fma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) { return __hfma(a, b, c); }
inline __nv_bfloat162 fma(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) { return __hfma2(a, b, c); }
template <class T> T div(T a, T b) { return a / b; }
template <class T> T rem(T a, T b) { return a % b; }
template <class T> T saturated(T x) { return x > T(0) ? x < T(1) ? x : T(1) : T(0); }

// Of two numbers one of which is NaN, the other one.
template <class T> T minimum(T a, T b) {
    if constexpr (std::is_integral_v<T>) return b < a ? b : a;
    else return static_cast<T>(fmin(static_cast<double>(a), static_cast<double>(b)));
}
template <class T> T maximum(T a, T b) {
    if constexpr (std::is_integral_v<T>) return a < b ? b : a;
    else return static_cast<T>(fmax(static_cast<double>(a), static_cast<double>(b)));
}
inline __half2 minimum(__half2 a, __half2 b) { return {minimum(a.x, b.x), minimum(a.y, b.y)}; }
inline __half2 maximum(__half2 a, __half2 b) { return {maximum(a.x, b.x), maximum(a.y, b.y)}; }
inline __nv_bfloat162 minimum(__nv_bfloat162 a, __nv_bfloat162 b) { return {minimum(a.x, b.x), minimum(a.y, b.y)}; }
inline __nv_bfloat162 maximum(__nv_bfloat162 a, __nv_bfloat162 b) { return {maximum(a.x, b.x), maximum(a.y, b.y)}; }
template <class T> T neg(T x) { return static_cast<T>(-x); }
template <class T> T absolute(T x) { return x < T(0) ? static_cast<T>(-x) : x; }
inline float absolute(float x) { return fabsf(x); }
inline double absolute(double x) { return fabs(x); }
inline __half2 neg(__half2 x) { return {neg(x.x), neg(x.y)}; }
inline __half2 absolute(__half2 x) { return {absolute(x.x), absolute(x.y)}; }
inline __nv_bfloat162 neg(__nv_bfloat162 x) { return {neg(x.x), neg(x.y)}; }
inline __nv_bfloat162 absolute(__nv_bfloat162 x) { return {absolute(x.x), absolute(x.y)}; }

#define WARPBUS_PTX(name, result) \
    template <class T> T name(T a) { const double x = static_cast<double>(a); return static_cast<T>(result); } \
    inline __half2 name(__half2 a) { return {name(a.x), name(a.y)}; } \
    inline __nv_bfloat162 name(__nv_bfloat162 a) { return {name(a.x), name(a.y)}; }
WARPBUS_PTX(ex2, exp2(x))
WARPBUS_PTX(lg2, log2(x))
WARPBUS_PTX(rcp, 1 / x)
WARPBUS_PTX(square_root, ::sqrt(x))
WARPBUS_PTX(reciprocal_root, 1 / ::sqrt(x))
WARPBUS_PTX(sine, ::sin(x))
WARPBUS_PTX(cosine, ::cos(x))
WARPBUS_PTX(hyperbolic_tangent, ::tanh(x))
#undef WARPBUS_PTX

// ---- bits

// More places than there are bits leave nothing.
template <class T> T shift_left(T x, uint32_t by) { return by < 8 * sizeof(T) ? static_cast<T>(x << by) : T(0); }
template <class T> T shift_right(T x, uint32_t by) { return static_cast<T>(x >> min<uint32_t>(by, 8 * sizeof(T) - 1) >> (by >= 8 * sizeof(T))); }
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t found = 0;
    for (unsigned i = 0; i < 8; ++i)
        if (table >> i & 1) found |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return found;
}
// Bytes of `b:a`; bit 3 of a selector fills the byte with its sign.
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    uint32_t found = 0;
    for (unsigned i = 0; i < 4; ++i) {
        const uint32_t chosen = selector >> 4 * i, byte = static_cast<uint32_t>(bytes >> (chosen & 7) * 8 & 0xFF);
        found |= (chosen & 8 ? byte >> 7 ? 0xFFu : 0u : byte) << 8 * i;
    }
    return found;
}
template <class T> T extract_bits(T x, uint32_t from, uint32_t count) {
    constexpr uint32_t bits = 8 * sizeof(T);
    from &= 255, count &= 255;
    const uint32_t last = min(from + count - 1, bits - 1);
    const bool sign = std::is_signed_v<T> && count && (x >> last & 1);
    Unsigned<T> found = 0;
    for (uint32_t i = 0; i < bits; ++i) {
        const bool bit = i < count && from + i < bits ? (x >> (from + i) & 1) != 0 : sign;
        found |= static_cast<Unsigned<T>>(bit) << i;
    }
    return static_cast<T>(found);
}
template <class T> T insert_bits(T from, T into, uint32_t at, uint32_t count) {
    for (uint32_t i = 0; i < (count & 255) && (at & 255) + i < 8 * sizeof(T); ++i) {
        const T bit = T(1) << ((at & 255) + i);
        into = static_cast<T>(from >> i & 1 ? into | bit : into & ~bit);
    }
    return into;
}
template <class T> uint32_t count_ones(T x) { return static_cast<uint32_t>(__popcll(x)); }
template <class T> uint32_t leading_zeros(T x) { return static_cast<uint32_t>(__clzll(static_cast<long long>(x))) - (64 - 8 * sizeof(T)); }
template <class T> T reversed(T x) {
    T found = 0;
    for (unsigned i = 0; i < 8 * sizeof(T); ++i) found |= static_cast<T>((x >> i & 1) << (8 * sizeof(T) - 1 - i));
    return found;
}
template <class T> uint32_t highest_bit(T x) {
    const auto bits = static_cast<Unsigned<T>>(std::is_signed_v<T> && x < 0 ? ~x : x);
    return bits ? static_cast<uint32_t>(63 - __clzll(static_cast<long long>(bits))) : ~0u;
}
template <class A, class B> int32_t dot4(uint32_t a, uint32_t b, int32_t sum) {
    for (unsigned i = 0; i < 4; ++i) sum += static_cast<A>(a >> 8 * i) * static_cast<B>(b >> 8 * i);
    return sum;
}

// ---- conversions

struct Nearest { static double integer(double x) { return nearbyint(x); } };
struct ToZero { static double integer(double x) { return trunc(x); } };
struct Down { static double integer(double x) { return floor(x); } };
struct Up { static double integer(double x) { return ceil(x); } };

// To integers the number is rounded, and limited to what they hold; NaN becomes 0.
template <class To, class Rounding, class From> To convert(From from) {
    if constexpr (!std::is_integral_v<From> && std::is_integral_v<To>) {
        const double x = Rounding::integer(static_cast<double>(from));
        constexpr bool sign = std::is_signed_v<To>;
        const double least = sign ? -exp2(8 * sizeof(To) - 1) : 0, end = exp2(8 * sizeof(To) - sign);
        constexpr To most = static_cast<To>(static_cast<Unsigned<To>>(~Unsigned<To>{0}) >> sign);
        return x != x ? To(0) : x <= least ? static_cast<To>(least) : x >= end ? most : static_cast<To>(x);
    } else return static_cast<To>(from);
}
// An integer, limited to what another type holds.
template <class To, class From> To limited(From from) {
    const auto x = static_cast<__int128>(from);
    constexpr bool sign = std::is_signed_v<To>;
    const __int128 end = static_cast<__int128>(1) << (8 * sizeof(To) - sign), least = sign ? -end : 0;
    return static_cast<To>(x < least ? least : x >= end ? end - 1 : x);
}
template <class To, class From> To rounded_to_integer(From from, double (*integer)(double)) {
    return static_cast<To>(integer(static_cast<double>(from)));
}
// TF32 has 10 digits after the point. Ties go away from zero (.rna), or to even (.rn).
inline uint32_t tf32(float x, bool away) {
    const uint32_t bits = same_bits<uint32_t>(x);
    if ((bits & 0x7F800000) == 0x7F800000) return bits;
    return (bits + (away ? 0x1000 : 0xFFF + (bits >> 13 & 1))) & ~0x1FFFu;
}

// FP8: a pair of numbers in 16 bits, of which numbers that are too large are the largest ones.
template <__nv_fp8_interpretation_t Kind> uint16_t to_fp8(float high, float low, bool relu) {
    const auto limited = [&](float x) { return relu && x < 0 ? 0.0f : x; };
    return fp8_pair(limited(low), limited(high), __NV_SATFINITE, Kind);
}
template <__nv_fp8_interpretation_t Kind> uint16_t to_fp8(__half2 x, bool relu) { return to_fp8<Kind>(x.y, x.x, relu); }
template <__nv_fp8_interpretation_t Kind> __half2 from_fp8(uint16_t x, bool relu) {
    const __half2 found = __nv_cvt_fp8x2_to_halfraw2(x, Kind);
    return relu ? __hmax2(found, {0, 0}) : found;
}

// ---- a warp

// Registers of the lanes, while all lanes of a warp execute an instruction together. The next instruction uses the
// other half: a lane that is there first must not overwrite what the others still read.
struct Published { uint64_t a[4], b[4]; };
inline Published published[2][kMostThreads];

inline Published *publish(const void *a, size_t size_a, const void *b, size_t size_b, const char *what, int line) {
    const unsigned half = current->warp_instructions++ & 1;
    Published &own = published[half][current->number];
    memcpy(own.a, a, size_a);
    memcpy(own.b, b, size_b);
    wait_for(Waits::warp, what, line);
    return published[half] + current->number / kWarp * kWarp;
}

struct alignas(16) Row { unsigned char bytes[16]; };

// Rows are loaded and stored where the program has the instruction, so that findings name its line.
template <unsigned Matrices> __forceinline__ Row load_row(uint64_t at) {
    return lane() < 8 * Matrices ? *address<const Row>(at) : Row{};
}
template <unsigned Matrices> __forceinline__ void store_row(uint64_t at, const Row &row) {
    if (lane() < 8 * Matrices) *address<Row>(at) = row;
}

// Lane 8 i + r has row r of matrix i, and gets 2 elements of 16 bits of each matrix: of row lane / 4, or of column
// lane / 4.
template <bool Transposed, class... R> void ldmatrix(const Row &own, const char *what, int line, R &...to) {
    const Published *all = publish(&own, sizeof own, nullptr, 0, what, line);
    const auto element = [&](unsigned matrix, unsigned at_row, unsigned column) {
        uint16_t found;
        memcpy(&found, reinterpret_cast<const char *>(all[8 * matrix + at_row].a) + 2 * column, sizeof found);
        return found;
    };
    const unsigned major = lane() / 4, minor = lane() % 4 * 2;
    unsigned matrix = 0;
    const auto both = [&] {
        const unsigned of = matrix++;
        return Transposed ? pack<uint32_t>(element(of, minor, major), element(of, minor + 1, major))
                          : pack<uint32_t>(element(of, major, minor), element(of, major, minor + 1));
    };
    (set(to, both()), ...);
}

// The other way round: lane 8 i + r gets row r of matrix i.
template <bool Transposed, class... R> Row stmatrix(const char *what, int line, R... from) {
    const uint32_t own[] = {as<uint32_t>(from)...};
    const Published *all = publish(own, sizeof own, nullptr, 0, what, line);
    const unsigned matrix = lane() / 8 % sizeof...(R), at_row = lane() % 8;
    Row written;
    for (unsigned column = 0; column < 8; ++column) {
        const unsigned major = Transposed ? column : at_row, minor = Transposed ? at_row : column;
        uint32_t pair;
        memcpy(&pair, reinterpret_cast<const char *>(all[4 * major + minor / 2].a) + 4 * matrix, sizeof pair);
        const uint16_t element = unpack<uint16_t>(pair, minor % 2);
        memcpy(written.bytes + 2 * column, &element, sizeof element);
    }
    return written;
}

// What a register of 32 or 64 bits holds of a matrix: `count` elements.
template <class T> struct Elements {
    static constexpr int count = 4 / sizeof(T);
    using Sum = std::conditional_t<std::is_integral_v<T>, int, float>;
    static Sum at(uint32_t bits, int index) {
        return static_cast<Sum>(as<T>(static_cast<uint32_t>(bits >> 8 * sizeof(T) * static_cast<unsigned>(index))));
    }
};
struct Tf32;
template <> struct Elements<Tf32> {
    static constexpr int count = 1;
    using Sum = float;
    static float at(uint32_t bits, int) { return same_bits<float>(bits & ~0x1FFFu); }
};
template <> struct Elements<double> {
    static constexpr int count = 1;
    using Sum = double;
    static double at(uint64_t bits, int) { return same_bits<double>(bits); }
};
template <__nv_fp8_interpretation_t Kind> struct ElementsOfFp8 {
    static constexpr int count = 4;
    using Sum = float;
    static float at(uint32_t bits, int index) { return fp8_value(static_cast<uint8_t>(bits >> 8 * index), Kind); }
};
struct E4m3;
struct E5m2;
template <> struct Elements<E4m3> : ElementsOfFp8<__NV_E4M3> {};
template <> struct Elements<E5m2> : ElementsOfFp8<__NV_E5M2> {};
struct S4;
struct U4;
template <> struct Elements<S4> {
    static constexpr int count = 8;
    using Sum = int;
    static int at(uint32_t bits, int index) { return static_cast<int>(bits << (28 - 4 * index)) >> 28; }
};
template <> struct Elements<U4> {
    static constexpr int count = 8;
    using Sum = int;
    static int at(uint32_t bits, int index) { return static_cast<int>(bits >> 4 * index & 15); }
};

// C += A B of a warp, A `[M, K]` by rows and B `[K, N]` by columns, 8 columns. Register r of lane 4 g + t holds, with
// `count` elements per register: of A those of row g + 8 (r % 2) (one row with M = 8) from column 4 count (r / 2) +
// count t on; of B those of column g from row 4 count r + count t on. Elements i of C are of row g + 8 (i / 2) and
// column 2 t + i % 2.
template <int M, int K, class A, class B, class C, class Register, size_t SizeA, size_t SizeB, size_t SizeC>
void mma(const Register (&a)[SizeA], const Register (&b)[SizeB], C (&c)[SizeC], bool limit, const char *what, int line) {
    constexpr int count = Elements<A>::count, step = 4 * count, halves = M / 8;
    static_assert(SizeA == halves * K / step, "mma: matrix A of this shape and type has another number of registers");
    static_assert(SizeB == K / step, "mma: matrix B of this shape and type has another number of registers");
    static_assert(SizeC == 2 * halves, "mma: matrix C of this shape has another number of elements");
    const Published *all = publish(a, sizeof a, b, sizeof b, what, line);
    const auto of = [](const uint64_t *from, int index) {
        Register found;
        memcpy(&found, reinterpret_cast<const char *>(from) + sizeof found * static_cast<unsigned>(index), sizeof found);
        return found;
    };
    const int g = static_cast<int>(lane()) / 4, t = static_cast<int>(lane()) % 4;
    for (int i = 0; i < static_cast<int>(SizeC); ++i) {
        using Sum = typename Elements<A>::Sum;
        using Total = std::conditional_t<std::is_integral_v<Sum>, int64_t, Sum>;
        Total sum = static_cast<Total>(c[i]);
        for (int k = 0; k < K; ++k) {
            const int part = k % step / count, r = k / step;
            const Register row = of(all[4 * g + part].a, halves * r + i / 2), column = of(all[4 * (2 * t + i % 2) + part].b, r);
            sum += Elements<A>::at(row, k % count) * Elements<B>::at(column, k % count);
        }
        if constexpr (std::is_integral_v<C>) c[i] = limit ? limited<C>(sum) : static_cast<C>(sum);
        else c[i] = static_cast<C>(sum);
    }
}

}  // namespace warpbus::ptx
