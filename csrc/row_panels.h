// Packs rows into panels, and unpacks them. A panel [width, PW] holds up to PW rows, one per lane.
#pragma once

#include "half_precision.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// `full`: all PW lanes are in use. The index c is the first lane of a vector.
template <bool full>
REGARD_INLINE void pack_rows(const Rows& rows, int64_t count, int64_t width, float factor, float* panel) {
    const float* from = rows.floats();
    const Floats factors = broadcast(factor);
    for (int c = 0; c < PW; c += W) {
        int64_t t = 0;
        for (; t + W <= width; t += W) {
            Floats block[W];
#pragma GCC unroll 16
            for (int r = 0; r < W; r++)
                block[r] = full || c + r < count ? load(from + (c + r) * rows.stride + t) * factors : Floats{};
            transpose(block);
#pragma GCC unroll 16
            for (int r = 0; r < W; r++) store(panel + (t + r) * PW + c, block[r]);
        }
        for (; t < width; t++)
            for (int r = 0; r < W; r++)
                panel[t * PW + c + r] = c + r < count ? from[(c + r) * rows.stride + t] * factor : 0.0f;
    }
}

// Packs float32 rows [count, width] times `factor` into a panel; lanes beyond `count` are 0.
REGARD_INLINE void pack_panel(const Rows& rows, int64_t count, int64_t width, float factor, float* panel) {
    if (count == PW)
        pack_rows<true>(rows, count, width, factor, panel);
    else
        pack_rows<false>(rows, count, width, factor, panel);
}

// Unpacks a panel into float32 rows [count, width], each lane times its factor. With `add`, adds to the rows.
template <bool add>
REGARD_INLINE void unpack_panel(const float* panel, const float* factors, int64_t count, int64_t width, float* rows,
                                int64_t stride) {
    for (int c = 0; c < PW && c < count; c += W) {
        const Floats lane_factors = load(factors + c);
        int64_t t = 0;
        for (; t + W <= width; t += W) {
            Floats block[W];
#pragma GCC unroll 16
            for (int r = 0; r < W; r++) block[r] = load(panel + (t + r) * PW + c) * lane_factors;
            transpose(block);
#pragma GCC unroll 16
            for (int r = 0; r < W; r++)
                if (c + r < count) {
                    float* to = rows + (c + r) * stride + t;
                    store(to, add ? load(to) + block[r] : block[r]);
                }
        }
        for (; t < width; t++)
            for (int r = 0; r < W && c + r < count; r++) {
                float& to = rows[(c + r) * stride + t];
                to = panel[t * PW + c + r] * factors[c + r] + (add ? to : 0.0f);
            }
    }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
