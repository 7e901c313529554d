"""The forward pass on a GPU: output, sums of the softmax, and the observables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._lowered_scores import Scores
from regard.kernels.score_tiles import working_dtype
from regard.kernels.triton._call import Call, Observables, new_call, rows_view
from regard.kernels.triton._forward import forward
from regard.kernels.triton._launch import (
    choose_tile,
    count_row_tiles,
    forward_kind,
    new_flags,
    run_kernel,
    score_mode,
    widths,
    with_hard_max,
)
from regard.kernels.triton._tile_sizes import careful_tile


def new_row_sums(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized row_max and row_sum ``[B, H, N]``, in the dtype that the operator promises."""
    row_max = q.new_empty(q.shape[:3], dtype=working_dtype(q))
    return row_max, torch.empty_like(row_max)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    row_sums: tuple[Tensor, Tensor] | None,
    observables: Observables | None = None,
) -> tuple[Call, Tensor]:
    """Compute ``out`` in v's dtype, and write row_max and row_sum if they are given.

    Returns the call too, for later passes.
    """
    out = v.new_empty(*q.shape[:3], v.shape[3])
    call = with_hard_max(new_call(q, k, v, scores))
    row_max, row_sum = row_sums or (None, None)
    tile = choose_tile(forward_kind(call, observed=observables is not None), call)
    programs = count_row_tiles(call, tile)
    nonfinite = new_flags(programs, call, scores)
    arguments: dict[str, Any] = {
        "call": call,
        "out": rows_view(out),
        "row_max_of_rows": row_max,
        "row_sum_of_rows": row_sum,
        "observables": observables,
        "nonfinite": nonfinite,
        "SCORES": score_mode(scores.scale),
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "CAREFUL": False,
    }
    arguments |= widths(call)
    run_kernel(forward, programs, tile, arguments)
    # The programs of this launch end at once, except those whose result was not finite.
    if nonfinite is not None:
        again = {"row_max_of_rows": None, "row_sum_of_rows": None, "observables": None, "CAREFUL": True}
        run_kernel(forward, programs, careful_tile(tile), arguments | again)
    return call, out
