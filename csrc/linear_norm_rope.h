// The layers around attention when a model decodes token by token: x Wᵀ + b for a few rows, norms, and RoPE. The
// matrices are far larger than x, so memory bandwidth decides: they are read once, in their own dtype, in memory order.
#pragma once

#include "array.h"
#include "decode_call.h"
#include "few_rows.h"
#include "threads.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// w · x, in four sums along the width. Memory is requested 4 KB ahead, mostly from the next rows of the matrix.
template <Dtype dtype>
REGARD_INLINE float weight_row_dot(const char* w, const float* x, int64_t width) {
    constexpr int64_t bytes = bytes_per_element(dtype);
    Floats sums[4] = {};
    int64_t t = 0;
    for (; t + 4 * W <= width; t += 4 * W) {
        __builtin_prefetch(w + t * bytes + 4096, 0, 0);
        if constexpr (W * 4 * bytes > 64) __builtin_prefetch(w + t * bytes + 4096 + 64, 0, 0);
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) sums[s] += load(x + t + s * W) * load_as_float32<dtype>(w, t + s * W);
    }
    for (; t + W <= width; t += W) sums[0] += load(x + t) * load_as_float32<dtype>(w, t);
    float rest = 0;
    for (; t < width; t++) rest += x[t] * element_as_float32<dtype>(w, t);
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

template <Dtype dtype>
inline void linear_as(const LinearCall& call, const float* x) {
    constexpr int64_t bytes = bytes_per_element(dtype);
    // About 128 KB of weights per task: enough tasks for several threads, and long sequential reads in each.
    const int64_t outputs_per_task =
        std::max<int64_t>(1, (128 << 10) / std::max<int64_t>(1, call.inputs * bytes));
    int64_t columns = 0;
    int64_t tasks = 0;
    for (int64_t k = 0; k < call.matrix_count; k++) {
        columns += call.matrices[k].outputs;
        tasks += (call.matrices[k].outputs + outputs_per_task - 1) / outputs_per_task;
    }
    const int threads = limit_threads(call.threads, (call.rows + READ_COST) * call.inputs * columns);
    run_tasks<int>(tasks, threads, [] { return 0; }, [&](int64_t task, int&) {
        // The tasks of all matrices are numbered in one sequence: find the matrix of this one.
        const LinearWeights* matrix = call.matrices;
        int64_t first = task * outputs_per_task;
        int64_t column = 0;  // the column of y at which the outputs of the matrix start
        while (first >= matrix->outputs) {
            first -= (matrix->outputs + outputs_per_task - 1) / outputs_per_task * outputs_per_task;
            column += matrix->outputs;
            matrix++;
        }
        const int64_t end = std::min(matrix->outputs, first + outputs_per_task);
        const auto* bias = static_cast<const char*>(matrix->bias);
        for (int64_t o = first; o < end; o++) {
            const char* row = static_cast<const char*>(matrix->weight) + o * matrix->weight_stride * bytes;
            for (int64_t i = 0; i < call.rows; i++) {
                float y = weight_row_dot<dtype>(row, x + i * call.inputs, call.inputs);
                if (bias) y += element_as_float32<dtype>(bias, o);
                from_float32(&y, static_cast<char*>(call.y) + (i * columns + column + o) * bytes, dtype, 1);
            }
        }
    });
}

inline void linear(const LinearCall& call) {
    Array<float> x(call.rows * call.inputs);
    for (int64_t i = 0; i < call.rows; i++) {
        const char* row = static_cast<const char*>(call.x) + i * call.x_stride * bytes_per_element(call.dtype);
        to_float32(row, call.dtype, x.data() + i * call.inputs, call.inputs);
    }
    switch (call.dtype) {
        case Dtype::float32: return linear_as<Dtype::float32>(call, x.data());
        case Dtype::bfloat16: return linear_as<Dtype::bfloat16>(call, x.data());
        case Dtype::float16: return linear_as<Dtype::float16>(call, x.data());
    }
}

REGARD_INLINE float sum_of_elements(const float* x, int64_t width) {
    Floats sums[2] = {};
    int64_t t = 0;
    for (; t + 2 * W <= width; t += 2 * W) {
        sums[0] += load(x + t);
        sums[1] += load(x + t + W);
    }
    float rest = 0;
    for (; t < width; t++) rest += x[t];
    return sum(sums[0] + sums[1]) + rest;
}

REGARD_INLINE void add_to_elements(float* x, float y, int64_t width) {
    int64_t t = 0;
    for (; t + W <= width; t += W) store(x + t, load(x + t) + y);
    for (; t < width; t++) x[t] += y;
}

// Normalizes one row in place.
inline void norm_row(const NormCall& call, const float* weight, const float* bias, float* x) {
    // The mean is subtracted twice: the computed mean is rounded, and a constant row must become exactly 0.
    if (call.norm.kind == NormKind::layer)
        for (int pass = 0; pass < 2; pass++)
            add_to_elements(x, -sum_of_elements(x, call.width) / call.width, call.width);
    const float mean_square = dot_product(x, x, call.width) / call.width;
    const float factor = static_cast<float>(1 / std::sqrt(static_cast<double>(mean_square) + call.norm.eps));
    int64_t t = 0;
    for (; t + W <= call.width; t += W) store(x + t, load(x + t) * factor * load(weight + t));
    for (; t < call.width; t++) x[t] = x[t] * factor * weight[t];
    if (bias)
        for (t = 0; t < call.width; t++) x[t] += bias[t];
}

inline void norm(const NormCall& call) {
    const int64_t bytes = bytes_per_element(call.dtype);
    Array<float> weight(call.width);
    Array<float> bias(call.norm.bias ? call.width : 0);
    to_float32(call.norm.weight, call.dtype, weight.data(), call.width);
    if (call.norm.bias) to_float32(call.norm.bias, call.dtype, bias.data(), call.width);
    const int threads = limit_threads(call.threads, 2 * READ_COST * call.rows * call.width);  // read and written
    const int64_t rows_per_task = std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(1, call.width));
    run_tasks<Array<float>>(
        (call.rows + rows_per_task - 1) / rows_per_task, threads, [&] { return Array<float>(call.width); },
        [&](int64_t task, Array<float>& buffer) {
            float* x = buffer.data();
            const int64_t end = std::min(call.rows, (task + 1) * rows_per_task);
            for (int64_t i = task * rows_per_task; i < end; i++) {
                to_float32(static_cast<const char*>(call.x) + i * call.x_stride * bytes, call.dtype, x, call.width);
                norm_row(call, weight.data(), call.norm.bias ? bias.data() : nullptr, x);
                from_float32(x, static_cast<char*>(call.y) + i * call.width * bytes, call.dtype, call.width);
            }
        });
}

// Rotary position embedding: y[f] = x[f]·cos[f] + x[partner of f]·sin[f]. Features beyond `width` are copied.
inline void rope(const RopeCall& call) {
    const int64_t bytes = bytes_per_element(call.dtype);
    const int64_t half = call.width / 2;
    Array<float> x(call.width);
    Array<float> y(call.width);
    for (int64_t b = 0; b < call.B; b++)
        for (int64_t h = 0; h < call.H; h++)
            for (int64_t i = 0; i < call.N; i++) {
                const char* from = address_of_row(call.x, call.dtype, b, h, i);
                char* to = static_cast<char*>(call.y) + ((b * call.H + h) * call.N + i) * call.D * bytes;
                const float* cos = call.cos + b * call.angles_batch_stride + i * call.width;
                const float* sin = call.sin + b * call.angles_batch_stride + i * call.width;
                to_float32(from, call.dtype, x.data(), call.width);
                if (call.layout == RopeLayout::halves) {
                    for (int64_t f = 0; f < half; f++) y[f] = x[f] * cos[f] + x[f + half] * sin[f];
                    for (int64_t f = half; f < call.width; f++) y[f] = x[f] * cos[f] + x[f - half] * sin[f];
                } else {
                    for (int64_t f = 0; f < call.width; f++) y[f] = x[f] * cos[f] + x[f ^ 1] * sin[f];
                }
                from_float32(y.data(), to, call.dtype, call.width);
                std::memcpy(to + call.width * bytes, from + call.width * bytes, (call.D - call.width) * bytes);
            }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
