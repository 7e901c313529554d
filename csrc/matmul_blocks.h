// The three matrix products of attention, in blocks whose sums stay in registers. In the first two, each lane belongs
// to one query, and the elements of keys and values are broadcast from their rows, so K and V are never packed. In the
// third, each lane belongs to one feature, and the weights are broadcast. MR, NR, W and PW are defined in simd.h. The
// index v counts vectors: those of a panel, or in the third product those of the features.
//
// A product may compute only some of the NR vectors of a panel, VECTORS of them: the pointers then point to the first.
#pragma once

#include <type_traits>

#include "simd.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// The number of keys (or features) that are computed at once. With fewer vectors there is room for more of them, and
// about eight sums are needed at least, because an addition waits for the one before it.
template <int VECTORS>
constexpr int block_rows = VECTORS == NR ? MR : VECTORS == 1 ? 8 : MR * NR / VECTORS;

// Calls work(VECTORS) with the number of vectors as a compile-time constant.
template <class Work>
REGARD_INLINE void with_vectors(int vectors, const Work& work) {
    if (vectors >= NR) return work(std::integral_constant<int, NR>());
    if constexpr (NR > 3)
        if (vectors == 3) return work(std::integral_constant<int, 3>());
    if constexpr (NR > 2)
        if (vectors == 2) return work(std::integral_constant<int, 2>());
    work(std::integral_constant<int, 1>());
}

// Calls work(ROWS, first) for blocks of rows that cover 0 … count − 1: blocks of block_rows<VECTORS>, then smaller ones.
template <int VECTORS, class Work>
REGARD_INLINE void for_blocks(int64_t count, const Work& work) {
    constexpr int rows = block_rows<VECTORS>;
    int64_t first = 0;
    for (; first + rows <= count; first += rows) work(std::integral_constant<int, rows>(), first);
    for (; first + 4 <= count; first += 4) work(std::integral_constant<int, 4>(), first);
    switch (count - first) {
        case 3: return work(std::integral_constant<int, 3>(), first);
        case 2: return work(std::integral_constant<int, 2>(), first);
        case 1: return work(std::integral_constant<int, 1>(), first);
        default: return;
    }
}

#if defined(REGARD_USE_NEON)

// On ARM one instruction multiplies a vector by one element of another vector. Elements are therefore loaded four at a
// time, instead of one by one into all lanes: this saves most loads.

// sums[r][v] += vectors[v] · elements[r][ELEMENT]
template <int ELEMENT, int ROWS, int VECTORS>
REGARD_INLINE void add_element_products(const float* vectors, const Floats (&elements)[ROWS],
                                        Floats (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        const Floats x = load(vectors + v * W);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sums[r][v] = vfmaq_laneq_f32(sums[r][v], x, elements[r], ELEMENT);
    }
}

// scores[j][lane] = Σ_t keys[j][t] · queries[t][lane] for KEYS keys.
template <int KEYS, int VECTORS>
REGARD_INLINE void dot_block(const float* keys, int64_t stride, const float* queries, float* scores, int64_t width) {
    Floats sums[KEYS][VECTORS] = {};
    int64_t t = 0;
    for (; t + 4 <= width; t += 4) {
        Floats elements[KEYS];
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++) elements[j] = load(keys + j * stride + t);
        add_element_products<0>(queries + t * PW, elements, sums);
        add_element_products<1>(queries + (t + 1) * PW, elements, sums);
        add_element_products<2>(queries + (t + 2) * PW, elements, sums);
        add_element_products<3>(queries + (t + 3) * PW, elements, sums);
    }
    for (; t < width; t++) {
        Floats elements[KEYS];
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++) elements[j] = broadcast(keys[j * stride + t]);
        add_element_products<0>(queries + t * PW, elements, sums);
    }
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(scores + j * PW + v * W, sums[j][v]);
}

#else

// scores[j][lane] = Σ_t keys[j][t] · queries[t][lane] for KEYS keys.
template <int KEYS, int VECTORS>
REGARD_INLINE void dot_block(const float* keys, int64_t stride, const float* queries, float* scores, int64_t width) {
    Floats sums[KEYS][VECTORS];
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[j][v] = Floats{};
#pragma GCC unroll 4
    for (int64_t t = 0; t < width; t++) {
        Floats query_elements[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) query_elements[v] = load(queries + t * PW + v * W);
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j++) {
            const Floats key_element = broadcast(keys[j * stride + t]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[j][v] += key_element * query_elements[v];
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; j++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(scores + j * PW + v * W, sums[j][v]);
}

#endif

// outputs[f][lane] += Σ_j values[j][f] · weights[j][lane] for FEATURES features.
template <int FEATURES, int VECTORS>
REGARD_INLINE void weighted_sum_block(const float* values, int64_t stride, const float* weights, float* outputs,
                                      int64_t count) {
    Floats sums[FEATURES][VECTORS];
#pragma GCC unroll 16
    for (int f = 0; f < FEATURES; f++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[f][v] = load(outputs + f * PW + v * W);
#pragma GCC unroll 4
    for (int64_t j = 0; j < count; j++) {
        Floats weights_of_key[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) weights_of_key[v] = load(weights + j * PW + v * W);
#pragma GCC unroll 16
        for (int f = 0; f < FEATURES; f++) {
            const Floats value = broadcast(values[j * stride + f]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[f][v] += value * weights_of_key[v];
        }
    }
#pragma GCC unroll 16
    for (int f = 0; f < FEATURES; f++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(outputs + f * PW + v * W, sums[f][v]);
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

// scores[j][lane] = Σ_t keys[j][t] · queries[t][lane] for `count` keys. The backward pass also calls it with values and
// the gradients of the outputs.
template <int VECTORS>
REGARD_INLINE void dot_products(const float* keys, int64_t stride, const float* queries, float* scores, int64_t count,
                                int64_t width) {
    for_blocks<VECTORS>(count, [&](auto rows, int64_t j) __attribute__((always_inline)) {
        dot_block<rows(), VECTORS>(keys + j * stride, stride, queries, scores + j * PW, width);
    });
}

// outputs[f][lane] += Σ_j values[j][f] · weights[j][lane] for `count` keys and `width` features. The backward pass also
// calls it with keys and the gradients of the scores.
template <int VECTORS>
REGARD_INLINE void weighted_sum(const float* values, int64_t stride, const float* weights, float* outputs,
                                int64_t count, int64_t width) {
    for_blocks<VECTORS>(width, [&](auto rows, int64_t f) __attribute__((always_inline)) {
        weighted_sum_block<rows(), VECTORS>(values + f, stride, weights, outputs + f * PW, count);
    });
}

// out[j][f] += Σ_lane weights[j][lane] · rows[lane][f] for `count` keys and `width` features.
REGARD_INLINE void add_outer_products(const float* weights, const float* rows, int64_t stride, int64_t lanes,
                                      float* out, int64_t out_stride, int64_t count, int64_t width) {
    int64_t f = 0;
    for (; f + PW <= width; f += PW)
        for_blocks<NR>(count, [&](auto keys, int64_t j) __attribute__((always_inline)) {
            outer_block<keys(), NR>(weights + j * PW, rows + f, stride, lanes, out + j * out_stride + f, out_stride);
        });
    const int64_t vectors_left = (width - f) / W;
    if (vectors_left) {
        with_vectors(static_cast<int>(vectors_left), [&](auto vectors) __attribute__((always_inline)) {
            for_blocks<vectors()>(count, [&](auto keys, int64_t j) __attribute__((always_inline)) {
                outer_block<keys(), vectors()>(weights + j * PW, rows + f, stride, lanes, out + j * out_stride + f,
                                               out_stride);
            });
        });
        f += vectors_left * W;
    }
    for (; f < width; f++)
        for (int64_t j = 0; j < count; j++) {
            float sum = out[j * out_stride + f];
            for (int64_t lane = 0; lane < lanes; lane++) sum += weights[j * PW + lane] * rows[lane * stride + f];
            out[j * out_stride + f] = sum;
        }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
