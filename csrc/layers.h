// What stands around attention when a model writes token by token: x Wᵀ + b for a few rows, and norms. Both are bound by
// memory, so weights are read once, in their own dtype, in the order in which they lie.
#pragma once

#include <vector>

#include "thin.h"
#include "threads.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// w · x in four sums along the width; memory is asked for 4 KB ahead, which is mostly the next rows.
template <Dtype dtype>
REGARD_INLINE float long_dot(const char* w, const float* x, int64_t width) {
    F sums[4] = {};
    int64_t t = 0;
    for (; t + 4 * W <= width; t += 4 * W) {
        __builtin_prefetch(w + (t * (dtype == Dtype::f32 ? 4 : 2)) + 4096, 0, 0);
        if constexpr (W * 4 * (dtype == Dtype::f32 ? 4 : 2) > 64)
            __builtin_prefetch(w + (t * (dtype == Dtype::f32 ? 4 : 2)) + 4096 + 64, 0, 0);
#pragma GCC unroll 4
        for (int y = 0; y < 4; y++) sums[y] += load(x + t + y * W) * load_as<dtype>(w, t + y * W);
    }
    for (; t + W <= width; t += W) sums[0] += load(x + t) * load_as<dtype>(w, t);
    float rest = 0;
    for (; t < width; t++) rest += x[t] * element<dtype>(w, t);
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

template <Dtype dtype>
inline void linear_as(const Linear& c, const float* x) {
    const int64_t size = dtype == Dtype::f32 ? 4 : 2;
    // About 128 KB of weights a task: many enough to share, long enough to stream.
    const int64_t outputs = std::max<int64_t>(1, (128 << 10) / std::max<int64_t>(1, c.in * size));
    struct Task {
        const Linear::Part* part;
        int64_t first, end, column;
    };
    std::vector<Task> tasks;
    int64_t total = 0;
    for (const auto& part : c.parts) {
        for (int64_t o = 0; o < part.out; o += outputs)
            tasks.push_back({&part, o, std::min(part.out, o + outputs), total});
        total += part.out;
    }
    run_tasks<int>(tasks.size(), c.threads, [] { return 0; }, [&](int64_t t, int&) {
        const Task& task = tasks[t];
        for (int64_t o = task.first; o < task.end; o++) {
            const char* row = static_cast<const char*>(task.part->w) + o * task.part->w_stride * size;
            const auto* bias = static_cast<const char*>(task.part->bias);
            for (int64_t i = 0; i < c.rows; i++) {
                float found = long_dot<dtype>(row, x + i * c.in, c.in);
                if (bias) found += element<dtype>(bias, o);
                narrow(&found, static_cast<char*>(c.y) + (i * total + task.column + o) * size, dtype, 1);
            }
        }
    });
}

inline void linear(const Linear& c) {
    std::vector<float> wide(c.rows * c.in);
    for (int64_t i = 0; i < c.rows; i++)
        widen(static_cast<const char*>(c.x) + i * c.x_stride * (c.dtype == Dtype::f32 ? 4 : 2), c.dtype,
              wide.data() + i * c.in, c.in);
    auto* call = c.dtype == Dtype::f32    ? linear_as<Dtype::f32>
                 : c.dtype == Dtype::bf16 ? linear_as<Dtype::bf16>
                                          : linear_as<Dtype::f16>;
    call(c, wide.data());
}

REGARD_INLINE float sum_of(const float* x, int64_t width) {
    F sums[2] = {};
    int64_t t = 0;
    for (; t + 2 * W <= width; t += 2 * W) sums[0] += load(x + t), sums[1] += load(x + t + W);
    float rest = 0;
    for (; t < width; t++) rest += x[t];
    return sum(sums[0] + sums[1]) + rest;
}

REGARD_INLINE void add_to_all(float* x, float y, int64_t width) {
    int64_t t = 0;
    for (; t + W <= width; t += W) store(x + t, load(x + t) + y);
    for (; t < width; t++) x[t] += y;
}

// (x − μ)/√(σ² + ε)·γ + β, or x/√(mean(x²) + ε)·γ.
inline void norm(const Norm& c) {
    const int64_t size = c.dtype == Dtype::f32 ? 4 : 2;
    std::vector<float> weight(c.width), bias(c.bias ? c.width : 0);
    widen(c.weight, c.dtype, weight.data(), c.width);
    if (c.bias) widen(c.bias, c.dtype, bias.data(), c.width);
    const int64_t rows = std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(1, c.width));
    run_tasks<std::vector<float>>(
        (c.rows + rows - 1) / rows, c.threads, [&] { return std::vector<float>(c.width); },
        [&](int64_t task, std::vector<float>& room) {
            float* x = room.data();
            for (int64_t i = task * rows; i < std::min(c.rows, (task + 1) * rows); i++) {
                widen(static_cast<const char*>(c.x) + i * c.x_stride * size, c.dtype, x, c.width);
                if (c.centred)  // twice: the mean itself is rounded, and of a constant vector nothing may be left
                    for (int again = 0; again < 2; again++) add_to_all(x, -sum_of(x, c.width) / c.width, c.width);
                const float mean = dot_product(x, x, c.width) / c.width;
                const float by = static_cast<float>(1 / std::sqrt(static_cast<double>(mean) + c.eps));
                int64_t t = 0;
                for (; t + W <= c.width; t += W) store(x + t, load(x + t) * by * load(weight.data() + t));
                for (; t < c.width; t++) x[t] = x[t] * by * weight[t];
                if (c.bias)
                    for (t = 0; t < c.width; t++) x[t] += bias[t];
                narrow(x, static_cast<char*>(c.y) + i * c.width * size, c.dtype, c.width);
            }
        });
}

// y[f] = x[f]·cos[f] + x[partner of f]·sin[f], row by row: the partner is half the width away, or the neighbour.
inline void turn(const Turn& c) {
    const int64_t size = c.dtype == Dtype::f32 ? 4 : 2, half = c.width / 2;
    std::vector<float> x(c.width), y(c.width);
    for (int64_t b = 0; b < c.B; b++)
        for (int64_t h = 0; h < c.H; h++)
            for (int64_t i = 0; i < c.n; i++) {
                const auto* from = static_cast<const char*>(c.x.data) + (b * c.x.b + h * c.x.h + i * c.x.i) * size;
                auto* to = static_cast<char*>(c.y) + ((b * c.H + h) * c.n + i) * c.d * size;
                const float* cos = c.cos + b * c.wave_b + i * c.width;
                const float* sin = c.sin + b * c.wave_b + i * c.width;
                widen(from, c.dtype, x.data(), c.width);
                if (c.halves) {
                    for (int64_t f = 0; f < half; f++) y[f] = x[f] * cos[f] + x[f + half] * sin[f];
                    for (int64_t f = half; f < c.width; f++) y[f] = x[f] * cos[f] + x[f - half] * sin[f];
                } else {
                    for (int64_t f = 0; f < c.width; f++) y[f] = x[f] * cos[f] + x[f ^ 1] * sin[f];
                }
                narrow(y.data(), to, c.dtype, c.width);
                std::memcpy(to + c.width * size, from + c.width * size, (c.d - c.width) * size);
            }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
