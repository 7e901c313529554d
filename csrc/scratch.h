// Scratch memory of one thread, and its cache of head contexts. Panels, lanes and PW are defined in simd.h.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "observables.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// Blocks of memory that are aligned to cache lines and freed together.
class Scratch {
public:
    float* allocate(int64_t floats) {
        // aligned_alloc needs whole cache lines. One line is added, so that `floats` may be 0.
        const int64_t bytes = (floats * 4 + 127) / 64 * 64;
        auto* piece = static_cast<float*>(std::aligned_alloc(64, bytes));
        if (!piece) throw std::bad_alloc();
        pieces_.emplace_back(piece, std::free);
        return piece;
    }

private:
    std::vector<std::unique_ptr<float, void (*)(void*)>> pieces_;
};

struct ForwardScratch : Scratch {
    float* queries;     // panels [D, PW] of a tile, or rows [lanes, D]
    float* outputs;     // panels [E, PW] of a tile, or rows [lanes, E]
    float* scores;      // [KEY_BLOCK, PW]
    float* dense_bias;  // [KEY_BLOCK, PW]
    float* spare;       // [KEY_BLOCK, PW]: the biases of hard attention, or the weights after dropout
    float* keys;        // a block of keys as float32, if they are not float32 already
    float* values;
    float* rows;  // the rows of one panel as float32
    float* bins;  // bins of the pooled map, for all panels of a tile
    Floats nonfinite = Floats{};  // 0 while all numbers are finite; NaN in some lane after one that is not

    explicit ForwardScratch(const AttentionCall& call) {
        const bool converts = call.dtype != Dtype::float32;
        queries = allocate(PANELS_PER_TILE * call.D * PW);
        outputs = allocate(PANELS_PER_TILE * call.E * PW);
        scores = allocate(KEY_BLOCK * PW);
        dense_bias = allocate(KEY_BLOCK * PW);
        spare = allocate(KEY_BLOCK * PW);
        keys = allocate(converts ? KEY_BLOCK * call.D : 1);
        values = allocate(converts ? KEY_BLOCK * call.E : 1);
        rows = allocate(PW * std::max(call.D, call.E));
        bins = allocate(PANELS_PER_TILE * bin_floats(call) + 1);
        for (PreparedHead& prepared : heads_)
            prepared.toeplitz = allocate(call.terms.empty() ? 1 : call.N + call.M + 2 * PW);
    }

    bool finite() const { return sum(nonfinite) == 0; }

    // Returns the context of head `index` = b·H + h, and computes it if it is not in the cache. The cache has one slot
    // per panel, because the panels of a tile may belong to different heads. The least recently used slot is replaced.
    const HeadContext& prepare_head(const AttentionCall& call, int64_t index) {
        PreparedHead* oldest = heads_;
        for (PreparedHead& prepared : heads_) {
            if (prepared.head.b >= 0 && prepared.head.b * call.H + prepared.head.h == index) {
                prepared.last_used = ++clock_;
                return prepared.head;
            }
            if (prepared.last_used < oldest->last_used) oldest = &prepared;
        }
        const int64_t h = index % call.H;
        oldest->head = HeadContext{index / call.H, h, h / (call.H / call.G)};
        oldest->last_used = ++clock_;
        init_head(call, oldest->head, oldest->toeplitz);
        return oldest->head;
    }

private:
    struct PreparedHead {
        HeadContext head;
        float* toeplitz = nullptr;
        int64_t last_used = 0;
    };
    PreparedHead heads_[PANELS_PER_TILE];
    int64_t clock_ = 0;
};

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
