// Vectors of the instruction set this file is compiled for, in the compiler's own vector types: one source for all.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace regard {
namespace REGARD_ISA_NAMESPACE {

#if defined(__AVX512F__)
constexpr int W = 16;   // floats in a vector
constexpr int NR = 4;   // vectors in a panel of queries
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int NR = 2;
#else
constexpr int W = 4;
constexpr int NR = 2;
#endif
constexpr int MR = 6;        // keys (or features) in a register block: MR·NR sums and NR operands fill the registers
constexpr int PW = NR * W;   // queries in a panel

typedef float F __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));
typedef float Fu __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t Iu __attribute__((vector_size(W * 4), aligned(4), may_alias));

#define REGARD_INLINE static inline __attribute__((always_inline))

REGARD_INLINE F load(const float* p) { return *reinterpret_cast<const Fu*>(p); }
REGARD_INLINE void store(float* p, F x) { *reinterpret_cast<Fu*>(p) = x; }
REGARD_INLINE I load(const int32_t* p) { return *reinterpret_cast<const Iu*>(p); }
REGARD_INLINE F all(float x) { return x - F{}; }  // x + 0 is not x for −0, and would cost an addition
REGARD_INLINE I all(int32_t x) { return I{} + x; }
REGARD_INLINE F select(I yes, F a, F b) { return yes ? a : b; }

// a where a > b, else b: a NaN in a is dropped, as hardware does.
REGARD_INLINE F larger(F a, F b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

REGARD_INLINE bool any(I x) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(x)) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(reinterpret_cast<__m256>(x)) != 0;
#else
    return (x[0] | x[1] | x[2] | x[3]) != 0;
#endif
}

REGARD_INLINE I is_nan(F x) { return x != x; }

// x, but no less than −127·ln 2, where e^x is 0 already; a NaN stays.
REGARD_INLINE F limited(F x) { return larger(all(-88.029692f), x); }

// e^x for x <= 88 that is limited: 2^n·e^f with n = round(x/ln 2) and e^f of degree 5 on [-ln 2/2, ln 2/2]; relative
// error 2e-7 near 0 and 5e-7 at the far end, where weights vanish; 0 below 2^-126, NaN stays NaN.
REGARD_INLINE F exp_of_limited(F x) {
    // Adding 1.5·2^23 rounds to a whole number in the low bits; 127 more, and these bits are the exponent of 2^n.
    const F shift = all(12582912.0f + 127.0f);
    const F t = x * all(1.44269504f) + shift;
    const F f = x - (t - shift) * all(0.693147181f);
    F p = all(8.290314755e-03f) * f + all(4.189793013e-02f);
    p = p * f + all(1.666763620e-01f);
    p = p * f + all(4.999914952e-01f);
    p = p * f + all(9.999997072e-01f);
    p = p * f + all(1.0f);
    return p * reinterpret_cast<F>(reinterpret_cast<U>(t) << 23);
}

REGARD_INLINE F exp(F x) { return exp_of_limited(limited(x)); }

REGARD_INLINE float sum(F x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(x);
#elif defined(__AVX2__)
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

// 0 in every lane while all of x is finite, else NaN somewhere. Four sums, so that none waits for the one before.
REGARD_INLINE F zero_if_finite(const float* x, int64_t count) {
    F zeros[4] = {};
    int64_t t = 0;
    for (; t + 4 * W <= count; t += 4 * W)
#pragma GCC unroll 4
        for (int y = 0; y < 4; y++) zeros[y] += load(x + t + y * W) * 0.0f;
    for (; t + W <= count; t += W) zeros[0] += load(x + t) * 0.0f;
    for (; t < count; t++) zeros[0][0] += x[t] * 0.0f;
    return (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]);
}

REGARD_INLINE float dot_product(const float* a, const float* b, int64_t count) {
    F sums[2] = {};
    int64_t t = 0;
    for (; t + 2 * W <= count; t += 2 * W)
        sums[0] += load(a + t) * load(b + t), sums[1] += load(a + t + W) * load(b + t + W);
    for (; t + W <= count; t += W) sums[0] += load(a + t) * load(b + t);
    float rest = 0;
    for (; t < count; t++) rest += a[t] * b[t];
    return sum(sums[0] + sums[1]) + rest;
}

// tanh x: a rational approximation on [-7.9, 7.9], beyond which float32 rounds to ±1; error about 2 roundings.
REGARD_INLINE F tanh(F x) {
    const F limit = all(7.90531110763549805f);
    x = select(x > limit, limit, select(x < -limit, -limit, x));
    const F s = x * x;
    F p = all(-2.76076847742355e-16f) * s + all(2.00018790482477e-13f);
    p = p * s + all(-8.60467152213735e-11f);
    p = p * s + all(5.12229709037114e-08f);
    p = p * s + all(1.48572235717979e-05f);
    p = p * s + all(6.37261928875436e-04f);
    p = p * s + all(4.89352455891786e-03f);
    F q = all(1.19825839466702e-06f) * s + all(1.18534705686654e-04f);
    q = q * s + all(2.26843463243900e-03f);
    q = q * s + all(4.89352518554385e-03f);
    return x * p / q;
}

// Transposes W vectors of W floats: log2 W rounds that swap off-diagonal blocks of half the size each time.
template <int step, int... lane>
REGARD_INLINE void swap_blocks(F& a, F& b, std::integer_sequence<int, lane...>) {
    const F top = __builtin_shufflevector(a, b, ((lane & step) ? W + lane - step : lane)...);
    const F low = __builtin_shufflevector(a, b, ((lane & step) ? W + lane : lane + step)...);
    a = top;
    b = low;
}

template <int step = W / 2>
REGARD_INLINE void transpose(F (&r)[W]) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
        if (!(i & step)) swap_blocks<step>(r[i], r[i + step], std::make_integer_sequence<int, W>());
    if constexpr (step > 1) transpose<step / 2>(r);
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
