// The second pass over the weights A = e^(s − high) / total: key mass, profile, each row's largest weights, and its
// weight on bins of keys.
//
// Sums over rows are whole numbers of 2^−32, kept by each thread for one head and added to the shared ones when the head
// changes: no order of threads changes a bit. Logits are those of the forward pass, which has found them finite.
#pragma once

#include "forward.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

struct LookScratch : ForwardScratch {
    const Call& call;
    const Look& what;
    int64_t head = -1;  // of whom these sums are
    std::vector<int64_t> key_mass, profile, profile_rows;
    std::vector<float> best;       // [PW, top]: logits, largest first
    std::vector<int64_t> best_at;  // their keys, −1 beyond the visible ones
    int64_t bin = 0;               // of the key that comes next

    LookScratch(const Call& c, const Look& look)
        : ForwardScratch(c), call(c), what(look), key_mass(look.key_mass ? c.m : 0),
          profile(look.profile ? 2 * look.radius + 1 : 0), profile_rows(profile.size()), best(PW * look.top),
          best_at(PW * look.top) {}
    LookScratch(const LookScratch&) = delete;
    ~LookScratch() { flush(); }

    void belongs_to(int64_t h) {
        if (h == head) return;
        flush();
        head = h;
    }
    void flush() {
        if (head < 0) return;
        add(key_mass, what.key_mass);
        add(profile, what.profile);
        add(profile_rows, what.profile_rows);
    }

private:
    void add(std::vector<int64_t>& from, int64_t* to) const {
        for (size_t t = 0; t < from.size(); t++)
            if (from[t]) __atomic_fetch_add(to + head * from.size() + t, from[t], __ATOMIC_RELAXED), from[t] = 0;
    }
};

// Logits of a block, before they become weights: the largest of each row, lower keys first among equals.
inline void look_for_top(const Panel& p, int64_t j, int64_t count, const float* s, const float* seen, LookScratch& w) {
    const int64_t k = w.what.top;
    F high[NR];
    for (int x = 0; x < NR; x++) high[x] = all(kHidden);
    for (int64_t y = 0; y < count; y++)
        for (int x = 0; x < NR; x++) high[x] = larger(load(s + y * PW + x * W), high[x]);
    for (int64_t x = 0; x < p.count; x++) {
        float* best = w.best.data() + x * k;
        int64_t* at = w.best_at.data() + x * k;
        if (at[k - 1] >= 0 && high[x / W][x % W] <= best[k - 1]) continue;  // nearly always, after the first blocks
        for (int64_t y = 0; y < count; y++) {
            const float logit = s[y * PW + x];
            if (seen[y * PW + x] == kHidden || (at[k - 1] >= 0 && logit <= best[k - 1])) continue;
            int64_t place = k - 1;
            for (; place > 0 && (at[place - 1] < 0 || logit > best[place - 1]); place--)
                best[place] = best[place - 1], at[place] = at[place - 1];
            best[place] = logit, at[place] = j + y;
        }
    }
}

inline void look_at_profile(const Panel& p, const uint8_t* counted, int64_t j, int64_t count, const float* weights,
                            const uint8_t* seen, LookScratch& w) {
    const int64_t radius = w.what.radius;
    for (int64_t x = 0; x < p.count; x++) {
        if (!counted[x]) continue;
        const int64_t at = p.i + x + w.what.shift;
        const int64_t from = std::max(j, at - radius), to = std::min(j + count, at + radius + 1);
        for (int64_t key = from; key < to; key++) {
            if (!seen[(key - j) * PW + x]) continue;
            w.profile[key - at + radius] += in_units(weights[(key - j) * PW + x]);
            w.profile_rows[key - at + radius]++;
        }
    }
}

// Adds the weights of keys j … j + count − 1 to their bins; `bin` is that of key j, and is left at that of the last key.
inline void look_at_bins(const Panel& p, float* rows, int64_t j, int64_t count, const float* weights, int64_t& bin,
                         const Look& what) {
    for (int64_t y = 0; y < count;) {
        while (what.edges[bin + 1] <= j + y) bin++;
        const int64_t stop = std::min(count, what.edges[bin + 1] - j);
        F part[NR];
        for (int x = 0; x < NR; x++) part[x] = F{};
        for (; y < stop; y++)
            for (int x = 0; x < NR; x++) part[x] += load(weights + y * PW + x * W);
        for (int64_t x = 0; x < p.count; x++) rows[x * what.bins + bin] += part[x / W][x % W];
    }
}

// One block of keys for one strip, whose `run` holds highs and 1/totals.
inline void look_block(const Call& c, int64_t j, int64_t count, const Rows& keys, LookScratch& w, Strip& strip) {
    float* s = w.scores;
    const Panel& p = strip.p;
    products(c, keys, strip.queries, strip.thin ? p.count : 0, s, count);
    if (c.best)
        to_hard_logits(c, strip.head, p, j, count, s, w.other, w.kept, strip.run.best, w.odd);
    else
        to_logits(c, strip.head, p, j, count, s, w.other, nullptr, w.odd);
    const float* logits = c.best ? w.kept : s;  // a key that lost a hard contest was visible all the same
    if (w.what.top) look_for_top(p, j, count, s, logits, w);
    if (!w.what.key_mass && !w.what.profile && !w.what.bins) return;
    alignas(64) uint8_t seen[BC * PW];
    const int64_t first = p.i + w.what.shift - w.what.radius, last = p.i + p.count + w.what.shift + w.what.radius;
    const bool near = w.what.profile && j + count > first && j < last;
    if (near)
        for (int64_t t = 0; t < count * PW; t++) seen[t] = logits[t] != kHidden;
    for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) {
            float* at = s + y * PW + x * W;
            store(at, exp(load(at) - strip.run.top[x]) * strip.run.total[x]);
        }
    const int64_t first_row = (strip.head.b * c.H + strip.head.h) * c.n + p.i;
    if (w.what.bins) look_at_bins(p, w.what.masses + first_row * w.what.bins, j, count, s, w.bin, w.what);
    if (!w.what.key_mass && !near) return;
    const uint8_t* counted = w.what.counted + first_row;
    w.belongs_to(strip.head.h);
    if (near) look_at_profile(p, counted, j, count, s, seen, w);
    if (!w.what.key_mass) return;
    alignas(64) float counts[PW] = {};
    for (int64_t x = 0; x < p.count; x++) counts[x] = counted[x];
    for (int64_t y = 0; y < count; y++) {
        F mass = F{};
        for (int x = 0; x < NR; x++) mass += load(s + y * PW + x * W) * load(counts + x * W);
        w.key_mass[j + y] += in_units(sum(mass));
    }
}

inline void look_at_strip(const Call& c, LookScratch& w, Strip& strip) {
    const Panel& p = strip.p;
    const int64_t first_row = (strip.head.b * c.H + strip.head.h) * c.n + p.i, k = w.what.top;
    for (int x = 0; x < PW; x++) {
        const int64_t row = first_row + std::min<int64_t>(x, p.count - 1);
        const bool empty = c.total[row] == 0;
        strip.run.top[x / W][x % W] = empty ? 0.0f : static_cast<float>(c.high[row]);
        strip.run.total[x / W][x % W] = empty ? 0.0f : static_cast<float>(1 / c.total[row]);
    }
    std::fill(w.best_at.begin(), w.best_at.end(), -1);
    int64_t first = p.first, last = p.last;
    w.bin = 0;
    if (!k && !w.what.key_mass && !w.what.bins) {  // a profile needs the keys around the queries only
        first = std::max(first, p.i + w.what.shift - w.what.radius);
        last = std::min(last, p.i + p.count + w.what.shift + w.what.radius);
    }
    if (w.what.bins) first = std::max(first, w.what.edges[0]), last = std::min(last, w.what.edges[w.what.bins]);
    for (int64_t j = first; j < last; j += BC) {
        const int64_t count = std::min(BC, last - j);
        look_block(c, j, count, float_rows(c.k, c.dtype, strip.head.b, strip.head.g, j, count, c.d, w.keys), w, strip);
    }
    for (int64_t x = 0; x < p.count; x++)
        for (int64_t t = 0; t < k; t++) {
            const int64_t to = (first_row + x) * k + t, at = w.best_at[x * k + t];
            const float low = w.best[x * k + t] - strip.run.top[x / W][x % W];
            w.what.top_weights[to] = at < 0 ? 0.0f : std::exp(low) * strip.run.total[x / W][x % W];
            w.what.top_at[to] = at;
        }
}

void look(const Call& c, const Look& what) {
    if (c.best) fill_all_best(c);
    const int64_t panels = (c.n + PW - 1) / PW;
    run_tasks<LookScratch>(
        c.B * c.H * panels, c.threads, [&] { return LookScratch(c, what); },
        [&](int64_t task, LookScratch& w) {
            Strip strip;
            start_strip<false>(c, w.enter(c, task / panels), task % panels * PW, w.panels, w.sums, nullptr, w, strip);
            look_at_strip(c, w, strip);
        });
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
