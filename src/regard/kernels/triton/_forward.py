"""The forward pass of one tile of queries: online softmax over blocks of keys.

It writes out, row_max and row_sum of its rows, and their observables if they are requested.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.triton._dropout import keep_tile, row_hash
from regard.kernels.triton._logits import (
    LOWEST,
    as_dtype,
    dot,
    is_finite,
    key_range,
    load_hard_max,
    load_rows,
    logit_tile,
    row_bounds,
    score_tile,
    store_rows,
    tile_is_finite,
)
from regard.kernels.triton._nan_rows import observe_nan_rows
from regard.kernels.triton._observables import (
    add_to_bins,
    add_to_map,
    observe_logits,
    observe_weights,
    rescale_entropy,
    store_row_values,
)


@triton.jit
def forward(
    call,
    out,
    row_max_of_rows,
    row_sum_of_rows,
    observables,
    nonfinite,
    SCORES: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAREFUL: tl.constexpr,
):
    tiles = tl.cdiv(call.N, ROWS)
    head = tl.program_id(0) // tiles
    # The last tiles come first: under a causal mask they have the most keys.
    tile = tiles - 1 - tl.program_id(0) % tiles
    if CAREFUL:
        # Only tiles whose result was not finite are computed again.
        if tl.load(nonfinite + tl.program_id(0)) == 0:
            return
    b = head // call.H
    h = head % call.H
    g = h // (call.H // call.G)
    rows = tile * ROWS + tl.arange(0, ROWS)
    exists = rows < call.N
    row_index = tl.cast(head, tl.int64) * call.N + rows
    lo, hi = row_bounds(call, b, rows)
    first, end = key_range(call, lo, hi, KEYS)
    hard_max = load_hard_max(call, row_index, exists, SCORES)
    q = load_rows(call.q, b, h, rows, call.N, D, D_PADDED)
    if call.seed is not None:
        row_hashes = row_hash(call, b, h, rows)

    # A sink is one more logit, without a value: the sum starts with its weight e^(sink − max) = 1.
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    if call.sinks is not None:
        sink = tl.load(call.sinks + h)
        row_max = tl.where(sink == float("-inf"), row_max, sink)
        row_sum = tl.where(sink == float("-inf"), row_sum, 1.0)
    outputs = tl.zeros([ROWS, E_PADDED], tl.float32)
    if CAREFUL:
        # Which outputs meet a visible +inf (bits 0–7) and −inf (from bit 8 on).
        tl.static_assert(KEYS < 256)
        hits = tl.zeros([ROWS, E_PADDED], tl.int32)
    if observables is not None:
        entropy_sum = tl.zeros([ROWS], tl.float32)
        offset_sum = tl.zeros([ROWS], tl.float32)
        distance_sum = tl.zeros([ROWS], tl.float32)
        sink_sum = tl.zeros([ROWS], tl.float32)
        local_sum = tl.zeros([ROWS], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        peak_at = tl.full([ROWS], -1, tl.int32)
        visible_keys = tl.zeros([ROWS], tl.int32)

    for j in range(first, end, KEYS):
        keys = j + tl.arange(0, KEYS)
        k = load_rows(call.k, b, g, keys, call.M, D, D_PADDED)
        scores = score_tile(call, b, h, g, rows, keys, q, k, SCORES, D)
        logits, visible = logit_tile(call, b, h, rows, keys, lo, hi, hard_max, scores, SCORES)
        block_max = tl.max(logits, 1)
        new_max = tl.maximum(row_max, block_max)
        rescale = tl.exp(row_max - new_max)
        if observables is not None:
            peak, peak_at, visible_keys = observe_logits(keys, logits, visible, block_max, peak, peak_at, visible_keys)
            entropy_sum = rescale_entropy(entropy_sum, row_max, new_max, rescale, row_sum)

        exponents = logits - new_max[:, None]
        weights = tl.exp(exponents)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        if observables is not None:
            entropy_sum, offset_sum, distance_sum, sink_sum, local_sum = observe_weights(
                observables,
                tile * ROWS,
                j,
                weights,
                exponents,
                rescale,
                entropy_sum,
                offset_sum,
                distance_sum,
                sink_sum,
                local_sum,
                ROWS,
                KEYS,
            )
            if observables.map is not None:
                add_to_bins(call, observables, head, rows, j, first, end, weights, row_max, KEYS)

        if call.seed is not None:
            weights = tl.where(keep_tile(call, row_hashes, keys), weights, 0.0)
        v = load_rows(call.v, b, g, keys, call.M, E, E_PADDED)
        if CAREFUL:
            value = v.to(tl.float32)
            # One product counts both signs: +inf is 1, and −inf is 256. A NaN counts as both, so that it stays a NaN.
            hit = tl.where(value == float("inf"), 1.0, tl.where(value == float("-inf"), 256.0, 257.0))
            hit = tl.where(is_finite(v), 0.0, hit).to(tl.float16)
            block_hits = dot(visible.to(tl.float16), hit, tl.zeros([ROWS, E_PADDED], tl.float32))
            hits = hits | block_hits.to(tl.int32)
            v = tl.where(is_finite(v), v, 0.0).to(v.dtype)
        outputs = outputs * rescale[:, None]
        outputs = dot(as_dtype(weights, v.dtype), v, outputs)

    # A row without keys divides by 1 instead of 0.
    empty = row_sum == 0
    divisor = tl.where(empty, 1.0, row_sum)
    if call.seed is not None:
        outputs = outputs * call.keep_factor
    outputs = outputs / divisor[:, None]
    if CAREFUL:
        up = (hits & 255) != 0
        down = hits >= 256
        outputs = tl.where(up, float("inf"), outputs)
        outputs = tl.where(down, tl.where(up, float("nan"), float("-inf")), outputs)
    elif nonfinite is not None:
        tl.store(nonfinite + tl.program_id(0), 1 - tile_is_finite(outputs))
    store_rows(out, b, h, rows, call.N, outputs, E, E_PADDED)
    if CAREFUL:
        return  # the rest does not depend on the values, and is written already
    if row_max_of_rows is not None:
        tl.store(row_max_of_rows + row_index, tl.where(empty, float("-inf"), row_max), mask=exists)
        tl.store(row_sum_of_rows + row_index, row_sum, mask=exists)
    if observables is not None:
        nan_rows = exists & (row_sum != row_sum)
        if tl.max(nan_rows.to(tl.int32), 0) > 0:
            # A maximum leaves NaN out.
            peak = tl.where(nan_rows & (peak != float("inf")), float("nan"), peak)
            peak_at, sink_sum, local_sum = observe_nan_rows(
                call,
                observables,
                b,
                h,
                head,
                rows,
                lo,
                hi,
                first,
                end,
                nan_rows,
                peak_at,
                sink_sum,
                local_sum,
                ROWS,
                KEYS,
            )
        share = store_row_values(
            call,
            observables,
            b,
            rows,
            row_index,
            row_max,
            row_sum,
            entropy_sum,
            offset_sum,
            distance_sum,
            sink_sum,
            local_sum,
            peak,
            peak_at,
            visible_keys,
        )
        if observables.map is not None:
            add_to_map(call, observables, head, h, rows, tile * ROWS, first, end, row_max, share, ROWS)
