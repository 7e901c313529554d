// The arguments of the kernels that decode one token at a time: linear maps, norms, RoPE, and whole transformer blocks.
// Strides are in elements.
#pragma once

#include "attention_call.h"

namespace regard {

// One weight matrix [outputs, inputs] with contiguous rows, and its bias [outputs] or null.
struct LinearWeights {
    const void* weight = nullptr;
    const void* bias = nullptr;
    int64_t outputs = 0;
    int64_t weight_stride = 0;
};

// y [rows, Σ outputs] = x [rows, inputs] · [W₁ᵀ W₂ᵀ …] + biases, all of one dtype.
struct LinearCall {
    const void* x = nullptr;
    void* y = nullptr;
    int64_t rows = 0;
    int64_t inputs = 0;
    int64_t x_stride = 0;
    const LinearWeights* matrices = nullptr;
    int64_t matrix_count = 0;
    Dtype dtype = Dtype::float32;
    int threads = 1;
};

enum class NormKind {
    rms,    // x / √(mean(x²) + ε) · γ
    layer,  // (x − μ) / √(σ² + ε) · γ + β
};

struct NormWeights {
    NormKind kind = NormKind::rms;
    const void* weight = nullptr;  // [width]; null: there is no norm
    const void* bias = nullptr;    // [width] or null
    double eps = 0;
};

// y [rows, width] = the norm of each row of x, all of one dtype.
struct NormCall {
    NormWeights norm;
    const void* x = nullptr;
    void* y = nullptr;
    int64_t rows = 0;
    int64_t width = 0;
    int64_t x_stride = 0;
    Dtype dtype = Dtype::float32;
    int threads = 1;
};

// Which two features RoPE rotates together: f and f + width/2 (halves), or 2f and 2f + 1 (pairs).
enum class RopeLayout { halves, pairs };

// y [B, H, N, D] = x with the first `width` features of each row rotated; cos and sin are [B or 1, N, width].
struct RopeCall {
    TensorView x;
    void* y = nullptr;
    const float* cos = nullptr;
    const float* sin = nullptr;
    int64_t B = 0;
    int64_t H = 0;
    int64_t N = 0;
    int64_t D = 0;
    int64_t width = 0;
    int64_t angles_batch_stride = 0;
    RopeLayout layout = RopeLayout::halves;
    Dtype dtype = Dtype::float32;
};

enum class Activation { relu, gelu, gelu_tanh, silu };

// A transformer block with its norms before attention and feed-forward. All weights have one dtype.
struct DecodeBlock {
    int64_t width = 0;
    int64_t H = 0;
    int64_t G = 0;
    int64_t D = 0;
    int64_t E = 0;
    Dtype dtype = Dtype::float32;
    NormWeights attention_norm;
    NormWeights feedforward_norm;
    NormWeights q_norm;
    NormWeights k_norm;
    LinearWeights q;
    LinearWeights k;
    LinearWeights v;
    LinearWeights out;
    LinearWeights gate;  // weight is null in a feed-forward without a gate
    LinearWeights up;
    LinearWeights down;
    Activation activation = Activation::relu;
    double scale = 1;
    double softcap = 0;
    const float* sinks = nullptr;  // [H]
    int64_t rope_width = 0;        // number of features that RoPE rotates; 0: none
    RopeLayout rope_layout = RopeLayout::halves;
};

// The arguments of one pass through a DecodeBlock: one new token per batch entry, which is a row of x and y.
struct DecodeCall {
    const void* x = nullptr;     // [rows, width]
    void* y = nullptr;           // [rows, width]
    const float* cos = nullptr;  // [rope_width]
    const float* sin = nullptr;
    TensorView k_cache;  // [rows, G, capacity, D]; the new key is stored at index `length` − 1 of the capacity
    TensorView v_cache;  // [rows, G, capacity, E]
    int64_t rows = 0;
    int64_t length = 0;   // number of keys, including the new one
    int64_t visible = 0;  // the last `visible` keys are attended to
    int threads = 1;
};

}  // namespace regard
