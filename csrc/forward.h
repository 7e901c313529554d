// out, and each row's largest logit and sum: online softmax over blocks of keys, one panel of queries at a time.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>

#include "threads.h"
#include "watch.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// Scratch of one thread, cut from one aligned piece of memory.
class Scratch {
public:
    float* take(int64_t floats) {
        pieces_.emplace_back(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 127) / 64 * 64)), std::free);
        return pieces_.back().get();
    }

private:
    std::vector<std::unique_ptr<float, void (*)(void*)>> pieces_;
};

struct ForwardScratch : Scratch {
    float *panels, *sums, *scores, *other, *kept, *line, *keys, *values, *rows, *masses;
    Head head;
    explicit ForwardScratch(const Call& c) {
        panels = take(PANELS * c.d * PW);
        sums = take(PANELS * c.e * PW);
        scores = take(BC * PW);
        other = take(BC * PW);
        kept = take(BC * PW);
        line = take(c.terms.empty() ? 1 : c.n + c.m + 2 * PW);
        keys = take(c.dtype == Dtype::f32 ? 1 : BC * c.d);
        values = take(c.dtype == Dtype::f32 ? 1 : BC * c.e);
        rows = take(PW * std::max(c.d, c.e));
        masses = take(c.watch ? PANELS * 2 * c.watch->bins * PW : 1);
    }
    // Makes `head` the index-th of B·H; what its tiles share is computed once.
    void enter(const Call& c, int64_t index) {
        if (head.b * c.H + head.h == index) return;
        head = Head{index / c.H, index % c.H, index % c.H / (c.H / c.G)};
        fill_line(c, head, line);
    }
};

struct Running {
    F top[NR], total[NR], best[NR];
};

inline void load_best(const Call& c, const Head& head, const Panel& p, F* best) {
    for (int x = 0; x < PW; x++) {
        const int64_t row = (head.b * c.H + head.h) * c.n + p.i + std::min<int64_t>(x, p.count - 1);
        best[x / W][x % W] = c.best[row];
    }
}

// The pass before hard attention: each row's largest visible product, in the very order of sums used later.
inline void fill_best(const Call& c, const Head& head, int64_t i, ForwardScratch& w) {
    Panel p;
    place_panel(c, head.b, i, p);
    int64_t stride;
    const float* rows = rows_of(c.q, c.dtype, head.b, head.h, i, p.count, c.d, w.rows, stride);
    to_panel(rows, stride, p.count, c.d, 1.0f, w.panels);
    F best[NR];
    for (int x = 0; x < NR; x++) best[x] = all(kHidden);
    for (int64_t j = p.first; j < p.last; j += BC) {
        const int64_t count = std::min(BC, p.last - j);
        const float* keys = rows_of(c.k, c.dtype, head.b, head.g, j, count, c.d, w.keys, stride);
        dot(keys, stride, w.panels, w.scores, count, c.d);
        raise_best(c, head, p, j, count, w.scores, w.other, w.kept, best);
    }
    for (int64_t x = 0; x < p.count; x++) c.best[(head.b * c.H + head.h) * c.n + i + x] = best[x / W][x % W];
}

inline void fill_all_best(const Call& c) {
    const int64_t panels = (c.n + PW - 1) / PW;
    run_tasks<ForwardScratch>(
        c.B * c.H * panels, c.threads, [&] { return ForwardScratch(c); },
        [&](int64_t task, ForwardScratch& w) {
            w.enter(c, task / panels);
            fill_best(c, w.head, task % panels * PW, w);
        });
}

// One block of keys for one panel: scores, softmax update, values.
template <bool watched>
REGARD_INLINE void forward_block(const Call& c, const Head& head, const Panel& p, int64_t j, int64_t count,
                                 const float* keys, int64_t key_stride, const float* values, int64_t value_stride,
                                 const float* queries, const uint32_t* hashes, ForwardScratch& w, float* sums,
                                 Running& run, Watching* watching) {
    float* s = w.scores;
    products(c, keys, key_stride, queries, s, count);
    if (c.best)
        to_hard_logits(c, head, p, j, count, s, w.other, w.kept, run.best);
    else
        to_logits(c, head, p, j, count, s, w.other, nullptr);
    F top[NR];
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) top[x] = all(kHidden);
    for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) top[x] = larger(load(s + y * PW + x * W), top[x]);
    if (watched) watch_logits(head, j, count, s, c.best ? w.kept : s, top, *watching);
    bool rose = false;
    F fade[NR];
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) {
        top[x] = larger(top[x], run.top[x]);
        rose |= any(top[x] > run.top[x]);
        fade[x] = exp(run.top[x] - top[x]);
    }
    if (watched && rose) fade_watching(*watching, run.top, top, run.total, fade);
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) {
        run.total[x] *= fade[x];
        run.top[x] = top[x];
    }
    if (watched) {
        watch_weights(c, j, count, s, top, run.total, *watching);
    } else {
        F block[NR];
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) block[x] = F{};
        for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) {
                const F weight = exp(load(s + y * PW + x * W) - top[x]);
                block[x] += weight;
                store(s + y * PW + x * W, weight);
            }
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) run.total[x] += block[x];
    }
    if (rose)
        for (int64_t f = 0; f < c.e; f++)
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) {
                float* at = sums + f * PW + x * W;
                store(at, load(at) * fade[x]);
            }
    if (c.dropout > 0) {
        drop(c, hashes, j, count, s, w.kept);
        s = w.kept;
    }
    mix(values, value_stride, s, sums, count, c.e);
}

// Divides by the totals and writes rows, highs and totals; false if a number is not finite.
inline bool finish_panel(const Call& c, const Head& head, const Panel& p, const Running& run, const float* sums,
                         ForwardScratch& w) {
    alignas(64) float inverse[PW];
    for (int x = 0; x < PW; x++) {
        const float total = run.total[x / W][x % W], top = run.top[x / W][x % W];
        inverse[x] = total == 0 ? 0.0f : 1 / total;
        if (x >= p.count) continue;
        const int64_t row = (head.b * c.H + head.h) * c.n + p.i + x;
        c.high[row] = total == 0 ? kHidden : top;
        c.total[row] = total;
    }
    F odd = F{};
    for (int64_t f = 0; f < c.e; f++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) odd += load(sums + f * PW + x * W) * load(inverse + x * W) * 0.0f;
    bool finite = true;
    for (int x = 0; x < W; x++) finite &= odd[x] == 0;
    char* out = const_cast<char*>(at(c.out, c.dtype, head.b, head.h, p.i));
    if (c.dtype == Dtype::f32) {
        from_panel<false>(sums, inverse, p.count, c.e, reinterpret_cast<float*>(out), c.out.i);
        return finite;
    }
    from_panel<false>(sums, inverse, p.count, c.e, w.rows, c.e);
    for (int64_t r = 0; r < p.count; r++) narrow(w.rows + r * c.e, out + r * c.out.i * 2, c.dtype, c.e);
    return finite;
}

template <bool watched>
inline bool forward_tile(const Call& c, const Head& head, int64_t i, ForwardScratch& w, float* map) {
    Watching watching[watched ? PANELS : 1];
    Panel panels[PANELS];
    Running run[PANELS];
    alignas(64) uint32_t hashes[PANELS][PW];
    int used = 0;
    int64_t first = c.m, last = 0;
    for (; used < PANELS && i + used * PW < c.n; used++) {
        Panel& p = panels[used];
        place_panel(c, head.b, i + used * PW, p);
        int64_t stride;
        const float* rows = rows_of(c.q, c.dtype, head.b, head.h, p.i, p.count, c.d, w.rows, stride);
        to_panel(rows, stride, p.count, c.d, query_factor(c), w.panels + used * c.d * PW);
        if (c.best) load_best(c, head, p, run[used].best);
        const float sink = c.sinks ? c.sinks[head.h] : kHidden;
        for (int x = 0; x < NR; x++) {
            run[used].top[x] = all(sink == kHidden ? kLowest : sink);
            run[used].total[x] = all(sink == kHidden ? 0.0f : 1.0f);
        }
        if (c.dropout > 0)
            for (int x = 0; x < PW; x++) hashes[used][x] = row_hash(c.seed, head.b, head.h, p.i + x);
        if (watched) start_watching(c, p, w.masses + used * 2 * c.watch->bins * PW, watching[used]);
        if (p.first < p.last) first = std::min(first, p.first), last = std::max(last, p.last);
    }
    std::memset(w.sums, 0, sizeof(float) * used * c.e * PW);
    for (int64_t j = first; j < last; j += BC) {
        const int64_t count = std::min(BC, last - j);
        int64_t key_stride, value_stride;
        const float* keys = rows_of(c.k, c.dtype, head.b, head.g, j, count, c.d, w.keys, key_stride);
        const float* values = rows_of(c.v, c.dtype, head.b, head.g, j, count, c.e, w.values, value_stride);
        for (int u = 0; u < used; u++) {
            const int64_t from = std::max(j, panels[u].first), to = std::min(j + count, panels[u].last);
            if (from >= to) continue;
            forward_block<watched>(c, head, panels[u], from, to - from, keys + (from - j) * key_stride, key_stride,
                          values + (from - j) * value_stride, value_stride, w.panels + u * c.d * PW, hashes[u], w,
                          w.sums + u * c.e * PW, run[u], watched ? &watching[u] : nullptr);
        }
    }
    if (c.best)  // a row that sees a NaN is NaN
        for (int u = 0; u < used; u++)
            for (int x = 0; x < NR; x++)
                run[u].total[x] = select(is_nan(run[u].best[x]), run[u].best[x], run[u].total[x]);
    if (watched)
        for (int u = 0; u < used; u++)
            finish_watching(c, head, panels[u], run[u].top, run[u].total, watching[u], map,
                            c.watch->bins ? i * c.watch->bins / c.n : 0);
    bool finite = true;
    for (int u = 0; u < used; u++) finite &= finish_panel(c, head, panels[u], run[u], w.sums + u * c.e * PW, w);
    return finite;
}

// Adds the tiles' parts of the map in order, so that the sums do not depend on which thread was faster.
inline void sum_maps(const Call& c, const std::vector<float>& parts, int64_t tiles, int64_t rows, int64_t span) {
    const int64_t g = c.watch->bins;
    for (int64_t task = 0; task < c.B * c.H * tiles; task++) {
        const int64_t h = task / tiles % c.H, first = task % tiles * rows * g / c.n;
        double* to = c.watch->map + (h * g + first) * g;
        const float* from = parts.data() + task * span * g;
        for (int64_t t = 0; t < std::min(span, g - first) * g; t++) to[t] += from[t];
    }
}

bool forward(const Call& c) {
    if (c.best) fill_all_best(c);
    std::atomic<bool> finite{true};
    const int64_t rows = PANELS * PW, tiles = (c.n + rows - 1) / rows, g = c.watch ? c.watch->bins : 0;
    const int64_t span = g && c.n ? std::min(g, rows * g / c.n + 2) : 0;  // row bins that a tile may touch
    std::vector<float> maps(c.B * c.H * tiles * span * g);
    run_tasks<ForwardScratch>(
        c.B * c.H * tiles, c.threads, [&] { return ForwardScratch(c); },
        [&](int64_t task, ForwardScratch& w) {
            w.enter(c, task / tiles);
            const int64_t tile = tiles - 1 - task % tiles;  // under a causal mask the long tiles come first
            float* map = maps.data() + (task / tiles * tiles + tile) * span * g;
            const bool good = c.watch ? forward_tile<true>(c, w.head, tile * rows, w, map)
                                      : forward_tile<false>(c, w.head, tile * rows, w, nullptr);
            if (!good) finite = false;
        });
    if (g) sum_maps(c, maps, tiles, rows, span);
    return finite;
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
