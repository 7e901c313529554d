// The three matrix products of attention, in blocks whose sums stay in registers. In the first two, each lane belongs
// to one query, and the elements of keys and values are broadcast from their rows, so K and V are never packed. In the
// third, each lane belongs to one feature, and the weights are broadcast. MR, NR, W and PW are defined in simd.h. The
// index v counts vectors: the NR vectors of a panel, or in the third product those of the features.
#pragma once

#include "simd.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// scores[j][lane] = Σ_t keys[j][t] · queries[t][lane] for KEYS keys.
template <int KEYS>
REGARD_INLINE void dot_block(const float* keys, int64_t stride, const float* queries, float* scores, int64_t width) {
    Floats sums[KEYS][NR];
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) sums[j][v] = Floats{};
#pragma GCC unroll 4
    for (int64_t t = 0; t < width; t++) {
        Floats query_elements[NR];
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) query_elements[v] = load(queries + t * PW + v * W);
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++) {
            const Floats key_element = broadcast(keys[j * stride + t]);
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) sums[j][v] += key_element * query_elements[v];
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) store(scores + j * PW + v * W, sums[j][v]);
}

// outputs[f][lane] += Σ_j values[j][f] · weights[j][lane] for FEATURES features.
template <int FEATURES>
REGARD_INLINE void weighted_sum_block(const float* values, int64_t stride, const float* weights, float* outputs,
                                      int64_t count) {
    Floats sums[FEATURES][NR];
#pragma GCC unroll 16
    for (int f = 0; f < FEATURES; f++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) sums[f][v] = load(outputs + f * PW + v * W);
#pragma GCC unroll 4
    for (int64_t j = 0; j < count; j++) {
        Floats weights_of_key[NR];
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) weights_of_key[v] = load(weights + j * PW + v * W);
#pragma GCC unroll 16
        for (int f = 0; f < FEATURES; f++) {
            const Floats value = broadcast(values[j * stride + f]);
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) sums[f][v] += value * weights_of_key[v];
        }
    }
#pragma GCC unroll 16
    for (int f = 0; f < FEATURES; f++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) store(outputs + f * PW + v * W, sums[f][v]);
}

// out[j][f] += Σ_lane weights[j][lane] · rows[lane][f] for KEYS keys and VECTORS vectors of features. There is one row
// per query: the query itself, or the gradient of its output. The result is a gradient of the keys or values.
template <int KEYS, int VECTORS>
REGARD_INLINE void outer_block(const float* weights, const float* rows, int64_t stride, int64_t lanes, float* out,
                               int64_t out_stride) {
    Floats sums[KEYS][VECTORS];
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[j][v] = load(out + j * out_stride + v * W);
#pragma GCC unroll 4
    for (int64_t lane = 0; lane < lanes; lane++) {
        Floats features[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) features[v] = load(rows + lane * stride + v * W);
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++) {
            const Floats weight = broadcast(weights[j * PW + lane]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[j][v] += weight * features[v];
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(out + j * out_stride + v * W, sums[j][v]);
}

// Handles the `count` < MR keys or features that remain after the full blocks. The switch makes `count` a compile-time
// constant, the template argument of a block.
#define REGARD_REMAINDER(count, call) \
    switch (count) {                  \
        case 5: call(5); break;       \
        case 4: call(4); break;       \
        case 3: call(3); break;       \
        case 2: call(2); break;       \
        case 1: call(1); break;       \
        default: break;               \
    }

// scores[j][lane] = Σ_t keys[j][t] · queries[t][lane] for `count` keys. The backward pass also calls it with values and
// the gradients of the outputs.
REGARD_INLINE void dot_products(const float* keys, int64_t stride, const float* queries, float* scores, int64_t count,
                                int64_t width) {
    int64_t j = 0;
    for (; j + MR <= count; j += MR) dot_block<MR>(keys + j * stride, stride, queries, scores + j * PW, width);
#define REGARD_CALL(keys_left) dot_block<keys_left>(keys + j * stride, stride, queries, scores + j * PW, width)
    REGARD_REMAINDER(count - j, REGARD_CALL)
#undef REGARD_CALL
}

// outputs[f][lane] += Σ_j values[j][f] · weights[j][lane] for `count` keys and `width` features. The backward pass also
// calls it with keys and the gradients of the scores.
REGARD_INLINE void weighted_sum(const float* values, int64_t stride, const float* weights, float* outputs,
                                int64_t count, int64_t width) {
    int64_t f = 0;
    for (; f + MR <= width; f += MR) weighted_sum_block<MR>(values + f, stride, weights, outputs + f * PW, count);
#define REGARD_CALL(features_left) \
    weighted_sum_block<features_left>(values + f, stride, weights, outputs + f * PW, count)
    REGARD_REMAINDER(width - f, REGARD_CALL)
#undef REGARD_CALL
}

// out[j][f] += Σ_lane weights[j][lane] · rows[lane][f] for `count` keys and `width` features.
REGARD_INLINE void add_outer_products(const float* weights, const float* rows, int64_t stride, int64_t lanes,
                                      float* out, int64_t out_stride, int64_t count, int64_t width) {
    int64_t f = 0;
    for (; f + PW <= width; f += PW) {
        int64_t j = 0;
        for (; j + MR <= count; j += MR)
            outer_block<MR, NR>(weights + j * PW, rows + f, stride, lanes, out + j * out_stride + f, out_stride);
#define REGARD_CALL(keys_left) \
    outer_block<keys_left, NR>(weights + j * PW, rows + f, stride, lanes, out + j * out_stride + f, out_stride)
        REGARD_REMAINDER(count - j, REGARD_CALL)
#undef REGARD_CALL
    }
    for (; f + W <= width; f += W)
        for (int64_t j = 0; j < count; j++)
            outer_block<1, 1>(weights + j * PW, rows + f, stride, lanes, out + j * out_stride + f, out_stride);
    for (; f < width; f++)
        for (int64_t j = 0; j < count; j++) {
            float sum = out[j * out_stride + f];
            for (int64_t lane = 0; lane < lanes; lane++) sum += weights[j * PW + lane] * rows[lane * stride + f];
            out[j * out_stride + f] = sum;
        }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
