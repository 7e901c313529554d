// Turns products q·k into logits (softcap, biases, masks) for one block [keys, PW]: some keys and one panel of queries.
// Panels, lanes and PW are defined in simd.h.
#pragma once

#include <limits>

#include "few_rows.h"
#include "query_panel.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

constexpr float kLowest = -3.402823466e38f;  // the initial running maximum: finite, so that −inf − max is not NaN
constexpr float kHidden = -std::numeric_limits<float>::infinity();  // the logit of a key that a query may not see

// The values that all blocks of one head share.
struct HeadContext {
    int64_t b = -1;
    int64_t h = -1;
    int64_t g = -1;
    bool has_toeplitz = false;
    bool has_terms = false;          // terms that are not Toeplitz
    bool has_dense = false;          // a dense bias, a dense mask, or such terms
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
            head.has_terms = true;
    }
    head.has_dense = head.has_terms || call.bias || call.mask;
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

    const float* bias_row(int64_t i) const { return bias + i * bias_view.row_stride; }
    const uint8_t* mask_row(int64_t i) const { return mask + i * mask_view.row_stride; }

    // The bias of query i and key j: −inf if the mask hides the key.
    float at(int64_t i, int64_t j) const {
        if (mask && !mask_row(i)[j * mask_view.column_stride]) return kHidden;
        return bias ? bias_row(i)[j * bias_view.column_stride] : 0.0f;
    }

    // The biases of query i and the keys j … j + W − 1, for contiguous rows.
    Floats keys_from(int64_t i, int64_t j) const {
        Floats values = Floats{};
        if (bias) values = load(bias_row(i) + j);
        if (!mask) return values;
        const Ints hidden = load_bytes(mask_row(i) + j) == Ints{};
        return select(hidden, broadcast(kHidden), values);
    }
};

// Requests the dense biases of W rows and of the keys j … j + KEY_BLOCK − 1. The rows of a long bias are far apart, and
// the processor does not see by itself which part of them comes next.
REGARD_INLINE void prefetch_dense_biases(const DenseBias& from, const Panel& panel, int lane, int64_t j) {
    const int64_t first = panel.first_row + lane;
    const int64_t end = panel.first_row + std::min<int64_t>(lane + W, panel.count);
    for (int64_t i = first; i < end; i++) {
        if (from.bias) prefetch(reinterpret_cast<const char*>(from.bias_row(i) + j), KEY_BLOCK * 4);
        if (from.mask) prefetch(reinterpret_cast<const char*>(from.mask_row(i) + j), KEY_BLOCK);
    }
}

// Calls work(key, lane, biases) for each vector of a block: the dense biases of key j + key and of the W rows from `lane`
// on. Blocks of W × W elements are read along the rows of the bias and transposed, because a lane is a row.
template <class Work>
REGARD_INLINE void for_dense_biases(const DenseBias& from, const Panel& panel, int64_t j, int64_t count,
                                    const Work& work) {
    if (from.same_for_all_rows()) {
        for (int64_t key = 0; key < count; key++) {
            const Floats value = broadcast(from.at(0, j + key));
            for (int v = 0; v < NR; v++) work(key, v * W, value);
        }
        return;
    }
    const int64_t last = panel.count - 1;  // lanes beyond the last row repeat it
    const bool contiguous = from.has_contiguous_rows();
    for (int c = 0; c < PW; c += W) {
        if (contiguous) prefetch_dense_biases(from, panel, c, j + KEY_BLOCK);
        int64_t key = 0;
        if (contiguous)
            for (; key + W <= count; key += W) {
                Floats block[W];
#pragma GCC unroll 16
                for (int r = 0; r < W; r++)
                    block[r] = from.keys_from(panel.first_row + std::min<int64_t>(c + r, last), j + key);
                transpose(block);
#pragma GCC unroll 16
                for (int r = 0; r < W; r++) work(key + r, c, block[r]);
            }
        for (; key < count; key++) {
            Floats values;
            for (int r = 0; r < W; r++)
                values[r] = from.at(panel.first_row + std::min<int64_t>(c + r, last), j + key);
            work(key, c, values);
        }
    }
}

// For keys j … j + count − 1: dense[key][lane] is the dense bias plus the terms that are not Toeplitz, or −inf if the
// mask hides the key.
inline void fill_dense_bias(const AttentionCall& call, const HeadContext& head, const Panel& panel, int64_t j,
                            int64_t count, float* dense) {
    for_dense_biases(DenseBias(call, head), panel, j, count, [&](int64_t key, int lane, Floats value)
                         __attribute__((always_inline)) { store(dense + key * PW + lane, value); });
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

// Whether the scores and outputs of a call are products of pairs of bfloat16 numbers (bf16_pairs.h). Queries, keys and
// values then keep their dtype. All passes must agree on this, because the order of sums in a score depends on it.
// A row of odd width ends with half a pair: such calls, which are rare, are converted to float32.
REGARD_INLINE bool uses_pairs(const AttentionCall& call) {
    return HAS_PAIRS && call.dtype == Dtype::bfloat16 && call.D % 2 == 0 && !call.hard_max;
}

// scores[key][lane] = scale · keys[key] · queries[lane], for `count` keys. If few_rows is 0, `queries` is a packed panel,
// and only the visible parts of the block are computed; the others are 0. Otherwise `queries` holds few_rows rows.
// Queries are scaled already, except in pairs. Without pairs, the keys of a panel must be float32.
// At scale 0 the products are 0, and q and k are not read: a NaN in them has no effect.
REGARD_INLINE void products(const AttentionCall& call, const Rows& keys, const float* queries, int64_t few_rows,
                            float* scores, int64_t count, const VisibleParts& visible) {
    const auto factor = static_cast<float>(call.scale);
    if (call.scale == 0)
        std::memset(scores, 0, sizeof(float) * count * PW);
    else if (few_rows && uses_pairs(call))
        few_rows_dot_of<PairedRows>(keys, queries, few_rows, scores, count, call.D, factor);
    else if (few_rows)
        few_rows_dot(keys, queries, few_rows, scores, count, call.D);
    else if (uses_pairs(call))
        visible_dot_products<PairOperand>(keys, queries, scores, count, call.D / 2, visible, factor);
    else
        visible_dot_products<Float32Operand>(keys, queries, scores, count, call.D, visible, 1.0f);
}

// score + bias. A bias of −inf hides the key whatever the score is. If the bias is not −inf and the sum is not finite,
// `nonfinite` becomes NaN.
REGARD_INLINE Floats add_bias(Floats score, Floats bias, Floats& nonfinite) {
    const Ints hides = bias == broadcast(kHidden);
    const Floats sum = select(hides, broadcast(kHidden), score + bias);
    nonfinite += select(hides, Floats{}, sum * 0.0f);
    return sum;
}

// Adds the dense bias, and the terms that are not Toeplitz, to the logits s of keys j … j + count − 1. `dense` is scratch
// memory.
inline void add_dense_bias(const AttentionCall& call, const HeadContext& head, const Panel& panel, int64_t j,
                           int64_t count, float* s, float* dense, Floats& nonfinite) {
    if (!head.has_terms) {
        // A transposed vector is added at once: written to memory and read again, it would take longer. With a check of
        // its own, an addition to the check does not have to wait for the one before.
        Floats checks[4] = {};
        for_dense_biases(DenseBias(call, head), panel, j, count, [&](int64_t key, int lane, Floats bias)
                             __attribute__((always_inline)) {
            float* at = s + key * PW + lane;
            store(at, add_bias(load(at), bias, checks[key % 4]));
        });
        nonfinite += (checks[0] + checks[1]) + (checks[2] + checks[3]);
        return;
    }
    fill_dense_bias(call, head, panel, j, count, dense);
    for (int64_t t = 0; t < count * NR; t++)
        store(s + t * W, add_bias(load(s + t * W), load(dense + t * W), nonfinite));
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
    if (head.has_dense)
        add_dense_bias(call, head, panel, j, count, s, dense, nonfinite);
    else if (!head.toeplitz_hides)  // else add_bias has made this check already
        nonfinite += zero_if_finite(s, count * PW);
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

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
