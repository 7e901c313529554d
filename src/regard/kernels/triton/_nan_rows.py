"""Observables of rows whose weights are NaN, because a visible logit is NaN or +inf.

As in the reference, each visible key of such a row has the weight NaN, and each hidden key the weight 0. The running
sums do not know which keys were visible, so the tile's keys are visited again, without q and k. This happens only in
tiles that have such a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.triton._logits import add_biases
from regard.kernels.triton._observables import bin_of_key

NO_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def observe_nan_rows(
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
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The values of ``nan_rows``; those of other rows are returned as they are.

    ``peak_at`` is the first visible key. A sum is 1 if it has a visible key, else 0: divided by a row_sum of NaN it is
    NaN, or stays 0. The bins of the map are NaN or 0.
    """
    size = observables.map_size
    bins_of_head = tl.cast(head, tl.int64) * size
    if observables.map is not None:
        for bin in range(bin_of_key(call, size, first), bin_of_key(call, size, end - 1) + 1):
            tl.store(observables.bin_mass + (bins_of_head + bin) * call.N + rows, 0.0, mask=nan_rows)
        # Another thread of the program may write to the same bin below.
        tl.debug_barrier()

    positions = rows.to(tl.int64) + observables.query_offset
    first_key = tl.full([ROWS], NO_KEY, tl.int32)
    sees_sink = tl.zeros([ROWS], tl.int32)
    sees_local = tl.zeros([ROWS], tl.int32)
    for j in range(first, end, KEYS):
        keys = j + tl.arange(0, KEYS)
        visible = (keys[None, :] >= lo[:, None]) & (keys[None, :] < hi[:, None]) & nan_rows[:, None]
        _, visible = add_biases(call, b, h, rows, keys, tl.zeros([ROWS, KEYS], tl.float32), visible)
        first_key = tl.minimum(first_key, tl.min(tl.where(visible, keys[None, :], NO_KEY), 1))
        in_sink = visible & (keys < observables.sink_keys)[None, :]
        sees_sink = tl.maximum(sees_sink, tl.max(in_sink.to(tl.int32), 1))
        in_local = visible & (tl.abs(keys[None, :] - positions[:, None]) <= observables.local_radius)
        sees_local = tl.maximum(sees_local, tl.max(in_local.to(tl.int32), 1))
        if observables.map is not None:
            bins = (keys.to(tl.int64) * size // call.M).to(tl.int32)
            last_key = tl.minimum(j + KEYS, end) - 1
            for bin in range(bin_of_key(call, size, j), bin_of_key(call, size, last_key) + 1):
                in_bin = visible & (bins == bin)[None, :]
                sees_bin = tl.max(in_bin.to(tl.int32), 1) > 0
                at = (bins_of_head + bin) * call.N + rows
                tl.store(observables.bin_mass + at, float("nan"), mask=sees_bin)
    # Another thread of the program may read what this thread has written.
    tl.debug_barrier()
    peak_at = tl.where(nan_rows, first_key, peak_at)
    sink_sum = tl.where(nan_rows, sees_sink.to(tl.float32), sink_sum)
    local_sum = tl.where(nan_rows, sees_local.to(tl.float32), local_sum)
    return peak_at, sink_sum, local_sum
