// Half precision in and out: kernels compute in float32, tiles are converted on the way.
#pragma once

#include "call.h"
#include "simd.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

REGARD_INLINE float from_bits(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

REGARD_INLINE uint32_t to_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

REGARD_INLINE float widen_bf16(uint16_t x) { return from_bits(uint32_t{x} << 16); }

// To nearest, ties to even; a NaN stays one.
REGARD_INLINE uint16_t narrow_bf16(float x) {
    const uint32_t u = to_bits(x);
    if (x != x) return static_cast<uint16_t>((u >> 16) | 0x40);
    return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

REGARD_INLINE float widen_f16(uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    const uint32_t sign = uint32_t{x & 0x8000u} << 16, body = x & 0x7fffu;
    if (body >= 0x7c00) return from_bits(sign | 0x7f800000u | ((body & 0x3ffu) << 13));
    // Exponent 15 of half is 127 of float; multiplying by 2^112 moves it, subnormal numbers included.
    return from_bits(sign | to_bits(from_bits(body << 13) * from_bits(0x77800000u)));
#endif
}

REGARD_INLINE uint16_t narrow_f16(float x) {
#if defined(__F16C__)
    return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
    const uint32_t u = to_bits(x), sign = (u >> 16) & 0x8000u, body = u & 0x7fffffffu;
    if (body > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (body >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (body < 0x38800000u) {  // subnormal: adding 1/2 leaves the rounded half in the low bits
        const float shifted = from_bits(body) + 0.5f;
        return static_cast<uint16_t>(sign | (to_bits(shifted) - to_bits(0.5f)));
    }
    const uint32_t rounded = body - 0x38000000u + 0xfffu + ((body >> 13) & 1u);
    return static_cast<uint16_t>(sign | (rounded >> 13));
#endif
}

REGARD_INLINE const char* at(const Tensor& x, Dtype dtype, int64_t b, int64_t h, int64_t i) {
    return static_cast<const char*>(x.data) + (b * x.b + h * x.h + i * x.i) * (dtype == Dtype::f32 ? 4 : 2);
}

inline void widen(const void* from, Dtype dtype, float* to, int64_t count) {
    const auto* half = static_cast<const uint16_t*>(from);
    if (dtype == Dtype::f32) {
        std::memcpy(to, from, count * 4);
    } else if (dtype == Dtype::bf16) {
        for (int64_t t = 0; t < count; t++) to[t] = widen_bf16(half[t]);
    } else {
        int64_t t = 0;
#if defined(__F16C__)
        for (; t + 8 <= count; t += 8)
            _mm256_storeu_ps(to + t, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + t))));
#endif
        for (; t < count; t++) to[t] = widen_f16(half[t]);
    }
}

inline void narrow(const float* from, void* to, Dtype dtype, int64_t count) {
    auto* half = static_cast<uint16_t*>(to);
    if (dtype == Dtype::f32) {
        std::memcpy(to, from, count * 4);
    } else if (dtype == Dtype::bf16) {
        for (int64_t t = 0; t < count; t++) half[t] = narrow_bf16(from[t]);
    } else {
        for (int64_t t = 0; t < count; t++) half[t] = narrow_f16(from[t]);
    }
}

// `count` rows of `width` numbers as float32: the tensor itself where it is float32, else a copy in `buffer`.
REGARD_INLINE const float* rows_of(const Tensor& x, Dtype dtype, int64_t b, int64_t h, int64_t first, int64_t count,
                                   int64_t width, float* buffer, int64_t& stride) {
    if (dtype == Dtype::f32) {
        stride = x.i;
        return reinterpret_cast<const float*>(at(x, dtype, b, h, first));
    }
    for (int64_t r = 0; r < count; r++) widen(at(x, dtype, b, h, first + r), dtype, buffer + r * width, width);
    stride = width;
    return buffer;
}

// Rows [count, width] → panel [width, PW], times `factor`; lanes beyond `count` are 0.
template <bool whole>
REGARD_INLINE void pack_panel(const float* rows, int64_t stride, int64_t count, int64_t width, float factor,
                              float* panel) {
    const F by = all(factor);
    for (int c = 0; c < PW; c += W) {
        int64_t t = 0;
        for (; t + W <= width; t += W) {
            F r[W];
#pragma GCC unroll 16
            for (int x = 0; x < W; x++) r[x] = whole || c + x < count ? load(rows + (c + x) * stride + t) * by : F{};
            transpose(r);
#pragma GCC unroll 16
            for (int x = 0; x < W; x++) store(panel + (t + x) * PW + c, r[x]);
        }
        for (; t < width; t++)
            for (int x = 0; x < W; x++)
                panel[t * PW + c + x] = c + x < count ? rows[(c + x) * stride + t] * factor : 0.0f;
    }
}

REGARD_INLINE void to_panel(const float* rows, int64_t stride, int64_t count, int64_t width, float factor,
                            float* panel) {
    if (count == PW)
        pack_panel<true>(rows, stride, count, width, factor, panel);
    else
        pack_panel<false>(rows, stride, count, width, factor, panel);
}

// Panel [width, PW] → rows [count, width], each lane times its factor, added to what is there if `add`.
template <bool add>
REGARD_INLINE void from_panel(const float* panel, const float* factor, int64_t count, int64_t width, float* rows,
                              int64_t stride) {
    for (int c = 0; c < PW && c < count; c += W) {
        const F by = load(factor + c);
        int64_t t = 0;
        for (; t + W <= width; t += W) {
            F r[W];
#pragma GCC unroll 16
            for (int x = 0; x < W; x++) r[x] = load(panel + (t + x) * PW + c) * by;
            transpose(r);
#pragma GCC unroll 16
            for (int x = 0; x < W; x++)
                if (c + x < count) {
                    float* to = rows + (c + x) * stride + t;
                    store(to, add ? load(to) + r[x] : r[x]);
                }
        }
        for (; t < width; t++)
            for (int x = 0; x < W && c + x < count; x++) {
                float& to = rows[(c + x) * stride + t];
                to = panel[t * PW + c + x] * factor[c + x] + (add ? to : 0.0f);
            }
    }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
