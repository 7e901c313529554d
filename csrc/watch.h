// Observables of rows and the pooled map, measured in the forward pass: sums that fade with the running maximum.
//
// With x = s − top and w = e^x:  T = Σ w·x,  D = Σ w·|δ|,  O = Σ w·δ. A sink starts as one more term with x = 0.
// At the end  entropy = log total − T/total,  distance = D/total,  offset = O/total.
#pragma once

#include "scores.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// The running sums of one panel.
struct Watching {
    F heat[NR], distance[NR], offset[NR], sink[NR], local[NR];
    F peak[NR], place[NR];   // the largest logit of a key, and where each lane's query stands
    I peak_at[NR], visible[NR];
    float *mass, *mass_top;  // [bins, PW]: weight on each bin of keys, at the maximum it was summed with
};

inline void start_watching(const Call& c, const Panel& p, float* room, Watching& w) {
    const Watch& what = *c.watch;
    for (int x = 0; x < NR; x++) {
        w.heat[x] = w.distance[x] = w.offset[x] = w.sink[x] = w.local[x] = F{};
        w.peak[x] = all(kHidden);
        w.peak_at[x] = all(int32_t{-1});
        w.visible[x] = I{};
        for (int y = 0; y < W; y++) w.place[x][y] = static_cast<float>(p.i + x * W + y + what.shift);
    }
    w.mass = room;
    w.mass_top = room + what.bins * PW;
    for (int64_t t = 0; t < what.bins * PW; t++) w.mass[t] = 0, w.mass_top[t] = kLowest;
}

// The maximum rose from `before` to `now` by a factor `fade`: everything summed so far fades.
REGARD_INLINE void fade_watching(Watching& w, const F* before, const F* now, const F* total, const F* fade) {
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) {
        // Where the fade is complete the difference may be as large as floats get, and must not become 0 · inf.
        const F down = larger(all(-1000.0f), before[x] - now[x]);
        w.heat[x] = fade[x] * (w.heat[x] + down * total[x]);
        w.distance[x] *= fade[x];
        w.offset[x] *= fade[x];
        w.sink[x] *= fade[x];
        w.local[x] *= fade[x];
    }
}

// Logits of a block, before they become weights: the highest key, and how many are visible.
REGARD_INLINE void watch_logits(const Head& head, int64_t j, int64_t count, const float* s, const float* seen,
                                const F* top, Watching& w) {
    I rose[NR];
    bool any_rose = false;
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) {
        rose[x] = top[x] > w.peak[x];
        any_rose |= any(rose[x]);
        w.peak[x] = larger(top[x], w.peak[x]);
    }
    if (any_rose)
        for (int64_t y = count - 1; y >= 0; y--)  // downwards: the lowest key of equals stays
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) {
                const I here = rose[x] & (load(s + y * PW + x * W) == w.peak[x]);
                w.peak_at[x] = here ? all(static_cast<int32_t>(j + y)) : w.peak_at[x];
            }
    if (head.hides)
        for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) w.visible[x] -= load(seen + y * PW + x * W) != all(kHidden);
}

// Weights of keys j … j + count − 1: what lies near the query, and on the first keys. Most blocks have neither.
REGARD_INLINE void watch_places(const Call& c, int64_t j, int64_t count, const float* weights, Watching& w) {
    const Watch& what = *c.watch;
    const F first = all(static_cast<float>(j));
    const F radius = all(static_cast<float>(what.radius));
    F lowest = first - w.place[NR - 1], highest = first + all(static_cast<float>(count - 1)) - w.place[0];
    const bool near = lowest[W - 1] <= what.radius && highest[0] >= -static_cast<float>(what.radius);
    if (near)
        for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) {
                const F delta = all(static_cast<float>(j + y)) - w.place[x];
                const I inside = (delta <= radius) & (delta >= -radius);
                w.local[x] += select(inside, load(weights + y * PW + x * W), F{});
            }
    for (int64_t y = 0; j + y < what.sinks && y < count; y++)
        for (int x = 0; x < NR; x++) w.sink[x] += load(weights + y * PW + x * W);
}

// The key after the last of bin ⌊j·g/m⌋.
REGARD_INLINE int64_t bin_end(const Call& c, int64_t bin) { return ((bin + 1) * c.m + c.watch->bins - 1) / c.watch->bins; }

// Adds `part`, the weights of one bin summed under the maximum `top`.
REGARD_INLINE void add_to_bin(Watching& w, int64_t bin, const F* part, const F* top) {
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) {
        float *mass = w.mass + bin * PW + x * W, *at = w.mass_top + bin * PW + x * W;
        store(mass, load(mass) * exp(load(at) - top[x]) + part[x]);
        store(at, top[x]);
    }
}

// Turns logits of keys j … j + count − 1 into weights under `top`, and adds them to every sum.
REGARD_INLINE void watch_weights(const Call& c, int64_t j, int64_t count, float* s, const F* top, F* total,
                                 Watching& w) {
    const int64_t bins = c.watch->bins;
    F block[NR];  // summed apart from the bins, in the order of an unwatched call: watching changes no bit of the output
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) block[x] = F{};
    for (int64_t y = 0; y < count;) {
        const int64_t bin = bins ? (j + y) * bins / c.m : 0;
        const int64_t stop = bins ? std::min(count, bin_end(c, bin) - j) : count;
        F part[NR];
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) part[x] = F{};
        for (; y < stop; y++)
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) {
                const F low = load(s + y * PW + x * W) - top[x], weight = exp(low);
                const F delta = all(static_cast<float>(j + y)) - w.place[x];
                store(s + y * PW + x * W, weight);
                block[x] += weight;
                part[x] += weight;
                w.heat[x] += weight * larger(all(-1000.0f), low);  // a hidden key: 0 · −1000, not 0 · −inf
                w.distance[x] += weight * larger(delta, -delta);
                w.offset[x] += weight * delta;
            }
        if (bins) add_to_bin(w, bin, part, top);
    }
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) total[x] += block[x];
    watch_places(c, j, count, s, w);
}

// Writes the row values of a panel and adds its rows to `map` [row bins of the tile, bins], whose first is `first_bin`.
inline void finish_watching(const Call& c, const Head& head, const Panel& p, const F* top, const F* total,
                            const Watching& w, float* map, int64_t first_bin) {
    const Watch& what = *c.watch;
    for (int64_t x = 0; x < p.count; x++) {
        const int u = static_cast<int>(x) / W, v = static_cast<int>(x) % W;
        const int64_t i = p.i + x, row = (head.b * c.H + head.h) * c.n + i;
        const int64_t visible = head.hides ? w.visible[u][v] : std::max<int64_t>(0, p.hi[x] - p.lo[x]);
        const float sum = total[u][v], inverse = sum == 0 ? 0.0f : 1 / sum;
        const bool some = visible > 0;
        what.entropy[row] = sum == 0 ? 0.0f : std::log(sum) - w.heat[u][v] * inverse;
        what.peak[row] = some ? std::exp(w.peak[u][v] - top[u][v]) * inverse : 0.0f;
        what.peak_at[row] = some ? w.peak_at[u][v] : -1;
        what.offset[row] = w.offset[u][v] * inverse;
        what.distance[row] = w.distance[u][v] * inverse;
        what.sink[row] = w.sink[u][v] * inverse;
        what.local[row] = w.local[u][v] * inverse;
        what.visible[row] = visible;
        if (!what.bins || !some || (what.real && !what.real[head.b * what.real_b + i])) continue;
        float* to = map + (i * what.bins / c.n - first_bin) * what.bins;
        for (int64_t bin = 0; bin < what.bins; bin++)
            if (const float mass = w.mass[bin * PW + x]) to[bin] += mass * std::exp(w.mass_top[bin * PW + x] - top[u][v]) * inverse;
    }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
