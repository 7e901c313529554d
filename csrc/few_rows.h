// Scores and weighted sums for a few queries, as in decoding. Vectors run along the width, and keys and values are read
// in their own dtype, from memory only once. Queries and sums are [lanes, width]; scores and weights are [keys, PW] as
// in matmul_blocks.h.
#pragma once

#include "bf16_pairs.h"
#include "half_precision.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// The number of rows that are prefetched ahead.
constexpr int64_t PREFETCH_ROWS = 16;

// Requests a row before it is needed, so that memory is not idle while the core computes something else.
REGARD_INLINE void prefetch(const char* row, int64_t bytes) {
    for (int64_t t = 0; t < bytes; t += 64) __builtin_prefetch(row + t);
}

// How a score of few rows reads its query and its keys: each vector has STEP elements of a row.

template <Dtype dtype>
struct ConvertedRows {
    typedef float Query;
    static constexpr int STEP = W;
    static constexpr int64_t KEY_BYTES = bytes_per_element(dtype);  // of one element of a key
    REGARD_INLINE Floats add_products(Floats sum, const Query* query, const char* key, int64_t t) {
        return sum + load(query + t) * load_as_float32<dtype>(key, t);
    }
    REGARD_INLINE float product(const Query* query, const char* key, int64_t t) {
        return query[t] * element_as_float32<dtype>(key, t);
    }
};

struct PairedRows {
    typedef uint16_t Query;
    static constexpr int STEP = 2 * W;
    static constexpr int64_t KEY_BYTES = 2;
    REGARD_INLINE Floats add_products(Floats sum, const Query* query, const char* key, int64_t t) {
        return add_pair_products(sum, load_pairs(query + t), load_pairs(key + t * 2));
    }
    REGARD_INLINE float product(const Query* query, const char* key, int64_t t) {
        return bf16_to_float(query[t]) * element_as_float32<Dtype::bfloat16>(key, t);
    }
};

// scores[r][lane] = factor · keys[r] · query for R keys, which lie `key_bytes` apart.
template <class Operand, int R>
REGARD_INLINE void few_rows_dot_block(const char* keys, int64_t key_bytes, const typename Operand::Query* query,
                                      float* scores, int64_t width, float factor) {
    Floats sums[R];
    float rest[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        sums[r] = Floats{};
        rest[r] = 0;
    }
    int64_t t = 0;
    for (; t + Operand::STEP <= width; t += Operand::STEP)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] = Operand::add_products(sums[r], query, keys + r * key_bytes, t);
    for (; t < width; t++)
        for (int r = 0; r < R; r++) rest[r] += Operand::product(query, keys + r * key_bytes, t);
    for (int r = 0; r < R; r++) scores[r * PW] = (sum(sums[r]) + rest[r]) * factor;
}

// scores[j][lane] = factor · keys[j] · queries[lane]; lanes beyond `lanes` are 0. Queries are [lanes, width].
template <class Operand>
REGARD_NOINLINE void few_rows_dot_of(const Rows& keys, const float* queries, int64_t lanes, float* scores,
                                     int64_t count, int64_t width, float factor) {
    const int64_t key_bytes = keys.stride * Operand::KEY_BYTES;
    std::memset(scores, 0, sizeof(float) * count * PW);
    for (int64_t lane = 0; lane < lanes; lane++) {
        const auto* query = reinterpret_cast<const typename Operand::Query*>(queries) + lane * width;
        int64_t j = 0;
        for (; j + 4 <= count; j += 4) {
            if (lane == 0)
                for (int r = 0; r < 4; r++)
                    prefetch(keys.data + (j + PREFETCH_ROWS + r) * key_bytes, width * Operand::KEY_BYTES);
            few_rows_dot_block<Operand, 4>(keys.data + j * key_bytes, key_bytes, query, scores + j * PW + lane, width,
                                           factor);
        }
        for (; j < count; j++)
            few_rows_dot_block<Operand, 1>(keys.data + j * key_bytes, key_bytes, query, scores + j * PW + lane, width,
                                           factor);
    }
}

// sums[f] += Σ_j values[j][f] · weights[j] for R vectors of features that start at feature f.
template <Dtype dtype, int R>
REGARD_INLINE void few_rows_sum_block(const char* values, int64_t value_bytes, int64_t f, const float* weights,
                                      float* sums, int64_t count, int64_t prefetch_bytes) {
    Floats sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r] = load(sums + f + r * W);
    for (int64_t j = 0; j < count; j++) {
        const Floats weight = broadcast(weights[j * PW]);
        if (prefetch_bytes) prefetch(values + (j + PREFETCH_ROWS) * value_bytes, prefetch_bytes);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sum[r] += weight * load_as_float32<dtype>(values + j * value_bytes, f + r * W);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(sums + f + r * W, sum[r]);
}

template <Dtype dtype>
REGARD_NOINLINE void few_rows_sum_as(const Rows& values, const float* weights, int64_t lanes, float* sums,
                                     int64_t count, int64_t width) {
    const int64_t value_bytes = values.stride * bytes_per_element(dtype);
    for (int64_t lane = 0; lane < lanes; lane++) {
        float* to = sums + lane * width;
        int64_t f = 0;
        for (; f + 8 * W <= width; f += 8 * W) {
            // The first pass over the rows requests them whole; later passes find them in cache.
            const int64_t prefetch_bytes = lane == 0 && f == 0 ? width * bytes_per_element(dtype) : 0;
            few_rows_sum_block<dtype, 8>(values.data, value_bytes, f, weights + lane, to, count, prefetch_bytes);
        }
        for (; f + W <= width; f += W)
            few_rows_sum_block<dtype, 1>(values.data, value_bytes, f, weights + lane, to, count, 0);
        for (; f < width; f++)
            for (int64_t j = 0; j < count; j++)
                to[f] += weights[j * PW + lane] * element_as_float32<dtype>(values.data + j * value_bytes, f);
    }
}

// scores[j][lane] = keys[j] · queries[lane]; lanes beyond `lanes` are 0. Queries are float32.
inline void few_rows_dot(const Rows& keys, const float* queries, int64_t lanes, float* scores, int64_t count,
                         int64_t width) {
    switch (keys.dtype) {
        case Dtype::float32:
            return few_rows_dot_of<ConvertedRows<Dtype::float32>>(keys, queries, lanes, scores, count, width, 1.0f);
        case Dtype::bfloat16:
            return few_rows_dot_of<ConvertedRows<Dtype::bfloat16>>(keys, queries, lanes, scores, count, width, 1.0f);
        case Dtype::float16:
            return few_rows_dot_of<ConvertedRows<Dtype::float16>>(keys, queries, lanes, scores, count, width, 1.0f);
    }
}

// sums[lane] += Σ_j values[j] · weights[j][lane].
inline void few_rows_weighted_sum(const Rows& values, const float* weights, int64_t lanes, float* sums, int64_t count,
                                  int64_t width) {
    switch (values.dtype) {
        case Dtype::float32: return few_rows_sum_as<Dtype::float32>(values, weights, lanes, sums, count, width);
        case Dtype::bfloat16: return few_rows_sum_as<Dtype::bfloat16>(values, weights, lanes, sums, count, width);
        case Dtype::float16: return few_rows_sum_as<Dtype::float16>(values, weights, lanes, sums, count, width);
    }
}

// --- values and weights in pairs of keys (bf16_pairs.h) ---

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
