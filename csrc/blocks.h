// The three matrix products of attention as register blocks. Queries lie in lanes, so keys and values are read by
// broadcast in their own layout: nothing of K and V is packed.
#pragma once

#include "simd.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// out[r][lane] = Σ_t rows[r][t] · panel[t][lane] for R rows: scores from keys and queries.
template <int R>
REGARD_INLINE void dot_block(const float* rows, int64_t stride, const float* panel, float* out, int64_t width) {
    F sum[R][NR];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < NR; c++) sum[r][c] = F{};
#pragma GCC unroll 4
    for (int64_t t = 0; t < width; t++) {
        F x[NR];
#pragma GCC unroll 4
        for (int c = 0; c < NR; c++) x[c] = load(panel + t * PW + c * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const F y = all(rows[r * stride + t]);
#pragma GCC unroll 4
            for (int c = 0; c < NR; c++) sum[r][c] += y * x[c];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < NR; c++) store(out + r * PW + c * W, sum[r][c]);
}

// sum[f][lane] += Σ_j rows[j][f] · weights[j][lane] for R features: outputs from values and weights.
template <int R>
REGARD_INLINE void mix_block(const float* rows, int64_t stride, const float* weights, float* sums, int64_t count) {
    F sum[R][NR];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < NR; c++) sum[r][c] = load(sums + r * PW + c * W);
#pragma GCC unroll 4
    for (int64_t j = 0; j < count; j++) {
        F x[NR];
#pragma GCC unroll 4
        for (int c = 0; c < NR; c++) x[c] = load(weights + j * PW + c * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const F y = all(rows[j * stride + r]);
#pragma GCC unroll 4
            for (int c = 0; c < NR; c++) sum[r][c] += y * x[c];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < NR; c++) store(sums + r * PW + c * W, sum[r][c]);
}

// out[r][f] += Σ_lane weights[r][lane] · rows[lane][f] for R keys and C vectors of features: gradients of keys and values.
template <int R, int C>
REGARD_INLINE void gather_block(const float* weights, const float* rows, int64_t stride, int64_t lanes, float* out,
                                int64_t out_stride) {
    F sum[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[r][c] = load(out + r * out_stride + c * W);
#pragma GCC unroll 4
    for (int64_t i = 0; i < lanes; i++) {
        F x[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) x[c] = load(rows + i * stride + c * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const F y = all(weights[r * PW + i]);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sum[r][c] += y * x[c];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(out + r * out_stride + c * W, sum[r][c]);
}

#define REGARD_REST(left, call)   \
    switch (left) {               \
        case 5: call(5); break;   \
        case 4: call(4); break;   \
        case 3: call(3); break;   \
        case 2: call(2); break;   \
        case 1: call(1); break;   \
        default: break;           \
    }

// scores[j][lane] = keys[j] · queries[lane], for `count` keys.
REGARD_INLINE void dot(const float* keys, int64_t stride, const float* panel, float* scores, int64_t count,
                       int64_t width) {
    int64_t j = 0;
    for (; j + MR <= count; j += MR) dot_block<MR>(keys + j * stride, stride, panel, scores + j * PW, width);
#define REGARD_CALL(r) dot_block<r>(keys + j * stride, stride, panel, scores + j * PW, width)
    REGARD_REST(count - j, REGARD_CALL)
#undef REGARD_CALL
}

// sums[f][lane] += Σ_j values[j][f] · weights[j][lane], for `width` features.
REGARD_INLINE void mix(const float* values, int64_t stride, const float* weights, float* sums, int64_t count,
                       int64_t width) {
    int64_t f = 0;
    for (; f + MR <= width; f += MR) mix_block<MR>(values + f, stride, weights, sums + f * PW, count);
#define REGARD_CALL(r) mix_block<r>(values + f, stride, weights, sums + f * PW, count)
    REGARD_REST(width - f, REGARD_CALL)
#undef REGARD_CALL
}

// out[j][f] += Σ_lane weights[j][lane] · rows[lane][f], for `count` keys and `width` features.
REGARD_INLINE void gather(const float* weights, const float* rows, int64_t stride, int64_t lanes, float* out,
                          int64_t out_stride, int64_t count, int64_t width) {
    int64_t f = 0;
    for (; f + PW <= width; f += PW) {
        int64_t j = 0;
        for (; j + MR <= count; j += MR)
            gather_block<MR, NR>(weights + j * PW, rows + f, stride, lanes, out + j * out_stride + f, out_stride);
#define REGARD_CALL(r) \
    gather_block<r, NR>(weights + j * PW, rows + f, stride, lanes, out + j * out_stride + f, out_stride)
        REGARD_REST(count - j, REGARD_CALL)
#undef REGARD_CALL
    }
    for (; f + W <= width; f += W)
        for (int64_t j = 0; j < count; j++)
            gather_block<1, 1>(weights + j * PW, rows + f, stride, lanes, out + j * out_stride + f, out_stride);
    for (; f < width; f++)
        for (int64_t j = 0; j < count; j++) {
            float sum = out[j * out_stride + f];
            for (int64_t i = 0; i < lanes; i++) sum += weights[j * PW + i] * rows[i * stride + f];
            out[j * out_stride + f] = sum;
        }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
