// The forward pass: a call is divided into tiles of a few panels, or into parts of its keys if there are few queries.
#pragma once

#include <atomic>

#include "array.h"
#include "forward_panel.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// Processes the keys `start` ≤ j < `stop` for all panels of a tile. All panels have the same key head, so they use each
// block of keys while it is in cache.
template <bool observed>
inline void forward_keys(const AttentionCall& call, int64_t start, int64_t stop, int panels, ForwardScratch& scratch,
                         PanelState* states) {
    int64_t first = stop;
    int64_t end = start;
    for (int p = 0; p < panels; p++) {
        const Panel& panel = states[p].panel;
        if (panel.first_key >= panel.end_key) continue;
        first = std::min(first, panel.first_key);
        end = std::max(end, panel.end_key);
    }
    first = std::max(first, start);
    end = std::min(end, stop);

    const HeadContext& head = states[0].head;
    const bool pairs = uses_pairs(call);
    bool all_have_few_rows = true;
    for (int p = 0; p < panels; p++) all_have_few_rows = all_have_few_rows && states[p].few_rows;
    // few_rows.h reads any dtype. A conversion to float32 pays only if several panels use the converted block.
    const bool in_own_dtype = pairs || (panels == 1 && all_have_few_rows);
    for (int64_t j = first; j < end; j += KEY_BLOCK) {
        const int64_t count = std::min(KEY_BLOCK, end - j);
        Rows keys = rows_of(call.k, call.dtype, head.b, head.g, j);
        Rows values = rows_of(call.v, call.dtype, head.b, head.g, j);
        if (!in_own_dtype) {
            keys = float_rows_of(call.k, call.dtype, head.b, head.g, j, count, call.D, scratch.keys);
            values = float_rows_of(call.v, call.dtype, head.b, head.g, j, count, call.E, scratch.values);
        }
        if (pairs && !all_have_few_rows)
            pair_rows(values.halves(), values.stride, count, call.E, scratch.value_pairs);
        for (int p = 0; p < panels; p++) {
            int64_t from = std::max(j, states[p].panel.first_key);
            const int64_t to = std::min(j + count, states[p].panel.end_key);
            if (from >= to) continue;
            if (pairs) from -= (from - j) % 2;  // start with a whole pair; its first key is hidden
            forward_block<observed>(call, from, to - from, keys.from(from - j), values.from(from - j),
                                    scratch.value_pairs + (from - j) / 2 * call.E, scratch, states[p]);
        }
    }
}

constexpr int64_t ENOUGH_TASKS = 8;  // enough to keep a few threads busy

// How a call is divided into tiles. The panels of all query heads that share a key head are numbered in one sequence,
// and each tile takes a few of them.
struct Tiling {
    int64_t panels_per_tile = PANELS_PER_TILE;
    int64_t panels_per_query_head;
    int64_t panels_per_key_head;
    int64_t tiles_per_key_head;
    int64_t tiles;

    explicit Tiling(const AttentionCall& call) {
        panels_per_query_head = panels_per_head(call);
        panels_per_key_head = call.H / call.G * panels_per_query_head;
        divide(call);
        // Smaller tiles if there would be too few for several threads. Not if each panel has few rows: it then takes
        // longer to read the keys than to compute, and panels must share them.
        while (panels_per_tile > 1 && tiles < ENOUGH_TASKS && call.N > PW / 4) {
            panels_per_tile /= 2;
            divide(call);
        }
    }

    void divide(const AttentionCall& call) {
        tiles_per_key_head = (panels_per_key_head + panels_per_tile - 1) / panels_per_tile;
        tiles = call.B * call.G * tiles_per_key_head;
    }

    int panels_in_tile(int64_t tile) const {
        return static_cast<int>(std::min(panels_per_tile, panels_per_key_head - tile * panels_per_tile));
    }

    // Starts the panels of one tile of one key head and returns how many there are.
    template <bool observed>
    int start(const AttentionCall& call, int64_t key_head, int64_t tile, float* outputs, float* bins,
              ForwardScratch& scratch, PanelState* states) const {
        const int panels = panels_in_tile(tile);
        for (int p = 0; p < panels; p++) {
            const int64_t panel = tile * panels_per_tile + p;
            const int64_t query_head = key_head * (call.H / call.G) + panel / panels_per_query_head;
            const int64_t first_row = panel % panels_per_query_head * PW;
            start_panel<observed>(call, scratch.prepare_head(call, query_head), first_row,
                                  scratch.queries + p * call.D * PW, outputs + p * call.E * PW,
                                  bins + p * bin_floats(call), scratch, states[p]);
        }
        return panels;
    }
};

template <bool observed>
inline bool forward_tiles(const AttentionCall& call) {
    const Tiling tiling(call);
    const int64_t per_key_head = tiling.tiles_per_key_head;
    std::atomic<bool> finite{true};
    run_tasks<ForwardScratch>(
        tiling.tiles, threads_for(call, 1), [&] { return ForwardScratch(call); },
        [&](int64_t task, ForwardScratch& scratch) {
            // The last tiles come first: under a causal mask they have the most keys.
            const int64_t tile = per_key_head - 1 - task % per_key_head;
            PanelState states[PANELS_PER_TILE];
            const int panels =
                tiling.start<observed>(call, task / per_key_head, tile, scratch.outputs, scratch.bins, scratch, states);
            forward_keys<observed>(call, 0, call.M, panels, scratch, states);
            for (int p = 0; p < panels; p++) finish_panel<observed>(call, scratch, states[p]);
            if (!scratch.finite()) finite = false;
        });
    return finite;
}

// The forward pass for few tiles and many keys, as in decoding: the keys are split into parts, each part is a task, and
// the results of the parts are merged in order.
template <bool observed>
inline bool forward_split_keys(const AttentionCall& call, int64_t splits) {
    const Tiling tiling(call);
    const int64_t tasks = tiling.tiles * splits;
    const int64_t keys_per_split = keys_per_part(call.M, splits, KEY_BLOCK);
    const int64_t output_floats = PANELS_PER_TILE * call.E * PW;
    const int64_t task_floats = output_floats + PANELS_PER_TILE * bin_floats(call);
    Array<PanelState> states(tasks * PANELS_PER_TILE);
    Array<float> buffers(tasks * task_floats);
    std::atomic<bool> finite{true};
    const int threads = threads_for(call, 1);
    const auto make_scratch = [&] { return ForwardScratch(call); };

    run_tasks<ForwardScratch>(tasks, threads, make_scratch, [&](int64_t task, ForwardScratch& scratch) {
        const int64_t tile = task / splits;
        const int64_t split = task % splits;
        float* outputs = buffers.data() + task * task_floats;
        PanelState* task_states = states.data() + task * PANELS_PER_TILE;
        const int panels =
            tiling.start<observed>(call, tile / tiling.tiles_per_key_head, tile % tiling.tiles_per_key_head, outputs,
                                   outputs + output_floats, scratch, task_states);
        if (split > 0)  // only the first part may start with the weight of the sink
            for (int p = 0; p < panels; p++)
                for (int v = 0; v < NR; v++) {
                    task_states[p].softmax.max[v] = broadcast(kLowest);
                    task_states[p].softmax.sum[v] = Floats{};
                }
        const int64_t end = std::min(call.M, (split + 1) * keys_per_split);
        forward_keys<observed>(call, split * keys_per_split, end, panels, scratch, task_states);
        if (!scratch.finite()) finite = false;
    });
    run_tasks<ForwardScratch>(tiling.tiles, threads, make_scratch, [&](int64_t tile, ForwardScratch& scratch) {
        const int panels = tiling.panels_in_tile(tile % tiling.tiles_per_key_head);
        for (int p = 0; p < panels; p++) {
            PanelState& merged = states[tile * splits * PANELS_PER_TILE + p];
            for (int64_t split = 1; split < splits; split++)
                merge_panels<observed>(call, merged, states[(tile * splits + split) * PANELS_PER_TILE + p]);
            finish_panel<observed>(call, scratch, merged);
        }
        if (!scratch.finite()) finite = false;
    });
    return finite;
}

// The number of parts into which the keys are split. It depends only on the shape, so that results are bit-identical
// for every number of threads.
inline int64_t count_key_splits(const AttentionCall& call) {
    constexpr int64_t min_keys_per_task = 1024;
    const int64_t tiles = Tiling(call).tiles;
    if (tiles == 0 || tiles >= ENOUGH_TASKS) return 1;
    return std::max<int64_t>(1, std::min(ENOUGH_TASKS / tiles, call.M / min_keys_per_task));
}

// Returns false if a result is not finite.
bool forward(const AttentionCall& call) {
    if (call.hard_max) fill_hard_max(call);
    const int64_t splits = count_key_splits(call);
    if (splits > 1)
        return call.observables ? forward_split_keys<true>(call, splits) : forward_split_keys<false>(call, splits);
    return call.observables ? forward_tiles<true>(call) : forward_tiles<false>(call);
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
