// The two products of forward for a few rows (decoding): lanes run along the width, and every key is read once, in its own
// dtype. Rows and sums lie in their own layout, [lanes, width]; scores and weights as in blocks.h, [keys, PW].
#pragma once

#include "convert.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// Rows of a tensor in its own dtype; `stride` in elements.
struct Rows {
    const char* data;
    int64_t stride;
    Dtype dtype;
    const float* floats() const { return reinterpret_cast<const float*>(data); }
    Rows from(int64_t row) const { return {data + row * stride * (dtype == Dtype::f32 ? 4 : 2), stride, dtype}; }
};

// `count` rows as float32, as `rows_of` gives them.
REGARD_INLINE Rows float_rows(const Tensor& x, Dtype dtype, int64_t b, int64_t h, int64_t first, int64_t count,
                              int64_t width, float* buffer) {
    int64_t stride;
    const float* rows = rows_of(x, dtype, b, h, first, count, width, buffer, stride);
    return {reinterpret_cast<const char*>(rows), stride, Dtype::f32};
}

// Elements t … t + W − 1 of a row as floats.
template <Dtype dtype>
REGARD_INLINE F load_as(const char* row, int64_t t) {
    if constexpr (dtype == Dtype::f32) return load(reinterpret_cast<const float*>(row) + t);
    const char* at = row + t * 2;
    // The compiler's own conversion takes three times as many instructions as these.
#if defined(__AVX512F__)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    if constexpr (dtype == Dtype::bf16) return reinterpret_cast<F>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    return _mm512_cvtph_ps(half);
#elif defined(__AVX2__)
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    if constexpr (dtype == Dtype::bf16) return reinterpret_cast<F>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    return _mm256_cvtph_ps(half);
#else
    F x{};
    for (int y = 0; y < W; y++) {
        const uint16_t half = reinterpret_cast<const uint16_t*>(at)[y];
        x[y] = dtype == Dtype::bf16 ? widen_bf16(half) : widen_f16(half);
    }
    return x;
#endif
}

template <Dtype dtype>
REGARD_INLINE float element(const char* row, int64_t t) {
    if constexpr (dtype == Dtype::f32) return reinterpret_cast<const float*>(row)[t];
    const uint16_t x = reinterpret_cast<const uint16_t*>(row)[t];
    return dtype == Dtype::bf16 ? widen_bf16(x) : widen_f16(x);
}

// scores[j][lane] = keys[j] · row for R keys `step` bytes apart.
template <Dtype dtype, int R>
REGARD_INLINE void thin_dot_block(const char* keys, int64_t step, const float* row, float* scores, int64_t width) {
    F sums[R];
    float rest[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sums[r] = F{}, rest[r] = 0;
    int64_t t = 0;
    for (; t + W <= width; t += W) {
        const F x = load(row + t);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] += x * load_as<dtype>(keys + r * step, t);
    }
    for (; t < width; t++)
        for (int r = 0; r < R; r++) rest[r] += row[t] * element<dtype>(keys + r * step, t);
    for (int r = 0; r < R; r++) scores[r * PW] = sum(sums[r]) + rest[r];
}

// Asks for a row's numbers before they are needed: between its two products a core does other things, and memory would wait.
REGARD_INLINE void prefetch(const char* row, int64_t bytes) {
    for (int64_t t = 0; t < bytes; t += 64) __builtin_prefetch(row + t);
}

constexpr int64_t AHEAD = 16;  // rows

template <Dtype dtype>
inline void thin_dot_as(const Rows& keys, const float* rows, int64_t lanes, float* scores, int64_t count,
                        int64_t width) {
    const int64_t size = dtype == Dtype::f32 ? 4 : 2, step = keys.stride * size;
    std::memset(scores, 0, sizeof(float) * count * PW);
    for (int64_t x = 0; x < lanes; x++) {
        int64_t j = 0;
        for (; j + 4 <= count; j += 4) {
            if (x == 0)
                for (int r = 0; r < 4; r++) prefetch(keys.data + (j + AHEAD + r) * step, width * size);
            thin_dot_block<dtype, 4>(keys.data + j * step, step, rows + x * width, scores + j * PW + x, width);
        }
        for (; j < count; j++)
            thin_dot_block<dtype, 1>(keys.data + j * step, step, rows + x * width, scores + j * PW + x, width);
    }
}

// sums[f] += Σ_j values[j][f] · weights[j] for R vectors of features.
template <Dtype dtype, int R>
REGARD_INLINE void thin_mix_block(const char* values, int64_t step, int64_t f, const float* weights, float* sums,
                                  int64_t count, int64_t ahead) {
    F sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r] = load(sums + f + r * W);
    for (int64_t j = 0; j < count; j++) {
        const F x = all(weights[j * PW]);
        if (ahead) prefetch(values + (j + AHEAD) * step, ahead);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sum[r] += x * load_as<dtype>(values + j * step, f + r * W);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(sums + f + r * W, sum[r]);
}

template <Dtype dtype>
inline void thin_mix_as(const Rows& values, const float* weights, int64_t lanes, float* sums, int64_t count,
                        int64_t width) {
    const int64_t size = dtype == Dtype::f32 ? 4 : 2, step = values.stride * size;
    for (int64_t x = 0; x < lanes; x++) {
        float* to = sums + x * width;
        int64_t f = 0;
        for (; f + 8 * W <= width; f += 8 * W)
            thin_mix_block<dtype, 8>(values.data, step, f, weights + x, to, count,
                                     x == 0 && f == 0 ? width * size : 0);
        for (; f + W <= width; f += W) thin_mix_block<dtype, 1>(values.data, step, f, weights + x, to, count, 0);
        for (; f < width; f++)
            for (int64_t j = 0; j < count; j++)
                to[f] += weights[j * PW + x] * element<dtype>(values.data + j * step, f);
    }
}

inline void thin_dot(const Rows& keys, const float* rows, int64_t lanes, float* scores, int64_t count, int64_t width) {
    auto* call = keys.dtype == Dtype::f32    ? thin_dot_as<Dtype::f32>
                 : keys.dtype == Dtype::bf16 ? thin_dot_as<Dtype::bf16>
                                             : thin_dot_as<Dtype::f16>;
    call(keys, rows, lanes, scores, count, width);
}

inline void thin_mix(const Rows& values, const float* weights, int64_t lanes, float* sums, int64_t count,
                     int64_t width) {
    auto* call = values.dtype == Dtype::f32    ? thin_mix_as<Dtype::f32>
                 : values.dtype == Dtype::bf16 ? thin_mix_as<Dtype::bf16>
                                               : thin_mix_as<Dtype::f16>;
    call(values, weights, lanes, sums, count, width);
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
