// From products to logits: softcap, biases, masks and dropout on one block [keys, PW] of one panel of queries.
#pragma once

#include <algorithm>
#include <limits>

#include "blocks.h"
#include "thin.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

constexpr float kLowest = -3.402823466e38f;  // where a running maximum starts: finite, so that −inf − m is no NaN
constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int64_t BC = 64;                       // keys in a block
constexpr int PANELS = PW >= 64 ? 1 : 64 / PW;   // panels that share a block of keys while it is in cache

// One panel of queries: where it stands, and what each lane may see.
struct Panel {
    int64_t i = 0, count = 0;                   // first row, rows in use
    int64_t first = 0, last = 0;                // keys that some lane sees: first ≤ j < last
    int64_t all_from = 0, all_to = 0;           // keys that every lane sees
    alignas(64) int32_t lo[PW], hi[PW];
};

inline void place_panel(const Call& c, int64_t b, int64_t i, Panel& p) {
    p.i = i;
    p.count = std::min<int64_t>(PW, c.n - i);
    p.first = c.m, p.last = 0, p.all_from = 0, p.all_to = c.m;
    for (int x = 0; x < PW; x++) {  // lanes beyond the end repeat the last row, so that they change no bound
        const int64_t row = i + std::min<int64_t>(x, p.count - 1);
        const int64_t lo = c.lo ? c.lo[b * c.lo_b + row] : 0, hi = c.hi ? c.hi[b * c.hi_b + row] : c.m;
        p.lo[x] = static_cast<int32_t>(lo), p.hi[x] = static_cast<int32_t>(hi);
        if (lo < hi) p.first = std::min(p.first, lo), p.last = std::max(p.last, hi);
        p.all_from = std::max(p.all_from, lo), p.all_to = std::min(p.all_to, hi);
    }
    if (p.first >= p.last) p.first = p.last = 0;
}

// What all blocks of one head share.
struct Head {
    int64_t b = -1, h = -1, g = -1;
    bool has_line = false, has_other = false;
    bool line_hides = false;  // a bias of −inf is on the line
    bool hides = false;  // something beside the runs of keys may hide one
    const float* line = nullptr;  // line[i - j + m]: the sum of all terms on a line
};

inline float term_value(const Term& t, int64_t b, int64_t h, int64_t i, int64_t at) {
    const float* row = static_cast<const float*>(t.table.data) + b * t.table.b + h * t.table.h + i * t.table.i;
    return row[std::clamp<int64_t>(at - t.first, 0, t.columns - 1)];
}

// a + b, NaN where two finite numbers overflow: −inf would pass for hidden, a NaN is reported.
inline float added(float a, float b) {
    const float sum = a + b;
    return sum == kHidden && a != kHidden && b != kHidden ? std::numeric_limits<float>::quiet_NaN() : sum;
}

inline bool on_line(const Term& t) { return t.line && t.table.i == 0; }

inline void fill_line(const Call& c, Head& head, float* line) {
    for (const Term& t : c.terms) (on_line(t) ? head.has_line : head.has_other) = true;
    head.has_other |= static_cast<bool>(c.bias) || static_cast<bool>(c.mask);
    head.hides = head.has_other;
    if (!head.has_line) return;
    std::fill(line, line + c.n + c.m + PW, 0.0f);
    for (const Term& t : c.terms)
        if (on_line(t))
            for (int64_t s = 1; s < c.n + c.m; s++)
                line[s] = added(line[s], term_value(t, head.b, head.h, 0, c.m - s - t.offset));
    for (int64_t s = 1; s < c.n + c.m; s++) head.line_hides |= line[s] == kHidden;
    head.hides |= head.line_hides;
    head.line = line;
}

// Dense bias and mask, and terms off the line, for keys j … j + count − 1: −inf where hidden.
inline void fill_other(const Call& c, const Head& head, const Panel& p, int64_t j, int64_t count, float* other) {
    const auto* bias = static_cast<const float*>(c.bias.data) + (c.bias ? head.b * c.bias.b + head.h * c.bias.h : 0);
    const auto* mask = static_cast<const uint8_t*>(c.mask.data) + (c.mask ? head.b * c.mask.b + head.h * c.mask.h : 0);
    for (int x = 0; x < PW; x++) {
        const int64_t i = p.i + std::min<int64_t>(x, p.count - 1);
        for (int64_t y = 0; y < count; y++) {
            float s = c.bias ? bias[i * c.bias.i + (j + y) * c.bias.j] : 0.0f;
            if (c.mask && !mask[i * c.mask.i + (j + y) * c.mask.j]) s = kHidden;
            other[y * PW + x] = s;
        }
    }
    for (const Term& t : c.terms) {
        if (on_line(t)) continue;
        for (int x = 0; x < PW; x++) {
            const int64_t i = p.i + std::min<int64_t>(x, p.count - 1), from = t.query_at[i];
            if (from == kNowhere) continue;
            for (int64_t y = 0; y < count; y++)
                if (t.key_at[j + y] != kNowhere)
                    other[y * PW + x] =
                        added(other[y * PW + x], term_value(t, head.b, head.h, i, t.key_at[j + y] - from));
        }
    }
}

// What queries are multiplied by when a panel is packed. Hard attention compares the products themselves.
REGARD_INLINE float query_factor(const Call& c) { return c.best ? 1.0f : static_cast<float>(c.scale); }

// Products of `count` keys with a panel of queries, or with `lanes` rows of a thin strip (0: a panel, and keys in
// float32). At scale 0 they are 0 and not looked at, not even a NaN in them.
REGARD_INLINE void products(const Call& c, const Rows& keys, const float* queries, int64_t lanes, float* s,
                            int64_t count) {
    if (c.scale == 0)
        std::memset(s, 0, sizeof(float) * count * PW);
    else if (lanes)
        thin_dot(keys, queries, lanes, s, count, c.d);
    else
        dot(keys.floats(), keys.stride, queries, s, count, c.d);
}

// s + bias: a bias of −inf hides whatever s is; `odd` becomes NaN if the sum of two finite numbers is not.
REGARD_INLINE F biased(F s, F bias, F& odd) {
    const I hides = bias == all(kHidden);
    const F sum = select(hides, all(kHidden), s + bias);
    odd += select(hides, F{}, sum * 0.0f);
    return sum;
}

// Turns products of keys j … j + count − 1 into logits. `other` is scratch. `slope`, if given, receives ∂logit/∂product
// of the softcap. The products arrive scaled. `odd` becomes NaN if a number is not finite: −inf would pass for hidden.
REGARD_INLINE void to_logits(const Call& c, const Head& head, const Panel& p, int64_t j, int64_t count, float* s,
                             float* other, float* slope, F& odd) {
    if (c.softcap > 0) {
        odd += zero_if_finite(s, count * PW);
        const F cap = all(static_cast<float>(c.softcap)), down = all(static_cast<float>(1 / c.softcap));
        for (int64_t y = 0; y < count * NR; y++) {
            const F bent = tanh(load(s + y * W) * down);
            store(s + y * W, cap * bent);
            if (slope) store(slope + y * W, all(1.0f) - bent * bent);
        }
    }
    if (head.has_line)
        for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) {
                float* at = s + y * PW + x * W;
                const F bias = load(head.line + (p.i + x * W) - (j + y) + c.m);
                store(at, head.line_hides ? biased(load(at), bias, odd) : load(at) + bias);
            }
    if (!head.line_hides) odd += zero_if_finite(s, count * PW);
    if (head.has_other) {
        fill_other(c, head, p, j, count, other);
        for (int64_t y = 0; y < count * NR; y++) store(s + y * W, biased(load(s + y * W), load(other + y * W), odd));
    }
    if (j < p.all_from || j + count > p.all_to)
        for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
            for (int x = 0; x < NR; x++) {
                float* at = s + y * PW + x * W;
                const I key = all(static_cast<int32_t>(j + y));
                const I see = (key >= load(p.lo + x * W)) & (key < load(p.hi + x * W));
                store(at, select(see, load(at), all(kHidden)));
            }
}

// Hard attention: of products and the rows' best, keeps the logits (biases) of the keys that tie; all others lose.
REGARD_INLINE void to_hard_logits(const Call& c, const Head& head, const Panel& p, int64_t j, int64_t count, float* s,
                                  float* other, float* logits, const F* best, F& odd) {
    odd += zero_if_finite(s, count * PW);
    std::memset(logits, 0, sizeof(float) * count * PW);
    to_logits(c, head, p, j, count, logits, other, nullptr, odd);
    for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) {
            float* at = s + y * PW + x * W;
            store(at, select(load(at) == best[x], load(logits + y * PW + x * W), all(kHidden)));
        }
}

// Raises `best` to the largest visible product of a block; a visible NaN makes it NaN, and it stays so.
REGARD_INLINE void raise_best(const Call& c, const Head& head, const Panel& p, int64_t j, int64_t count,
                              const float* s, float* other, float* logits, F* best, F& odd) {
    odd += zero_if_finite(s, count * PW);
    std::memset(logits, 0, sizeof(float) * count * PW);
    to_logits(c, head, p, j, count, logits, other, nullptr, odd);
    for (int64_t y = 0; y < count; y++)
#pragma GCC unroll 4
        for (int x = 0; x < NR; x++) {
            const F product = load(s + y * PW + x * W);
            const F seen = select(load(logits + y * PW + x * W) == all(kHidden), all(kHidden), product);
            best[x] = select(is_nan(seen), seen, larger(seen, best[x]));
        }
}

// murmur3's finaliser on 32-bit words (scores.py).
template <class T>
REGARD_INLINE T mix_bits(T x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// The part of the dropout hash that a row fixes.
REGARD_INLINE uint32_t row_hash(int64_t seed, int64_t b, int64_t h, int64_t i) {
    const auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    uint32_t r = mix_bits(low ^ mix_bits(high) ^ (static_cast<uint32_t>(b) * 0x9E3779B1u));
    r = mix_bits(r ^ (static_cast<uint32_t>(h) * 0x85EBCA77u));
    return mix_bits(r ^ (static_cast<uint32_t>(i) * 0xC2B2AE3Du));
}

// weights[y][lane] times 0 or 1/(1 − p), into `kept`.
REGARD_INLINE void drop(const Call& c, const uint32_t* rows, int64_t j, int64_t count, const float* weights,
                        float* kept) {
    const double edge = std::ceil(c.dropout * 4294967296.0);
    const bool none = edge >= 4294967296.0;
    const auto least = none ? 0u : static_cast<uint32_t>(edge);
    const F factor = all(none ? 0.0f : static_cast<float>(1 / (1 - c.dropout)));
    for (int64_t y = 0; y < count; y++) {
        const uint32_t key = mix_bits(static_cast<uint32_t>(j + y) + 0x27D4EB2Fu);
        for (int x = 0; x < NR; x++) {
            U r;
            std::memcpy(&r, rows + x * W, sizeof r);
            const I keep = reinterpret_cast<I>(mix_bits(r ^ key) >= least);
            const int64_t place = y * PW + x * W;
            store(kept + place, select(keep, load(weights + place) * factor, F{}));
        }
    }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
