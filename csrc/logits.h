// Turns products q·k into logits (softcap, biases, masks) for one block [keys, PW]: some keys and one panel of queries.
// Also has dropout. Panels, lanes and PW are defined in simd.h.
#pragma once

#include <algorithm>
#include <limits>

#include "bf16_pairs.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

constexpr float kLowest = -3.402823466e38f;  // the initial running maximum: finite, so that −inf − max is not NaN
constexpr float kHidden = -std::numeric_limits<float>::infinity();  // the logit of a key that a query may not see

constexpr int64_t KEY_BLOCK = 64;   // keys in a block
constexpr int64_t KEY_GROUP = 16;   // keys that are skipped together if no row of a vector sees them
constexpr int PANELS_PER_TILE = 4;  // panels that share a block of keys while it is in cache

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
    // The vectors in use, and for each of them the keys that some of its lanes see.
    int vectors = NR;
    int64_t first_key_of_vector[NR];
    int64_t end_key_of_vector[NR];
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
    panel.vectors = static_cast<int>((panel.count + W - 1) / W);
    for (int v = 0; v < panel.vectors; v++) {
        panel.first_key_of_vector[v] = call.M;
        panel.end_key_of_vector[v] = 0;
        for (int lane = v * W; lane < (v + 1) * W; lane++) {
            if (panel.lo[lane] >= panel.hi[lane]) continue;
            panel.first_key_of_vector[v] = std::min<int64_t>(panel.first_key_of_vector[v], panel.lo[lane]);
            panel.end_key_of_vector[v] = std::max<int64_t>(panel.end_key_of_vector[v], panel.hi[lane]);
        }
    }
}

// The parts of a block that some row sees: keys first_key … first_key + keys − 1 of the block, for `vectors` vectors of
// the panel from first_vector on. Products outside of these parts need not be computed.
struct VisiblePart {
    int64_t first_key;
    int64_t keys;
    int first_vector;
    int vectors;

    int lane() const { return first_vector * W; }
    int64_t offset() const { return first_key * PW + lane(); }  // in a block [keys, PW]
};

struct VisibleParts {
    VisiblePart parts[KEY_BLOCK / KEY_GROUP];
    int size = 0;

    const VisiblePart* begin() const { return parts; }
    const VisiblePart* end() const { return parts + size; }
    bool is_whole(int64_t count) const { return size == 1 && parts[0].keys == count && parts[0].vectors == NR; }
};

// The visible parts of the keys j … j + count − 1.
inline void find_visible_parts(const Panel& panel, int64_t j, int64_t count, VisibleParts& visible) {
    visible.size = 0;
    if (j >= panel.all_see_from && j + count <= panel.all_see_to) {
        visible.parts[visible.size++] = {0, count, 0, panel.vectors};
        return;
    }
    for (int64_t key = 0; key < count; key += KEY_GROUP) {
        const int64_t keys = std::min(KEY_GROUP, count - key);
        const auto sees = [&](int v) {
            return panel.first_key_of_vector[v] < j + key + keys && panel.end_key_of_vector[v] > j + key;
        };
        int first = 0;
        int end = panel.vectors;
        while (first < end && !sees(first)) first++;
        while (end > first && !sees(end - 1)) end--;
        if (first == end) continue;

        // A group that continues the last part is added to it, because larger blocks are faster.
        if (visible.size > 0) {
            VisiblePart& last = visible.parts[visible.size - 1];
            if (last.first_key + last.keys == key && last.first_vector == first && last.vectors == end - first) {
                last.keys += keys;
                continue;
            }
        }
        visible.parts[visible.size++] = {key, keys, first, end - first};
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

// The dense bias and the dense mask of one head, as one bias.
struct DenseBias {
    const float* bias;
    const uint8_t* mask;
    const TensorView& bias_view;
    const TensorView& mask_view;

    DenseBias(const AttentionCall& call, const HeadContext& head)
        : bias(static_cast<const float*>(call.bias.data)),
          mask(static_cast<const uint8_t*>(call.mask.data)),
          bias_view(call.bias),
          mask_view(call.mask) {
        if (bias) bias += head.b * bias_view.batch_stride + head.h * bias_view.head_stride;
        if (mask) mask += head.b * mask_view.batch_stride + head.h * mask_view.head_stride;
    }

    bool same_for_all_rows() const {
        return (!bias || bias_view.row_stride == 0) && (!mask || mask_view.row_stride == 0);
    }
    bool has_contiguous_rows() const {
        return (!bias || bias_view.column_stride == 1) && (!mask || mask_view.column_stride == 1);
    }

    // The bias of query i and key j: −inf if the mask hides the key.
    float at(int64_t i, int64_t j) const {
        if (mask && !mask[i * mask_view.row_stride + j * mask_view.column_stride]) return kHidden;
        return bias ? bias[i * bias_view.row_stride + j * bias_view.column_stride] : 0.0f;
    }

    // The biases of query i and the keys j … j + W − 1, for contiguous rows.
    Floats keys_from(int64_t i, int64_t j) const {
        Floats values = Floats{};
        if (bias) values = load(bias + i * bias_view.row_stride + j);
        if (!mask) return values;
        const Ints hidden = load_bytes(mask + i * mask_view.row_stride + j) == Ints{};
        return select(hidden, broadcast(kHidden), values);
    }
};

// dense[key][lane] = the dense bias of keys j … j + count − 1. Blocks of W × W elements are read along the rows of the
// bias and transposed, because a lane is a row.
inline void read_dense_bias(const DenseBias& from, const Panel& panel, int64_t j, int64_t count, float* dense) {
    if (from.same_for_all_rows()) {
        for (int64_t key = 0; key < count; key++) {
            const Floats value = broadcast(from.at(0, j + key));
            for (int v = 0; v < NR; v++) store(dense + key * PW + v * W, value);
        }
        return;
    }
    const int64_t last = panel.count - 1;  // lanes beyond the last row repeat it
    for (int c = 0; c < PW; c += W) {
        int64_t key = 0;
        if (from.has_contiguous_rows())
            for (; key + W <= count; key += W) {
                Floats block[W];
#pragma GCC unroll 16
                for (int r = 0; r < W; r++)
                    block[r] = from.keys_from(panel.first_row + std::min<int64_t>(c + r, last), j + key);
                transpose(block);
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) store(dense + (key + r) * PW + c, block[r]);
            }
        for (; key < count; key++)
            for (int r = 0; r < W; r++)
                dense[key * PW + c + r] = from.at(panel.first_row + std::min<int64_t>(c + r, last), j + key);
    }
}

// For keys j … j + count − 1: dense[key][lane] is the dense bias plus the terms that are not Toeplitz, or −inf if the
// mask hides the key.
inline void fill_dense_bias(const AttentionCall& call, const HeadContext& head, const Panel& panel, int64_t j,
                            int64_t count, float* dense) {
    read_dense_bias(DenseBias(call, head), panel, j, count, dense);
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

// dot_products of matmul_blocks.h for the visible parts of a block of `count` keys (or values); the other parts are 0.
REGARD_INLINE void visible_dot_products(const Rows& keys, const float* queries, float* scores, int64_t count,
                                        int64_t width, const VisibleParts& visible) {
    if (!visible.is_whole(count)) std::memset(scores, 0, sizeof(float) * count * PW);
    for (const VisiblePart& part : visible)
        with_vectors(part.vectors, [&](auto vectors) __attribute__((always_inline)) {
            dot_products<vectors()>(keys.from(part.first_key).floats(), keys.stride, queries + part.lane(),
                                    scores + part.offset(), part.keys, width);
        });
}

// weighted_sum of matmul_blocks.h over the visible parts of a block: the weights of the other parts are 0.
REGARD_INLINE void visible_weighted_sum(const Rows& values, const float* weights, float* outputs, int64_t width,
                                        const VisibleParts& visible) {
    for (const VisiblePart& part : visible)
        with_vectors(part.vectors, [&](auto vectors) __attribute__((always_inline)) {
            weighted_sum<vectors()>(values.from(part.first_key).floats(), values.stride, weights + part.offset(),
                                    outputs + part.lane(), part.keys, width);
        });
}

// The factor of the queries before the products are computed. Hard attention compares unscaled products.
REGARD_INLINE float query_factor(const AttentionCall& call) {
    return call.hard_max ? 1.0f : static_cast<float>(call.scale);
}

// Whether the scores and outputs of a call are products of pairs of bfloat16 numbers (bf16_pairs.h). Queries, keys and
// values then keep their dtype. All passes must agree on this, because the order of sums in a score depends on it.
REGARD_INLINE bool uses_pairs(const AttentionCall& call) {
    return HAS_PAIRS && call.dtype == Dtype::bfloat16 && !call.hard_max;
}

// scores[key][lane] = scale · keys[key] · queries[lane], for `count` keys. If few_rows is 0, `queries` is a packed panel,
// and only the visible parts of the block are computed; the others are 0. Otherwise `queries` holds few_rows rows.
// Queries are scaled already, except in pairs. Without pairs, the keys of a panel must be float32.
// At scale 0 the products are 0, and q and k are not read: a NaN in them has no effect.
REGARD_INLINE void products(const AttentionCall& call, const Rows& keys, const float* queries, int64_t few_rows,
                            float* scores, int64_t count, const VisibleParts& visible) {
    const auto factor = static_cast<float>(call.scale);
    if (call.scale == 0) {
        std::memset(scores, 0, sizeof(float) * count * PW);
        return;
    }
    if (few_rows) {
        if (uses_pairs(call))
            few_rows_pair_dot(keys.halves(), keys.stride, reinterpret_cast<const uint16_t*>(queries), few_rows, scores,
                              count, call.D, factor);
        else
            few_rows_dot(keys, queries, few_rows, scores, count, call.D);
        return;
    }
    if (!uses_pairs(call)) return visible_dot_products(keys, queries, scores, count, call.D, visible);
    const auto* pairs = reinterpret_cast<const uint32_t*>(queries);
    if (!visible.is_whole(count)) std::memset(scores, 0, sizeof(float) * count * PW);
    for (const VisiblePart& part : visible)
        with_vectors(part.vectors, [&](auto vectors) __attribute__((always_inline)) {
            pair_dot_products<vectors()>(keys.from(part.first_key).halves(), keys.stride, pairs + part.lane(),
                                         scores + part.offset(), part.keys, call.D, factor);
        });
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
