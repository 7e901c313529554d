// One token through one block: y = z + down(φ(up(norm(z)))), z = x + out(attention(norm(x), cache)). The same functions that
// the layers call one by one, without a way back to Python between them, which costs as much as reading the weights.
#pragma once

#include "forward.h"
#include "layers.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

struct Buffer {
    std::vector<char> bytes;
    Buffer(int64_t count, int64_t size) : bytes(count * size) {}
    char* at(int64_t element, int64_t size) { return bytes.data() + element * size; }
    void* data() { return bytes.data(); }
};

REGARD_INLINE F activated(F x, Activation activation) {
    switch (activation) {
        case Activation::relu: return larger(F{}, x);  // in this order a NaN stays
        case Activation::silu: return x / (1.0f + exp(select(x < -88.0f, all(88.0f), -x)));
        case Activation::gelu_tanh: {  // x·(1 + tanh u)/2 is x/(1 + e^−2u), which stays exact where tanh nears −1
            const F twice = 1.5957691216f * (x + 0.044715f * x * x * x);
            return x / (1.0f + exp(select(twice < -88.0f, all(88.0f), -twice)));
        }
        case Activation::gelu: break;
    }
    for (int y = 0; y < W; y++) x[y] *= 0.5f * (1.0f + std::erf(x[y] * 0.7071067812f));
    return x;
}

// hidden[i] = φ(first[i]), times second[i] where there is one; rows of `stride` elements.
inline void activate(const Step& c, const Buffer& from, Buffer& to, int64_t hidden, int64_t stride) {
    const int64_t size = c.dtype == Dtype::f32 ? 4 : 2;
    std::vector<float> first(hidden + W), second(hidden + W);
    for (int64_t i = 0; i < c.rows; i++) {
        const char* row = from.bytes.data() + i * stride * size;
        widen(row, c.dtype, first.data(), hidden);
        if (c.gated) widen(row + hidden * size, c.dtype, second.data(), hidden);
        for (int64_t t = 0; t < hidden; t += W) {
            F x = activated(load(first.data() + t), c.activation);
            if (c.gated) x *= load(second.data() + t);
            store(first.data() + t, x);
        }
        narrow(first.data(), to.at(i * hidden, size), c.dtype, hidden);
    }
}

inline void add(const void* a, const void* b, void* to, int64_t count, Dtype dtype) {
    std::vector<float> x(count), y(count);
    widen(a, dtype, x.data(), count);
    widen(b, dtype, y.data(), count);
    for (int64_t t = 0; t < count; t++) x[t] += y[t];
    narrow(x.data(), to, dtype, count);
}

// The heads of one kind, normed and turned: from columns `first` … of qkv to [rows, heads, d].
inline void ready(const Step& c, Buffer& qkv, int64_t first, int64_t heads, int64_t total, const Step::NormPart& by,
                  void* to) {
    const int64_t size = c.dtype == Dtype::f32 ? 4 : 2;
    if (by.weight)
        for (int64_t i = 0; i < c.rows; i++) {
            char* row = qkv.at(i * total + first, size);
            norm({row, by.weight, by.bias, row, heads, c.d, c.d, by.eps, by.centred, c.dtype, 1});
        }
    const Tensor from{qkv.at(first, size), total, c.d, 0, 1};
    if (c.turned) {
        turn({from, to, c.cos, c.sin, c.rows, heads, 1, c.d, c.turned, 0, c.halves, c.dtype});
    } else {
        for (int64_t i = 0; i < c.rows; i++)
            std::memcpy(static_cast<char*>(to) + i * heads * c.d * size, qkv.at(i * total + first, size),
                        heads * c.d * size);
    }
}

// Copies [rows, heads, width] to the last row of a cache.
inline void append(const Step& c, const char* from, int64_t row_stride, Tensor cache, int64_t width) {
    const int64_t size = c.dtype == Dtype::f32 ? 4 : 2;
    for (int64_t b = 0; b < c.rows; b++)
        for (int64_t h = 0; h < c.kv_heads; h++)
            std::memcpy(static_cast<char*>(cache.data) + (b * cache.b + h * cache.h + (c.m - 1) * cache.i) * size,
                        from + (b * row_stride + h * width) * size, width * size);
}

// False if attention is not finite: the caller then takes the way that looks closer.
inline bool step(const Step& c) {
    const int64_t size = c.dtype == Dtype::f32 ? 4 : 2, H = c.heads, G = c.kv_heads;
    const int64_t total = H * c.d + G * (c.d + c.e), joined = H * c.e;
    Buffer h(c.rows * c.width, size), qkv(c.rows * total, size), q(c.rows * H * c.d, size), k(c.rows * G * c.d, size),
        heads(c.rows * joined, size), z(c.rows * c.width, size);
    const auto linear_of = [&](void* x, int64_t in, const std::vector<Linear::Part>& parts, void* y) {
        linear({x, y, c.rows, in, in, parts, c.dtype, c.threads});
    };
    const auto norm_of = [&](const void* x, const Step::NormPart& by, void* y) {
        norm({x, by.weight, by.bias, y, c.rows, c.width, c.width, by.eps, by.centred, c.dtype, 1});
    };

    norm_of(c.x, c.first, h.data());
    linear_of(h.data(), c.width, c.qkv, qkv.data());
    ready(c, qkv, 0, H, total, c.q_norm, q.data());
    ready(c, qkv, H * c.d, G, total, c.k_norm, k.data());
    append(c, k.bytes.data(), G * c.d, c.k, c.d);
    append(c, qkv.at((H + G) * c.d, size), total, c.v, c.e);

    Call call;
    call.B = c.rows, call.H = H, call.G = G, call.n = 1, call.m = c.seen, call.d = c.d, call.e = c.e;
    call.dtype = c.dtype, call.scale = c.scale, call.softcap = c.softcap, call.sinks = c.sinks;
    call.threads = c.threads;
    const auto last = [&](Tensor x) {
        x.data = static_cast<char*>(x.data) + (c.m - c.seen) * x.i * size;
        return x;
    };
    call.q = {q.data(), H * c.d, c.d, c.d, 1}, call.k = last(c.k), call.v = last(c.v);
    call.out = {heads.data(), joined, c.e, c.e, 1};
    if (!forward(call)) return false;

    linear_of(heads.data(), joined, {c.out}, h.data());
    add(c.x, h.data(), z.data(), c.rows * c.width, c.dtype);
    norm_of(z.data(), c.second, h.data());
    int64_t wide = 0;
    for (const auto& part : c.up) wide += part.out;
    const int64_t hidden = c.up[0].out;
    Buffer up(c.rows * wide, size), inside(c.rows * hidden, size);
    linear_of(h.data(), c.width, c.up, up.data());
    activate(c, up, inside, hidden, wide);
    linear_of(inside.data(), hidden, {c.down}, h.data());
    add(z.data(), h.data(), c.y, c.rows * c.width, c.dtype);
    return true;
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
