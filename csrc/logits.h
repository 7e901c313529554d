// Turns products q·k into logits (softcap, biases, masks) for one block [keys, PW]: some keys and one panel of queries.
// Also has dropout. Panels, lanes and PW are defined in simd.h.
#pragma once

#include <algorithm>
#include <limits>

#include "few_rows.h"
#include "matmul_blocks.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

constexpr float kLowest = -3.402823466e38f;  // the initial running maximum: finite, so that −inf − max is not NaN
constexpr float kHidden = -std::numeric_limits<float>::infinity();  // the logit of a key that a query may not see

constexpr int64_t KEY_BLOCK = 64;                        // keys in a block
constexpr int PANELS_PER_TILE = PW >= 64 ? 1 : 64 / PW;  // panels that share a block of keys while it is in cache

// Which rows a panel of queries holds, and which keys each lane may see according to lo and hi. Masks and biases may
// hide more keys.
struct Panel {
    int64_t first_row = 0;
    int64_t count = 0;  // number of rows in use
    // No lane sees a key outside first_key ≤ j < end_key. Every lane sees all keys all_see_from ≤ j < all_see_to.
    int64_t first_key = 0;
    int64_t end_key = 0;
    int64_t all_see_from = 0;
    int64_t all_see_to = 0;
    // A lane sees the keys lo ≤ j < hi.
    alignas(64) int32_t lo[PW];
    alignas(64) int32_t hi[PW];
};

inline void init_panel(const AttentionCall& call, int64_t b, int64_t first_row, Panel& panel) {
    panel.first_row = first_row;
    panel.count = std::min<int64_t>(PW, call.N - first_row);
    panel.first_key = call.M;
    panel.end_key = 0;
    panel.all_see_from = 0;
    panel.all_see_to = call.M;
    for (int lane = 0; lane < PW; lane++) {
        // Lanes beyond the last row repeat it, so that they change no bound.
        const int64_t row = first_row + std::min<int64_t>(lane, panel.count - 1);
        int64_t lo = 0;
        int64_t hi = call.M;
        // Clamped, so that a wrong value in lo or hi cannot lead to a key that does not exist.
        if (call.lo) lo = std::clamp<int64_t>(call.lo[b * call.lo_batch_stride + row], 0, call.M);
        if (call.hi) hi = std::clamp<int64_t>(call.hi[b * call.hi_batch_stride + row], 0, call.M);
        panel.lo[lane] = static_cast<int32_t>(lo);
        panel.hi[lane] = static_cast<int32_t>(hi);
        if (lo < hi) {
            panel.first_key = std::min(panel.first_key, lo);
            panel.end_key = std::max(panel.end_key, hi);
        }
        panel.all_see_from = std::max(panel.all_see_from, lo);
        panel.all_see_to = std::min(panel.all_see_to, hi);
    }
    if (panel.first_key >= panel.end_key) {
        panel.first_key = 0;
        panel.end_key = 0;
    }
}

// The values that all blocks of one head share.
struct HeadContext {
    int64_t b = -1;
    int64_t h = -1;
    int64_t g = -1;
    bool has_toeplitz = false;
    bool has_dense = false;          // a dense bias, a dense mask, or a term that is not Toeplitz
    bool toeplitz_hides = false;     // some Toeplitz bias is −inf
    bool hides = false;              // something besides lo and hi may hide a key
    const float* toeplitz = nullptr;  // toeplitz[i − j + M]: the sum of all Toeplitz terms
};

// The bias of a term for query i and a key at this offset from the query.
inline float term_value(const RelativeTerm& term, int64_t b, int64_t h, int64_t i, int64_t offset) {
    const TensorView& table = term.table;
    const float* row = static_cast<const float*>(table.data) + b * table.batch_stride + h * table.head_stride +
                       i * table.row_stride;
    return row[std::clamp<int64_t>(subtract_positions(offset, term.first_offset), 0, term.columns - 1)];
}

// a + b, but NaN if the sum of two finite numbers overflows to −inf: −inf would hide the key silently, while a NaN is
// reported.
inline float add_biases(float a, float b) {
    const float sum = a + b;
    if (sum == kHidden && a != kHidden && b != kHidden) return std::numeric_limits<float>::quiet_NaN();
    return sum;
}

// Fills `head`, whose b, h and g are set already, and its vector of Toeplitz biases.
inline void init_head(const AttentionCall& call, HeadContext& head, float* toeplitz) {
    for (const RelativeTerm& term : call.terms) {
        if (term.is_toeplitz)
            head.has_toeplitz = true;
        else
            head.has_dense = true;
    }
    if (call.bias || call.mask) head.has_dense = true;
    head.hides = head.has_dense;
    if (!head.has_toeplitz) return;

    std::fill(toeplitz, toeplitz + call.N + call.M + PW, 0.0f);
    for (const RelativeTerm& term : call.terms) {
        if (!term.is_toeplitz) continue;
        for (int64_t t = 1; t < call.N + call.M; t++) {
            const int64_t offset = subtract_positions(call.M - t, term.query_offset);
            const float value = term_value(term, head.b, head.h, 0, offset);
            toeplitz[t] = add_biases(toeplitz[t], value);
        }
    }
    for (int64_t t = 1; t < call.N + call.M; t++) head.toeplitz_hides |= toeplitz[t] == kHidden;
    head.hides |= head.toeplitz_hides;
    head.toeplitz = toeplitz;
}

// For keys j … j + count − 1: dense[key][lane] is the dense bias plus the terms that are not Toeplitz, or −inf if the
// mask hides the key.
inline void fill_dense_bias(const AttentionCall& call, const HeadContext& head, const Panel& panel, int64_t j,
                            int64_t count, float* dense) {
    const auto* bias = static_cast<const float*>(call.bias.data);
    const auto* mask = static_cast<const uint8_t*>(call.mask.data);
    if (bias) bias += head.b * call.bias.batch_stride + head.h * call.bias.head_stride;
    if (mask) mask += head.b * call.mask.batch_stride + head.h * call.mask.head_stride;
    for (int lane = 0; lane < PW; lane++) {
        const int64_t i = panel.first_row + std::min<int64_t>(lane, panel.count - 1);
        for (int64_t key = 0; key < count; key++) {
            float value = 0.0f;
            if (bias) value = bias[i * call.bias.row_stride + (j + key) * call.bias.column_stride];
            if (mask && !mask[i * call.mask.row_stride + (j + key) * call.mask.column_stride]) value = kHidden;
            dense[key * PW + lane] = value;
        }
    }
    for (const RelativeTerm& term : call.terms) {
        if (term.is_toeplitz) continue;
        for (int lane = 0; lane < PW; lane++) {
            const int64_t i = panel.first_row + std::min<int64_t>(lane, panel.count - 1);
            const int64_t query_position = term.query_positions[i];
            if (query_position == kNoPosition) continue;
            for (int64_t key = 0; key < count; key++) {
                const int64_t key_position = term.key_positions[j + key];
                if (key_position == kNoPosition) continue;
                const int64_t offset = subtract_positions(key_position, query_position);
                const float value = term_value(term, head.b, head.h, i, offset);
                dense[key * PW + lane] = add_biases(dense[key * PW + lane], value);
            }
        }
    }
}

// The factor of the queries before the products are computed. Hard attention compares unscaled products.
REGARD_INLINE float query_factor(const AttentionCall& call) {
    return call.hard_max ? 1.0f : static_cast<float>(call.scale);
}

// scores[key][lane] = keys[key] · queries[lane], for `count` keys. If few_rows is 0, `queries` is a packed panel and
// the keys are float32. Otherwise `queries` holds few_rows unpacked rows, and the keys may have any dtype.
// At scale 0 the products are 0, and q and k are not read: a NaN in them has no effect.
REGARD_INLINE void products(const AttentionCall& call, const Rows& keys, const float* queries, int64_t few_rows,
                            float* scores, int64_t count) {
    if (call.scale == 0)
        std::memset(scores, 0, sizeof(float) * count * PW);
    else if (few_rows)
        few_rows_dot(keys, queries, few_rows, scores, count, call.D);
    else
        dot_products(keys.floats(), keys.stride, queries, scores, count, call.D);
}

// score + bias. A bias of −inf hides the key whatever the score is. If the bias is not −inf and the sum is not finite,
// `nonfinite` becomes NaN.
REGARD_INLINE Floats add_bias(Floats score, Floats bias, Floats& nonfinite) {
    const Ints hides = bias == broadcast(kHidden);
    const Floats sum = select(hides, broadcast(kHidden), score + bias);
    nonfinite += select(hides, Floats{}, sum * 0.0f);
    return sum;
}

// softcap·tanh(s / softcap), in place; `slope`, if given, receives the derivative.
REGARD_INLINE void apply_softcap(const AttentionCall& call, int64_t count, float* s, float* slope) {
    const Floats cap = broadcast(static_cast<float>(call.softcap));
    const Floats inverse = broadcast(static_cast<float>(1 / call.softcap));
    for (int64_t t = 0; t < count * NR; t++) {
        const Floats tanh_s = tanh(load(s + t * W) * inverse);
        store(s + t * W, cap * tanh_s);
        if (slope) store(slope + t * W, broadcast(1.0f) - tanh_s * tanh_s);
    }
}

// Turns the scaled products s of keys j … j + count − 1 into logits, in place. `dense` is scratch memory. `slope`, if
// given, receives the derivative of the softcap. `nonfinite` becomes NaN if a score of a visible key is not finite,
// because −inf would look like a hidden key.
REGARD_INLINE void to_logits(const AttentionCall& call, const HeadContext& head, const Panel& panel, int64_t j,
                             int64_t count, float* s, float* dense, float* slope, Floats& nonfinite) {
    if (call.softcap > 0) {
        nonfinite += zero_if_finite(s, count * PW);
        apply_softcap(call, count, s, slope);
    }
    if (head.has_toeplitz)
        for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) {
                float* at = s + key * PW + v * W;
                const Floats bias = load(head.toeplitz + (panel.first_row + v * W) - (j + key) + call.M);
                store(at, head.toeplitz_hides ? add_bias(load(at), bias, nonfinite) : load(at) + bias);
            }
    // If a Toeplitz bias hides keys, add_bias has made this check already.
    if (!head.toeplitz_hides) nonfinite += zero_if_finite(s, count * PW);
    if (head.has_dense) {
        fill_dense_bias(call, head, panel, j, count, dense);
        for (int64_t t = 0; t < count * NR; t++)
            store(s + t * W, add_bias(load(s + t * W), load(dense + t * W), nonfinite));
    }
    if (j < panel.all_see_from || j + count > panel.all_see_to)
        for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) {
                float* at = s + key * PW + v * W;
                const Ints index = broadcast(static_cast<int32_t>(j + key));
                const Ints visible = (index >= load(panel.lo + v * W)) & (index < load(panel.hi + v * W));
                store(at, select(visible, load(at), broadcast(kHidden)));
            }
}

// For hard attention: the biases of a block without its products, and −inf where a key is hidden.
REGARD_INLINE void fill_biases(const AttentionCall& call, const HeadContext& head, const Panel& panel, int64_t j,
                               int64_t count, float* biases, float* dense, Floats& nonfinite) {
    std::memset(biases, 0, sizeof(float) * count * PW);
    to_logits(call, head, panel, j, count, biases, dense, nullptr, nonfinite);
}

// For hard attention: turns products s into logits, in place. The logit of a key whose product equals the row's largest
// product is its bias; all other keys get −inf.
REGARD_INLINE void to_hard_logits(const AttentionCall& call, const HeadContext& head, const Panel& panel, int64_t j,
                                  int64_t count, float* s, float* dense, float* biases, const Floats* hard_max,
                                  Floats& nonfinite) {
    nonfinite += zero_if_finite(s, count * PW);
    fill_biases(call, head, panel, j, count, biases, dense, nonfinite);
    for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            float* at = s + key * PW + v * W;
            store(at, select(load(at) == hard_max[v], load(biases + key * PW + v * W), broadcast(kHidden)));
        }
}

// Raises `hard_max` to the largest visible product of a block. A visible NaN makes hard_max NaN, which then stays NaN.
REGARD_INLINE void update_hard_max(const AttentionCall& call, const HeadContext& head, const Panel& panel, int64_t j,
                                   int64_t count, const float* s, float* dense, float* biases, Floats* hard_max,
                                   Floats& nonfinite) {
    nonfinite += zero_if_finite(s, count * PW);
    fill_biases(call, head, panel, j, count, biases, dense, nonfinite);
    for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            const Floats product = load(s + key * PW + v * W);
            const Ints hidden = load(biases + key * PW + v * W) == broadcast(kHidden);
            const Floats visible = select(hidden, broadcast(kHidden), product);
            hard_max[v] = select(is_nan(visible), visible, max(visible, hard_max[v]));
        }
}

// The final mixing step of the hash function MurmurHash3, on 32-bit words. Dropout uses the hash that is defined in
// regard/_lowered_scores.py, so that every backend drops the same weights.
template <class T>
REGARD_INLINE T mix_bits(T x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// The part of the dropout hash that is the same for all keys of a row.
REGARD_INLINE uint32_t row_hash(int64_t seed, int64_t b, int64_t h, int64_t i) {
    const auto low = static_cast<uint32_t>(seed);
    const auto high = static_cast<uint32_t>(seed >> 32);
    uint32_t hash = mix_bits(low ^ mix_bits(high) ^ (static_cast<uint32_t>(b) * 0x9E3779B1u));
    hash = mix_bits(hash ^ (static_cast<uint32_t>(h) * 0x85EBCA77u));
    return mix_bits(hash ^ (static_cast<uint32_t>(i) * 0xC2B2AE3Du));
}

// to[key][lane] = from[key][lane] times 0 or 1/(1 − dropout).
REGARD_INLINE void apply_dropout(const AttentionCall& call, const uint32_t* row_hashes, int64_t j, int64_t count,
                                 const float* from, float* to) {
    const double edge = std::ceil(call.dropout * 4294967296.0);
    const bool drop_all = edge >= 4294967296.0;
    const auto threshold = drop_all ? 0u : static_cast<uint32_t>(edge);
    const Floats factor = broadcast(drop_all ? 0.0f : static_cast<float>(1 / (1 - call.dropout)));
    for (int64_t key = 0; key < count; key++) {
        const uint32_t key_hash = mix_bits(static_cast<uint32_t>(j + key) + 0x27D4EB2Fu);
        for (int v = 0; v < NR; v++) {
            UInts hashes;
            std::memcpy(&hashes, row_hashes + v * W, sizeof hashes);
            const Ints keep = reinterpret_cast<Ints>(mix_bits(hashes ^ key_hash) >= threshold);
            const int64_t at = key * PW + v * W;
            store(to + at, select(keep, load(from + at) * factor, Floats{}));
        }
    }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
