// Pairs of bfloat16 numbers, which are multiplied without a conversion to float32: one instruction multiplies the numbers
// of two pairs and adds both products to a float32 sum. AVX-512 BF16 and the BF16 extension of ARM have it.
//
// A pair has 32 bits, with the first number in the low half. Queries are packed in pairs of features, [D/2, PW]. The
// features of a key are pairs already, and are broadcast from their rows. Weights and values are paired by keys:
// [⌈keys/2⌉, PW] and [⌈keys/2⌉, E]. The product of two bfloat16 numbers is exact in float32. Scores are scaled after the
// sum, because a scaled query would not be a bfloat16 number. The weights are rounded to bfloat16.
#pragma once

#include "simd.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

#if defined(__AVX512BF16__) || defined(REGARD_EMULATE_AVX512BF16) || defined(REGARD_NEON_BF16)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

typedef uint32_t UnalignedPairs __attribute__((vector_size(W * 4), aligned(2), may_alias));

REGARD_INLINE UInts load_pairs(const void* p) { return *static_cast<const UnalignedPairs*>(p); }
REGARD_INLINE void store_pairs(uint32_t* p, UInts x) { *reinterpret_cast<UnalignedPairs*>(p) = x; }
REGARD_INLINE UInts broadcast_pair(uint32_t x) { return UInts{} + x; }

REGARD_INLINE uint32_t pair_at(const void* p) {
    uint32_t pair;
    std::memcpy(&pair, p, 4);
    return pair;
}

// x, but ±0 if x is subnormal. The instructions below do this in every mode of the processor.
REGARD_INLINE Floats flush_subnormals(Floats x) {
    const UInts bits = reinterpret_cast<UInts>(x);
    const UInts subnormal = reinterpret_cast<UInts>((bits & 0x7fffffffu) < 0x00800000u);
    return reinterpret_cast<Floats>(bits & (~subnormal | 0x80000000u));
}

#if defined(REGARD_EMULATE_AVX512BF16)

// a·b + c with one rounding, for both halves of the vectors.
REGARD_INLINE Floats fused_multiply_add(Floats a, Floats b, Floats c) {
    __m256 x[2];
    __m256 y[2];
    __m256 z[2];
    std::memcpy(x, &a, sizeof x);
    std::memcpy(y, &b, sizeof y);
    std::memcpy(z, &c, sizeof z);
    for (int half = 0; half < 2; half++) z[half] = _mm256_fmadd_ps(x[half], y[half], z[half]);
    std::memcpy(&c, z, sizeof z);
    return c;
}

// a·b + c with one rounding, but ±0 if the result is below 2^-126. The instruction decides this after it has rounded to
// 24 bits, whatever the exponent is: a sum just below 2^-126 is 0 although a subnormal result would round up to 2^-126.
// The numbers times 2^50 have the same digits and are not subnormal.
REGARD_INLINE Floats fused_multiply_add_flushed(Floats a, Floats b, Floats c) {
    const Floats scaled = fused_multiply_add(a * 0x1p50f, b, c * 0x1p50f);
    constexpr uint32_t limit = (127 - 76) << 23;  // the bits of 2^-76
    const UInts tiny = reinterpret_cast<UInts>((reinterpret_cast<UInts>(scaled) & 0x7fffffffu) < limit);
    const UInts result = reinterpret_cast<UInts>(fused_multiply_add(a, b, c));
    return reinterpret_cast<Floats>(result & (~tiny | 0x80000000u));
}

// sum + a·b for pairs a and b. This is the definition of the instruction VDPBF16PS: two fused multiply–adds, the second
// numbers of the pairs first, each rounded to nearest even; subnormal numbers count as 0.
// Not inlined: it is slow anyway, and in unrolled loops it would take minutes to compile.
REGARD_NOINLINE inline Floats add_pair_products_emulated(Floats sum, UInts a, UInts b) {
    const auto second = [](UInts x) { return flush_subnormals(reinterpret_cast<Floats>(x & 0xffff0000u)); };
    const auto first = [](UInts x) { return flush_subnormals(reinterpret_cast<Floats>(x << 16)); };
    sum = fused_multiply_add_flushed(second(a), second(b), flush_subnormals(sum));
    return fused_multiply_add_flushed(first(a), first(b), sum);
}

#endif

REGARD_INLINE Floats add_pair_products(Floats sum, UInts a, UInts b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#elif defined(REGARD_NEON_BF16)
    return vbfdotq_f32(sum, reinterpret_cast<bfloat16x8_t>(a), reinterpret_cast<bfloat16x8_t>(b));
#elif defined(REGARD_EMULATE_AVX512BF16)
    return add_pair_products_emulated(sum, a, b);
#else
    (void)a;
    (void)b;
    return sum;  // never called: HAS_PAIRS is false
#endif
}

#if defined(REGARD_USE_NEON)

// sum + a·b, where b is one pair of a vector for all lanes.
template <int LANE>
REGARD_INLINE Floats add_lane_pair_products(Floats sum, UInts a, UInts pairs) {
#if defined(REGARD_NEON_BF16)
    return vbfdotq_laneq_f32(sum, reinterpret_cast<bfloat16x8_t>(a), reinterpret_cast<bfloat16x8_t>(pairs), LANE);
#else
    (void)a;
    (void)pairs;
    return sum;  // never called: HAS_PAIRS is false
#endif
}

#endif

// Rounds two vectors to bfloat16, to nearest even, and pairs them lane by lane.
REGARD_INLINE UInts to_pairs(Floats first, Floats second) {
#if defined(__AVX512BF16__)
    const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return reinterpret_cast<UInts>(_mm512_permutexvar_epi16(_mm512_load_si512(order), halves));
#elif defined(REGARD_NEON_BF16)
    const auto low = reinterpret_cast<uint16x4_t>(vcvt_bf16_f32(first));
    const auto high = reinterpret_cast<uint16x4_t>(vcvt_bf16_f32(second));
    return vmovl_u16(low) | (vmovl_u16(high) << 16);
#else
    const auto rounded = [](Floats x) {
        const UInts bits = reinterpret_cast<UInts>(flush_subnormals(x));
        const UInts nan = reinterpret_cast<UInts>(is_nan(x));
        return (nan & (bits | 0x400000u)) | (~nan & (bits + 0x7fffu + ((bits >> 16) & 1u)));
    };
    return (rounded(first) >> 16) | (rounded(second) & 0xffff0000u);
#endif
}

// --- packing ---

// Packs bfloat16 rows [count, width] of even width into a panel [width/2, PW] of pairs of features; lanes beyond `count`
// are 0.
inline void pack_pair_panel(const uint16_t* rows, int64_t stride, int64_t count, int64_t width, uint32_t* panel) {
    for (int c = 0; c < PW; c += W) {
        int64_t t = 0;
        for (; t + 2 * W <= width; t += 2 * W) {
            Floats block[W];
#pragma GCC unroll 16
            for (int r = 0; r < W; r++)
                block[r] = c + r < count ? reinterpret_cast<Floats>(load_pairs(rows + (c + r) * stride + t)) : Floats{};
            transpose(block);
#pragma GCC unroll 16
            for (int r = 0; r < W; r++)
                store_pairs(panel + (t / 2 + r) * PW + c, reinterpret_cast<UInts>(block[r]));
        }
        for (; t < width; t += 2)
            for (int r = 0; r < W; r++)
                panel[t / 2 * PW + c + r] = c + r < count ? pair_at(rows + (c + r) * stride + t) : 0;
    }
}

// W bfloat16 numbers, each in the low half of a lane.
REGARD_INLINE UInts widen(const uint16_t* x) {
    typedef uint16_t Narrow __attribute__((vector_size(W * 2), aligned(2), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Narrow*>(x), UInts);
}

// Pairs bfloat16 rows [count, width] by rows: [⌈count/2⌉, width]. A last odd row is paired with zeros.
inline void pair_rows(const uint16_t* rows, int64_t stride, int64_t count, int64_t width, uint32_t* pairs) {
    for (int64_t j = 0; j < count; j += 2) {
        const uint16_t* first = rows + j * stride;
        const uint16_t* second = first + stride;
        uint32_t* to = pairs + j / 2 * width;
        const bool both = j + 1 < count;
        int64_t f = 0;
        for (; f + W <= width; f += W) {
            UInts x = widen(first + f);
            if (both) x |= widen(second + f) << 16;
            store_pairs(to + f, x);
        }
        for (; f < width; f++) to[f] = first[f] | (both ? uint32_t{second[f]} << 16 : 0);
    }
}

// Rounds weights [count, PW] to bfloat16 and pairs them by keys: [⌈count/2⌉, PW].
template <int VECTORS>
REGARD_INLINE void pair_weights(const float* weights, int64_t count, uint32_t* pairs) {
    for (int64_t j = 0; j < count; j += 2)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const float* at = weights + j * PW + v * W;
            store_pairs(pairs + j / 2 * PW + v * W, to_pairs(load(at), j + 1 < count ? load(at + PW) : Floats{}));
        }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
