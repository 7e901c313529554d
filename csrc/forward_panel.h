// The forward pass of one panel of queries: online softmax over blocks of keys. Writes out, row_max and row_sum of its
// rows, and their observables if they are requested. The other passes use parts of it.
#pragma once

#include "dropout.h"
#include "row_panels.h"
#include "scratch.h"
#include "threads.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// The running softmax of one panel.
struct OnlineSoftmax {
    Floats max[NR];       // the largest logit of the keys processed so far
    Floats sum[NR];       // Σ e^(logit − max) over these keys
    Floats hard_max[NR];  // hard attention: the largest product of the row, from a separate pass
};

// The state of one panel during the loop over the keys.
struct PanelState {
    HeadContext head;
    Panel panel;
    OnlineSoftmax softmax;
    ObservableSums observables;
    bool few_rows;     // see has_few_rows
    bool has_outputs;  // whether `outputs` is more than zeros
    float* queries;  // panel [D, PW]; with few rows [lanes, D]
    float* outputs;  // panel [E, PW]; with few rows [lanes, E]
    alignas(64) uint32_t row_hashes[PW];

    int64_t lanes() const { return few_rows ? panel.count : PW; }
};

// The number of threads for a pass with `factor` times the multiply–adds of a forward pass without a mask.
inline int threads_for(const AttentionCall& call, double factor) {
    const double products = 1.0 * call.H * call.N * call.M * (call.D + call.E);
    const double read = 1.0 * call.G * call.M * (call.D + call.E);
    return limit_threads(call.threads, factor * call.B * (products + READ_COST * read));
}

// The number of keys per part if `keys` are divided into `parts` of whole blocks. The last parts may have fewer or none.
inline int64_t keys_per_part(int64_t keys, int64_t parts, int64_t block) {
    const int64_t blocks = (keys + block - 1) / block;
    return (blocks + parts - 1) / parts * block;
}

inline int64_t panels_per_head(const AttentionCall& call) { return (call.N + PW - 1) / PW; }

// The index of a lane's row in [B, H, N]. Lanes beyond the last row repeat it.
REGARD_INLINE int64_t row_of_lane(const AttentionCall& call, const HeadContext& head, const Panel& panel, int lane) {
    const int64_t i = panel.first_row + std::min<int64_t>(lane, panel.count - 1);
    return (head.b * call.H + head.h) * call.N + i;
}

// The keys j … j + count − 1 for the scores: in their own dtype if the call uses pairs, else as float32.
REGARD_INLINE Rows score_keys(const AttentionCall& call, const HeadContext& head, int64_t j, int64_t count,
                              float* buffer) {
    if (uses_pairs(call)) return rows_of(call.k, call.dtype, head.b, head.g, j);
    return float_rows_of(call.k, call.dtype, head.b, head.g, j, count, call.D, buffer);
}

// --- hard attention ---

inline void load_hard_max(const AttentionCall& call, const HeadContext& head, const Panel& panel, Floats* hard_max) {
    for (int lane = 0; lane < PW; lane++)
        hard_max[lane / W][lane % W] = call.hard_max[row_of_lane(call, head, panel, lane)];
}

// The first pass of hard attention: finds the largest visible product of each row. The main pass tests products for
// equality with it, so both passes must add the terms of a product in the same order.
inline void fill_hard_max_of_panel(const AttentionCall& call, const HeadContext& head, int64_t first_row,
                                   ForwardScratch& scratch) {
    Panel panel;
    init_panel(call, head.b, first_row, panel);
    const Rows rows =
        float_rows_of(call.q, call.dtype, head.b, head.h, first_row, panel.count, call.D, scratch.rows);
    pack_panel(rows, panel.count, call.D, 1.0f, scratch.queries);
    Floats hard_max[NR];
    for (int v = 0; v < NR; v++) hard_max[v] = broadcast(kHidden);
    for (int64_t j = panel.first_key; j < panel.end_key; j += KEY_BLOCK) {
        const int64_t count = std::min(KEY_BLOCK, panel.end_key - j);
        const Rows keys = float_rows_of(call.k, call.dtype, head.b, head.g, j, count, call.D, scratch.keys);
        VisibleParts visible;
        find_visible_parts(panel, j, count, visible);
        products(call, keys, scratch.queries, 0, scratch.scores, count, visible);
        update_hard_max(call, head, panel, j, count, scratch.scores, scratch.dense_bias, scratch.spare, hard_max,
                        scratch.nonfinite);
    }
    for (int64_t lane = 0; lane < panel.count; lane++)
        call.hard_max[(head.b * call.H + head.h) * call.N + first_row + lane] = hard_max[lane / W][lane % W];
}

inline void fill_hard_max(const AttentionCall& call) {
    const int64_t panels = panels_per_head(call);
    run_tasks<ForwardScratch>(
        call.B * call.H * panels, threads_for(call, 0.5), [&] { return ForwardScratch(call); },
        [&](int64_t task, ForwardScratch& scratch) {
            const HeadContext& head = scratch.prepare_head(call, task / panels);
            fill_hard_max_of_panel(call, head, task % panels * PW, scratch);
        });
}

// --- one panel ---

// Whether a panel has so few queries that the products of few_rows.h are faster than those of a packed panel. Not in
// hard attention, whose first pass uses packed panels: both passes must sum in the same order.
inline bool has_few_rows(const AttentionCall& call, const Panel& panel) {
    return panel.count <= PW / 4 && !call.hard_max;
}

// Writes the queries of a panel to `queries`: as rows [count, D], or packed into a panel [D, PW]. They are scaled, or
// keep their dtype and are not scaled if the call uses pairs. `buffer` is for rows that must be converted.
inline void place_queries(const AttentionCall& call, const HeadContext& head, const Panel& panel, bool few_rows,
                          float* buffer, float* queries) {
    if (uses_pairs(call)) {
        const Rows rows = rows_of(call.q, call.dtype, head.b, head.h, panel.first_row);
        if (!few_rows)
            return pack_pair_panel(rows.halves(), rows.stride, panel.count, call.D,
                                   reinterpret_cast<uint32_t*>(queries));
        for (int64_t lane = 0; lane < panel.count; lane++)
            std::memcpy(reinterpret_cast<uint16_t*>(queries) + lane * call.D, rows.from(lane).data, call.D * 2);
        return;
    }
    const Rows rows =
        float_rows_of(call.q, call.dtype, head.b, head.h, panel.first_row, panel.count, call.D, buffer);
    const float factor = query_factor(call);
    if (!few_rows) return pack_panel(rows, panel.count, call.D, factor, queries);
    for (int64_t lane = 0; lane < panel.count; lane++)
        for (int64_t t = 0; t < call.D; t++)
            queries[lane * call.D + t] = rows.floats()[lane * rows.stride + t] * factor;
}

// Scales the queries of a panel and starts its softmax. The panel's scratch memory is `queries`, `outputs` and `bins`.
template <bool observed>
inline void start_panel(const AttentionCall& call, const HeadContext& head, int64_t first_row, float* queries,
                        float* outputs, float* bins, ForwardScratch& scratch, PanelState& state) {
    state.head = head;
    state.queries = queries;
    state.outputs = outputs;
    Panel& panel = state.panel;
    init_panel(call, head.b, first_row, panel);
    state.few_rows = has_few_rows(call, panel);
    place_queries(call, head, panel, state.few_rows, scratch.rows, queries);
    std::memset(outputs, 0, sizeof(float) * call.E * state.lanes());
    state.has_outputs = false;
    if (call.hard_max) load_hard_max(call, head, panel, state.softmax.hard_max);

    // A sink is one more logit, without a value: the sum starts with its weight e^(sink − max) = 1.
    const float sink = call.sinks ? call.sinks[head.h] : kHidden;
    for (int v = 0; v < NR; v++) {
        state.softmax.max[v] = broadcast(sink == kHidden ? kLowest : sink);
        state.softmax.sum[v] = broadcast(sink == kHidden ? 0.0f : 1.0f);
    }
    if (call.dropout > 0)
        for (int lane = 0; lane < PW; lane++)
            state.row_hashes[lane] = row_hash(call.seed, head.b, head.h, first_row + lane);
    if (observed) init_observables(call, panel, bins, state.observables);
}

// Multiplies the outputs summed so far by each lane's factor.
inline void rescale_outputs(const AttentionCall& call, const Floats* rescale, PanelState& state) {
    if (state.few_rows) {
        for (int64_t lane = 0; lane < state.panel.count; lane++)
            for (int64_t f = 0; f < call.E; f++) state.outputs[lane * call.E + f] *= rescale[lane / W][lane % W];
        return;
    }
    for (int64_t f = 0; f < call.E; f++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            float* at = state.outputs + f * PW + v * W;
            store(at, load(at) * rescale[v]);
        }
}

// Computes the logits of a block into scratch.scores, for soft or hard attention. Returns a block in which −inf marks
// exactly the hidden keys: the logits, or the biases in hard attention, where the logits of many visible keys are −inf.
REGARD_INLINE const float* block_logits(const AttentionCall& call, int64_t j, int64_t count, const Rows& keys,
                                        const VisibleParts& visible, ForwardScratch& scratch,
                                        const PanelState& state) {
    const Panel& panel = state.panel;
    float* s = scratch.scores;
    products(call, keys, state.queries, state.few_rows ? panel.count : 0, s, count, visible);
    if (call.hard_max) {
        to_hard_logits(call, state.head, panel, j, count, s, scratch.dense_bias, scratch.spare,
                       state.softmax.hard_max, scratch.nonfinite);
        return scratch.spare;
    }
    to_logits(call, state.head, panel, j, count, s, scratch.dense_bias, nullptr, scratch.nonfinite);
    return s;
}

// The largest of `count` logits per lane.
REGARD_INLINE void max_of_block(const float* s, int64_t count, Floats* block_max) {
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) block_max[v] = broadcast(kHidden);
    for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) block_max[v] = max(load(s + key * PW + v * W), block_max[v]);
}

// Replaces each logit by its weight exp(logit − row_max), in place, and adds the weights to `row_sum`.
REGARD_INLINE void weigh_block(float* s, int64_t count, const Floats* row_max, Floats* row_sum) {
    Floats block_sum[NR];
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) block_sum[v] = Floats{};
    for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            const Floats weight = exp(load(s + key * PW + v * W) - row_max[v]);
            block_sum[v] += weight;
            store(s + key * PW + v * W, weight);
        }
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) row_sum[v] += block_sum[v];
}

// Adds the values of a block, times their weights, to the outputs. `value_pairs` are the values in pairs, if the call
// uses them.
REGARD_INLINE void add_values(const AttentionCall& call, int64_t count, const float* weights, const Rows& values,
                              const uint32_t* value_pairs, const VisibleParts& visible, ForwardScratch& scratch,
                              PanelState& state) {
    uint32_t* pairs = scratch.weight_pairs;
    if (state.few_rows) {
        if (!uses_pairs(call))
            return few_rows_weighted_sum(values, weights, state.panel.count, state.outputs, count, call.E);
        pair_weights<NR>(weights, count, pairs);
        return few_rows_pair_sum(values.halves(), values.stride, pairs, state.panel.count, state.outputs, count, call.E);
    }
    if (!uses_pairs(call)) return visible_weighted_sum(values, weights, state.outputs, count, call.E, visible);
    for (const VisiblePart& part : visible)
        with_vectors(part.vectors, [&](auto vectors) __attribute__((always_inline)) {
            // A part starts with an even key, so that its pairs are those of the values.
            uint32_t* part_pairs = pairs + part.first_key / 2 * PW + part.lane();
            pair_weights<vectors()>(weights + part.offset(), part.keys, part_pairs);
            const uint32_t* part_values = value_pairs + part.first_key / 2 * call.E;
            weighted_sum<PairOperand, vectors()>(reinterpret_cast<const char*>(part_values), call.E * 4, part_pairs,
                                                 state.outputs + part.lane(), (part.keys + 1) / 2, call.E);
        });
}

// One block of keys for one panel: scores, update of the softmax, weighted sum of values.
template <bool observed>
REGARD_INLINE void forward_block(const AttentionCall& call, int64_t j, int64_t count, const Rows& keys,
                                 const Rows& values, const uint32_t* value_pairs, ForwardScratch& scratch,
                                 PanelState& state) {
    float* s = scratch.scores;
    OnlineSoftmax& softmax = state.softmax;
    VisibleParts visible;
    find_visible_parts(state.panel, j, count, visible);
    const float* hidden = block_logits(call, j, count, keys, visible, scratch, state);
    Floats row_max[NR];
    max_of_block(s, count, row_max);
    if (observed) observe_logits(state.head, j, count, s, hidden, row_max, state.observables);

    bool max_rose = false;
    Floats rescale[NR];
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) {
        row_max[v] = max(row_max[v], softmax.max[v]);
        max_rose |= any(row_max[v] > softmax.max[v]);
        rescale[v] = exp(softmax.max[v] - row_max[v]);
    }
    if (observed && max_rose)
        rescale_observables(state.observables, softmax.max, row_max, softmax.sum, rescale);
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) {
        softmax.sum[v] *= rescale[v];
        softmax.max[v] = row_max[v];
    }
    if (observed)
        observe_weights(call, state.head.b, j, count, s, row_max, softmax.sum, state.observables);
    else
        weigh_block(s, count, row_max, softmax.sum);
    if (max_rose && state.has_outputs) rescale_outputs(call, rescale, state);
    state.has_outputs = true;

    if (call.dropout > 0) {
        apply_dropout(call, state.row_hashes, j, count, s, scratch.spare);
        s = scratch.spare;
    }
    add_values(call, count, s, values, value_pairs, visible, scratch, state);
}

// Adds the sums of `b` to those of `a`. Both are states of the same panel, for two parts of its keys. The keys of b
// come after those of a.
template <bool observed>
inline void merge_panels(const AttentionCall& call, PanelState& a, PanelState& b) {
    Floats row_max[NR];
    Floats a_rescale[NR];
    Floats b_rescale[NR];
    for (int v = 0; v < NR; v++) {
        row_max[v] = max(a.softmax.max[v], b.softmax.max[v]);
        a_rescale[v] = exp(a.softmax.max[v] - row_max[v]);
        b_rescale[v] = exp(b.softmax.max[v] - row_max[v]);
    }
    if (observed)
        merge_observables(call, row_max, a.softmax.max, a.softmax.sum, a_rescale, a.observables, b.softmax.max,
                          b.softmax.sum, b_rescale, b.observables);
    rescale_outputs(call, a_rescale, a);
    rescale_outputs(call, b_rescale, b);
    for (int64_t t = 0; t < call.E * a.lanes(); t++) a.outputs[t] += b.outputs[t];
    for (int v = 0; v < NR; v++) {
        a.softmax.sum[v] = a.softmax.sum[v] * a_rescale[v] + b.softmax.sum[v] * b_rescale[v];
        a.softmax.max[v] = row_max[v];
    }
}

// Divides the outputs by the sums, and writes the rows of out, row_max, row_sum and the observables.
template <bool observed>
inline void finish_panel(const AttentionCall& call, ForwardScratch& scratch, PanelState& state) {
    const Panel& panel = state.panel;
    const HeadContext& head = state.head;
    OnlineSoftmax& softmax = state.softmax;
    if (call.hard_max)  // a row that sees a NaN is NaN
        for (int v = 0; v < NR; v++)
            softmax.sum[v] = select(is_nan(softmax.hard_max[v]), softmax.hard_max[v], softmax.sum[v]);
    if (observed) finish_observables(call, head, panel, softmax.max, softmax.sum, state.observables);

    alignas(64) float inverse[PW];
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) {
        const Floats sum = softmax.sum[v];
        store(inverse + v * W, select(sum == Floats{}, Floats{}, broadcast(1.0f) / sum));
        scratch.nonfinite += sum * 0.0f;
    }
    if (call.row_max)
        for (int lane = 0; lane < panel.count; lane++) {
            const int64_t row = row_of_lane(call, head, panel, lane);
            const float sum = softmax.sum[lane / W][lane % W];
            call.row_max[row] = sum == 0 ? kHidden : softmax.max[lane / W][lane % W];
            call.row_sum[row] = sum;
        }
    scratch.nonfinite += zero_if_finite(state.outputs, call.E * state.lanes());

    // float32 rows are written directly to `out`; half-precision rows are computed in scratch memory and converted.
    char* out = const_cast<char*>(address_of_row(call.out, call.dtype, head.b, head.h, panel.first_row));
    const bool in_place = call.dtype == Dtype::float32;
    float* rows = in_place ? reinterpret_cast<float*>(out) : scratch.rows;
    const int64_t stride = in_place ? call.out.row_stride : call.E;
    if (state.few_rows) {
        for (int64_t lane = 0; lane < panel.count; lane++)
            for (int64_t f = 0; f < call.E; f++)
                rows[lane * stride + f] = state.outputs[lane * call.E + f] * inverse[lane];
    } else {
        unpack_panel<false>(state.outputs, inverse, panel.count, call.E, rows, stride);
    }
    if (!in_place)
        for (int64_t lane = 0; lane < panel.count; lane++)
            from_float32(rows + lane * call.E, out + lane * call.out.row_stride * 2, call.dtype, call.E);
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
