"""The second pass: the weights A = e^(logit − row_max) / row_sum are computed again from the final sums of the softmax.

It measures key mass, profile, the largest weights of each row, and the weight of each row on bins of keys. Sums over
rows are integers in units of 2^−32, so they do not depend on the order of the programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.triton._logits import (
    LOWEST,
    key_range,
    load_hard_max,
    load_row_sums,
    load_rows,
    logit_tile,
    row_bounds,
    score_tile,
    weight_tile,
)
from regard.kernels.triton._observables import in_units


@triton.jit
def add_to_profile(pass_, h, keys, rows, visible, counted, weights):
    """Add the weights of a tile to the profile, by key position − query position."""
    radius = tl.cast(pass_.profile_radius, tl.int64)
    positions = rows.to(tl.int64) + pass_.query_offset
    offsets = keys.to(tl.int64)[None, :] - positions[:, None]
    inside = visible & (counted != 0)[:, None] & (tl.abs(offsets) <= radius)
    at = tl.cast(h, tl.int64) * (2 * radius + 1) + offsets + radius
    is_nan = weights != weights
    tl.atomic_add(pass_.profile + at, in_units(tl.where(is_nan, 0.0, weights)), mask=inside, sem="relaxed")
    tl.store(pass_.profile_nan + at, 1, mask=inside & is_nan)
    tl.atomic_add(pass_.profile_rows + at, inside.to(tl.int64), mask=inside, sem="relaxed")


@triton.jit
def update_top(keys, logits, visible, least, top_logits, top_at, TOP_PADDED: tl.constexpr, slots, top_count):
    """Insert the logits of a tile into each row's list of its largest ones. Of equal logits, the lower key stays.

    A list is not sorted. A logit that is larger than the smallest of a list takes its place, the highest key first.
    ``least`` is the lowest rank of a visible key in each row.
    """
    # A visible key of weight 0 ranks above a hidden one. NaN is not larger than anything, so it gets the lowest rank.
    ranks = tl.where(visible, tl.maximum(logits, least[:, None]), float("-inf"))
    best = tl.max(ranks, 1)
    worst = tl.min(tl.where(slots < top_count, top_logits, float("inf")), 1)
    while tl.max((best > worst).to(tl.int32), 0) > 0:
        at = tl.min(tl.where(ranks == best[:, None], keys[None, :], 2**31 - 1), 1)
        is_worst = (slots < top_count) & (top_logits == worst[:, None])
        # Free slots have key −1; one of them, and of equal logits the one with the highest key, is replaced.
        worst_at = tl.max(tl.where(is_worst, top_at, -1), 1)
        is_worst = is_worst & (top_at == worst_at[:, None])
        slot = tl.min(tl.where(is_worst, slots, TOP_PADDED), 1)
        takes = (slots == slot[:, None]) & (best > worst)[:, None]
        top_logits = tl.where(takes, best[:, None], top_logits)
        top_at = tl.where(takes, at[:, None], top_at)

        ranks = tl.where(keys[None, :] == at[:, None], float("-inf"), ranks)
        best = tl.max(ranks, 1)
        worst = tl.min(tl.where(slots < top_count, top_logits, float("inf")), 1)
    return top_logits, top_at


@triton.jit
def store_top(pass_, row_index, exists, row_max, inverse_sum, top_logits, top_at, slots):
    """Write each row's list, largest weight first; of equal weights, the lower key first."""
    for t in range(0, pass_.top_count):
        best = tl.max(top_logits, 1)
        # A free slot has key −1 and no weight.
        at = tl.min(tl.where((top_logits == best[:, None]) & (top_at >= 0), top_at, 2**31 - 1), 1)
        found = best > float("-inf")
        weight = tl.where(found, tl.exp(best - row_max) * inverse_sum, 0.0)
        tl.store(pass_.top + row_index * pass_.top_count + t, weight, mask=exists)
        tl.store(pass_.top_at + row_index * pass_.top_count + t, tl.where(found, at, -1).to(tl.int64), mask=exists)
        taken = (top_at == at[:, None]) & found[:, None]
        top_logits = tl.where(taken, float("-inf"), top_logits)


@triton.jit
def second_pass(
    call,
    pass_,
    row_max_of_rows,
    row_sum_of_rows,
    SCORES: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    tiles = tl.cdiv(call.N, ROWS)
    head = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles
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
    counted = tl.load(pass_.counted + row_index, mask=exists, other=0)
    q = load_rows(call.q, b, h, rows, call.N, D, D_PADDED)

    if pass_.top is not None:
        slots = tl.arange(0, TOP_PADDED)[None, :]
        top_logits = tl.full([ROWS, TOP_PADDED], float("-inf"), tl.float32)
        top_at = tl.full([ROWS, TOP_PADDED], -1, tl.int32)
        # In a row of NaN all visible keys have the same rank.
        least = tl.where(inverse_sum == inverse_sum, LOWEST, float("inf"))
    for j in range(first, end, KEYS):
        keys = j + tl.arange(0, KEYS)
        k = load_rows(call.k, b, g, keys, call.M, D, D_PADDED)
        scores = score_tile(call, b, h, g, rows, keys, q, k, SCORES, D)
        logits, visible = logit_tile(call, b, h, rows, keys, lo, hi, hard_max, scores, SCORES)
        if pass_.top is not None:
            top_logits, top_at = update_top(
                keys, logits, visible, least, top_logits, top_at, TOP_PADDED, slots, pass_.top_count
            )
        weights = weight_tile(logits, visible, row_max, inverse_sum)
        if pass_.key_mass is not None:
            mass = tl.sum(tl.where((counted != 0)[:, None], weights, 0.0), 0)
            to = tl.cast(h, tl.int64) * call.M + keys
            is_nan = mass != mass
            tl.atomic_add(pass_.key_mass + to, in_units(tl.where(is_nan, 0.0, mass)), mask=keys < call.M, sem="relaxed")
            tl.store(pass_.key_mass_nan + to, 1, mask=(keys < call.M) & is_nan)
        if pass_.profile is not None:
            first_near = tl.cast(pass_.query_offset, tl.int64) + tile * ROWS - pass_.profile_radius
            end_near = first_near + ROWS + 2 * tl.cast(pass_.profile_radius, tl.int64)
            if (j + KEYS > first_near) & (j < end_near):
                add_to_profile(pass_, h, keys, rows, visible, counted, weights)
    if pass_.top is not None:
        store_top(pass_, row_index, exists, row_max, inverse_sum, top_logits, top_at, slots)


@triton.jit
def sum_bins(
    call,
    bin_edges,
    bin_count,
    bin_masses,
    row_max_of_rows,
    row_sum_of_rows,
    SCORES: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """bin_masses[b, h, i, t] += the weight of row i on the keys bin_edges[t] ≤ j < bin_edges[t + 1]."""
    tiles = tl.cdiv(call.N, ROWS)
    head = tl.program_id(0) // tiles
    b = head // call.H
    h = head % call.H
    g = h // (call.H // call.G)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    exists = rows < call.N
    row_index = tl.cast(head, tl.int64) * call.N + rows
    lo, hi = row_bounds(call, b, rows)
    first, end = key_range(call, lo, hi, KEYS)
    # Keys outside all bins are not read.
    first_in_bins = tl.load(bin_edges).to(tl.int32)
    first = tl.maximum(first, first_in_bins // KEYS * KEYS)
    end = tl.minimum(end, tl.load(bin_edges + bin_count).to(tl.int32))
    hard_max = load_hard_max(call, row_index, exists, SCORES)
    row_max, inverse_sum = load_row_sums(row_max_of_rows, row_sum_of_rows, row_index, exists)
    q = load_rows(call.q, b, h, rows, call.N, D, D_PADDED)

    # The bin of the first key of the block, or one before it.
    bin = tl.cast(0, tl.int32)
    for j in range(first, end, KEYS):
        keys = j + tl.arange(0, KEYS)
        k = load_rows(call.k, b, g, keys, call.M, D, D_PADDED)
        scores = score_tile(call, b, h, g, rows, keys, q, k, SCORES, D)
        logits, visible = logit_tile(call, b, h, rows, keys, lo, hi, hard_max, scores, SCORES)
        weights = weight_tile(logits, visible, row_max, inverse_sum)
        more = (bin < bin_count) & (tl.load(bin_edges + bin) < j + KEYS)
        while more:
            inside = (keys >= tl.load(bin_edges + bin)) & (keys < tl.load(bin_edges + bin + 1))
            mass = tl.sum(tl.where(inside[None, :], weights, 0.0), 1)
            to = bin_masses + row_index * bin_count + bin
            tl.store(to, tl.load(to, mask=exists, other=0.0) + mass, mask=exists)
            # A bin that goes on after this block is continued with the next block.
            ends_here = tl.load(bin_edges + bin + 1) <= j + KEYS
            bin += ends_here.to(tl.int32)
            more = ends_here & (bin < bin_count)
            more = more & (tl.load(bin_edges + bin) < j + KEYS)
        # Another thread of the program may read what this thread has written.
        tl.debug_barrier()
