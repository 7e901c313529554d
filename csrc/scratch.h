// Scratch memory of one thread, and its cache of head contexts. Panels, lanes and PW are defined in simd.h.
#pragma once

#include <cstdlib>
#include <new>

#include "observables.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// Blocks of memory that are aligned to cache lines and freed together.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() {
        while (newest_) {
            Piece* older = newest_->older;
            std::free(newest_);
            newest_ = older;
        }
    }

    float* allocate(int64_t floats) {
        const int64_t lines = (floats * 4 + CACHE_LINE - 1) / CACHE_LINE;
        void* memory = std::aligned_alloc(CACHE_LINE, (lines + 1) * CACHE_LINE);
        if (!memory) throw std::bad_alloc();
        newest_ = new (memory) Piece{newest_};
        return reinterpret_cast<float*>(static_cast<char*>(memory) + CACHE_LINE);
    }

private:
    static constexpr int64_t CACHE_LINE = 64;
    // Takes the cache line before each piece of memory, so that the pieces need no list of their own.
    struct Piece {
        Piece* older;
    };
    Piece* newest_ = nullptr;
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
    float* bins;  // bins of the pooled map and groups of keys, for all panels of a tile
    uint32_t* weight_pairs;  // [KEY_BLOCK / 2, PW] and [KEY_BLOCK / 2, E], if the call uses pairs (bf16_pairs.h)
    uint32_t* value_pairs;
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
        weight_pairs = reinterpret_cast<uint32_t*>(allocate(uses_pairs(call) ? KEY_BLOCK / 2 * PW : 1));
        value_pairs = reinterpret_cast<uint32_t*>(allocate(uses_pairs(call) ? KEY_BLOCK / 2 * call.E : 1));
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
