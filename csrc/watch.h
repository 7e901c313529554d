// Observables of rows and the pooled map, measured in the forward pass: sums that fade with the running maximum.
//
// With x = s − top and w = e^x:  T = Σ w·x,  D = Σ w·|δ|,  O = Σ w·δ. A sink starts as one more term with x = 0.
// At the end  entropy = log total − T/total,  distance = D/total,  offset = O/total.
#pragma once

#include "scores.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// A sum of weights in whole numbers of 2^−32, rounded: 2^31 rows fit. (A call of llrint or ldexp costs more than the sum.)
REGARD_INLINE int64_t in_units(float x) { return static_cast<int64_t>(static_cast<double>(x) * 0x1p32 + 0.5); }

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
    std::fill(w.mass, w.mass_top, 0.0f);
    std::fill(w.mass_top, w.mass_top + what.bins * PW, kLowest);
}

// The maximum rose from `before` to `now` by a factor `fade`: everything summed so far fades.
REGARD_INLINE void fade_watching(Watching& w, const F* before, const F* now, const F* total, const F* fade) {
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) {
        // Limited: where the fade is complete the difference may be as large as floats get, and 0 · inf is NaN.
        w.heat[x] = fade[x] * (w.heat[x] + limited(before[x] - now[x]) * total[x]);
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

// Turns logits of keys j + from … j + to − 1 into weights under `top`; sums them, and their distance from key j.
template <bool twice>
REGARD_INLINE void weigh(int64_t from, int64_t to, float* s, const F* top, F* block, F* part, F* far, Watching& w) {
    for (int64_t y = from; y < to; y++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) {
            const F low = limited(load(s + y * PW + x * W) - top[x]), weight = exp_of_limited(low);
            store(s + y * PW + x * W, weight);
            if (twice) part[x] += weight;
            block[x] += weight;
            w.heat[x] += weight * low;
            far[x] += weight * all(static_cast<float>(y));
        }
}

// Turns logits of keys j … j + count − 1 into weights under `top`, and adds them to every sum.
REGARD_INLINE void watch_weights(const Call& c, int64_t j, int64_t count, float* s, const F* top, F* total,
                                 Watching& w) {
    const int64_t bins = c.watch->bins;
    // `block` is summed in the order of an unwatched call, apart from the bins: watching changes no bit of the output.
    F block[NR], far[NR];
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) block[x] = far[x] = F{};
    const int64_t first_bin = bins ? j * bins / c.m : 0;
    if (!bins || bin_end(c, first_bin) >= j + count) {
        weigh<false>(0, count, s, top, block, block, far, w);
        if (bins) add_to_bin(w, first_bin, block, top);
    } else {
        for (int64_t y = 0, stop; y < count; y = stop) {
            const int64_t bin = (j + y) * bins / c.m;
            stop = std::min(count, bin_end(c, bin) - j);
            F part[NR];
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) part[x] = F{};
            weigh<true>(y, stop, s, top, block, part, far, w);
            add_to_bin(w, bin, part, top);
        }
    }
    // Σ w·δ = Σ w·(key − j) + (j − query)·Σ w; where all keys lie on one side of all queries, |δ| is δ or −δ.
    const bool after = static_cast<float>(j) >= w.place[NR - 1][W - 1];
    const bool before = static_cast<float>(j + count - 1) <= w.place[0][0];
#pragma GCC unroll 4
    for (int x = 0; x < NR; x++) {
        const F shift = far[x] + (all(static_cast<float>(j)) - w.place[x]) * block[x];
        w.offset[x] += shift;
        if (after || before) w.distance[x] += after ? shift : -shift;
        total[x] += block[x];
    }
    if (!after && !before)
        for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) {
                const F delta = all(static_cast<float>(j + y)) - w.place[x];
                w.distance[x] += load(s + y * PW + x * W) * larger(delta, -delta);
            }
    watch_places(c, j, count, s, w);
}

// Joins two parts of one panel's keys, `b`'s after `a`'s: both were summed under maxima of their own and fade to `top`.
inline void join_watching(const Call& c, const F* top, const F* a_top, const F* a_total, const F* a_fade, Watching& a,
                          const F* b_top, const F* b_total, const F* b_fade, Watching& b) {
    fade_watching(a, a_top, top, a_total, a_fade);
    fade_watching(b, b_top, top, b_total, b_fade);
    for (int x = 0; x < NR; x++) {
        a.heat[x] += b.heat[x], a.distance[x] += b.distance[x], a.offset[x] += b.offset[x];
        a.sink[x] += b.sink[x], a.local[x] += b.local[x], a.visible[x] += b.visible[x];
        const I higher = b.peak[x] > a.peak[x];
        a.peak_at[x] = higher ? b.peak_at[x] : a.peak_at[x];
        a.peak[x] = larger(a.peak[x], b.peak[x]);
    }
    for (int64_t t = 0; t < c.watch->bins * PW; t += W) {
        const F at = larger(load(a.mass_top + t), load(b.mass_top + t));
        store(a.mass + t, load(a.mass + t) * exp(load(a.mass_top + t) - at) +
                              load(b.mass + t) * exp(load(b.mass_top + t) - at));
        store(a.mass_top + t, at);
    }
}

// Adds the panel's rows to the map, each times its `share`: 1/total, or 0 for a row that does not count. Sums are whole
// numbers of 2^−32, so that neither their order nor the number of threads changes a bit.
inline void add_to_map(const Call& c, const Head& head, const Panel& p, const F* top, const float* share,
                       const Watching& w) {
    const int64_t g = c.watch->bins;
    alignas(64) float mass[PW];
    int64_t rows[PW];
    for (int64_t x = 0; x < p.count; x++) rows[x] = (p.i + x) * g / c.n;
    for (int64_t bin = 0; bin < g; bin++) {
        for (int x = 0; x < NR; x++) {
            const int64_t at = bin * PW + x * W;
            store(mass + x * W, load(w.mass + at) * exp(load(w.mass_top + at) - top[x]) * load(share + x * W));
        }
        for (int64_t x = 0; x < p.count;) {
            const int64_t row = rows[x];
            float total = 0;
            for (; x < p.count && rows[x] == row; x++) total += mass[x];
            if (total > 0)
                __atomic_fetch_add(c.watch->map + (head.h * g + row) * g + bin,
                                   in_units(total), __ATOMIC_RELAXED);
        }
    }
}

// Writes the row values of a panel and adds its rows to the map.
inline void finish_watching(const Call& c, const Head& head, const Panel& p, const F* top, const F* total,
                            const Watching& w) {
    const Watch& what = *c.watch;
    alignas(64) float share[PW] = {};
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
        if (some && (!what.real || what.real[head.b * what.real_b + i])) share[x] = inverse;
    }
    if (what.bins) add_to_map(c, head, p, top, share, w);
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
