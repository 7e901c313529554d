// Scores and weighted sums for a few queries, as in decoding. Vectors run along the width, and keys and values are read
// in their own dtype, from memory only once. Queries and sums are [lanes, width]; scores and weights are [keys, PW] as
// in matmul_blocks.h.
#pragma once

#include "half_precision.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// The number of rows that are prefetched ahead.
constexpr int64_t PREFETCH_ROWS = 16;

// Requests a row before it is needed, so that memory is not idle while the core computes something else.
REGARD_INLINE void prefetch(const char* row, int64_t bytes) {
    for (int64_t t = 0; t < bytes; t += 64) __builtin_prefetch(row + t);
}

// scores[j][lane] = keys[j] · query for R keys, which lie `key_bytes` apart.
template <Dtype dtype, int R>
REGARD_INLINE void few_rows_dot_block(const char* keys, int64_t key_bytes, const float* query, float* scores,
                                      int64_t width) {
    Floats sums[R];
    float rest[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        sums[r] = Floats{};
        rest[r] = 0;
    }
    int64_t t = 0;
    for (; t + W <= width; t += W) {
        const Floats x = load(query + t);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] += x * load_as_float32<dtype>(keys + r * key_bytes, t);
    }
    for (; t < width; t++)
        for (int r = 0; r < R; r++) rest[r] += query[t] * element_as_float32<dtype>(keys + r * key_bytes, t);
    for (int r = 0; r < R; r++) scores[r * PW] = sum(sums[r]) + rest[r];
}

template <Dtype dtype>
REGARD_NOINLINE void few_rows_dot_as(const Rows& keys, const float* queries, int64_t lanes, float* scores,
                                     int64_t count, int64_t width) {
    const int64_t key_bytes = keys.stride * bytes_per_element(dtype);
    std::memset(scores, 0, sizeof(float) * count * PW);
    for (int64_t lane = 0; lane < lanes; lane++) {
        const float* query = queries + lane * width;
        int64_t j = 0;
        for (; j + 4 <= count; j += 4) {
            if (lane == 0)
                for (int r = 0; r < 4; r++)
                    prefetch(keys.data + (j + PREFETCH_ROWS + r) * key_bytes, width * bytes_per_element(dtype));
            few_rows_dot_block<dtype, 4>(keys.data + j * key_bytes, key_bytes, query, scores + j * PW + lane, width);
        }
        for (; j < count; j++)
            few_rows_dot_block<dtype, 1>(keys.data + j * key_bytes, key_bytes, query, scores + j * PW + lane, width);
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

// scores[j][lane] = keys[j] · queries[lane]; lanes beyond `lanes` are 0.
inline void few_rows_dot(const Rows& keys, const float* queries, int64_t lanes, float* scores, int64_t count,
                         int64_t width) {
    switch (keys.dtype) {
        case Dtype::float32: return few_rows_dot_as<Dtype::float32>(keys, queries, lanes, scores, count, width);
        case Dtype::bfloat16: return few_rows_dot_as<Dtype::bfloat16>(keys, queries, lanes, scores, count, width);
        case Dtype::float16: return few_rows_dot_as<Dtype::float16>(keys, queries, lanes, scores, count, width);
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

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
