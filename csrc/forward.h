// out, and each row's largest logit and sum: online softmax over blocks of keys, a few panels of queries at a time.
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
    float *panels, *sums, *scores, *other, *kept, *keys, *values, *rows, *masses;
    F odd = F{};  // 0 while every number on the way is finite, then NaN
    bool finite() const { return sum(odd) == 0; }
    explicit ForwardScratch(const Call& c) {
        panels = take(PANELS * c.d * PW);
        sums = take(PANELS * c.e * PW);
        scores = take(BC * PW);
        other = take(BC * PW);
        kept = take(BC * PW);
        keys = take(c.dtype == Dtype::f32 ? 1 : BC * c.d);
        values = take(c.dtype == Dtype::f32 ? 1 : BC * c.e);
        rows = take(PW * std::max(c.d, c.e));
        masses = take(c.watch ? PANELS * 2 * c.watch->bins * PW : 1);
        for (Slot& slot : slots_) slot.line = take(c.terms.empty() ? 1 : c.n + c.m + 2 * PW);
    }
    // The index-th of B·H heads. What its tiles share is computed once, and kept for as many heads as a tile can have.
    const Head& enter(const Call& c, int64_t index) {
        Slot* oldest = slots_;
        for (Slot& slot : slots_) {
            if (slot.head.b >= 0 && slot.head.b * c.H + slot.head.h == index) {
                slot.used = ++clock_;
                return slot.head;
            }
            if (slot.used < oldest->used) oldest = &slot;
        }
        oldest->head = Head{index / c.H, index % c.H, index % c.H / (c.H / c.G)};
        oldest->used = ++clock_;
        fill_line(c, oldest->head, oldest->line);
        return oldest->head;
    }

private:
    struct Slot {
        Head head;
        float* line = nullptr;
        int64_t used = 0;
    };
    Slot slots_[PANELS];
    int64_t clock_ = 0;
};

struct Running {
    F top[NR], total[NR], best[NR];
};

// One panel at work: its queries, its running softmax, and what it watches.
struct Strip {
    Head head;
    Panel p;
    Running run;
    Watching watching;
    bool thin;               // a few rows only: see thin.h
    float *queries, *sums;   // panels [d, PW] and [e, PW]; of a thin strip rows [lanes, d] and [lanes, e]
    alignas(64) uint32_t hashes[PW];
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
        products(c, float_rows(c.k, c.dtype, head.b, head.g, j, count, c.d, w.keys), w.panels, 0, w.scores, count);
        raise_best(c, head, p, j, count, w.scores, w.other, w.kept, best, w.odd);
    }
    for (int64_t x = 0; x < p.count; x++) c.best[(head.b * c.H + head.h) * c.n + i + x] = best[x / W][x % W];
}

inline void fill_all_best(const Call& c) {
    const int64_t panels = (c.n + PW - 1) / PW;
    run_tasks<ForwardScratch>(
        c.B * c.H * panels, c.threads, [&] { return ForwardScratch(c); },
        [&](int64_t task, ForwardScratch& w) {
            fill_best(c, w.enter(c, task / panels), task % panels * PW, w);
        });
}

// Queries of a strip, scaled; its softmax before any key. `sums` and `masses` are its room.
template <bool watched>
inline void start_strip(const Call& c, const Head& head, int64_t i, float* queries, float* sums, float* masses,
                        ForwardScratch& w, Strip& strip) {
    strip.head = head;
    strip.queries = queries, strip.sums = sums;
    Panel& p = strip.p;
    place_panel(c, head.b, i, p);
    // Hard attention compares products with those of another pass: one order of sums for all.
    strip.thin = p.count <= PW / 4 && !c.best;
    int64_t stride;
    const float* rows = rows_of(c.q, c.dtype, head.b, head.h, p.i, p.count, c.d, w.rows, stride);
    if (strip.thin)
        for (int64_t x = 0; x < p.count; x++)
            for (int64_t t = 0; t < c.d; t++) queries[x * c.d + t] = rows[x * stride + t] * query_factor(c);
    else
        to_panel(rows, stride, p.count, c.d, query_factor(c), queries);
    std::memset(sums, 0, sizeof(float) * c.e * (strip.thin ? p.count : PW));
    if (c.best) load_best(c, head, p, strip.run.best);
    const float sink = c.sinks ? c.sinks[head.h] : kHidden;
    for (int x = 0; x < NR; x++) {
        strip.run.top[x] = all(sink == kHidden ? kLowest : sink);
        strip.run.total[x] = all(sink == kHidden ? 0.0f : 1.0f);
    }
    if (c.dropout > 0)
        for (int x = 0; x < PW; x++) strip.hashes[x] = row_hash(c.seed, head.b, head.h, p.i + x);
    if (watched) start_watching(c, p, masses, strip.watching);
}

// Everything summed so far, times each lane's factor.
inline void fade_sums(const Call& c, const F* fade, Strip& strip) {
    if (strip.thin) {
        for (int64_t x = 0; x < strip.p.count; x++)
            for (int64_t f = 0; f < c.e; f++) strip.sums[x * c.e + f] *= fade[x / W][x % W];
        return;
    }
    for (int64_t f = 0; f < c.e; f++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) {
            float* at = strip.sums + f * PW + x * W;
            store(at, load(at) * fade[x]);
        }
}

// One block of keys for one strip: scores, softmax update, values.
template <bool watched>
REGARD_INLINE void forward_block(const Call& c, int64_t j, int64_t count, const Rows& keys, const Rows& values,
                                 ForwardScratch& w, Strip& strip) {
    float* s = w.scores;
    Running& run = strip.run;
    const Panel& p = strip.p;
    products(c, keys, strip.queries, strip.thin ? p.count : 0, s, count);
    if (c.best)
        to_hard_logits(c, strip.head, p, j, count, s, w.other, w.kept, run.best, w.odd);
    else
        to_logits(c, strip.head, p, j, count, s, w.other, nullptr, w.odd);
    F top[NR];
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) top[x] = all(kHidden);
    for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) top[x] = larger(load(s + y * PW + x * W), top[x]);
    if (watched) watch_logits(strip.head, j, count, s, c.best ? w.kept : s, top, strip.watching);
    bool rose = false;
    F fade[NR];
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) {
        top[x] = larger(top[x], run.top[x]);
        rose |= any(top[x] > run.top[x]);
        fade[x] = exp(run.top[x] - top[x]);
    }
    if (watched && rose) fade_watching(strip.watching, run.top, top, run.total, fade);
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) {
        run.total[x] *= fade[x];
        run.top[x] = top[x];
    }
    if (watched) {
        watch_weights(c, j, count, s, top, run.total, strip.watching);
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
    if (rose) fade_sums(c, fade, strip);
    if (c.dropout > 0) {
        drop(c, strip.hashes, j, count, s, w.kept);
        s = w.kept;
    }
    if (strip.thin)
        thin_mix(values, s, p.count, strip.sums, count, c.e);
    else
        mix(values.floats(), values.stride, s, strip.sums, count, c.e);
}

// Keys start … stop − 1 for all strips of a tile: they have one key head, and share its blocks while these are in cache.
template <bool watched>
inline void forward_keys(const Call& c, int64_t start, int64_t stop, int used, ForwardScratch& w, Strip* strips) {
    int64_t first = stop, last = start;
    for (int u = 0; u < used; u++) {
        const Panel& p = strips[u].p;
        if (p.first < p.last) first = std::min(first, p.first), last = std::max(last, p.last);
    }
    first = std::max(first, start), last = std::min(last, stop);
    const Head& head = strips[0].head;
    const bool as_it_is = used == 1 && strips[0].thin;  // nobody shares a converted block
    for (int64_t j = first; j < last; j += BC) {
        const int64_t count = std::min(BC, last - j);
        const Rows keys = as_it_is ? Rows{at(c.k, c.dtype, head.b, head.g, j), c.k.i, c.dtype}
                                   : float_rows(c.k, c.dtype, head.b, head.g, j, count, c.d, w.keys);
        const Rows values = as_it_is ? Rows{at(c.v, c.dtype, head.b, head.g, j), c.v.i, c.dtype}
                                     : float_rows(c.v, c.dtype, head.b, head.g, j, count, c.e, w.values);
        for (int u = 0; u < used; u++) {
            const Panel& p = strips[u].p;
            const int64_t from = std::max(j, p.first), to = std::min(j + count, p.last);
            if (from < to)
                forward_block<watched>(c, from, to - from, keys.from(from - j), values.from(from - j), w, strips[u]);
        }
    }
}

// Joins what two parts of the keys gave one strip; `b`'s keys come after `a`'s.
template <bool watched>
inline void join_strips(const Call& c, Strip& a, Strip& b) {
    F top[NR], a_fade[NR], b_fade[NR];
    for (int x = 0; x < NR; x++) {
        top[x] = larger(a.run.top[x], b.run.top[x]);
        a_fade[x] = exp(a.run.top[x] - top[x]);
        b_fade[x] = exp(b.run.top[x] - top[x]);
    }
    if (watched)
        join_watching(c, top, a.run.top, a.run.total, a_fade, a.watching, b.run.top, b.run.total, b_fade, b.watching);
    fade_sums(c, a_fade, a);
    fade_sums(c, b_fade, b);
    for (int64_t t = 0; t < c.e * (a.thin ? a.p.count : PW); t++) a.sums[t] += b.sums[t];
    for (int x = 0; x < NR; x++) {
        a.run.total[x] = a.run.total[x] * a_fade[x] + b.run.total[x] * b_fade[x];
        a.run.top[x] = top[x];
    }
}

// Divides by the totals and writes rows, highs, totals and row values.
template <bool watched>
inline void finish_strip(const Call& c, ForwardScratch& w, Strip& strip) {
    const Panel& p = strip.p;
    const Head& head = strip.head;
    Running& run = strip.run;
    if (c.best)  // a row that sees a NaN is NaN
        for (int x = 0; x < NR; x++) run.total[x] = select(is_nan(run.best[x]), run.best[x], run.total[x]);
    if (watched) finish_watching(c, head, p, run.top, run.total, strip.watching);
    alignas(64) float inverse[PW];
    for (int x = 0; x < PW; x++) {
        const float total = run.total[x / W][x % W];
        inverse[x] = total == 0 ? 0.0f : 1 / total;
        if (x >= p.count) continue;
        if (c.high) {
            const int64_t row = (head.b * c.H + head.h) * c.n + p.i + x;
            c.high[row] = total == 0 ? kHidden : run.top[x / W][x % W];
            c.total[row] = total;
        }
        w.odd[0] += total * 0.0f;
    }
    w.odd += zero_if_finite(strip.sums, c.e * (strip.thin ? p.count : PW));
    char* out = const_cast<char*>(at(c.out, c.dtype, head.b, head.h, p.i));
    const bool direct = c.dtype == Dtype::f32;
    float* rows = direct ? reinterpret_cast<float*>(out) : w.rows;
    const int64_t stride = direct ? c.out.i : c.e;
    if (strip.thin)
        for (int64_t x = 0; x < p.count; x++)
            for (int64_t f = 0; f < c.e; f++) rows[x * stride + f] = strip.sums[x * c.e + f] * inverse[x];
    else
        from_panel<false>(strip.sums, inverse, p.count, c.e, rows, stride);
    if (!direct)
        for (int64_t x = 0; x < p.count; x++) narrow(rows + x * c.e, out + x * c.out.i * 2, c.dtype, c.e);
}

// How a call is cut into tiles: panels of all query heads that share a key head, PANELS of them at a time.
struct Tiling {
    int64_t per_head, per_group, tiles;
    explicit Tiling(const Call& c)
        : per_head((c.n + PW - 1) / PW), per_group(c.H / c.G * per_head), tiles((per_group + PANELS - 1) / PANELS) {}

    // Starts the strips of a tile of a key head; returns how many there are.
    template <bool watched>
    int start(const Call& c, int64_t group, int64_t tile, float* sums, float* masses, ForwardScratch& w,
              Strip* strips) const {
        int used = 0;
        for (; used < PANELS && tile * PANELS + used < per_group; used++) {
            const int64_t panel = tile * PANELS + used, head = group * (c.H / c.G) + panel / per_head;
            start_strip<watched>(c, w.enter(c, head), panel % per_head * PW, w.panels + used * c.d * PW,
                                 sums + used * c.e * PW, watched ? masses + used * 2 * c.watch->bins * PW : nullptr, w,
                                 strips[used]);
        }
        return used;
    }
};

template <bool watched>
inline bool forward_tiles(const Call& c) {
    const Tiling tiling(c);
    std::atomic<bool> finite{true};
    run_tasks<ForwardScratch>(
        c.B * c.G * tiling.tiles, c.threads, [&] { return ForwardScratch(c); },
        [&](int64_t task, ForwardScratch& w) {
            const int64_t tile = tiling.tiles - 1 - task % tiling.tiles;  // under a causal mask the long ones come first
            Strip strips[PANELS];
            const int used = tiling.start<watched>(c, task / tiling.tiles, tile, w.sums, w.masses, w, strips);
            forward_keys<watched>(c, 0, c.m, used, w, strips);
            for (int u = 0; u < used; u++) finish_strip<watched>(c, w, strips[u]);
            if (!w.finite()) finite = false;
        });
    return finite;
}

// Few tiles and many keys (decoding): parts of the keys are tasks of their own, then joined in order.
template <bool watched>
inline bool forward_parts(const Call& c, int64_t parts) {
    const Tiling tiling(c);
    const int64_t tasks = c.B * c.G * tiling.tiles * parts, size = (c.m / BC + parts) / parts * BC;
    const int64_t sums = PANELS * c.e * PW, masses = watched ? PANELS * 2 * c.watch->bins * PW : 0;
    std::vector<Strip> strips(tasks * PANELS);
    std::vector<float> room(tasks * (sums + masses));
    std::atomic<bool> finite{true};
    auto make = [&] { return ForwardScratch(c); };
    run_tasks<ForwardScratch>(tasks, c.threads, make, [&](int64_t task, ForwardScratch& w) {
        const int64_t whole = task / parts, part = task % parts;
        float* mine = room.data() + task * (sums + masses);
        Strip* at = strips.data() + task * PANELS;
        const int used = tiling.start<watched>(c, whole / tiling.tiles, whole % tiling.tiles, mine, mine + sums, w, at);
        if (part > 0)  // the first part has the sink
            for (int u = 0; u < used; u++)
                for (int x = 0; x < NR; x++) at[u].run.top[x] = all(kLowest), at[u].run.total[x] = F{};
        forward_keys<watched>(c, part * size, std::min(c.m, (part + 1) * size), used, w, at);
        if (!w.finite()) finite = false;
    });
    run_tasks<ForwardScratch>(tasks / parts, c.threads, make, [&](int64_t whole, ForwardScratch& w) {
        for (int u = 0; u < PANELS && whole % tiling.tiles * PANELS + u < tiling.per_group; u++) {
            Strip& all_keys = strips[whole * parts * PANELS + u];
            for (int64_t part = 1; part < parts; part++)
                join_strips<watched>(c, all_keys, strips[(whole * parts + part) * PANELS + u]);
            finish_strip<watched>(c, w, all_keys);
        }
        if (!w.finite()) finite = false;
    });
    return finite;
}

// Into how many parts the keys are cut: by the shape alone, never by the threads, so that these change no bit.
inline int64_t parts_of_keys(const Call& c) {
    constexpr int64_t enough = 8, least = 1024;  // tasks that keep a few threads busy; keys that are worth a task
    const int64_t tasks = c.B * c.G * Tiling(c).tiles;
    return tasks == 0 || tasks >= enough ? 1 : std::max<int64_t>(1, std::min(enough / tasks, c.m / least));
}

bool forward(const Call& c) {
    if (c.best) fill_all_best(c);
    const int64_t parts = parts_of_keys(c);
    if (parts > 1) return c.watch ? forward_parts<true>(c, parts) : forward_parts<false>(c, parts);
    return c.watch ? forward_tiles<true>(c) : forward_tiles<false>(c);
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
