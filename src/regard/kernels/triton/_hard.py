"""The first pass of hard attention: the largest visible product q·k of each row.

The other passes test products for equality with it, so all passes add the terms of a product in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.triton._logits import add_biases, hard_products, key_range, row_bounds


@triton.jit
def fill_hard_max(call, hard_max_of_rows, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    tiles = tl.cdiv(call.N, ROWS)
    head = tl.program_id(0) // tiles
    b = head // call.H
    h = head % call.H
    g = h // (call.H // call.G)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    lo, hi = row_bounds(call, b, rows)
    first, end = key_range(call, lo, hi, KEYS)

    hard_max = tl.full([ROWS], float("-inf"), tl.float32)
    for j in range(first, end, KEYS):
        keys = j + tl.arange(0, KEYS)
        products = hard_products(call, b, h, g, rows, keys, D)
        visible = (keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None])
        _, visible = add_biases(call, b, h, rows, keys, tl.zeros_like(products), visible)
        # tl.max may drop a NaN; a visible one must reach its row.
        nan_keys = tl.sum((visible & (products != products)).to(tl.int32), 1)
        block_max = tl.max(tl.where(visible & (products == products), products, float("-inf")), 1)
        block_max = tl.where(nan_keys > 0, float("nan"), block_max)
        hard_max = tl.maximum(hard_max, block_max, propagate_nan=tl.PropagateNan.ALL)
    tl.store(hard_max_of_rows + tl.cast(head, tl.int64) * call.N + rows, hard_max, mask=rows < call.N)
