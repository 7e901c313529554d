// The backward pass. It computes the weights again, block by block. With A = e^(logit − row_max) / row_sum, the
// gradient g of the output, and Δ = out·g:
//   dS = A ∘ (g vᵀ − Δ),  dq = scale·dS k,  dk = scale·dSᵀ q,  dv = Aᵀ g.
// The gradient of a bias is dS itself. With a softcap, dS is multiplied by the softcap's slope for dq and dk.
//
// If a loss contains the entropy H of the rows, with gradient h, then dS −= h·A ∘ (log A + H). The gradient of a row's
// largest logit is added to dS at the key that has it. Attribution sums the contributions c = A ∘ (g vᵀ): over queries,
// and over bins of queries and keys.
#pragma once

#include "forward.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// The number of keys whose dk and dv stay in cache during the loop over all queries.
constexpr int64_t KEY_CHUNK = 1024;
// dk and dv are summed separately over this many queries before they are added to the total. Such two-level sums have
// smaller errors. This matters for the first keys of a causal call, to which every query adds.
constexpr int64_t QUERY_CHUNK = 256;

struct BackwardScratch : ForwardScratch {
    float* grad_out;       // panel [E, PW]
    float* grad_weights;   // [KEY_BLOCK, PW]: g vᵀ
    float* softcap_slope;  // [KEY_BLOCK, PW]
    float* dq;             // panel [D, PW]
    float* dk;             // [KEY_CHUNK, D]
    float* dv;             // [KEY_CHUNK, E]
    float* query_rows;     // the rows of one panel as float32, if they are not float32 already
    float* grad_out_rows;
    float* shifted_logits;    // [KEY_BLOCK, PW]: logit − row_max, if a loss contains the entropy
    float* contributed_keys;  // [KEY_CHUNK], summed in two levels like dk
    float* contributed_bins;  // [contributed_bins, PW]: the contributions of each bin of keys to one panel

    BackwardScratch(const AttentionCall& call, const Gradients& gradients) : ForwardScratch(call) {
        const bool converts = call.dtype != Dtype::float32;
        grad_out = allocate(call.E * PW);
        grad_weights = allocate(KEY_BLOCK * PW);
        softcap_slope = allocate(KEY_BLOCK * PW);
        dq = allocate(call.D * PW);
        dk = allocate(std::min(KEY_CHUNK, call.M) * call.D);
        dv = allocate(std::min(KEY_CHUNK, call.M) * call.E);
        query_rows = allocate(converts ? PW * call.D : 1);
        grad_out_rows = allocate(converts ? PW * call.E : 1);
        shifted_logits = allocate(gradients.grad_entropy ? KEY_BLOCK * PW : 1);
        contributed_keys = allocate(gradients.contributed_keys ? std::min(KEY_CHUNK, call.M) : 1);
        contributed_bins = allocate(gradients.contributed_bins * PW + 1);
    }
};

// One panel of queries, and the values that every block of keys needs.
struct BackwardPanel {
    Panel panel;
    bool few_rows;  // as in the forward pass, so that both sum the products in the same order
    Rows queries;   // rows [count, D] as float32
    Rows grad_out;  // rows [count, E] as float32
    Floats row_max[NR];
    Floats inverse_sum[NR];
    Floats delta[NR];
    Floats hard_max[NR];
    Floats grad_entropy[NR];
    Floats entropy_shift[NR];  // entropy − log row_sum: log A + entropy is logit − row_max + this
    alignas(64) uint32_t row_hashes[PW];
};

// ∂(scale·q·k)/∂(q·k), or 0 in hard attention, where small changes of q and k do not change the output.
inline float score_slope(const AttentionCall& call) { return call.hard_max ? 0.0f : static_cast<float>(call.scale); }

// delta = out · grad_out of the rows of one panel.
inline void fill_delta(const AttentionCall& call, const Gradients& gradients, const HeadContext& head,
                       int64_t first_row, BackwardScratch& scratch) {
    const int64_t count = std::min<int64_t>(PW, call.N - first_row);
    const Rows grad_out = float_rows_of(gradients.grad_out, call.dtype, head.b, head.h, first_row, count, call.E,
                                        scratch.grad_out_rows);
    const Rows out = float_rows_of(call.out, call.dtype, head.b, head.h, first_row, count, call.E, scratch.rows);
    for (int64_t r = 0; r < count; r++)
        gradients.delta[(head.b * call.H + head.h) * call.N + first_row + r] =
            dot_product(grad_out.floats() + r * grad_out.stride, out.floats() + r * out.stride, call.E);
}

inline void load_panel(const AttentionCall& call, const Gradients& gradients, const HeadContext& head,
                       BackwardScratch& scratch, BackwardPanel& state) {
    const Panel& panel = state.panel;
    const int64_t first_row = panel.first_row;
    state.queries =
        float_rows_of(call.q, call.dtype, head.b, head.h, first_row, panel.count, call.D, scratch.query_rows);
    state.grad_out = float_rows_of(gradients.grad_out, call.dtype, head.b, head.h, first_row, panel.count, call.E,
                                   scratch.grad_out_rows);
    state.few_rows = has_few_rows(call, panel);
    place_queries(call, head, panel, state.few_rows, scratch.rows, scratch.queries);
    if (call.hard_max) load_hard_max(call, head, panel, state.hard_max);
    pack_panel(state.grad_out, panel.count, call.E, 1.0f, scratch.grad_out);
    for (int lane = 0; lane < PW; lane++) {
        const int64_t row = row_of_lane(call, head, panel, lane);
        const bool empty = call.row_sum[row] == 0;
        state.row_max[lane / W][lane % W] = empty ? 0.0f : static_cast<float>(call.row_max[row]);
        state.inverse_sum[lane / W][lane % W] = empty ? 0.0f : static_cast<float>(1 / call.row_sum[row]);
        // The weights of lanes beyond the last row are e^−∞ = 0, whatever their biases are.
        if (lane >= panel.count) state.row_max[lane / W][lane % W] = -kHidden;
        state.delta[lane / W][lane % W] = gradients.delta[row];
        if (gradients.grad_entropy) {
            const double log_sum = empty ? 0 : std::log(call.row_sum[row]);
            state.grad_entropy[lane / W][lane % W] = gradients.grad_entropy[row];
            state.entropy_shift[lane / W][lane % W] = static_cast<float>(gradients.entropy[row] - log_sum);
        }
        if (call.dropout > 0) state.row_hashes[lane] = row_hash(call.seed, head.b, head.h, first_row + lane);
    }
}

// Adds dS of one block to the gradients of the biases.
inline void add_to_biases(const AttentionCall& call, const Gradients& gradients, const HeadContext& head,
                          const Panel& panel, int64_t j, int64_t count, const float* ds) {
    const int64_t head_index = head.b * call.H + head.h;
    if (gradients.toeplitz) {
        float* to = gradients.toeplitz + head_index * (call.N + call.M);
        for (int64_t key = 0; key < count; key++)
            for (int lane = 0; lane < panel.count; lane++)
                to[panel.first_row + lane - (j + key) + call.M] += ds[key * PW + lane];
    }
    if (gradients.bias) {
        const TensorView& bias = gradients.bias;
        float* to = static_cast<float*>(bias.data) + head.b * bias.batch_stride + head.h * bias.head_stride;
        for (int lane = 0; lane < panel.count; lane++)
            for (int64_t key = 0; key < count; key++)
                to[(panel.first_row + lane) * bias.row_stride + (j + key) * bias.column_stride] += ds[key * PW + lane];
    }
    for (size_t t = 0; t < gradients.terms.size(); t++) {
        const RelativeTerm& term = call.terms[t];
        if (!gradients.terms[t]) continue;
        for (int lane = 0; lane < panel.count; lane++) {
            const int64_t i = panel.first_row + lane;
            const int64_t query_position = term.query_positions[i];
            if (query_position == kNoPosition) continue;
            const int64_t row = term.per_row ? head_index * call.N + i : head_index;
            float* to = gradients.terms[t] + row * term.columns;
            for (int64_t key = 0; key < count; key++) {
                const int64_t key_position = term.key_positions[j + key];
                if (key_position == kNoPosition) continue;
                const int64_t offset = subtract_positions(key_position, query_position);
                const int64_t column = subtract_positions(offset, term.first_offset);
                to[std::clamp<int64_t>(column, 0, term.columns - 1)] += ds[key * PW + lane];
            }
        }
    }
}

// add_outer_products of matmul_blocks.h for the visible parts of a block. `rows` has one row per query of the panel.
REGARD_INLINE void add_visible_outer_products(const float* weights, const Rows& rows, const Panel& panel, float* out,
                                              int64_t width, const VisibleParts& visible) {
    for (const VisiblePart& part : visible) {
        const int64_t lanes = std::min<int64_t>(part.vectors * W, panel.count - part.lane());
        add_outer_products(weights + part.offset(), rows.from(part.lane()).floats(), rows.stride, lanes,
                           out + part.first_key * width, width, part.keys, width);
    }
}

// Turns logits into weights, in place. Keeps logit − row_max for the gradient of the entropy, if one is wanted.
REGARD_INLINE void to_weights(const Gradients& gradients, const BackwardPanel& state, int64_t count, float* s,
                              float* shifted) {
    if (!gradients.grad_entropy) {
        for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) {
                float* at = s + key * PW + v * W;
                store(at, exp(load(at) - state.row_max[v]) * state.inverse_sum[v]);
            }
        return;
    }
    for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            const int64_t at = key * PW + v * W;
            // Clamped where the weight is 0, because 0 · −inf would be NaN.
            const Floats x = clamp_for_exp(load(s + at) - state.row_max[v]);
            store(shifted + at, x);
            store(s + at, exp_clamped(x) * state.inverse_sum[v]);
        }
}

// Subtracts h·(log A + H) from g vᵀ, the factor of A in dS.
REGARD_INLINE void subtract_entropy_gradient(const BackwardPanel& state, int64_t count, const float* shifted,
                                             float* grad_weights) {
    for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            const int64_t at = key * PW + v * W;
            const Floats log_weight_and_entropy = load(shifted + at) + state.entropy_shift[v];
            store(grad_weights + at, load(grad_weights + at) - state.grad_entropy[v] * log_weight_and_entropy);
        }
}

// Adds the gradient of each row's largest logit to dS of keys j … j + count − 1.
inline void add_logit_max_gradient(const AttentionCall& call, const Gradients& gradients, const HeadContext& head,
                                   const Panel& panel, int64_t j, int64_t count, float* ds) {
    const int64_t first_row = (head.b * call.H + head.h) * call.N + panel.first_row;
    for (int64_t lane = 0; lane < panel.count; lane++) {
        const int64_t key = gradients.peak_at[first_row + lane] - j;
        if (key >= 0 && key < count) ds[key * PW + lane] += gradients.grad_logit_max[first_row + lane];
    }
}

// Adds the contributions of one block to the sums of its keys, and to the bins of the panel. `weights` are those before
// dropout, and `grad_weights` is 0 where dropout removes a weight.
REGARD_INLINE void add_contributions(const AttentionCall& call, const Gradients& gradients, int64_t j, int64_t count,
                                     const float* weights, const float* grad_weights, float* key_sums, float* bins) {
    const int64_t size = gradients.contributed_bins;
    for (int64_t key = 0, stop = count; key < count; key = stop) {
        // Key j is in bin ⌊j·size/M⌋.
        const int64_t bin = size ? (j + key) * size / call.M : 0;
        if (size) stop = std::min(count, ((bin + 1) * call.M + size - 1) / size - j);
        Floats bin_sum[NR];
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) bin_sum[v] = Floats{};
        for (int64_t t = key; t < stop; t++) {
            Floats key_sum = Floats{};
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) {
                const int64_t at = t * PW + v * W;
                const Floats contribution = load(weights + at) * load(grad_weights + at);
                key_sum += contribution;
                bin_sum[v] += contribution;
            }
            key_sums[t] += sum(key_sum);
        }
        if (size)
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) {
                float* at = bins + bin * PW + v * W;
                store(at, load(at) + bin_sum[v]);
            }
    }
}

// Adds the bins of one panel, for the keys first … end − 1, to the map of its head, and sets them to 0.
inline void add_panel_to_map(const AttentionCall& call, const Gradients& gradients, const HeadContext& head,
                             const Panel& panel, int64_t first, int64_t end, float* bins, float* map) {
    const int64_t size = gradients.contributed_bins;
    int64_t map_rows[PW];
    for (int64_t lane = 0; lane < panel.count; lane++) map_rows[lane] = (panel.first_row + lane) * size / call.N;
    for (int64_t bin = first * size / call.M; bin <= (end - 1) * size / call.M; bin++) {
        float* in_bin = bins + bin * PW;
        for (int64_t lane = 0; lane < panel.count;) {
            const int64_t map_row = map_rows[lane];
            float cell = 0;
            for (; lane < panel.count && map_rows[lane] == map_row; lane++) cell += in_bin[lane];
            map[((head.b * call.H + head.h) * size + map_row) * size + bin] += cell;
        }
        std::fill(in_bin, in_bin + PW, 0.0f);
    }
}

// One block of keys for one panel: adds to scratch.dq, `dk`, `dv`, `key_sums` and the gradients of the biases.
REGARD_INLINE void backward_block(const AttentionCall& call, const Gradients& gradients, const HeadContext& head,
                                  const BackwardPanel& state, int64_t j, int64_t count, const Rows& keys,
                                  const Rows& values, float* dk, float* dv, float* key_sums,
                                  BackwardScratch& scratch) {
    float* s = scratch.scores;
    float* grad_weights = scratch.grad_weights;
    VisibleParts visible;
    find_visible_parts(state.panel, j, count, visible);
    const Rows keys_for_scores = uses_pairs(call) ? rows_of(call.k, call.dtype, head.b, head.g, j) : keys;
    products(call, keys_for_scores, scratch.queries, state.few_rows ? state.panel.count : 0, s, count, visible);
    if (call.hard_max)
        to_hard_logits(call, head, state.panel, j, count, s, scratch.dense_bias, scratch.spare, state.hard_max,
                       scratch.nonfinite);
    else
        to_logits(call, head, state.panel, j, count, s, scratch.dense_bias,
                  call.softcap > 0 ? scratch.softcap_slope : nullptr, scratch.nonfinite);
    visible_dot_products<Float32Operand>(values, scratch.grad_out, grad_weights, count, call.E, visible, 1.0f);
    to_weights(gradients, state, count, s, scratch.shifted_logits);

    // dv gets the weights after dropout; the gradient of the weights passes through the same dropout.
    float* dropped = s;
    if (call.dropout > 0) {
        dropped = scratch.spare;
        apply_dropout(call, state.row_hashes, j, count, s, dropped);
        apply_dropout(call, state.row_hashes, j, count, grad_weights, grad_weights);
    }
    add_visible_outer_products(dropped, state.grad_out, state.panel, dv, call.E, visible);
    if (gradients.contributed_keys)
        add_contributions(call, gradients, j, count, s, grad_weights, key_sums, scratch.contributed_bins);
    if (gradients.grad_entropy) subtract_entropy_gradient(state, count, scratch.shifted_logits, grad_weights);

    // dS = A ∘ (g vᵀ − Δ), in place.
    for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            const int64_t at = key * PW + v * W;
            store(s + at, load(s + at) * (load(grad_weights + at) - state.delta[v]));
        }
    if (gradients.grad_logit_max) add_logit_max_gradient(call, gradients, head, state.panel, j, count, s);
    // These numbers are added to the gradients of the biases, which are not checked later.
    scratch.nonfinite += zero_if_finite(s, count * PW);
    add_to_biases(call, gradients, head, state.panel, j, count, s);
    if (call.scale == 0 || call.hard_max) return;  // dq and dk are 0
    if (call.softcap > 0)
        for (int64_t t = 0; t < count * NR; t++)
            store(s + t * W, load(s + t * W) * load(scratch.softcap_slope + t * W));
    visible_weighted_sum(keys, s, scratch.dq, count, call.D, visible);
    add_visible_outer_products(s, state.queries, state.panel, dk, call.D, visible);
}

// One panel of queries and the keys start … stop − 1: adds to dq of its rows, to scratch.dk, scratch.dv and
// scratch.contributed_keys, and to `map`.
inline void backward_panel(const AttentionCall& call, const Gradients& gradients, const HeadContext& head,
                           int64_t first_row, int64_t start, int64_t stop, float* dq, float* map,
                           BackwardScratch& scratch) {
    BackwardPanel state;
    init_panel(call, head.b, first_row, state.panel);
    const int64_t first = std::max(start, state.panel.first_key);
    const int64_t end = std::min(stop, state.panel.end_key);
    if (first >= end) return;
    load_panel(call, gradients, head, scratch, state);
    std::memset(scratch.dq, 0, sizeof(float) * call.D * PW);
    for (int64_t j = first; j < end; j += KEY_BLOCK) {
        const int64_t count = std::min(KEY_BLOCK, end - j);
        const Rows keys = float_rows_of(call.k, call.dtype, head.b, head.g, j, count, call.D, scratch.keys);
        const Rows values = float_rows_of(call.v, call.dtype, head.b, head.g, j, count, call.E, scratch.values);
        backward_block(call, gradients, head, state, j, count, keys, values, scratch.dk + (j - start) * call.D,
                       scratch.dv + (j - start) * call.E, scratch.contributed_keys + (j - start), scratch);
    }
    if (map) add_panel_to_map(call, gradients, head, state.panel, first, end, scratch.contributed_bins, map);
    alignas(64) float factors[PW];
    std::fill(factors, factors + PW, score_slope(call));
    float* to = dq + ((head.b * call.H + head.h) * call.N + first_row) * call.D;
    unpack_panel<true>(scratch.dq, factors, state.panel.count, call.D, to, call.D);
}

// to += factor · from, and from = 0.
inline void flush_gradient(float* from, float* to, int64_t count, float factor) {
    for (int64_t t = 0; t < count; t++) {
        to[t] += factor * from[t];
        from[t] = 0;
    }
}

// The keys from … to − 1 of one key head: adds to their dk and dv, to dq and the contributions of every query head that
// shares the key head.
inline void backward_key_head(const AttentionCall& call, const Gradients& gradients, int64_t b, int64_t g,
                              int64_t from, int64_t to, float* dq, float* map, BackwardScratch& scratch) {
    const int64_t heads_per_group = call.H / call.G;
    std::fill(scratch.contributed_bins, scratch.contributed_bins + gradients.contributed_bins * PW, 0.0f);
    for (int64_t start = from; start < to; start += KEY_CHUNK) {
        const int64_t keys = std::min(KEY_CHUNK, to - start);
        const int64_t first_key = (b * call.G + g) * call.M + start;
        std::memset(scratch.dk, 0, sizeof(float) * keys * call.D);
        std::memset(scratch.dv, 0, sizeof(float) * keys * call.E);
        if (gradients.contributed_keys) std::fill(scratch.contributed_keys, scratch.contributed_keys + keys, 0.0f);
        for (int64_t h = g * heads_per_group; h < (g + 1) * heads_per_group; h++) {
            const HeadContext& head = scratch.prepare_head(call, b * call.H + h);
            for (int64_t i = 0; i < call.N; i += QUERY_CHUNK) {
                for (int64_t row = i; row < std::min(i + QUERY_CHUNK, call.N); row += PW)
                    backward_panel(call, gradients, head, row, start, start + keys, dq, map, scratch);
                flush_gradient(scratch.dk, gradients.dk + first_key * call.D, keys * call.D, score_slope(call));
                flush_gradient(scratch.dv, gradients.dv + first_key * call.E, keys * call.E, 1.0f);
                if (gradients.contributed_keys)
                    flush_gradient(scratch.contributed_keys,
                                   gradients.contributed_keys + (b * call.H + h) * call.M + start, keys, 1.0f);
            }
        }
    }
}

inline bool all_finite(const float* x, int64_t count) { return sum(zero_if_finite(x, count)) == 0; }

// The number of parts into which the keys of a head are split. It depends only on the shape, as in the forward pass.
// Gradients of biases are sums over all keys, so they need one task per head.
inline int64_t count_backward_splits(const AttentionCall& call, const Gradients& gradients) {
    constexpr int64_t enough_tasks = 4;
    const int64_t key_heads = call.B * call.G;
    if (key_heads == 0 || key_heads >= enough_tasks) return 1;
    if (gradients.toeplitz || gradients.bias || !gradients.terms.empty()) return 1;
    return std::clamp<int64_t>((call.M + KEY_CHUNK - 1) / KEY_CHUNK, 1, enough_tasks / key_heads);
}

// Returns false if a gradient is not finite.
bool backward(const AttentionCall& call, const Gradients& gradients) {
    const int threads = threads_for(call, 2.5);  // five products instead of two
    std::atomic<bool> finite{true};
    if (call.hard_max) fill_hard_max(call);
    const int64_t panels = panels_per_head(call);
    const auto make_scratch = [&] { return BackwardScratch(call, gradients); };
    run_tasks<BackwardScratch>(
        call.B * call.H, threads, make_scratch, [&](int64_t task, BackwardScratch& scratch) {
            const HeadContext head{task / call.H, task % call.H, 0};
            for (int64_t p = 0; p < panels; p++) fill_delta(call, gradients, head, p * PW, scratch);
        });

    // If there are few key heads, their keys are split into parts, and each part is a task. Each part has its own dq
    // and its own map; these are added in order.
    const int64_t splits = count_backward_splits(call, gradients);
    const int64_t keys_per_split = keys_per_part(call.M, splits, KEY_CHUNK);
    const int64_t key_heads = call.B * call.G;
    const int64_t dq_floats = call.B * call.H * call.N * call.D;
    const int64_t dq_floats_per_key_head = dq_floats / std::max<int64_t>(1, key_heads);
    Array<float> other_dq((splits - 1) * dq_floats);
    const int64_t map_floats_per_head = gradients.contributed_bins * gradients.contributed_bins;
    const int64_t map_floats = call.B * call.H * map_floats_per_head;
    Array<float> other_maps((splits - 1) * map_floats);
    run_tasks<BackwardScratch>(
        key_heads * splits, threads, make_scratch, [&](int64_t task, BackwardScratch& scratch) {
            const int64_t key_head = task / splits;
            const int64_t split = task % splits;
            float* dq = split == 0 ? gradients.dq : other_dq.data() + (split - 1) * dq_floats;
            float* map = gradients.contributed_map;
            if (map && split > 0) map = other_maps.data() + (split - 1) * map_floats;
            const int64_t end = std::min(call.M, (split + 1) * keys_per_split);
            backward_key_head(call, gradients, key_head / call.G, key_head % call.G, split * keys_per_split, end, dq,
                              map, scratch);
            if (!scratch.finite()) finite = false;
        });
    run_tasks<int>(key_heads, threads, [] { return 0; }, [&](int64_t key_head, int) {
        const int64_t first = key_head * dq_floats_per_key_head;
        float* dq = gradients.dq + first;
        for (int64_t split = 1; split < splits; split++) {
            const float* other = other_dq.data() + (split - 1) * dq_floats + first;
            for (int64_t t = 0; t < dq_floats_per_key_head; t++) dq[t] += other[t];
        }
        const int64_t map_part = call.H / call.G * map_floats_per_head;
        for (int64_t split = 1; gradients.contributed_map && split < splits; split++) {
            float* map = gradients.contributed_map + key_head * map_part;
            const float* other = other_maps.data() + (split - 1) * map_floats + key_head * map_part;
            for (int64_t t = 0; t < map_part; t++) map[t] += other[t];
        }
        if (!all_finite(dq, dq_floats_per_key_head) ||
            !all_finite(gradients.dk + key_head * call.M * call.D, call.M * call.D) ||
            !all_finite(gradients.dv + key_head * call.M * call.E, call.M * call.E))
            finite = false;
    });
    return finite;
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
