// Gradients: tiles are computed again. With A = e^(s − high) / total, g = ∂out and Δ = out·g,
//   dS = A ∘ (g vᵀ − Δ),  dq = scale·dS k,  dk = scale·dSᵀ q,  dv = Aᵀ g;  biases get dS itself.
#pragma once

#include "forward.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

constexpr int64_t KS = 1024;  // keys whose dk and dv stay in cache while all queries pass by
// Queries whose part of dk and dv is summed by itself before it joins the rest: sums in two levels err less, which
// shows in the first keys of a causal call, where every query adds.
constexpr int64_t QS = 256;

struct BackwardScratch : ForwardScratch {
    float *grads, *pulled, *slope, *moved, *query_rows, *grad_rows, *dk, *dv;
    explicit BackwardScratch(const Call& c) : ForwardScratch(c) {
        grads = take(c.e * PW);
        pulled = take(BC * PW);
        slope = take(BC * PW);
        moved = take(c.d * PW);
        dk = take(std::min(KS, c.m) * c.d);
        dv = take(std::min(KS, c.m) * c.e);
        query_rows = take(c.dtype == Dtype::f32 ? 1 : PW * c.d);
        grad_rows = take(c.dtype == Dtype::f32 ? 1 : PW * c.e);
    }
};

// One panel of queries against keys from … to: everything but the loop over blocks is set up once.
struct BackwardPanel {
    Panel p;
    const float *queries, *grads;  // rows in their own layout
    int64_t query_stride, grad_stride;
    F high[NR], inverse[NR], delta[NR], best[NR];
    alignas(64) uint32_t hashes[PW];
};

// ∂(scale·q·k)/∂(q·k); 0 where the output does not move with q and k.
inline float step(const Call& c) { return c.best ? 0.0f : static_cast<float>(c.scale); }

inline void fill_delta(const Call& c, const Gradients& g, const Head& head, int64_t i, BackwardScratch& w) {
    const int64_t count = std::min<int64_t>(PW, c.n - i);
    int64_t grad_stride, out_stride;
    const float* grad = rows_of(g.grad, c.dtype, head.b, head.h, i, count, c.e, w.grad_rows, grad_stride);
    const float* out = rows_of(c.out, c.dtype, head.b, head.h, i, count, c.e, w.rows, out_stride);
    for (int64_t r = 0; r < count; r++)
        g.delta[(head.b * c.H + head.h) * c.n + i + r] =
            dot_product(grad + r * grad_stride, out + r * out_stride, c.e);
}

inline void enter_panel(const Call& c, const Gradients& g, const Head& head, int64_t i, BackwardScratch& w,
                        BackwardPanel& b) {
    place_panel(c, head.b, i, b.p);
    const Panel& p = b.p;
    b.queries = rows_of(c.q, c.dtype, head.b, head.h, i, p.count, c.d, w.query_rows, b.query_stride);
    b.grads = rows_of(g.grad, c.dtype, head.b, head.h, i, p.count, c.e, w.grad_rows, b.grad_stride);
    to_panel(b.queries, b.query_stride, p.count, c.d, query_factor(c), w.panels);
    if (c.best) load_best(c, head, p, b.best);
    to_panel(b.grads, b.grad_stride, p.count, c.e, 1.0f, w.grads);
    for (int x = 0; x < PW; x++) {
        const int64_t row = (head.b * c.H + head.h) * c.n + i + std::min<int64_t>(x, p.count - 1);
        const bool empty = c.total[row] == 0;
        b.high[x / W][x % W] = empty ? 0.0f : static_cast<float>(c.high[row]);
        b.inverse[x / W][x % W] = empty ? 0.0f : static_cast<float>(1 / c.total[row]);
        b.delta[x / W][x % W] = g.delta[row];
        if (c.dropout > 0) b.hashes[x] = row_hash(c.seed, head.b, head.h, i + x);
    }
}

inline void add_to_biases(const Call& c, const Gradients& g, const Head& head, const Panel& p, int64_t j,
                          int64_t count, const float* s) {
    const int64_t bh = head.b * c.H + head.h;
    if (g.line)
        for (int64_t y = 0; y < count; y++)
            for (int x = 0; x < p.count; x++)
                g.line[bh * (c.n + c.m) + p.i + x - (j + y) + c.m] += s[y * PW + x];
    if (g.bias) {
        float* to = static_cast<float*>(g.bias.data) + head.b * g.bias.b + head.h * g.bias.h;
        for (int x = 0; x < p.count; x++)
            for (int64_t y = 0; y < count; y++) to[(p.i + x) * g.bias.i + (j + y) * g.bias.j] += s[y * PW + x];
    }
    for (size_t t = 0; t < c.terms.size() && t < g.terms.size(); t++) {
        const Term& term = c.terms[t];
        if (!g.terms[t]) continue;
        for (int x = 0; x < p.count; x++) {
            const int64_t i = p.i + x, from = term.query_at[i], row = term.table.i ? bh * c.n + i : bh;
            if (from == kNowhere) continue;
            float* to = g.terms[t] + row * term.columns;
            for (int64_t y = 0; y < count; y++)
                if (term.key_at[j + y] != kNowhere)
                    to[std::clamp<int64_t>(term.key_at[j + y] - from - term.first, 0, term.columns - 1)] +=
                        s[y * PW + x];
        }
    }
}

REGARD_INLINE void backward_block(const Call& c, const Gradients& g, const Head& head, const BackwardPanel& b,
                                  int64_t j, int64_t count, const float* keys, int64_t key_stride,
                                  const float* values, int64_t value_stride, float* dk, float* dv,
                                  BackwardScratch& w) {
    float *s = w.scores, *pulled = w.pulled;
    products(c, {reinterpret_cast<const char*>(keys), key_stride, Dtype::f32}, w.panels, 0, s, count);
    if (c.best)
        to_hard_logits(c, head, b.p, j, count, s, w.other, w.kept, b.best, w.odd);
    else
        to_logits(c, head, b.p, j, count, s, w.other, c.softcap > 0 ? w.slope : nullptr, w.odd);
    dot(values, value_stride, w.grads, pulled, count, c.e);
    for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) {
            float* at = s + y * PW + x * W;
            store(at, exp(load(at) - b.high[x]) * b.inverse[x]);
        }
    float* kept = s;
    if (c.dropout > 0) {
        kept = w.kept;
        drop(c, b.hashes, j, count, s, kept);
        drop(c, b.hashes, j, count, pulled, pulled);
    }
    gather(kept, b.grads, b.grad_stride, b.p.count, dv, c.e, count, c.e);
    for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) {
            const int64_t at = y * PW + x * W;
            store(s + at, load(s + at) * (load(pulled + at) - b.delta[x]));
        }
    w.odd += zero_if_finite(s, count * PW);  // biases get these numbers, and nobody looks at theirs again
    add_to_biases(c, g, head, b.p, j, count, s);
    if (c.scale == 0 || c.best) return;  // the output does not move with q and k
    if (c.softcap > 0)
        for (int64_t y = 0; y < count * NR; y++) store(s + y * W, load(s + y * W) * load(w.slope + y * W));
    mix(keys, key_stride, s, w.moved, count, c.d);
    gather(s, b.queries, b.query_stride, b.p.count, dk, c.d, count, c.d);
}

// One panel of queries against keys start … stop: dq of its rows, and its part of w.dk and w.dv.
inline void backward_panel(const Call& c, const Gradients& g, const Head& head, int64_t i, int64_t start, int64_t stop,
                           float* dq, BackwardScratch& w) {
    BackwardPanel panel;
    place_panel(c, head.b, i, panel.p);
    const int64_t first = std::max(start, panel.p.first), last = std::min(stop, panel.p.last);
    if (first >= last) return;
    enter_panel(c, g, head, i, w, panel);
    std::memset(w.moved, 0, sizeof(float) * c.d * PW);
    for (int64_t j = first; j < last; j += BC) {
        const int64_t count = std::min(BC, last - j);
        int64_t key_stride, value_stride;
        const float* keys = rows_of(c.k, c.dtype, head.b, head.g, j, count, c.d, w.keys, key_stride);
        const float* values = rows_of(c.v, c.dtype, head.b, head.g, j, count, c.e, w.values, value_stride);
        backward_block(c, g, head, panel, j, count, keys, key_stride, values, value_stride,
                       w.dk + (j - start) * c.d, w.dv + (j - start) * c.e, w);
    }
    alignas(64) float factor[PW];
    std::fill(factor, factor + PW, step(c));
    from_panel<true>(w.moved, factor, panel.p.count, c.d, dq + ((head.b * c.H + head.h) * c.n + i) * c.d, c.d);
}

// to += factor · from, and from = 0.
inline void flush(float* from, float* to, int64_t count, float factor) {
    for (int64_t t = 0; t < count; t++) to[t] += factor * from[t], from[t] = 0;
}

// dk and dv of keys from … to − 1 of one key head, and their part of dq of every query head that shares it.
inline void backward_group(const Call& c, const Gradients& g, int64_t b, int64_t group, int64_t from, int64_t to,
                           float* dq, BackwardScratch& w) {
    const int64_t repeat = c.H / c.G;
    for (int64_t start = from; start < to; start += KS) {
        const int64_t keys = std::min(KS, to - start), first_key = (b * c.G + group) * c.m + start;
        std::memset(w.dk, 0, sizeof(float) * keys * c.d);
        std::memset(w.dv, 0, sizeof(float) * keys * c.e);
        for (int64_t h = group * repeat; h < (group + 1) * repeat; h++) {
            const Head& head = w.enter(c, b * c.H + h);
            for (int64_t i = 0; i < c.n; i += QS) {
                for (int64_t p = i; p < std::min(i + QS, c.n); p += PW)
                    backward_panel(c, g, head, p, start, start + keys, dq, w);
                flush(w.dk, g.k + first_key * c.d, keys * c.d, step(c));
                flush(w.dv, g.v + first_key * c.e, keys * c.e, 1.0f);
            }
        }
    }
}

inline bool all_finite(const float* x, int64_t count) { return sum(zero_if_finite(x, count)) == 0; }

// Into how many parts the keys of a head are cut: by the shape alone, as forward's. Biases are summed over all keys, so
// their gradients need one task a head.
inline int64_t parts_of_gradients(const Call& c, const Gradients& g) {
    constexpr int64_t enough = 4;
    const int64_t heads = c.B * c.G;
    if (heads == 0 || heads >= enough || g.line || g.bias || !g.terms.empty()) return 1;
    return std::clamp<int64_t>((c.m + KS - 1) / KS, 1, enough / heads);
}

bool backward(const Call& c, const Gradients& g) {
    std::atomic<bool> finite{true};
    if (c.best) fill_all_best(c);
    const int64_t panels = (c.n + PW - 1) / PW;
    auto make = [&] { return BackwardScratch(c); };
    run_tasks<BackwardScratch>(c.B * c.H, c.threads, make, [&](int64_t task, BackwardScratch& w) {
        const Head head{task / c.H, task % c.H, 0};
        for (int64_t p = 0; p < panels; p++) fill_delta(c, g, head, p * PW, w);
    });
    // Few key heads: parts of their keys are tasks of their own, each with a dq of its own, added in order.
    const int64_t parts = parts_of_gradients(c, g), size = (c.m / KS + parts) / parts * KS;
    const int64_t heads = c.B * c.G, dq_size = c.B * c.H * c.n * c.d, mine = dq_size / std::max<int64_t>(1, heads);
    std::vector<float> others((parts - 1) * dq_size);
    run_tasks<BackwardScratch>(heads * parts, c.threads, make, [&](int64_t task, BackwardScratch& w) {
        const int64_t head = task / parts, part = task % parts;
        float* dq = part == 0 ? g.q : others.data() + (part - 1) * dq_size;
        backward_group(c, g, head / c.G, head % c.G, part * size, std::min(c.m, (part + 1) * size), dq, w);
        if (!w.finite()) finite = false;
    });
    run_tasks<int>(heads, c.threads, [] { return 0; }, [&](int64_t head, int) {
        float* dq = g.q + head * mine;
        for (int64_t part = 1; part < parts; part++)
            for (int64_t t = 0; t < mine; t++) dq[t] += others[(part - 1) * dq_size + head * mine + t];
        if (!all_finite(dq, mine) || !all_finite(g.k + head * c.m * c.d, c.m * c.d) ||
            !all_finite(g.v + head * c.m * c.e, c.m * c.e))
            finite = false;
    });
    return finite;
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
