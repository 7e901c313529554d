"""Observables of each row and the pooled map, measured in the forward pass: running sums that are rescaled with the
running maximum, like the sums of the online softmax. ``csrc/observables.h`` has the formulas.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.triton._logits import LOWEST

# A tile of queries that lies in fewer rows of the map than this adds one sum per row; else each query adds its own.
FEW_MAP_ROWS = tl.constexpr(4)


@triton.jit
def in_units(x):
    """A sum of weights in units of 2^−32, rounded. Sums of integers do not depend on their order.

    NaN is no integer: who adds units adds 0 in its place, and enters it in a table of its own.
    """
    return (x.to(tl.float64) * 4294967296.0 + 0.5).to(tl.int64)


@triton.jit
def observe_logits(keys, logits, visible, block_max, peak, peak_at, visible_keys):
    """Which key has the largest logit (the lowest of equal ones), and how many keys are visible."""
    is_max = visible & (logits == block_max[:, None])
    block_at = tl.min(tl.where(is_max, keys[None, :], 2**31 - 1), 1)
    rose = block_max > peak
    peak_at = tl.where(rose, block_at, peak_at)
    peak = tl.maximum(peak, block_max)
    return peak, peak_at, visible_keys + tl.sum(visible.to(tl.int32), 1)


@triton.jit
def rescale_entropy(entropy_sum, old_max, new_max, rescale, row_sum):
    """Σ w·x relative to the new maximum. The shift is bounded, because 0 · inf would be NaN where rescale is 0."""
    shift = tl.maximum(old_max - new_max, -1e30)
    return rescale * (entropy_sum + shift * row_sum)


@triton.jit
def observe_weights(
    observables,
    first_row,
    j,
    weights,
    exponents,
    rescale,
    entropy_sum,
    offset_sum,
    distance_sum,
    sink_sum,
    local_sum,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Add the weights of keys j … j + KEYS − 1 to every sum. ``exponents`` are logit − max; the weight is their e^x."""
    entropy_sum += tl.sum(tl.where(weights > 0, weights * exponents, 0.0), 1)

    # δ = key position − query position. The first of the block is computed with integers, and is exact below 2^24.
    first_position = observables.query_offset + tl.cast(first_row, tl.int64)
    positions = first_position + tl.arange(0, ROWS)
    key = tl.arange(0, KEYS)
    delta = (j - positions).to(tl.float32)[:, None] + key.to(tl.float32)[None, :]
    offset_sum = offset_sum * rescale + tl.sum(weights * delta, 1)
    distance_sum = distance_sum * rescale + tl.sum(weights * tl.abs(delta), 1)

    sink_sum = sink_sum * rescale
    if j < observables.sink_keys:
        sink_sum += tl.sum(tl.where((j + key < observables.sink_keys)[None, :], weights, 0.0), 1)
    local_sum = local_sum * rescale
    last_near = first_position + ROWS - 1 + observables.local_radius
    if (j <= last_near) & (j + KEYS > first_position - observables.local_radius):
        near = (tl.abs((j + key)[None, :] - positions[:, None])) <= observables.local_radius
        local_sum += tl.sum(tl.where(near, weights, 0.0), 1)
    return entropy_sum, offset_sum, distance_sum, sink_sum, local_sum


@triton.jit
def bin_of_key(call, size, j):
    """Key j is in bin ⌊j·size/M⌋ of the map."""
    return (tl.cast(j, tl.int64) * size // call.M).to(tl.int32)


@triton.jit
def add_to_bins(call, observables, head, rows, j, first, end, weights, row_max, KEYS: tl.constexpr):
    """Add the weights of a block, relative to ``row_max``, to the bins of its keys.

    A bin has a mass per row, and the maximum that this mass is relative to. They are in memory, because the bins of a
    tile do not fit into registers. Keys come in order: only the first bin of a block can have a mass already.
    """
    size = observables.map_size
    keys = j + tl.arange(0, KEYS)
    bins = (keys.to(tl.int64) * size // call.M).to(tl.int32)
    last_key = tl.minimum(j + KEYS, end) - 1
    exists = rows < call.N
    previous_bin = tl.where(tl.cast(j, tl.int32) > first, bin_of_key(call, size, j - 1), -1)
    for bin in range(bin_of_key(call, size, j), bin_of_key(call, size, last_key) + 1):
        mass = tl.sum(tl.where((bins == bin)[None, :], weights, 0.0), 1)
        at = (tl.cast(head, tl.int64) * size + bin) * call.N + rows
        started = tl.where(rows >= 0, previous_bin, -1) == bin
        old_mass = tl.load(observables.bin_mass + at, mask=exists & started, other=0.0)
        old_max = tl.load(observables.bin_max + at, mask=exists & started, other=LOWEST)
        tl.store(observables.bin_mass + at, old_mass * tl.exp(old_max - row_max) + mass, mask=exists)
        tl.store(observables.bin_max + at, row_max, mask=exists)
    # Another thread of the program may read what this thread has written.
    tl.debug_barrier()


@triton.jit
def store_row_values(
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
):
    """Write the row values. Returns each row's share of the map: 1/row_sum, or 0 for a row that is not counted.

    The share is NaN for a row of NaN.
    """
    exists = rows < call.N
    empty = row_sum == 0
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, row_sum))
    entropy = tl.where(empty, 0.0, tl.log(tl.where(empty, 1.0, row_sum)) - entropy_sum * inverse)
    sees = visible_keys > 0
    tl.store(observables.logit_max + row_index, peak, mask=exists)
    tl.store(observables.entropy + row_index, entropy, mask=exists)
    tl.store(observables.peak + row_index, tl.where(sees, tl.exp(peak - row_max) * inverse, 0.0), mask=exists)
    tl.store(observables.peak_at + row_index, tl.where(sees, peak_at, -1).to(tl.int64), mask=exists)
    tl.store(observables.offset + row_index, offset_sum * inverse, mask=exists)
    tl.store(observables.distance + row_index, distance_sum * inverse, mask=exists)
    # In a row of NaN these stay 0 without a visible key there.
    tl.store(observables.sink + row_index, tl.where(sink_sum == 0, 0.0, sink_sum * inverse), mask=exists)
    tl.store(observables.local + row_index, tl.where(local_sum == 0, 0.0, local_sum * inverse), mask=exists)
    tl.store(observables.visible + row_index, visible_keys.to(tl.int64), mask=exists)
    counts = sees & exists
    if observables.real_queries is not None:
        at = observables.real_queries + tl.cast(b, tl.int64) * observables.real_queries_batch_stride + rows
        counts = counts & (tl.load(at, mask=exists, other=0) != 0)
    return tl.where(counts, inverse, 0.0)


@triton.jit
def add_to_map(call, observables, head, h, rows, first_row, first, end, row_max, share, ROWS: tl.constexpr):
    """Add the bins of all rows of a tile, each times its share, to the map."""
    size = observables.map_size
    exists = rows < call.N
    map_rows = (rows.to(tl.int64) * size // call.N).to(tl.int32)
    last_row = tl.minimum(first_row + ROWS, call.N) - 1
    first_map_row = (tl.cast(first_row, tl.int64) * size // call.N).to(tl.int32)
    last_map_row = (tl.cast(last_row, tl.int64) * size // call.N).to(tl.int32)
    if first < end:
        for bin in range(bin_of_key(call, size, first), bin_of_key(call, size, end - 1) + 1):
            at = (tl.cast(head, tl.int64) * size + bin) * call.N + rows
            mass = tl.load(observables.bin_mass + at, mask=exists, other=0.0)
            bin_max = tl.load(observables.bin_max + at, mask=exists, other=LOWEST)
            # The bins of a row of NaN are NaN or 0 already.
            mass = tl.where(share == share, mass * tl.exp(bin_max - row_max) * share, mass)
            mass = tl.where(share == 0, 0.0, mass)
            is_nan = mass != mass
            units = tl.where(mass > 0, in_units(mass), 0)
            if last_map_row - first_map_row < FEW_MAP_ROWS:
                for map_row in range(first_map_row, last_map_row + 1):
                    cell = tl.sum(tl.where(map_rows == map_row, units, 0), 0)
                    has_nan = tl.max((is_nan & (map_rows == map_row)).to(tl.int32), 0) > 0
                    to = (tl.cast(h, tl.int64) * size + map_row) * size + bin
                    tl.atomic_add(observables.map + to, cell, sem="relaxed")
                    tl.store(observables.map_nan + to, 1, mask=has_nan)
            else:
                to = (tl.cast(h, tl.int64) * size + map_rows) * size + bin
                tl.atomic_add(observables.map + to, units, mask=units > 0, sem="relaxed")
                tl.store(observables.map_nan + to, 1, mask=is_nan)
