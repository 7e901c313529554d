// Runs one new token through one transformer block with the activation φ:
//   z = x + out(attention(norm(x), cache)),  y = z + down(φ(up(norm(z)))).
// Python can also call these layers one by one, but for one token the Python calls take as long as reading the weights.
#pragma once

#include "linear_norm_rope.h"
#include "forward.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// A zero-initialized array of one dtype.
struct Buffer {
    Array<char> bytes;
    int64_t element_bytes;

    Buffer(int64_t count, Dtype dtype)
        : bytes(count * bytes_per_element(dtype)), element_bytes(bytes_per_element(dtype)) {}
    char* at(int64_t element) { return bytes.data() + element * element_bytes; }
    char* data() { return bytes.data(); }
};

REGARD_INLINE Floats activate(Floats x, Activation activation) {
    switch (activation) {
        case Activation::relu: return max(Floats{}, x);  // this argument order propagates NaN
        case Activation::silu: return x / (1.0f + exp(select(x < -88.0f, broadcast(88.0f), -x)));
        case Activation::gelu_tanh: {  // x·(1 + tanh u)/2 = x/(1 + e^−2u), which is accurate where tanh is close to −1
            const Floats two_u = 1.5957691216f * (x + 0.044715f * x * x * x);
            return x / (1.0f + exp(select(two_u < -88.0f, broadcast(88.0f), -two_u)));
        }
        case Activation::gelu: break;
    }
    for (int lane = 0; lane < W; lane++) x[lane] *= 0.5f * (1.0f + std::erf(x[lane] * 0.7071067812f));
    return x;
}

// hidden = φ(up), or φ(gate) · up elementwise if the block has a gate. A row of `from` holds [up], or [gate, up].
inline void activate_rows(const DecodeBlock& block, int64_t rows, Buffer& from, Buffer& hidden) {
    const int64_t width = block.up.outputs;
    const bool gated = block.gate.weight != nullptr;
    Array<float> first(width + W);
    Array<float> second(width + W);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = i * (block.gate.outputs + block.up.outputs);
        to_float32(from.at(row), block.dtype, first.data(), width);
        if (gated) to_float32(from.at(row + width), block.dtype, second.data(), width);
        for (int64_t t = 0; t < width; t += W) {
            Floats x = activate(load(first.data() + t), block.activation);
            if (gated) x *= load(second.data() + t);
            store(first.data() + t, x);
        }
        from_float32(first.data(), hidden.at(i * width), block.dtype, width);
    }
}

// to = a + b, summed in float32.
inline void add_rows(const void* a, const void* b, void* to, int64_t count, Dtype dtype) {
    Array<float> x(count);
    Array<float> y(count);
    to_float32(a, dtype, x.data(), count);
    to_float32(b, dtype, y.data(), count);
    for (int64_t t = 0; t < count; t++) x[t] += y[t];
    from_float32(x.data(), to, dtype, count);
}

// Applies the head norm (in place, in qkv) and RoPE to the `heads` heads that start at `column` of each row of qkv, and
// writes them to `to` [rows, heads, D]. A step that the block does not have is skipped.
inline void norm_and_rotate(const DecodeBlock& block, const DecodeCall& call, Buffer& qkv, int64_t column,
                            int64_t heads, int64_t qkv_width, const NormWeights& head_norm, Buffer& to) {
    if (head_norm.weight)
        for (int64_t i = 0; i < call.rows; i++) {
            char* row = qkv.at(i * qkv_width + column);
            norm({head_norm, row, row, heads, block.D, block.D, block.dtype, 1});
        }
    if (block.rope_width) {
        const TensorView from{qkv.at(column), qkv_width, block.D, 0, 1};
        rope({from, to.data(), call.cos, call.sin, call.rows, heads, 1, block.D, block.rope_width, 0,
              block.rope_layout, block.dtype});
        return;
    }
    const int64_t row_bytes = heads * block.D * bytes_per_element(block.dtype);
    for (int64_t i = 0; i < call.rows; i++)
        std::memcpy(to.at(i * heads * block.D), qkv.at(i * qkv_width + column), row_bytes);
}

// Copies the new keys or values [rows, G, width] to the last row of a cache. `row_stride` is that of `from`, in
// elements.
inline void append_to_cache(const DecodeBlock& block, const DecodeCall& call, const char* from, int64_t row_stride,
                            const TensorView& cache, int64_t width) {
    const int64_t bytes = bytes_per_element(block.dtype);
    for (int64_t b = 0; b < call.rows; b++)
        for (int64_t g = 0; g < block.G; g++) {
            const char* to = address_of_row(cache, block.dtype, b, g, call.length - 1);
            std::memcpy(const_cast<char*>(to), from + (b * row_stride + g * width) * bytes, width * bytes);
        }
}

// Builds the AttentionCall of the new queries and the last `visible` keys of the cache.
inline AttentionCall cached_attention(const DecodeBlock& block, const DecodeCall& call, Buffer& q, Buffer& out) {
    AttentionCall attention;
    attention.B = call.rows;
    attention.H = block.H;
    attention.G = block.G;
    attention.N = 1;
    attention.M = call.visible;
    attention.D = block.D;
    attention.E = block.E;
    attention.dtype = block.dtype;
    attention.scale = block.scale;
    attention.softcap = block.softcap;
    attention.sinks = block.sinks;
    attention.threads = call.threads;
    const int64_t first = call.length - call.visible;
    attention.q = {q.data(), block.H * block.D, block.D, block.D, 1};
    attention.k = call.k_cache;
    attention.k.data = const_cast<char*>(address_of_row(call.k_cache, block.dtype, 0, 0, first));
    attention.v = call.v_cache;
    attention.v.data = const_cast<char*>(address_of_row(call.v_cache, block.dtype, 0, 0, first));
    attention.out = {out.data(), block.H * block.E, block.E, block.E, 1};
    return attention;
}

// Runs the whole block. Returns false if the attention is not finite: then y is not written, and the caller must run
// the layers one by one.
inline bool decode_block(const DecodeBlock& block, const DecodeCall& call) {
    const int64_t rows = call.rows;
    const int64_t qkv_width = block.H * block.D + block.G * (block.D + block.E);
    const auto run_linear = [&](Buffer& x, int64_t inputs, const LinearWeights* matrices, int64_t count, Buffer& y) {
        linear({x.data(), y.data(), rows, inputs, inputs, matrices, count, block.dtype, call.threads});
    };
    const auto run_norm = [&](const NormWeights& weights, const void* x, Buffer& y) {
        norm({weights, x, y.data(), rows, block.width, block.width, block.dtype, 1});
    };

    Buffer h(rows * block.width, block.dtype);
    Buffer qkv(rows * qkv_width, block.dtype);
    run_norm(block.attention_norm, call.x, h);
    const LinearWeights qkv_weights[] = {block.q, block.k, block.v};
    run_linear(h, block.width, qkv_weights, 3, qkv);

    Buffer q(rows * block.H * block.D, block.dtype);
    Buffer k(rows * block.G * block.D, block.dtype);
    norm_and_rotate(block, call, qkv, 0, block.H, qkv_width, block.q_norm, q);
    norm_and_rotate(block, call, qkv, block.H * block.D, block.G, qkv_width, block.k_norm, k);
    append_to_cache(block, call, k.data(), block.G * block.D, call.k_cache, block.D);
    append_to_cache(block, call, qkv.at((block.H + block.G) * block.D), qkv_width, call.v_cache, block.E);

    Buffer heads(rows * block.H * block.E, block.dtype);
    if (!forward(cached_attention(block, call, q, heads))) return false;

    Buffer z(rows * block.width, block.dtype);
    run_linear(heads, block.H * block.E, &block.out, 1, h);
    add_rows(call.x, h.data(), z.data(), rows * block.width, block.dtype);
    run_norm(block.feedforward_norm, z.data(), h);

    const LinearWeights gate_and_up[] = {block.gate, block.up};
    const int64_t gates = block.gate.weight ? 1 : 0;
    Buffer wide(rows * (block.gate.outputs + block.up.outputs), block.dtype);
    Buffer hidden(rows * block.up.outputs, block.dtype);
    run_linear(h, block.width, gate_and_up + 1 - gates, 1 + gates, wide);
    activate_rows(block, rows, wide, hidden);
    run_linear(hidden, block.up.outputs, &block.down, 1, h);
    add_rows(z.data(), h.data(), call.y, rows * block.width, block.dtype);
    return true;
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
