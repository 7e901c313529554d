// Observables of each row and the pooled map, measured in the forward pass: running sums that are rescaled whenever the
// running maximum rises, like the sums of the online softmax.
//
// With x = logit − max, weight w = e^x and δ = key position − query position, the running sums are
//   sum = Σ w,  entropy_sum = Σ w·x,  distance = Σ w·|δ|,  offset = Σ w·δ.
// At the end, entropy = log sum − entropy_sum/sum, and distance and offset are divided by sum. A learned sink is one
// more term of the denominator, which starts with x = 0.
//
// A weight is "relative to" the maximum in its exponent. Weights must be relative to the same maximum to be added.
#pragma once

#include "logits.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// A sum of weights in units of 2^−32, rounded: 2^31 rows fit. (A call of llrint or ldexp costs more than the sum.)
REGARD_INLINE int64_t in_units(float x) { return static_cast<int64_t>(static_cast<double>(x) * 0x1p32 + 0.5); }

// The running sums of one panel.
struct ObservableSums {
    Floats entropy_sum[NR];
    Floats distance[NR];
    Floats offset[NR];
    Floats sink[NR];
    Floats local[NR];
    Floats peak[NR];  // the largest logit of a key
    Ints peak_at[NR];
    Ints visible[NR];
    Floats query_position[NR];
    // [map_size, PW]: the weight on each bin of keys, and the maximum that this weight is relative to.
    float* bin_mass;
    float* bin_max;
    // [group_count, PW]: the weight on each group of keys, relative to the running maximum.
    float* group_mass;
    int64_t group_count;
};

// How many floats of scratch memory the bins and the groups of one panel need.
inline int64_t bin_floats(const AttentionCall& call) {
    return call.observables ? (2 * call.observables->map_size + call.observables->group_count) * PW : 0;
}

inline void init_observables(const AttentionCall& call, const Panel& panel, float* bins, ObservableSums& sums) {
    const Observables& wanted = *call.observables;
    for (int v = 0; v < NR; v++) {
        sums.entropy_sum[v] = Floats{};
        sums.distance[v] = Floats{};
        sums.offset[v] = Floats{};
        sums.sink[v] = Floats{};
        sums.local[v] = Floats{};
        sums.peak[v] = broadcast(kHidden);
        sums.peak_at[v] = broadcast(int32_t{-1});
        sums.visible[v] = Ints{};
        for (int lane = 0; lane < W; lane++)
            sums.query_position[v][lane] = static_cast<float>(panel.first_row + v * W + lane + wanted.query_offset);
    }
    sums.bin_mass = bins;
    sums.bin_max = bins + wanted.map_size * PW;
    std::fill(sums.bin_mass, sums.bin_max, 0.0f);
    sums.group_mass = sums.bin_max + wanted.map_size * PW;
    sums.group_count = wanted.group_count;
    std::fill(sums.bin_max, sums.group_mass, kLowest);
    std::fill(sums.group_mass, sums.group_mass + wanted.group_count * PW, 0.0f);
}

// Rescales all sums after the maximum has risen from `old_max` to `new_max`; rescale = e^(old_max − new_max).
REGARD_INLINE void rescale_observables(ObservableSums& sums, const Floats* old_max, const Floats* new_max,
                                       const Floats* row_sum, const Floats* rescale) {
    for (int64_t group = 0; group < sums.group_count; group++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            float* mass = sums.group_mass + group * PW + v * W;
            store(mass, load(mass) * rescale[v]);
        }
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) {
        // Clamped, because the difference may overflow to −inf where rescale is 0, and 0 · inf is NaN.
        const Floats shift = clamp_for_exp(old_max[v] - new_max[v]);
        sums.entropy_sum[v] = rescale[v] * (sums.entropy_sum[v] + shift * row_sum[v]);
        sums.distance[v] *= rescale[v];
        sums.offset[v] *= rescale[v];
        sums.sink[v] *= rescale[v];
        sums.local[v] *= rescale[v];
    }
}

// Reads the logits of a block before they become weights: which key has the largest logit, and how many keys are
// visible. `block_max` is the largest logit of each lane. In `hidden`, −inf marks the hidden keys (block_logits in
// forward_panel.h).
REGARD_INLINE void observe_logits(const HeadContext& head, int64_t j, int64_t count, const float* s,
                                  const float* hidden, const Floats* block_max, ObservableSums& sums) {
    Ints rose[NR];
    bool any_rose = false;
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) {
        rose[v] = block_max[v] > sums.peak[v];
        any_rose |= any(rose[v]);
        sums.peak[v] = max(block_max[v], sums.peak[v]);
    }
    if (any_rose)
        for (int64_t key = count - 1; key >= 0; key--)  // downwards, so that of equal logits the lowest key remains
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) {
                const Ints is_peak = rose[v] & (load(s + key * PW + v * W) == sums.peak[v]);
                sums.peak_at[v] = is_peak ? broadcast(static_cast<int32_t>(j + key)) : sums.peak_at[v];
            }
    if (head.hides)
        for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++)  // a true comparison is −1
                sums.visible[v] -= load(hidden + key * PW + v * W) != broadcast(kHidden);
}

// Adds the weights of those keys among j … j + count − 1 that are near the query, or that are first keys of the
// sequence. Few blocks have any.
REGARD_INLINE void observe_near_and_first(const AttentionCall& call, int64_t j, int64_t count, const float* weights,
                                          ObservableSums& sums) {
    const Observables& wanted = *call.observables;
    const Floats first = broadcast(static_cast<float>(j));
    const Floats radius = broadcast(static_cast<float>(wanted.local_radius));
    const Floats lowest = first - sums.query_position[NR - 1];
    const Floats highest = first + broadcast(static_cast<float>(count - 1)) - sums.query_position[0];
    const bool near = lowest[W - 1] <= wanted.local_radius && highest[0] >= -static_cast<float>(wanted.local_radius);
    if (near)
        for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) {
                const Floats delta = broadcast(static_cast<float>(j + key)) - sums.query_position[v];
                const Ints inside = (delta <= radius) & (delta >= -radius);
                sums.local[v] += select(inside, load(weights + key * PW + v * W), Floats{});
            }
    for (int64_t key = 0; j + key < wanted.sink_keys && key < count; key++)
        for (int v = 0; v < NR; v++) sums.sink[v] += load(weights + key * PW + v * W);
}

// Adds the weights of keys j … j + count − 1 to the groups of their keys. Neighbouring keys of one group are added up in
// registers: groups of text are often long runs.
REGARD_INLINE void observe_groups(const AttentionCall& call, int64_t b, int64_t j, int64_t count, const float* weights,
                                  ObservableSums& sums) {
    const Observables& wanted = *call.observables;
    const int64_t* groups = wanted.key_groups + b * wanted.key_groups_batch_stride + j;
    for (int64_t key = 0; key < count;) {
        const int64_t group = groups[key];
        if (group < 0) {
            key++;
            continue;
        }
        Floats run_sum[NR];
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) run_sum[v] = load(weights + key * PW + v * W);
        for (key++; key < count && groups[key] == group; key++)
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) run_sum[v] += load(weights + key * PW + v * W);
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            float* mass = sums.group_mass + group * PW + v * W;
            store(mass, load(mass) + run_sum[v]);
        }
    }
}

// The first key after a bin of the map. Key j is in bin ⌊j·size/M⌋.
REGARD_INLINE int64_t end_of_bin(const AttentionCall& call, int64_t bin) {
    const int64_t size = call.observables->map_size;
    return ((bin + 1) * call.M + size - 1) / size;
}

// Adds `mass`, a sum of weights relative to `row_max`, to one bin.
REGARD_INLINE void add_to_bin(ObservableSums& sums, int64_t bin, const Floats* mass, const Floats* row_max) {
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) {
        float* bin_mass = sums.bin_mass + bin * PW + v * W;
        float* bin_max = sums.bin_max + bin * PW + v * W;
        store(bin_mass, load(bin_mass) * exp(load(bin_max) - row_max[v]) + mass[v]);
        store(bin_max, row_max[v]);
    }
}

// Turns the logits of keys `from` … `to` − 1 of a block into weights relative to `row_max`. Adds the weights to
// `block_sum`, and weight · (index of the key in the block) to `index_sum`. If `with_bin`, adds the weights to
// `bin_sum` too.
template <bool with_bin>
REGARD_INLINE void weigh_keys(int64_t from, int64_t to, float* s, const Floats* row_max, Floats* block_sum,
                              Floats* bin_sum, Floats* index_sum, ObservableSums& sums) {
    for (int64_t key = from; key < to; key++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            const Floats x = clamp_for_exp(load(s + key * PW + v * W) - row_max[v]);
            const Floats weight = exp_clamped(x);
            store(s + key * PW + v * W, weight);
            if (with_bin) bin_sum[v] += weight;
            block_sum[v] += weight;
            sums.entropy_sum[v] += weight * x;
            index_sum[v] += weight * broadcast(static_cast<float>(key));
        }
}

// Turns the logits of keys j … j + count − 1 of batch entry b into weights relative to `row_max`, and adds them to
// every sum.
REGARD_INLINE void observe_weights(const AttentionCall& call, int64_t b, int64_t j, int64_t count, float* s,
                                   const Floats* row_max, Floats* row_sum, ObservableSums& sums) {
    const int64_t bins = call.observables->map_size;
    // Weights are added to `block_sum` in the same order as in a call without observables, whatever the bins are:
    // observing changes no bit of the output.
    Floats block_sum[NR];
    Floats index_sum[NR];
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) {
        block_sum[v] = Floats{};
        index_sum[v] = Floats{};
    }
    const int64_t first_bin = bins ? j * bins / call.M : 0;
    if (!bins || end_of_bin(call, first_bin) >= j + count) {
        weigh_keys<false>(0, count, s, row_max, block_sum, block_sum, index_sum, sums);
        if (bins) add_to_bin(sums, first_bin, block_sum, row_max);
    } else {
        for (int64_t key = 0, stop; key < count; key = stop) {
            const int64_t bin = (j + key) * bins / call.M;
            stop = std::min(count, end_of_bin(call, bin) - j);
            Floats bin_sum[NR];
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) bin_sum[v] = Floats{};
            weigh_keys<true>(key, stop, s, row_max, block_sum, bin_sum, index_sum, sums);
            add_to_bin(sums, bin, bin_sum, row_max);
        }
    }
    // Σ w·δ = Σ w·(key − j) + (j − query)·Σ w. If all keys lie on one side of all queries, |δ| is δ or −δ.
    const bool after = static_cast<float>(j) >= sums.query_position[NR - 1][W - 1];
    const bool before = static_cast<float>(j + count - 1) <= sums.query_position[0][0];
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) {
        const Floats first_offset = broadcast(static_cast<float>(j)) - sums.query_position[v];
        const Floats offset = index_sum[v] + first_offset * block_sum[v];
        sums.offset[v] += offset;
        if (after || before) sums.distance[v] += after ? offset : -offset;
        row_sum[v] += block_sum[v];
    }
    if (!after && !before)
        for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
            for (int v = 0; v < NR; v++) {
                const Floats delta = broadcast(static_cast<float>(j + key)) - sums.query_position[v];
                sums.distance[v] += load(s + key * PW + v * W) * max(delta, -delta);
            }
    observe_near_and_first(call, j, count, s, sums);
    if (sums.group_count) observe_groups(call, b, j, count, s, sums);
}

// Adds the sums of `b` to those of `a`. Both are sums of the same panel, for two parts of its keys. The keys of b come
// after those of a. Each part is relative to its own maximum, and both are rescaled to `row_max`.
inline void merge_observables(const AttentionCall& call, const Floats* row_max, const Floats* a_max,
                              const Floats* a_sum, const Floats* a_rescale, ObservableSums& a, const Floats* b_max,
                              const Floats* b_sum, const Floats* b_rescale, ObservableSums& b) {
    rescale_observables(a, a_max, row_max, a_sum, a_rescale);
    rescale_observables(b, b_max, row_max, b_sum, b_rescale);
    for (int v = 0; v < NR; v++) {
        a.entropy_sum[v] += b.entropy_sum[v];
        a.distance[v] += b.distance[v];
        a.offset[v] += b.offset[v];
        a.sink[v] += b.sink[v];
        a.local[v] += b.local[v];
        a.visible[v] += b.visible[v];
        const Ints higher = b.peak[v] > a.peak[v];
        a.peak_at[v] = higher ? b.peak_at[v] : a.peak_at[v];
        a.peak[v] = max(a.peak[v], b.peak[v]);
    }
    for (int64_t t = 0; t < call.observables->map_size * PW; t += W) {
        const Floats bin_max = max(load(a.bin_max + t), load(b.bin_max + t));
        store(a.bin_mass + t, load(a.bin_mass + t) * exp(load(a.bin_max + t) - bin_max) +
                                  load(b.bin_mass + t) * exp(load(b.bin_max + t) - bin_max));
        store(a.bin_max + t, bin_max);
    }
    for (int64_t t = 0; t < a.group_count * PW; t += W)
        store(a.group_mass + t, load(a.group_mass + t) + load(b.group_mass + t));
}

// Adds the panel's rows to the map, each times its `share`: 1/row_sum, or 0 for a row that is not counted. Sums are
// integers in units of 2^−32, so that neither their order nor the number of threads changes a bit.
inline void add_to_map(const AttentionCall& call, const HeadContext& head, const Panel& panel, const Floats* row_max,
                       const float* share, const ObservableSums& sums) {
    const int64_t size = call.observables->map_size;
    alignas(64) float mass[PW];
    int64_t map_rows[PW];
    for (int64_t lane = 0; lane < panel.count; lane++) map_rows[lane] = (panel.first_row + lane) * size / call.N;
    for (int64_t bin = 0; bin < size; bin++) {
        for (int v = 0; v < NR; v++) {
            const int64_t at = bin * PW + v * W;
            const Floats rescale = exp(load(sums.bin_max + at) - row_max[v]);
            store(mass + v * W, load(sums.bin_mass + at) * rescale * load(share + v * W));
        }
        for (int64_t lane = 0; lane < panel.count;) {
            const int64_t map_row = map_rows[lane];
            float cell = 0;
            for (; lane < panel.count && map_rows[lane] == map_row; lane++) cell += mass[lane];
            if (cell > 0) {
                int64_t* to = call.observables->map + (head.h * size + map_row) * size + bin;
                __atomic_fetch_add(to, in_units(cell), __ATOMIC_RELAXED);
            }
        }
    }
}

// Writes the row values of a panel and adds its rows to the map.
inline void finish_observables(const AttentionCall& call, const HeadContext& head, const Panel& panel,
                               const Floats* row_max, const Floats* row_sum, const ObservableSums& sums) {
    const Observables& wanted = *call.observables;
    alignas(64) float share[PW] = {};
    for (int64_t lane = 0; lane < panel.count; lane++) {
        const int v = static_cast<int>(lane) / W;
        const int l = static_cast<int>(lane) % W;
        const int64_t i = panel.first_row + lane;
        const int64_t row = (head.b * call.H + head.h) * call.N + i;
        int64_t visible = std::max<int64_t>(0, panel.hi[lane] - panel.lo[lane]);
        if (head.hides) visible = sums.visible[v][l];
        const float sum = row_sum[v][l];
        const float inverse = sum == 0 ? 0.0f : 1 / sum;
        for (int64_t group = 0; group < sums.group_count; group++)
            wanted.groups[row * sums.group_count + group] = sums.group_mass[group * PW + lane] * inverse;
        wanted.logit_max[row] = visible > 0 ? sums.peak[v][l] : kHidden;
        wanted.entropy[row] = sum == 0 ? 0.0f : std::log(sum) - sums.entropy_sum[v][l] * inverse;
        wanted.peak[row] = visible > 0 ? std::exp(sums.peak[v][l] - row_max[v][l]) * inverse : 0.0f;
        wanted.peak_at[row] = visible > 0 ? sums.peak_at[v][l] : -1;
        wanted.offset[row] = sums.offset[v][l] * inverse;
        wanted.distance[row] = sums.distance[v][l] * inverse;
        wanted.sink[row] = sums.sink[v][l] * inverse;
        wanted.local[row] = sums.local[v][l] * inverse;
        wanted.visible[row] = visible;
        const bool is_real =
            !wanted.real_queries || wanted.real_queries[head.b * wanted.real_queries_batch_stride + i];
        if (visible > 0 && is_real) share[lane] = inverse;
    }
    if (wanted.map_size) add_to_map(call, head, panel, row_max, share, sums);
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
