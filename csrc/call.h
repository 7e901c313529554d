// One call as the kernels see it: pointers, strides in elements, numbers. No Python, no torch.
#pragma once

#include <cstdint>
#include <vector>

namespace regard {

enum class Dtype { f32, bf16, f16 };

// A tensor [B, H, rows, width]. A broadcast dimension has stride 0; the last dimension is contiguous in q, k, v, out
// and the gradients, and may be broadcast (stride 0) in mask and bias.
struct Tensor {
    void* data = nullptr;
    int64_t b = 0, h = 0, i = 0, j = 1;
    explicit operator bool() const { return data != nullptr; }
};

// One relative term (scores.py): bias += table[b, h, i, clamp(key_at[j] - query_at[i] - first, 0, columns - 1)].
struct Term {
    Tensor table;  // float32; i is 0 where rows share
    int64_t columns = 0, first = 0;
    const int64_t* query_at = nullptr;
    const int64_t* key_at = nullptr;
    // Coordinates i + offset and j: every lane reads its neighbour's column, and all such terms become one vector.
    bool line = false;
    int64_t offset = 0;
};

struct Call {
    int64_t B = 0, H = 0, G = 0, n = 0, m = 0, d = 0, e = 0;
    Dtype dtype = Dtype::f32;
    Tensor q, k, v, out;
    // Each row's largest logit and Σ e^(s − high), [B, H, n]: −inf and 0 in a row that sees nothing. Forward leaves
    // them out where they are null.
    double *high = nullptr, *total = nullptr;
    const int64_t* lo = nullptr;
    const int64_t* hi = nullptr;
    int64_t lo_b = 0, hi_b = 0;  // stride over the batch; rows are contiguous
    Tensor mask;                 // uint8
    Tensor bias;                 // float32
    std::vector<Term> terms;
    const float* sinks = nullptr;  // [H]
    double scale = 1, softcap = 0, dropout = 0;
    int64_t seed = 0;
    int threads = 1;
    // Hard attention (scale = inf): the largest visible product of each row, [B, H, n]; filled by a pass of its own.
    float* best = nullptr;
    const struct Watch* watch = nullptr;
};

// What to measure on the way (observables.py); row values are [B, H, n].
struct Watch {
    float *entropy = nullptr, *peak = nullptr, *offset = nullptr, *distance = nullptr, *sink = nullptr,
          *local = nullptr;
    int64_t *peak_at = nullptr, *visible = nullptr;
    int64_t shift = 0, sinks = 0, radius = 0;  // query i stands at i + shift; j < sinks; |δ| ≤ radius
    int64_t bins = 0;                          // g of the map, 0 for none
    int64_t* map = nullptr;                    // [H, g, g]: sums over the rows that count, in units of 2^−32
    const uint8_t* real = nullptr;             // rows that are no padding, by batch entry; null: all
    int64_t real_b = 0;
};

// What a second pass measures, from highs and totals: what cannot be summed while the maximum still rises.
struct Look {
    const uint8_t* counted = nullptr;  // [B, H, n]: the rows that count per head
    int64_t* key_mass = nullptr;       // [H, m], in units of 2^−32
    int64_t *profile = nullptr, *profile_rows = nullptr;  // [H, 2·radius + 1]: weights in units of 2^−32, and rows
    int64_t radius = 0, shift = 0;     // query i stands at i + shift
    int64_t top = 0;                   // how many of a row's largest weights
    float* top_weights = nullptr;      // [B, H, n, top]
    int64_t* top_at = nullptr;
    int64_t bins = 0;                  // of keys: edges[t] ≤ j < edges[t + 1] is bin t; alone, and no other keys are read
    const int64_t* edges = nullptr;
    float* masses = nullptr;           // [B, H, n, bins]: each row's weight on each bin
};

// What backward adds to a call: gradients in float32 that start at 0.
struct Gradients {
    Tensor grad;               // of out, in the call's dtype
    float *q, *k, *v;          // [B, H, n, d], [B, G, m, d], [B, G, m, e], contiguous
    float* delta;              // [B, H, n]: out · grad, filled by backward
    float* line = nullptr;     // [B, H, n + m]: of the terms on a line together, by i - j + m
    Tensor bias;               // float32, strides 0 where broadcast
    std::vector<float*> terms;  // of each term off the line, [B, H, n or 1, columns]; null for those on it
};

constexpr int64_t kNowhere = -(int64_t{1} << 30);  // scores.NOWHERE

// y [rows, Σ out] = x [rows, in] · [W₁ᵀ W₂ᵀ …] + biases, all of one dtype; strides in elements, rows of W contiguous.
struct Linear {
    struct Part {
        const void *w, *bias;
        int64_t out, w_stride;
    };
    const void* x;
    void* y;
    int64_t rows, in, x_stride;
    std::vector<Part> parts;
    Dtype dtype;
    int threads;
};

// y [B, H, n, d] = x with the first `width` features of each row turned; cos and sin are [B or 1, n, width].
struct Turn {
    Tensor x;
    void* y;
    const float *cos, *sin;
    int64_t B, H, n, d, width, wave_b;
    bool halves;
    Dtype dtype;
};

// y [rows, width] = a norm of each row of x, all of one dtype; bias may be null.
struct Norm {
    const void *x, *weight, *bias;
    void* y;
    int64_t rows, width, x_stride;
    double eps;
    bool centred;
    Dtype dtype;
    int threads;
};

enum class Activation { relu, gelu, gelu_tanh, silu };

// One new token of each row through a block with norms before its two parts (step.h). Tensors of one dtype.
struct Step {
    struct NormPart {
        const void *weight = nullptr, *bias = nullptr;
        double eps = 0;
        bool centred = false;
    };
    // What stays from token to token.
    int64_t width = 0, heads = 0, kv_heads = 0, d = 0, e = 0;
    Dtype dtype = Dtype::f32;
    NormPart first, second, q_norm, k_norm;
    std::vector<Linear::Part> qkv, up;  // up: the gate first, where there is one
    Linear::Part out{}, down{};
    Activation activation = Activation::relu;
    bool gated = false, halves = true;
    double scale = 1, softcap = 0;
    const float* sinks = nullptr;
    int64_t turned = 0;  // features that a rotary position turns
    // What each token brings.
    const void* x = nullptr;
    void* y = nullptr;
    const float *cos = nullptr, *sin = nullptr;
    Tensor k, v;                 // the cache, with room for the new row
    int64_t rows = 0, m = 0, seen = 0;  // m keys with the new one, the last `seen` of which are looked at
    int threads = 1;
};

}  // namespace regard
