// Products of bfloat16 numbers without a conversion to float32: AVX-512 BF16 multiplies pairs of them and adds both
// products to a float32 sum.
//
// A pair has 32 bits, with the first number in the low half. Queries are packed in pairs of features, [⌈D/2⌉, PW]. The
// features of a key are pairs already, and are broadcast from their rows. Weights and values are paired by keys:
// [⌈keys/2⌉, PW] and [⌈keys/2⌉, E]. The product of two bfloat16 numbers is exact in float32. Scores are scaled after the
// sum, because a scaled query would not be a bfloat16 number. The weights are rounded to bfloat16.
#pragma once

#include "few_rows.h"
#include "matmul_blocks.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

#if defined(__AVX512BF16__) || defined(REGARD_EMULATE_AVX512BF16)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

typedef uint32_t UnalignedPairs __attribute__((vector_size(W * 4), aligned(2), may_alias));

REGARD_INLINE UInts load_pairs(const void* p) { return *static_cast<const UnalignedPairs*>(p); }
REGARD_INLINE void store_pairs(uint32_t* p, UInts x) { *reinterpret_cast<UnalignedPairs*>(p) = x; }
REGARD_INLINE UInts broadcast_pair(uint32_t x) { return UInts{} + x; }

REGARD_INLINE uint32_t pair_at(const uint16_t* x) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
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

// sum + a·b for pairs a and b. This is the definition of the instruction VDPBF16PS: two fused multiply–adds, the second
// numbers of the pairs first, each rounded to nearest even; subnormal numbers count as 0.
// Not inlined: it is slow anyway, and in unrolled loops it would take minutes to compile.
REGARD_NOINLINE inline Floats add_pair_products_emulated(Floats sum, UInts a, UInts b) {
    const auto second = [](UInts x) { return flush_subnormals(reinterpret_cast<Floats>(x & 0xffff0000u)); };
    const auto first = [](UInts x) { return flush_subnormals(reinterpret_cast<Floats>(x << 16)); };
    sum = flush_subnormals(fused_multiply_add(second(a), second(b), flush_subnormals(sum)));
    return flush_subnormals(fused_multiply_add(first(a), first(b), sum));
}

#endif

REGARD_INLINE Floats add_pair_products(Floats sum, UInts a, UInts b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#elif defined(REGARD_EMULATE_AVX512BF16)
    return add_pair_products_emulated(sum, a, b);
#else
    (void)a;
    (void)b;
    return sum;  // never called: HAS_PAIRS is false
#endif
}

// Rounds two vectors to bfloat16, to nearest even, and pairs them lane by lane.
REGARD_INLINE UInts to_pairs(Floats first, Floats second) {
#if defined(__AVX512BF16__)
    const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return reinterpret_cast<UInts>(_mm512_permutexvar_epi16(_mm512_load_si512(order), halves));
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

// Packs bfloat16 rows [count, width] into a panel [⌈width/2⌉, PW] of pairs of features; lanes beyond `count` are 0.
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
            for (int r = 0; r < W; r++) {
                const uint16_t* at = rows + (c + r) * stride + t;
                uint32_t pair = 0;
                if (c + r < count) pair = t + 1 < width ? pair_at(at) : *at;
                panel[t / 2 * PW + c + r] = pair;
            }
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

// --- products: as in matmul_blocks.h, with pairs ---

// scores[j][lane] = factor · Σ_t keys[j][t] · queries[t][lane] for KEYS keys.
template <int KEYS, int VECTORS>
REGARD_INLINE void pair_dot_block(const uint16_t* keys, int64_t stride, const uint32_t* queries, float* scores,
                                  int64_t width, Floats factor) {
    Floats sums[KEYS][VECTORS];
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[j][v] = Floats{};
#pragma GCC unroll 4
    for (int64_t t = 0; t < width / 2; t++) {
        UInts query_pairs[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) query_pairs[v] = load_pairs(queries + t * PW + v * W);
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++) {
            const UInts key_pair = broadcast_pair(pair_at(keys + j * stride + 2 * t));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[j][v] = add_pair_products(sums[j][v], key_pair, query_pairs[v]);
        }
    }
    if (width % 2)
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[j][v] = add_pair_products(sums[j][v], broadcast_pair(keys[j * stride + width - 1]),
                                               load_pairs(queries + width / 2 * PW + v * W));
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(scores + j * PW + v * W, sums[j][v] * factor);
}

// outputs[f][lane] += Σ_j values[j][f] · weights[j][lane] for FEATURES features and `count` pairs of keys.
template <int FEATURES, int VECTORS>
REGARD_INLINE void pair_weighted_sum_block(const uint32_t* values, int64_t stride, const uint32_t* weights,
                                           float* outputs, int64_t count) {
    Floats sums[FEATURES][VECTORS];
#pragma GCC unroll 16
    for (int f = 0; f < FEATURES; f++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[f][v] = load(outputs + f * PW + v * W);
#pragma GCC unroll 4
    for (int64_t j = 0; j < count; j++) {
        UInts weight_pairs[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) weight_pairs[v] = load_pairs(weights + j * PW + v * W);
#pragma GCC unroll 16
        for (int f = 0; f < FEATURES; f++) {
            const UInts value_pair = broadcast_pair(values[j * stride + f]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[f][v] = add_pair_products(sums[f][v], value_pair, weight_pairs[v]);
        }
    }
#pragma GCC unroll 16
    for (int f = 0; f < FEATURES; f++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(outputs + f * PW + v * W, sums[f][v]);
}

// scores[j][lane] = factor · Σ_t keys[j][t] · queries[t][lane] for `count` keys.
template <int VECTORS>
REGARD_INLINE void pair_dot_products(const uint16_t* keys, int64_t stride, const uint32_t* queries, float* scores,
                                     int64_t count, int64_t width, float factor) {
    const Floats factors = broadcast(factor);
    for_blocks<VECTORS>(count, [&](auto rows, int64_t j) __attribute__((always_inline)) {
        pair_dot_block<rows(), VECTORS>(keys + j * stride, stride, queries, scores + j * PW, width, factors);
    });
}

// outputs[f][lane] += Σ_j values[j][f] · weights[j][lane] for `count` pairs of keys and `width` features.
template <int VECTORS>
REGARD_INLINE void pair_weighted_sum(const uint32_t* values, int64_t stride, const uint32_t* weights, float* outputs,
                                     int64_t count, int64_t width) {
    for_blocks<VECTORS>(width, [&](auto rows, int64_t f) __attribute__((always_inline)) {
        pair_weighted_sum_block<rows(), VECTORS>(values + f, stride, weights, outputs + f * PW, count);
    });
}

// --- a few queries: vectors run along the width, as in few_rows.h ---

// scores[r][lane] = factor · keys[r] · query for R keys and one query of `width` bfloat16 numbers.
template <int R>
REGARD_INLINE void few_rows_pair_dot_block(const uint16_t* keys, int64_t stride, const uint16_t* query, float* scores,
                                           int64_t width, float factor) {
    Floats sums[R];
    float rest[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        sums[r] = Floats{};
        rest[r] = 0;
    }
    int64_t t = 0;
    for (; t + 2 * W <= width; t += 2 * W) {
        const UInts query_pairs = load_pairs(query + t);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
            sums[r] = add_pair_products(sums[r], query_pairs, load_pairs(keys + r * stride + t));
    }
    for (; t < width; t++)
        for (int r = 0; r < R; r++) rest[r] += bf16_to_float(query[t]) * bf16_to_float(keys[r * stride + t]);
    for (int r = 0; r < R; r++) scores[r * PW] = (sum(sums[r]) + rest[r]) * factor;
}

// scores[j][lane] = factor · keys[j] · queries[lane]; lanes beyond `lanes` are 0. Queries are [lanes, width].
REGARD_NOINLINE inline void few_rows_pair_dot(const uint16_t* keys, int64_t stride, const uint16_t* queries,
                                              int64_t lanes, float* scores, int64_t count, int64_t width,
                                              float factor) {
    std::memset(scores, 0, sizeof(float) * count * PW);
    for (int64_t lane = 0; lane < lanes; lane++) {
        const uint16_t* query = queries + lane * width;
        int64_t j = 0;
        for (; j + 4 <= count; j += 4) {
            if (lane == 0)
                for (int r = 0; r < 4; r++)
                    prefetch(reinterpret_cast<const char*>(keys + (j + PREFETCH_ROWS + r) * stride), width * 2);
            few_rows_pair_dot_block<4>(keys + j * stride, stride, query, scores + j * PW + lane, width, factor);
        }
        for (; j < count; j++)
            few_rows_pair_dot_block<1>(keys + j * stride, stride, query, scores + j * PW + lane, width, factor);
    }
}

typedef uint16_t Halves __attribute__((vector_size(W * 4), aligned(2), may_alias));  // 2·W bfloat16 numbers

// Pairs the numbers of two rows: those of features `first` … `first` + W − 1 of a vector.
template <int first, int... half>
REGARD_INLINE UInts interleave(Halves a, Halves b, std::integer_sequence<int, half...>) {
    return reinterpret_cast<UInts>(__builtin_shufflevector(a, b, (first + half / 2 + (half % 2) * 2 * W)...));
}

// sums[f] += Σ_j values[j][f] · weights[j] for R · 2 · W features, which start at f. Weights are pairs, PW apart.
template <int R>
REGARD_INLINE void few_rows_pair_sum_block(const uint16_t* values, int64_t stride, int64_t f, const uint32_t* weights,
                                           float* sums, int64_t count, int64_t prefetch_bytes) {
    constexpr auto halves = std::make_integer_sequence<int, 2 * W>();
    Floats sum[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        sum[r][0] = load(sums + f + 2 * r * W);
        sum[r][1] = load(sums + f + 2 * r * W + W);
    }
    for (int64_t j = 0; j < count; j += 2) {
        const UInts weight = broadcast_pair(weights[j / 2 * PW]);
        const uint16_t* row = values + j * stride + f;
        if (prefetch_bytes) {
            prefetch(reinterpret_cast<const char*>(row + PREFETCH_ROWS * stride), prefetch_bytes);
            prefetch(reinterpret_cast<const char*>(row + (PREFETCH_ROWS + 1) * stride), prefetch_bytes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const Halves first = *reinterpret_cast<const Halves*>(row + 2 * r * W);
            Halves second = Halves{};
            if (j + 1 < count) second = *reinterpret_cast<const Halves*>(row + stride + 2 * r * W);
            sum[r][0] = add_pair_products(sum[r][0], weight, interleave<0>(first, second, halves));
            sum[r][1] = add_pair_products(sum[r][1], weight, interleave<W>(first, second, halves));
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        store(sums + f + 2 * r * W, sum[r][0]);
        store(sums + f + 2 * r * W + W, sum[r][1]);
    }
}

// sums[lane] += Σ_j values[j] · weights[j][lane] for `count` keys. Weights are rounded and paired by pair_weights.
REGARD_NOINLINE inline void few_rows_pair_sum(const uint16_t* values, int64_t stride, const uint32_t* weights,
                                              int64_t lanes, float* sums, int64_t count, int64_t width) {
    for (int64_t lane = 0; lane < lanes; lane++) {
        float* to = sums + lane * width;
        int64_t f = 0;
        for (; f + 8 * W <= width; f += 8 * W) {
            const int64_t prefetch_bytes = lane == 0 && f == 0 ? width * 2 : 0;
            few_rows_pair_sum_block<4>(values, stride, f, weights + lane, to, count, prefetch_bytes);
        }
        for (; f + 2 * W <= width; f += 2 * W)
            few_rows_pair_sum_block<1>(values, stride, f, weights + lane, to, count, 0);
        for (; f < width; f++)
            for (int64_t j = 0; j < count; j++) {
                const uint32_t pair = weights[j / 2 * PW + lane];
                const auto half = static_cast<uint16_t>(j % 2 ? pair >> 16 : pair);
                to[f] += bf16_to_float(half) * bf16_to_float(values[j * stride + f]);
            }
    }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
