"""Gradients of dense biases and of the tables of relative terms: sums of dS over the pairs that read an element.

A program has one tile of a bias. It adds up dS over the heads and batch entries that share the bias, in their order.
Where one row or column of a bias belongs to all queries or keys, each tile has its own part, and the parts are added
afterwards. No float is added by two programs.

An element of a table belongs to pairs of many tiles. Its sum is an integer, whose order does not matter. The unit of
the integers of a head is 2^−61 times a power of two above Σ |dS|, so a sum has more digits than a float32 and cannot
overflow. Summands that are not finite are counted instead of added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.triton._backward import backward_tile
from regard.kernels.triton._logits import (
    key_range,
    load_hard_max,
    load_row_sums,
    load_rows,
    logit_tile,
    row_bounds,
    score_tile,
    term_columns,
    weight_tile,
)


@triton.jit
def add_to_table(call, term, gradient, head, rows, keys, d_logits, visible, units_per_one):
    """Add a tile of dS to the gradient of one table."""
    columns, has_position = term_columns(call, term, rows, keys)
    adds = visible & has_position
    finite = d_logits - d_logits == 0
    units = tl.where(adds & finite, d_logits * units_per_one, 0.0).to(tl.int64)
    table_row = tl.zeros_like(rows).to(tl.int64) + head
    if gradient.per_row is not None:
        table_row = tl.cast(head, tl.int64) * call.N + rows
    at = table_row[:, None] * term.columns + columns
    counted = (adds & (finite == 0)).to(tl.int32)
    tl.atomic_add(gradient.nonfinite + at, counted, mask=counted > 0, sem="relaxed")

    # Far from the diagonal all pairs of a tile often read the same element, the first or last column of a table.
    lowest = tl.min(tl.min(columns, 1), 0)
    highest = tl.max(tl.max(columns, 1), 0)
    if gradient.per_row is not None:
        if lowest == highest:
            row_units = tl.sum(units, 1)
            to = gradient.units + table_row * term.columns + lowest
            tl.atomic_add(to, row_units, mask=row_units != 0, sem="relaxed")
        else:
            tl.atomic_add(gradient.units + at, units, mask=units != 0, sem="relaxed")
    else:
        if lowest == highest:
            tile_units = tl.sum(tl.sum(units, 1), 0)
            tl.atomic_add(gradient.units + tl.cast(head, tl.int64) * term.columns + lowest, tile_units, sem="relaxed")
        else:
            tl.atomic_add(gradient.units + at, units, mask=units != 0, sem="relaxed")


@triton.jit
def bias_gradients(
    call,
    grad_out,
    row_max_of_rows,
    row_sum_of_rows,
    delta_of_rows,
    gradients,
    shared_batches,
    shared_heads,
    units_per_one,
    SCORES: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of the bias ``[shared_batches, shared_heads, N, M]``, which is broadcast to [B, H, N, M]."""
    row_tiles = tl.cdiv(call.N, ROWS)
    key_tiles = tl.cdiv(call.M, KEYS)
    key_tile = tl.program_id(0) % key_tiles
    row_tile = tl.program_id(0) // key_tiles % row_tiles
    bias_head = tl.program_id(0) // key_tiles // row_tiles
    first_b = bias_head // shared_heads
    first_h = bias_head % shared_heads
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    exists = rows < call.N
    j = key_tile * KEYS
    keys = j + tl.arange(0, KEYS)

    total = tl.zeros([ROWS, KEYS], tl.float32)
    for b in range(first_b, call.B, shared_batches):
        lo, hi = row_bounds(call, b, rows)
        first, end = key_range(call, lo, hi, 1)
        if (first < j + KEYS) & (end > j):
            for h in range(first_h, call.H, shared_heads):
                g = h // (call.H // call.G)
                head = b * call.H + h
                row_index = tl.cast(head, tl.int64) * call.N + rows
                hard_max = load_hard_max(call, row_index, exists, SCORES)
                row_max, inverse_sum = load_row_sums(row_max_of_rows, row_sum_of_rows, row_index, exists)
                delta = tl.load(delta_of_rows + row_index, mask=exists, other=0.0)
                q = load_rows(call.q, b, h, rows, call.N, D, D_PADDED)
                k = load_rows(call.k, b, g, keys, call.M, D, D_PADDED)
                v = load_rows(call.v, b, g, keys, call.M, E, E_PADDED)
                grad_rows = load_rows(grad_out, b, h, rows, call.N, E, E_PADDED)
                scores = score_tile(call, b, h, g, rows, keys, q, k, SCORES, D)
                logits, visible = logit_tile(call, b, h, rows, keys, lo, hi, hard_max, scores, SCORES)
                weights = weight_tile(logits, visible, row_max, inverse_sum)
                _, d_logits, _ = backward_tile(call, b, h, rows, keys, scores, weights, visible, grad_rows, v, delta)
                total += d_logits
                for t in tl.static_range(len(gradients.terms)):
                    units = tl.load(units_per_one + head)
                    add_to_table(call, call.terms[t], gradients.terms[t], head, rows, keys, d_logits, visible, units)

    if gradients.bias is not None:
        view = gradients.bias
        to = view.data + tl.cast(bias_head, tl.int64) * view.head_stride
        exists_key = keys < call.M
        if gradients.one_row is not None:
            if gradients.one_column is not None:
                at = tl.cast(row_tile, tl.int64) * view.row_stride + key_tile
                tl.store(to + at, tl.sum(tl.sum(total, 1), 0))
            else:
                tl.store(to + tl.cast(row_tile, tl.int64) * view.row_stride + keys, tl.sum(total, 0), mask=exists_key)
        else:
            row_start = rows.to(tl.int64) * view.row_stride
            if gradients.one_column is not None:
                tl.store(to + row_start + key_tile, tl.sum(total, 1), mask=exists)
            else:
                mask = exists[:, None] & exists_key[None, :]
                tl.store(to + row_start[:, None] + keys[None, :], total, mask=mask)
