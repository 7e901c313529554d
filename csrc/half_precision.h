// Conversion between float32 and half precision, and reading rows of any dtype as float32: kernels compute in float32.
#pragma once

#include "attention_call.h"
#include "simd.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

REGARD_INLINE float float_from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

REGARD_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

REGARD_INLINE float bf16_to_float(uint16_t x) { return float_from_bits(uint32_t{x} << 16); }

// Rounds to nearest, ties to even. A NaN stays a NaN.
REGARD_INLINE uint16_t float_to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

REGARD_INLINE float f16_to_float(uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    const uint32_t sign = uint32_t{x & 0x8000u} << 16;
    const uint32_t body = x & 0x7fffu;
    if (body >= 0x7c00) return float_from_bits(sign | 0x7f800000u | ((body & 0x3ffu) << 13));
    // The exponent bias is 15 in a half and 127 in a float: multiplying by 2^112 corrects it, also for subnormals.
    return float_from_bits(sign | bits_of(float_from_bits(body << 13) * float_from_bits(0x77800000u)));
#endif
}

REGARD_INLINE uint16_t float_to_f16(float x) {
#if defined(__F16C__)
    return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
    const uint32_t bits = bits_of(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t body = bits & 0x7fffffffu;
    if (body > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (body >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (body < 0x38800000u) {  // subnormal as float16: adding 0.5f rounds; the low bits are then the result
        const float shifted = float_from_bits(body) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)));
    }
    const uint32_t rounded = body - 0x38000000u + 0xfffu + ((body >> 13) & 1u);
    return static_cast<uint16_t>(sign | (rounded >> 13));
#endif
}

inline void to_float32(const void* from, Dtype dtype, float* to, int64_t count) {
    const auto* half = static_cast<const uint16_t*>(from);
    if (dtype == Dtype::float32) {
        std::memcpy(to, from, count * 4);
    } else if (dtype == Dtype::bfloat16) {
        for (int64_t t = 0; t < count; t++) to[t] = bf16_to_float(half[t]);
    } else {
        int64_t t = 0;
#if defined(__F16C__)
        for (; t + 8 <= count; t += 8)
            _mm256_storeu_ps(to + t, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + t))));
#endif
        for (; t < count; t++) to[t] = f16_to_float(half[t]);
    }
}

inline void from_float32(const float* from, void* to, Dtype dtype, int64_t count) {
    auto* half = static_cast<uint16_t*>(to);
    if (dtype == Dtype::float32) {
        std::memcpy(to, from, count * 4);
    } else if (dtype == Dtype::bfloat16) {
        for (int64_t t = 0; t < count; t++) half[t] = float_to_bf16(from[t]);
    } else {
        for (int64_t t = 0; t < count; t++) half[t] = float_to_f16(from[t]);
    }
}

// W consecutive elements of a row as floats. The compiler's own conversion takes three times as many instructions.
template <Dtype dtype>
REGARD_INLINE Floats load_as_float32(const char* row, int64_t t) {
    if constexpr (dtype == Dtype::float32) return load(reinterpret_cast<const float*>(row) + t);
    const char* from = row + t * 2;
#if defined(REGARD_USE_AVX512)
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if constexpr (dtype == Dtype::bfloat16)
        return reinterpret_cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    return _mm512_cvtph_ps(half);
#elif defined(REGARD_USE_AVX2)
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    if constexpr (dtype == Dtype::bfloat16)
        return reinterpret_cast<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    return _mm256_cvtph_ps(half);
#else
    Floats x{};
    for (int lane = 0; lane < W; lane++) {
        const uint16_t half = reinterpret_cast<const uint16_t*>(from)[lane];
        x[lane] = dtype == Dtype::bfloat16 ? bf16_to_float(half) : f16_to_float(half);
    }
    return x;
#endif
}

template <Dtype dtype>
REGARD_INLINE float element_as_float32(const char* row, int64_t t) {
    if constexpr (dtype == Dtype::float32) return reinterpret_cast<const float*>(row)[t];
    const uint16_t half = reinterpret_cast<const uint16_t*>(row)[t];
    return dtype == Dtype::bfloat16 ? bf16_to_float(half) : f16_to_float(half);
}

// Rows of one head in memory, with their dtype; `stride` in elements.
struct Rows {
    const char* data;
    int64_t stride;
    Dtype dtype;

    const float* floats() const { return reinterpret_cast<const float*>(data); }
    const uint16_t* halves() const { return reinterpret_cast<const uint16_t*>(data); }
    int64_t row_bytes() const { return stride * bytes_per_element(dtype); }
    Rows from(int64_t row) const { return {data + row * row_bytes(), stride, dtype}; }
};

REGARD_INLINE const char* address_of_row(const TensorView& x, Dtype dtype, int64_t b, int64_t h, int64_t row) {
    const int64_t element = b * x.batch_stride + h * x.head_stride + row * x.row_stride;
    return static_cast<const char*>(x.data) + element * bytes_per_element(dtype);
}

// Rows of x in their own dtype, from `first` on.
REGARD_INLINE Rows rows_of(const TensorView& x, Dtype dtype, int64_t b, int64_t h, int64_t first) {
    return {address_of_row(x, dtype, b, h, first), x.row_stride, dtype};
}

// `count` rows of `width` elements as float32: x itself if it is float32, else a copy in `buffer`.
REGARD_INLINE Rows float_rows_of(const TensorView& x, Dtype dtype, int64_t b, int64_t h, int64_t first, int64_t count,
                                 int64_t width, float* buffer) {
    if (dtype == Dtype::float32) return rows_of(x, dtype, b, h, first);
    for (int64_t r = 0; r < count; r++)
        to_float32(address_of_row(x, dtype, b, h, first + r), dtype, buffer + r * width, width);
    return {reinterpret_cast<const char*>(buffer), width, Dtype::float32};
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
