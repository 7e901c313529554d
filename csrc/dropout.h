// Dropout of weights, by a hash of seed, batch entry, head, query and key. Panels, lanes and PW are defined in simd.h.
#pragma once

#include "attention_call.h"
#include "simd.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

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
