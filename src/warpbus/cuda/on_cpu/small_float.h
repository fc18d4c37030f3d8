// A float of 16 bits and pairs of it: a part of `cuda_fp16.h` and `cuda_bf16.h`, which each include it once.
//
// They define the names WARPBUS_NUMBER, WARPBUS_PAIR, WARPBUS_RAW and WARPBUS_RAW_PAIR of the types, and WARPBUS_BITS and WARPBUS_VALUE of
// the conversions from and to float. Numbers are rounded to the nearest after each operation, as on a GPU.

struct WARPBUS_RAW { unsigned short x; };

class WARPBUS_NUMBER {
  public:
    WARPBUS_NUMBER() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    WARPBUS_NUMBER(T value) : bits_(WARPBUS_BITS(static_cast<float>(value))) {}
    WARPBUS_NUMBER(WARPBUS_RAW raw) : bits_(raw.x) {}
    operator float() const { return WARPBUS_VALUE(bits_); }
    operator WARPBUS_RAW() const { return {bits_}; }

  private:
    unsigned short bits_;
};

struct alignas(4) WARPBUS_RAW_PAIR { unsigned short x, y; };

struct alignas(4) WARPBUS_PAIR {
    WARPBUS_NUMBER x, y;
    WARPBUS_PAIR() = default;
    WARPBUS_PAIR(WARPBUS_NUMBER x, WARPBUS_NUMBER y) : x(x), y(y) {}
    WARPBUS_PAIR(WARPBUS_RAW_PAIR raw) : x(WARPBUS_RAW{raw.x}), y(WARPBUS_RAW{raw.y}) {}
    operator WARPBUS_RAW_PAIR() const { return {static_cast<WARPBUS_RAW>(x).x, static_cast<WARPBUS_RAW>(y).x}; }
};

// An operation on one number and on pairs, by float, which has more than twice the digits: so it is rounded once.
#define WARPBUS_OPERATION(name, result) \
    inline WARPBUS_NUMBER __h##name(WARPBUS_NUMBER a, WARPBUS_NUMBER b) { const float x = a, y = b; return result; } \
    inline WARPBUS_PAIR __h##name##2(WARPBUS_PAIR a, WARPBUS_PAIR b) { return {__h##name(a.x, b.x), __h##name(a.y, b.y)}; }
WARPBUS_OPERATION(add, x + y)
WARPBUS_OPERATION(sub, x - y)
WARPBUS_OPERATION(mul, x * y)
WARPBUS_OPERATION(max, fmaxf(x, y))
WARPBUS_OPERATION(min, fminf(x, y))
#undef WARPBUS_OPERATION
inline WARPBUS_NUMBER __hdiv(WARPBUS_NUMBER a, WARPBUS_NUMBER b) { return static_cast<float>(a) / static_cast<float>(b); }
inline WARPBUS_PAIR __h2div(WARPBUS_PAIR a, WARPBUS_PAIR b) { return {__hdiv(a.x, b.x), __hdiv(a.y, b.y)}; }
inline WARPBUS_NUMBER __hfma(WARPBUS_NUMBER a, WARPBUS_NUMBER b, WARPBUS_NUMBER c) {
    return static_cast<double>(static_cast<float>(a)) * static_cast<float>(b) + static_cast<float>(c);
}
inline WARPBUS_PAIR __hfma2(WARPBUS_PAIR a, WARPBUS_PAIR b, WARPBUS_PAIR c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline WARPBUS_NUMBER __hneg(WARPBUS_NUMBER a) { return -static_cast<float>(a); }
inline WARPBUS_NUMBER __habs(WARPBUS_NUMBER a) { return fabsf(a); }
inline WARPBUS_PAIR __hneg2(WARPBUS_PAIR a) { return {__hneg(a.x), __hneg(a.y)}; }
inline bool __hisnan(WARPBUS_NUMBER a) { return std::isnan(static_cast<float>(a)); }

#define WARPBUS_OPERATION(operation, name) \
    inline WARPBUS_NUMBER operator operation(WARPBUS_NUMBER a, WARPBUS_NUMBER b) { return name(a, b); } \
    inline WARPBUS_NUMBER &operator operation##=(WARPBUS_NUMBER &a, WARPBUS_NUMBER b) { return a = name(a, b); }
WARPBUS_OPERATION(+, __hadd)
WARPBUS_OPERATION(-, __hsub)
WARPBUS_OPERATION(*, __hmul)
WARPBUS_OPERATION(/, __hdiv)
#undef WARPBUS_OPERATION
inline WARPBUS_NUMBER operator-(WARPBUS_NUMBER a) { return __hneg(a); }
inline WARPBUS_PAIR operator+(WARPBUS_PAIR a, WARPBUS_PAIR b) { return __hadd2(a, b); }
inline WARPBUS_PAIR operator-(WARPBUS_PAIR a, WARPBUS_PAIR b) { return __hsub2(a, b); }
inline WARPBUS_PAIR operator*(WARPBUS_PAIR a, WARPBUS_PAIR b) { return __hmul2(a, b); }

#define WARPBUS_OPERATION(operation, name) \
    inline bool operator operation(WARPBUS_NUMBER a, WARPBUS_NUMBER b) { return static_cast<float>(a) operation static_cast<float>(b); } \
    inline bool name(WARPBUS_NUMBER a, WARPBUS_NUMBER b) { return a operation b; }
WARPBUS_OPERATION(==, __heq)
WARPBUS_OPERATION(!=, __hne)
WARPBUS_OPERATION(<, __hlt)
WARPBUS_OPERATION(<=, __hle)
WARPBUS_OPERATION(>, __hgt)
WARPBUS_OPERATION(>=, __hge)
#undef WARPBUS_OPERATION

#define WARPBUS_OPERATION(name) \
    inline WARPBUS_NUMBER h##name(WARPBUS_NUMBER a) { return name##f(a); } \
    inline WARPBUS_PAIR h2##name(WARPBUS_PAIR a) { return {h##name(a.x), h##name(a.y)}; }
WARPBUS_OPERATION(exp)
WARPBUS_OPERATION(exp2)
WARPBUS_OPERATION(log)
WARPBUS_OPERATION(log2)
WARPBUS_OPERATION(sqrt)
WARPBUS_OPERATION(sin)
WARPBUS_OPERATION(cos)
WARPBUS_OPERATION(floor)
WARPBUS_OPERATION(ceil)
WARPBUS_OPERATION(rsqrt)
#undef WARPBUS_OPERATION
inline WARPBUS_NUMBER hrcp(WARPBUS_NUMBER a) { return 1 / static_cast<float>(a); }

inline float __low2float(WARPBUS_PAIR x) { return x.x; }
inline float __high2float(WARPBUS_PAIR x) { return x.y; }

#undef WARPBUS_NUMBER
#undef WARPBUS_PAIR
#undef WARPBUS_RAW
#undef WARPBUS_RAW_PAIR
#undef WARPBUS_BITS
#undef WARPBUS_VALUE
