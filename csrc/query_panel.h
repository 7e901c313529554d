// A panel of queries, which keys its rows see, and the products of the parts of a block that some row sees. Panels, lanes
// and PW are defined in simd.h.
#pragma once

#include <algorithm>

#include "half_precision.h"
#include "matmul_blocks.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

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

// Without bounds, every row sees every key.
REGARD_INLINE void see_all_keys(const AttentionCall& call, Panel& panel) {
    panel.first_key = 0;
    panel.end_key = call.M;
    panel.all_see_from = 0;
    panel.all_see_to = call.M;
#pragma GCC unroll 4
    for (int v = 0; v < NR; v++) {
        store(panel.lo + v * W, Ints{});
        store(panel.hi + v * W, broadcast(static_cast<int32_t>(call.M)));
        panel.first_key_of_vector[v] = 0;
        panel.end_key_of_vector[v] = call.M;
    }
}

inline void init_panel(const AttentionCall& call, int64_t b, int64_t first_row, Panel& panel) {
    panel.first_row = first_row;
    panel.count = std::min<int64_t>(PW, call.N - first_row);
    panel.vectors = static_cast<int>((panel.count + W - 1) / W);
    if (!call.lo && !call.hi) return see_all_keys(call, panel);

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

// --- products of the visible parts; `Operand` as in matmul_blocks.h ---

// Not inlined: in a function that also has the products of whole blocks, both would be slower.
template <class Operand>
REGARD_NOINLINE void dot_products_of_parts(const Rows& keys, const void* queries, float* scores, int64_t count,
                                           int64_t units, const VisibleParts& visible, float factor) {
    std::memset(scores, 0, sizeof(float) * count * PW);
    for (const VisiblePart& part : visible)
        with_vectors(part.vectors, [&](auto vectors) __attribute__((always_inline)) {
            dot_products<Operand, vectors()>(keys.from(part.first_key).data, keys.row_bytes(),
                                             static_cast<const float*>(queries) + part.lane(), scores + part.offset(),
                                             part.keys, units, factor);
        });
}

// dot_products of matmul_blocks.h for the visible parts of a block of `count` keys (or values); the other parts are 0.
template <class Operand>
REGARD_INLINE void visible_dot_products(const Rows& keys, const void* queries, float* scores, int64_t count,
                                        int64_t units, const VisibleParts& visible, float factor) {
    if (visible.is_whole(count))
        dot_products<Operand, NR>(keys.data, keys.row_bytes(), queries, scores, count, units, factor);
    else
        dot_products_of_parts<Operand>(keys, queries, scores, count, units, visible, factor);
}

REGARD_NOINLINE inline void weighted_sum_of_parts(const Rows& values, const float* weights, float* outputs,
                                                  int64_t width, const VisibleParts& visible) {
    for (const VisiblePart& part : visible)
        with_vectors(part.vectors, [&](auto vectors) __attribute__((always_inline)) {
            weighted_sum<Float32Operand, vectors()>(values.from(part.first_key).data, values.row_bytes(),
                                                    weights + part.offset(), outputs + part.lane(), part.keys, width);
        });
}

// weighted_sum of matmul_blocks.h over the visible parts of a block: the weights of the other parts are 0.
REGARD_INLINE void visible_weighted_sum(const Rows& values, const float* weights, float* outputs, int64_t count,
                                        int64_t width, const VisibleParts& visible) {
    if (visible.is_whole(count))
        weighted_sum<Float32Operand, NR>(values.data, values.row_bytes(), weights, outputs, count, width);
    else
        weighted_sum_of_parts(values, weights, outputs, width, visible);
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
