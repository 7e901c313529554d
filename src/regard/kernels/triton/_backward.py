"""The backward pass. It computes the weights again, tile by tile. With A = e^(logit − row_max) / row_sum, the gradient
g of the output, and Δ = out·g:

    dS = A ∘ (g vᵀ − Δ),  dq = scale·dS k,  dk = scale·dSᵀ q,  dv = Aᵀ g

One kernel has a tile of queries and adds up dq, another has a tile of keys and adds up dk and dv. Each sum has one
owner and a fixed order, so that the same input gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.triton._dropout import keep_tile, row_hash
from regard.kernels.triton._logits import (
    as_dtype,
    dot,
    is_finite,
    key_range,
    load_hard_max,
    load_row_sums,
    load_rows,
    logit_tile,
    row_bounds,
    score_tile,
    store_rows,
    tile_is_finite,
    weight_tile,
)

# How many bounds of rows are read at once where a range of rows is searched.
ROWS_OF_A_SCAN = tl.constexpr(512)


@triton.jit
def fill_delta(call, out, grad_out, delta_of_rows, E: tl.constexpr, E_PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Δ = out·grad_out of each row."""
    tiles = tl.cdiv(call.N, ROWS)
    head = tl.program_id(0) // tiles
    b = head // call.H
    h = head % call.H
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    out_rows = load_rows(out, b, h, rows, call.N, E, E_PADDED).to(tl.float32)
    grad_rows = load_rows(grad_out, b, h, rows, call.N, E, E_PADDED).to(tl.float32)
    delta = tl.sum(out_rows * grad_rows, 1)
    tl.store(delta_of_rows + tl.cast(head, tl.int64) * call.N + rows, delta, mask=rows < call.N)


@triton.jit
def weighted_sum(weights, x, sees, sums, hits, CAREFUL: tl.constexpr):
    """sums + weights @ x. If CAREFUL, ``hits`` counts the visible numbers of x that are not finite.

    ``sees`` is 1 at visible pairs and 0 at hidden ones, in float16.

    0 · NaN of a hidden pair would reach the sum. The usual kernel forms it, and its programs report sums that are not
    finite. Those are computed again by the careful kernel, which leaves such numbers out and counts them.
    """
    if CAREFUL:
        finite = is_finite(x)
        hits = dot(sees, tl.where(finite, 0.0, 1.0).to(tl.float16), hits)
        x = tl.where(finite, x, 0.0).to(x.dtype)
    sums = dot(as_dtype(weights, x.dtype), x, sums)
    return sums, hits


@triton.jit
def backward_tile(call, b, h, rows, keys, scores, weights, visible, grad_rows, v, delta):
    """Weights that dropout leaves, dS, and dS times the slope of the softcap, all 0 at hidden pairs."""
    pulled = dot(grad_rows, tl.trans(v), tl.zeros_like(weights))
    surviving = weights
    if call.seed is not None:
        keep = keep_tile(call, row_hash(call, b, h, rows), keys)
        pulled = tl.where(keep, pulled * call.keep_factor, 0.0)
        surviving = tl.where(keep, weights, 0.0)
    d_logits = tl.where(visible, weights * (pulled - delta[:, None]), 0.0)
    d_scores = d_logits
    if call.softcap is not None:
        tanh = scores / call.softcap
        d_scores = tl.where(visible, d_logits * (1.0 - tanh * tanh), 0.0)
    return surviving, d_logits, d_scores


@triton.jit
def rows_that_see(call, b, j, KEYS: tl.constexpr):
    """All queries that see one of the keys j … j + KEYS − 1 are in the range first ≤ i < end, which is returned."""
    first = tl.cast(0, tl.int32)
    end = tl.cast(call.N, tl.int32)
    if call.lo is not None or call.hi is not None:
        first = tl.cast(call.N, tl.int32)
        end = tl.cast(0, tl.int32)
        for i in range(0, call.N, ROWS_OF_A_SCAN):
            rows = i + tl.arange(0, ROWS_OF_A_SCAN)
            lo, hi = row_bounds(call, b, rows)
            sees = (lo < hi) & (lo < j + KEYS) & (hi > j)
            first = tl.minimum(first, tl.min(tl.where(sees, rows, call.N), 0))
            end = tl.maximum(end, tl.max(tl.where(sees, rows + 1, 0), 0))
    return first, end


@triton.jit
def backward_queries(
    call,
    grad_out,
    row_max_of_rows,
    row_sum_of_rows,
    delta_of_rows,
    dq,
    d_logit_sizes,
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
    """dq of one tile of queries, and Σ_j |dS_ij| of each row if ``d_logit_sizes`` is given."""
    tiles = tl.cdiv(call.N, ROWS)
    head = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles
    if CAREFUL:
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
    row_max, inverse_sum = load_row_sums(row_max_of_rows, row_sum_of_rows, row_index, exists)
    delta = tl.load(delta_of_rows + row_index, mask=exists, other=0.0)
    q = load_rows(call.q, b, h, rows, call.N, D, D_PADDED)
    grad_rows = load_rows(grad_out, b, h, rows, call.N, E, E_PADDED)

    sums = tl.zeros([ROWS, D_PADDED], tl.float32)
    hits = 0.0
    if CAREFUL:
        hits = tl.zeros([ROWS, D_PADDED], tl.float32)
    if d_logit_sizes is not None:
        sizes = tl.zeros([ROWS], tl.float32)
    for j in range(first, end, KEYS):
        keys = j + tl.arange(0, KEYS)
        k = load_rows(call.k, b, g, keys, call.M, D, D_PADDED)
        scores = score_tile(call, b, h, g, rows, keys, q, k, SCORES, D)
        logits, visible = logit_tile(call, b, h, rows, keys, lo, hi, hard_max, scores, SCORES)
        weights = weight_tile(logits, visible, row_max, inverse_sum)
        v = load_rows(call.v, b, g, keys, call.M, E, E_PADDED)
        _, d_logits, d_scores = backward_tile(call, b, h, rows, keys, scores, weights, visible, grad_rows, v, delta)
        if d_logit_sizes is not None:
            sizes += tl.sum(tl.where(d_logits - d_logits == 0, tl.abs(d_logits), 0.0), 1)
        if dq is not None:
            sums, hits = weighted_sum(d_scores, k, visible.to(tl.float16), sums, hits, CAREFUL)

    if d_logit_sizes is not None:
        tl.store(d_logit_sizes + row_index, sizes, mask=exists)
    if dq is not None:
        sums = sums * call.scale
        if CAREFUL:
            sums = tl.where(hits > 0, float("nan"), sums)
        elif nonfinite is not None:
            tl.store(nonfinite + tl.program_id(0), 1 - tile_is_finite(sums))
        store_rows(dq, b, h, rows, call.N, sums, D, D_PADDED)


@triton.jit
def backward_keys(
    call,
    grad_out,
    row_max_of_rows,
    row_sum_of_rows,
    delta_of_rows,
    dk,
    dv,
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
    """dk and dv of one tile of keys: sums over the queries of all heads that share the key head."""
    if CAREFUL:
        if tl.load(nonfinite + tl.program_id(0)) == 0:
            return
    tiles = tl.cdiv(call.M, KEYS)
    key_head = tl.program_id(0) // tiles
    b = key_head // call.G
    g = key_head % call.G
    j = tl.program_id(0) % tiles * KEYS
    keys = j + tl.arange(0, KEYS)
    k = load_rows(call.k, b, g, keys, call.M, D, D_PADDED)
    v = load_rows(call.v, b, g, keys, call.M, E, E_PADDED)

    dk_sums = tl.zeros([KEYS, D_PADDED], tl.float32)
    dv_sums = tl.zeros([KEYS, E_PADDED], tl.float32)
    dk_hits = 0.0
    dv_hits = 0.0
    if CAREFUL:
        dk_hits = tl.zeros([KEYS, D_PADDED], tl.float32)
        dv_hits = tl.zeros([KEYS, E_PADDED], tl.float32)
    # Everything is loaded without a condition: Triton loads the next tile ahead only in such a loop.
    first_row, end_row = rows_that_see(call, b, j, KEYS)
    heads = call.H // call.G
    for h in range(g * heads, (g + 1) * heads):
        for i in range(first_row // ROWS * ROWS, end_row, ROWS):
            rows = i + tl.arange(0, ROWS)
            exists = rows < call.N
            lo, hi = row_bounds(call, b, rows)
            row_index = (b * call.H + h).to(tl.int64) * call.N + rows
            hard_max = load_hard_max(call, row_index, exists, SCORES)
            row_max, inverse_sum = load_row_sums(row_max_of_rows, row_sum_of_rows, row_index, exists)
            delta = tl.load(delta_of_rows + row_index, mask=exists, other=0.0)
            q = load_rows(call.q, b, h, rows, call.N, D, D_PADDED)
            grad_rows = load_rows(grad_out, b, h, rows, call.N, E, E_PADDED)
            scores = score_tile(call, b, h, g, rows, keys, q, k, SCORES, D)
            logits, visible = logit_tile(call, b, h, rows, keys, lo, hi, hard_max, scores, SCORES)
            weights = weight_tile(logits, visible, row_max, inverse_sum)
            surviving, _, d_scores = backward_tile(
                call, b, h, rows, keys, scores, weights, visible, grad_rows, v, delta
            )
            # Converted first: Triton cannot transpose single bits on every GPU.
            seen_from = tl.trans(visible.to(tl.float16))
            dv_sums, dv_hits = weighted_sum(tl.trans(surviving), grad_rows, seen_from, dv_sums, dv_hits, CAREFUL)
            if dk is not None:
                dk_sums, dk_hits = weighted_sum(tl.trans(d_scores), q, seen_from, dk_sums, dk_hits, CAREFUL)

    if call.seed is not None:
        dv_sums = dv_sums * call.keep_factor
    dk_sums = dk_sums * call.scale
    if CAREFUL:
        dk_sums = tl.where(dk_hits > 0, float("nan"), dk_sums)
        dv_sums = tl.where(dv_hits > 0, float("nan"), dv_sums)
    elif nonfinite is not None:
        finite = tile_is_finite(dv_sums)
        if dk is not None:
            finite = finite * tile_is_finite(dk_sums)
        tl.store(nonfinite + tl.program_id(0), 1 - finite)
    store_rows(dv, b, g, keys, call.M, dv_sums, E, E_PADDED)
    if dk is not None:
        store_rows(dk, b, g, keys, call.M, dk_sums, D, D_PADDED)
