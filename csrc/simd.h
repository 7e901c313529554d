// SIMD vectors, as vector types of the compiler: the same source is compiled for every instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// The intrinsics that a build uses. The emulation of AVX-512 has its tiles and its order of sums, but is compiled for
// AVX2: the compiler splits each vector in two. It is slow, and runs the code of AVX-512 on machines without it.
#if defined(REGARD_EMULATE_AVX512BF16)
#define REGARD_WIDE_VECTORS 1
#elif defined(__AVX512F__)
#define REGARD_WIDE_VECTORS 1
#define REGARD_USE_AVX512 1
#elif defined(__AVX2__)
#define REGARD_USE_AVX2 1
#elif defined(REGARD_NEON)
#include <arm_neon.h>
#define REGARD_USE_NEON 1
#endif

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// A vector has W floats, called lanes. NR vectors form a panel with one query per lane: a panel has PW = NR·W queries.
// The scores of KEYS_AT_ONCE keys and the outputs of FEATURES_AT_ONCE features are summed at once, so that the sums and
// what is multiplied fill the registers: 32 on AVX-512 and ARM, 16 elsewhere. Narrow panels waste fewer lanes if there
// are few queries, and fewer products at the edge of a mask.
#if defined(REGARD_WIDE_VECTORS)
constexpr int W = 16;
constexpr int NR = 2;
constexpr int KEYS_AT_ONCE = 12;
constexpr int FEATURES_AT_ONCE = 12;
#elif defined(REGARD_USE_AVX2)
constexpr int W = 8;
constexpr int NR = 2;
constexpr int KEYS_AT_ONCE = 6;
constexpr int FEATURES_AT_ONCE = 6;
#elif defined(REGARD_USE_NEON)
// The elements of all keys of a block stay in registers too, those of its features do not.
constexpr int W = 4;
constexpr int NR = 4;
constexpr int KEYS_AT_ONCE = 5;
constexpr int FEATURES_AT_ONCE = 6;
#else
constexpr int W = 4;
constexpr int NR = 2;
constexpr int KEYS_AT_ONCE = 6;
constexpr int FEATURES_AT_ONCE = 6;
#endif
constexpr int PW = NR * W;

typedef float Floats __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t UInts __attribute__((vector_size(W * 4)));
typedef float UnalignedFloats __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t UnalignedInts __attribute__((vector_size(W * 4), aligned(4), may_alias));

#define REGARD_INLINE static inline __attribute__((always_inline))
// For loops that are slower inside a large function, where registers are scarce: decoding loses 5% without it.
#define REGARD_NOINLINE __attribute__((noinline))

REGARD_INLINE Floats load(const float* p) { return *reinterpret_cast<const UnalignedFloats*>(p); }
REGARD_INLINE void store(float* p, Floats x) { *reinterpret_cast<UnalignedFloats*>(p) = x; }
typedef uint8_t Bytes __attribute__((vector_size(W)));

// W bytes as integers.
REGARD_INLINE Ints load_bytes(const uint8_t* p) {
    Bytes bytes;
    std::memcpy(&bytes, p, W);
    return __builtin_convertvector(bytes, Ints);
}

REGARD_INLINE Ints load(const int32_t* p) { return *reinterpret_cast<const UnalignedInts*>(p); }
REGARD_INLINE void store(int32_t* p, Ints x) { *reinterpret_cast<UnalignedInts*>(p) = x; }

// x in every lane. The compiler removes a subtraction of 0, because x − 0 is always x. It cannot remove an addition of
// 0, because −0 + 0 is 0.
REGARD_INLINE Floats broadcast(float x) { return x - Floats{}; }
REGARD_INLINE Ints broadcast(int32_t x) { return Ints{} + x; }
REGARD_INLINE Floats select(Ints condition, Floats a, Floats b) { return condition ? a : b; }

// a where a > b, else b, like the instruction of the hardware: a NaN in a is dropped, and a NaN in b stays.
REGARD_INLINE Floats max(Floats a, Floats b) {
#if defined(REGARD_USE_AVX512)
    return _mm512_max_ps(a, b);
#elif defined(REGARD_USE_AVX2)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

REGARD_INLINE bool any(Ints condition) {
#if defined(REGARD_USE_AVX512)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(condition)) != 0;
#elif defined(REGARD_USE_AVX2)
    return _mm256_movemask_ps(reinterpret_cast<__m256>(condition)) != 0;
#elif defined(REGARD_USE_NEON)
    return vmaxvq_u32(reinterpret_cast<uint32x4_t>(condition)) != 0;
#else
    int32_t all = 0;
    for (int lane = 0; lane < W; lane++) all |= condition[lane];
    return all != 0;
#endif
}

REGARD_INLINE Ints is_nan(Floats x) { return x != x; }

// x, but at least −127·ln 2, where exp_clamped(x) is already 0. A NaN stays.
REGARD_INLINE Floats clamp_for_exp(Floats x) { return max(broadcast(-88.029692f), x); }

// e^x for −127·ln 2 ≤ x ≤ 88: 2^n·e^f with n = round(x/ln 2) and a polynomial of degree 5 for e^f, |f| ≤ ln 2/2. The
// relative error is 2e-7 near 0 and 5e-7 at the lower end, where weights vanish. 0 below 2^-126, NaN stays NaN.
REGARD_INLINE Floats exp_clamped(Floats x) {
    // Adding 1.5·2^23 rounds to a whole number in the low bits. With 127 more these bits are the exponent of 2^n.
    const Floats shift = broadcast(12582912.0f + 127.0f);
    const Floats t = x * broadcast(1.44269504f) + shift;
    const Floats f = x - (t - shift) * broadcast(0.693147181f);
    Floats p = broadcast(8.290314755e-03f) * f + broadcast(4.189793013e-02f);
    p = p * f + broadcast(1.666763620e-01f);
    p = p * f + broadcast(4.999914952e-01f);
    p = p * f + broadcast(9.999997072e-01f);
    p = p * f + broadcast(1.0f);
    return p * reinterpret_cast<Floats>(reinterpret_cast<UInts>(t) << 23);
}

REGARD_INLINE Floats exp(Floats x) { return exp_clamped(clamp_for_exp(x)); }

// The sum of all lanes.
REGARD_INLINE float sum(Floats x) {
#if defined(REGARD_USE_AVX512)
    return _mm512_reduce_add_ps(x);
#elif defined(REGARD_USE_AVX2)
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
#else
    for (int half = W / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) x[lane] += x[lane + half];
    return x[0];
#endif
}

// 0 in every lane if all elements of x are finite, else NaN in some lane. With four sums, an addition does not have to
// wait for the previous one.
REGARD_INLINE Floats zero_if_finite(const float* x, int64_t count) {
    Floats zeros[4] = {};
    int64_t t = 0;
    for (; t + 4 * W <= count; t += 4 * W)
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) zeros[s] += load(x + t + s * W) * 0.0f;
    for (; t + W <= count; t += W) zeros[0] += load(x + t) * 0.0f;
    for (; t < count; t++) zeros[0][0] += x[t] * 0.0f;
    return (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]);
}

REGARD_INLINE float dot_product(const float* a, const float* b, int64_t count) {
    Floats sums[2] = {};
    int64_t t = 0;
    for (; t + 2 * W <= count; t += 2 * W) {
        sums[0] += load(a + t) * load(b + t);
        sums[1] += load(a + t + W) * load(b + t + W);
    }
    for (; t + W <= count; t += W) sums[0] += load(a + t) * load(b + t);
    float rest = 0;
    for (; t < count; t++) rest += a[t] * b[t];
    return sum(sums[0] + sums[1]) + rest;
}

// tanh x: a rational approximation on [-7.9, 7.9], beyond which float32 rounds to ±1. The error is about 2 roundings.
REGARD_INLINE Floats tanh(Floats x) {
    const Floats limit = broadcast(7.90531110763549805f);
    x = select(x > limit, limit, select(x < -limit, -limit, x));
    const Floats s = x * x;
    Floats p = broadcast(-2.76076847742355e-16f) * s + broadcast(2.00018790482477e-13f);
    p = p * s + broadcast(-8.60467152213735e-11f);
    p = p * s + broadcast(5.12229709037114e-08f);
    p = p * s + broadcast(1.48572235717979e-05f);
    p = p * s + broadcast(6.37261928875436e-04f);
    p = p * s + broadcast(4.89352455891786e-03f);
    Floats q = broadcast(1.19825839466702e-06f) * s + broadcast(1.18534705686654e-04f);
    q = q * s + broadcast(2.26843463243900e-03f);
    q = q * s + broadcast(4.89352518554385e-03f);
    return x * p / q;
}

template <int size, int... lane>
REGARD_INLINE void swap_blocks(Floats& a, Floats& b, std::integer_sequence<int, lane...>) {
    const Floats upper = __builtin_shufflevector(a, b, ((lane & size) ? W + lane - size : lane)...);
    const Floats lower = __builtin_shufflevector(a, b, ((lane & size) ? W + lane : lane + size)...);
    a = upper;
    b = lower;
}

// Transposes W vectors of W floats: log2 W rounds, each of which swaps off-diagonal blocks of half the size.
template <int size = W / 2>
REGARD_INLINE void transpose(Floats (&rows)[W]) {
#pragma GCC unroll 16
    for (int r = 0; r < W; r++)
        if (!(r & size)) swap_blocks<size>(rows[r], rows[r + size], std::make_integer_sequence<int, W>());
    if constexpr (size > 1) transpose<size / 2>(rows);
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
