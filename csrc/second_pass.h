// The second pass computes the weights A = e^(logit − row_max) / row_sum again and measures key mass, profile, the
// largest weights of each row, and the weight of each row on bins of keys.
//
// Sums over rows are integers in units of 2^−32, so they do not depend on the order of the threads. Each thread sums
// one head at a time, and adds its sums to the shared ones before the next head. The forward pass has checked that the
// logits of all visible keys are finite.
#pragma once

#include "forward.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

struct SecondPassScratch : ForwardScratch {
    const SecondPass& wanted;
    // Sums of the head `summed_head`, not yet added to the shared ones.
    int64_t summed_head = -1;
    Array<int64_t> key_mass;
    Array<int64_t> profile;
    Array<int64_t> profile_rows;
    // [PW, top_count]: the largest logits of each row, largest first, and their keys; −1 where a row has fewer keys.
    Array<float> top_logits;
    Array<int64_t> top_at;
    int64_t bin = 0;  // the bin of the last key that was added; 0 before the first one

    SecondPassScratch(const AttentionCall& call, const SecondPass& pass)
        : ForwardScratch(call),
          wanted(pass),
          key_mass(pass.key_mass ? call.M : 0),
          profile(pass.profile ? 2 * pass.profile_radius + 1 : 0),
          profile_rows(profile.size()),
          top_logits(PW * pass.top_count),
          top_at(PW * pass.top_count) {}
    SecondPassScratch(const SecondPassScratch&) = delete;
    ~SecondPassScratch() { flush(); }

    // Prepares the sums for head h: sums of another head are added to the shared ones first.
    void sum_for_head(int64_t h) {
        if (h == summed_head) return;
        flush();
        summed_head = h;
    }

    void flush() {
        if (summed_head < 0) return;
        add_to_shared(key_mass, wanted.key_mass);
        add_to_shared(profile, wanted.profile);
        add_to_shared(profile_rows, wanted.profile_rows);
    }

private:
    void add_to_shared(Array<int64_t>& sums, int64_t* shared) const {
        for (int64_t t = 0; t < sums.size(); t++) {
            if (sums[t] == 0) continue;
            __atomic_fetch_add(shared + summed_head * sums.size() + t, sums[t], __ATOMIC_RELAXED);
            sums[t] = 0;
        }
    }
};

// Inserts the logits of a block into each row's list of its largest logits. Of equal logits, the lower key comes first.
// In `hidden`, −inf marks the hidden keys.
inline void update_top(const Panel& panel, int64_t j, int64_t count, const float* s, const float* hidden,
                       SecondPassScratch& scratch) {
    const int64_t size = scratch.wanted.top_count;
    Floats block_max[NR];
    max_of_block(s, count, block_max);
    for (int64_t lane = 0; lane < panel.count; lane++) {
        float* logits = scratch.top_logits.data() + lane * size;
        int64_t* keys = scratch.top_at.data() + lane * size;
        // After the first blocks, nearly every block has no logit large enough for the list.
        if (keys[size - 1] >= 0 && block_max[lane / W][lane % W] <= logits[size - 1]) continue;
        for (int64_t key = 0; key < count; key++) {
            const float logit = s[key * PW + lane];
            if (hidden[key * PW + lane] == kHidden) continue;
            if (keys[size - 1] >= 0 && logit <= logits[size - 1]) continue;
            int64_t place = size - 1;
            for (; place > 0 && (keys[place - 1] < 0 || logit > logits[place - 1]); place--) {
                logits[place] = logits[place - 1];
                keys[place] = keys[place - 1];
            }
            logits[place] = logit;
            keys[place] = j + key;
        }
    }
}

inline void add_to_profile(const Panel& panel, const uint8_t* counted, int64_t j, int64_t count, const float* weights,
                           const uint8_t* visible, SecondPassScratch& scratch) {
    const int64_t radius = scratch.wanted.profile_radius;
    for (int64_t lane = 0; lane < panel.count; lane++) {
        if (!counted[lane]) continue;
        const int64_t query_position = panel.first_row + lane + scratch.wanted.query_offset;
        const int64_t from = std::max(j, query_position - radius);
        const int64_t to = std::min(j + count, query_position + radius + 1);
        for (int64_t key = from; key < to; key++) {
            if (!visible[(key - j) * PW + lane]) continue;
            scratch.profile[key - query_position + radius] += in_units(weights[(key - j) * PW + lane]);
            scratch.profile_rows[key - query_position + radius]++;
        }
    }
}

inline void add_to_key_mass(const Panel& panel, const uint8_t* counted, int64_t j, int64_t count,
                            const float* weights, SecondPassScratch& scratch) {
    // Weights of rows that do not count are left out, not multiplied by 0: they may be infinite or NaN.
    alignas(64) int32_t counts[PW] = {};
    for (int64_t lane = 0; lane < panel.count; lane++) counts[lane] = counted[lane];
    for (int64_t key = 0; key < count; key++) {
        Floats mass = Floats{};
        for (int v = 0; v < NR; v++)
            mass += select(load(counts + v * W) != 0, load(weights + key * PW + v * W), Floats{});
        scratch.key_mass[j + key] += in_units(sum(mass));
    }
}

// Adds the weights of keys j … j + count − 1 to their bins. `bin` is at most the bin of key j, and becomes the bin of
// the last key.
inline void add_to_bins(const Panel& panel, float* rows, int64_t j, int64_t count, const float* weights, int64_t& bin,
                        const SecondPass& wanted) {
    for (int64_t key = 0; key < count;) {
        while (wanted.bin_edges[bin + 1] <= j + key) bin++;
        const int64_t stop = std::min(count, wanted.bin_edges[bin + 1] - j);
        Floats mass[NR];
        for (int v = 0; v < NR; v++) mass[v] = Floats{};
        for (; key < stop; key++)
            for (int v = 0; v < NR; v++) mass[v] += load(weights + key * PW + v * W);
        for (int64_t lane = 0; lane < panel.count; lane++)
            rows[lane * wanted.bin_count + bin] += mass[lane / W][lane % W];
    }
}

// One block of keys for one panel. `state.softmax` holds row_max and 1/row_sum.
inline void second_pass_block(const AttentionCall& call, int64_t j, int64_t count, const Rows& keys,
                              SecondPassScratch& scratch, PanelState& state) {
    const SecondPass& wanted = scratch.wanted;
    const Panel& panel = state.panel;
    float* s = scratch.scores;
    VisibleParts parts;
    find_visible_parts(panel, j, count, parts);
    const float* hidden = block_logits(call, j, count, keys, parts, scratch, state);
    if (wanted.top_count) update_top(panel, j, count, s, hidden, scratch);
    if (!wanted.key_mass && !wanted.profile && !wanted.bin_count) return;

    // `hidden` may be the same array as `s`, so read it before the logits become weights.
    alignas(64) uint8_t visible[KEY_BLOCK * PW];
    const int64_t first_near = panel.first_row + wanted.query_offset - wanted.profile_radius;
    const int64_t end_near = panel.first_row + panel.count + wanted.query_offset + wanted.profile_radius;
    const bool in_profile = wanted.profile && j + count > first_near && j < end_near;
    if (in_profile)
        for (int64_t t = 0; t < count * PW; t++) visible[t] = hidden[t] != kHidden;
    for (int64_t key = 0; key < count; key++)
#pragma GCC unroll 4
        for (int v = 0; v < NR; v++) {
            float* at = s + key * PW + v * W;
            store(at, exp(load(at) - state.softmax.max[v]) * state.softmax.sum[v]);
        }

    const int64_t first_row = row_of_lane(call, state.head, panel, 0);
    if (wanted.bin_count)
        add_to_bins(panel, wanted.bin_masses + first_row * wanted.bin_count, j, count, s, scratch.bin, wanted);
    if (!wanted.key_mass && !in_profile) return;
    const uint8_t* counted = wanted.counted + first_row;
    scratch.sum_for_head(state.head.h);
    if (in_profile) add_to_profile(panel, counted, j, count, s, visible, scratch);
    if (wanted.key_mass) add_to_key_mass(panel, counted, j, count, s, scratch);
}

inline void second_pass_panel(const AttentionCall& call, SecondPassScratch& scratch, PanelState& state) {
    const SecondPass& wanted = scratch.wanted;
    const Panel& panel = state.panel;
    for (int lane = 0; lane < PW; lane++) {
        const int64_t row = row_of_lane(call, state.head, panel, lane);
        const bool empty = call.row_sum[row] == 0;
        state.softmax.max[lane / W][lane % W] = empty ? 0.0f : static_cast<float>(call.row_max[row]);
        state.softmax.sum[lane / W][lane % W] = empty ? 0.0f : static_cast<float>(1 / call.row_sum[row]);
    }
    std::fill(scratch.top_at.begin(), scratch.top_at.end(), -1);
    scratch.bin = 0;

    int64_t first = panel.first_key;
    int64_t end = panel.end_key;
    if (!wanted.top_count && !wanted.key_mass && !wanted.bin_count) {
        // A profile needs only the keys around the queries.
        first = std::max(first, panel.first_row + wanted.query_offset - wanted.profile_radius);
        end = std::min(end, panel.first_row + panel.count + wanted.query_offset + wanted.profile_radius);
    }
    if (wanted.bin_count) {
        first = std::max(first, wanted.bin_edges[0]);
        end = std::min(end, wanted.bin_edges[wanted.bin_count]);
    }
    for (int64_t j = first; j < end; j += KEY_BLOCK) {
        const int64_t count = std::min(KEY_BLOCK, end - j);
        const Rows keys = score_keys(call, state.head, j, count, scratch.keys);
        second_pass_block(call, j, count, keys, scratch, state);
    }

    const int64_t first_row = row_of_lane(call, state.head, panel, 0);
    for (int64_t lane = 0; lane < panel.count; lane++)
        for (int64_t t = 0; t < wanted.top_count; t++) {
            const int64_t from = lane * wanted.top_count + t;
            const int64_t to = (first_row + lane) * wanted.top_count + t;
            const float x = scratch.top_logits[from] - state.softmax.max[lane / W][lane % W];
            const float weight = std::exp(x) * state.softmax.sum[lane / W][lane % W];
            wanted.top[to] = scratch.top_at[from] < 0 ? 0.0f : weight;
            wanted.top_at[to] = scratch.top_at[from];
        }
}

void second_pass(const AttentionCall& call, const SecondPass& wanted) {
    if (call.hard_max) fill_hard_max(call);
    const int64_t panels = panels_per_head(call);
    run_tasks<SecondPassScratch>(
        call.B * call.H * panels, threads_for(call, 0.5), [&] { return SecondPassScratch(call, wanted); },
        [&](int64_t task, SecondPassScratch& scratch) {
            PanelState state;
            const HeadContext& head = scratch.prepare_head(call, task / panels);
            start_panel<false>(call, head, task % panels * PW, scratch.queries, scratch.outputs, nullptr, scratch,
                               state);
            second_pass_panel(call, scratch, state);
        });
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
