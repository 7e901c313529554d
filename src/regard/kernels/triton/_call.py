"""The arguments of the Triton kernels: what ``AttentionCall`` in ``csrc/attention_call.h`` is for the CPU kernel.

Triton compiles a kernel again for each set of absent arguments: ``if call.bias is not None`` is decided when the kernel
is compiled, so an option that a call does not use costs nothing.

Sizes have one letter each: B batch entries, H query heads, G key/value heads, N queries, M keys. The widths D of
queries and keys and E of values are constants of a compiled kernel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard._lowered_scores import RelativeTerm, Scores
from regard.kernels.native import contiguous_rows
from regard.kernels.score_tiles import convert_bias


class View(NamedTuple):
    """A tensor ``[B, H, rows, columns]``. A broadcast dimension has stride 0."""

    data: Tensor
    batch_stride: int
    head_stride: int
    row_stride: int
    column_stride: int


class Term(NamedTuple):
    """One ``RelativeTerm``: bias += table[b, h, i, clamp(key position − query position − first_offset)]."""

    table: View
    columns: int
    first_offset: int
    query_positions: Tensor
    key_positions: Tensor


class Call(NamedTuple):
    """One call of attention. None means that the call does not use the option."""

    q: View
    k: View
    v: View
    B: int
    H: int
    G: int
    N: int
    M: int
    scale: float
    softcap: float | None
    # Query i sees the keys lo[b, i] ≤ j < hi[b, i].
    lo: Tensor | None
    lo_batch_stride: int
    hi: Tensor | None
    hi_batch_stride: int
    mask: View | None
    bias: View | None
    terms: tuple[Term, ...]
    sinks: Tensor | None
    seed: Tensor | None
    # A weight survives dropout if its hash, as an unsigned number, is at least this one.
    keep_from: int
    keep_factor: float
    # Hard attention: the largest visible product q·k of each row, [B, H, N].
    hard_max: Tensor | None


class Observables(NamedTuple):
    """The measurements of the forward pass. Row values are [B, H, N]."""

    logit_max: Tensor
    entropy: Tensor
    peak: Tensor
    offset: Tensor
    distance: Tensor
    sink: Tensor
    local: Tensor
    peak_at: Tensor
    visible: Tensor
    query_offset: int  # query i stands at i + query_offset
    sink_keys: int
    local_radius: int
    map_size: int
    map: Tensor | None  # [H, map_size, map_size], integers in units of 2^−32
    map_nan: Tensor | None  # uint8, as large as the map: 1 where a summand is NaN
    # [B·H, map_size, N]: the weight of each row on each bin of keys, and the maximum that it is relative to.
    bin_mass: Tensor | None
    bin_max: Tensor | None
    real_queries: Tensor | None  # [B or 1, N]: 0 for padding
    real_queries_batch_stride: int


class SecondPass(NamedTuple):
    """The measurements that need the final row_max and row_sum of each row."""

    counted: Tensor  # [B, H, N]: 1 for real queries that see a key
    key_mass: Tensor | None  # [H, M], in units of 2^−32
    key_mass_nan: Tensor | None  # uint8: 1 where a summand is NaN
    profile: Tensor | None  # [H, 2·profile_radius + 1], in units of 2^−32
    profile_nan: Tensor | None
    profile_rows: Tensor | None
    profile_radius: int
    query_offset: int
    top_count: int
    top: Tensor | None  # [B, H, N, top_count]
    top_at: Tensor | None


class TermGradient(NamedTuple):
    """The gradient of one table ``[B, H, N or 1, columns]``."""

    units: Tensor  # int64, in a unit per head
    nonfinite: Tensor  # int32: how many summands were not finite
    per_row: int | None  # 1 if each query has its own row of the table, else None


class BiasGradients(NamedTuple):
    """The gradients that ``_bias_gradients.py`` computes."""

    # float32 [B or 1, H or 1, rows, columns]. If the bias has one row for all queries, there is one row per tile of
    # queries; likewise for columns.
    bias: View | None
    one_row: int | None
    one_column: int | None
    terms: tuple[TermGradient, ...]


def new_call(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Call:
    """The arguments of one call. Only tensors without contiguous rows are copied."""
    B, H, N, _ = q.shape
    lo = None
    hi = None
    if scores.lo is not None:
        lo = contiguous_rows(scores.lo)
    if scores.hi is not None:
        hi = contiguous_rows(scores.hi)
    mask = None
    if scores.mask is not None:
        mask = view(scores.mask.view(torch.uint8))
    bias = None
    if scores.bias is not None:
        bias = view(_as_kernel_float(scores.bias))
    sinks = None
    if scores.sinks is not None:
        sinks = convert_bias(scores.sinks, torch.float32).contiguous()

    # Without dropout these numbers are not used.
    keep_from = 0
    keep_factor = 1.0
    seed = None
    if scores.dropout > 0:
        seed = scores.seed
        keep_from = min(math.ceil(scores.dropout * 2**32), 2**32 - 1)
        # p = 1 drops everything; 1/(1 − p) would be infinite.
        keep_factor = 0.0 if scores.dropout == 1 else 1 / (1 - scores.dropout)
    return Call(
        q=view(contiguous_rows(q)),
        k=view(contiguous_rows(k)),
        v=view(contiguous_rows(v)),
        B=B,
        H=H,
        G=k.shape[1],
        N=N,
        M=k.shape[2],
        scale=scores.scale,
        softcap=scores.softcap or None,
        lo=lo,
        lo_batch_stride=_batch_stride(lo),
        hi=hi,
        hi_batch_stride=_batch_stride(hi),
        mask=mask,
        bias=bias,
        terms=tuple(_new_term(term) for term in scores.terms),
        sinks=sinks,
        seed=seed,
        # The bits of an unsigned number, as the signed number that kernels take.
        keep_from=keep_from - 2**32 if keep_from >= 2**31 else keep_from,
        keep_factor=keep_factor,
        hard_max=None,
    )


def view(x: Tensor) -> View:
    """``x [B or 1, H or 1, rows or 1, columns or 1]`` with stride 0 in the dimensions of size 1."""
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return View(x, *strides)


def rows_view(x: Tensor) -> View:
    """``view`` of a tensor whose columns are contiguous, even if there is only one."""
    return view(x)._replace(column_stride=1)


def _new_term(term: RelativeTerm) -> Term:
    table = contiguous_rows(_as_kernel_float(term.table))
    return Term(
        table=rows_view(table),
        columns=term.table.shape[3],
        first_offset=term.first_offset,
        query_positions=term.query_positions.contiguous(),
        key_positions=term.key_positions.contiguous(),
    )


def _as_kernel_float(x: Tensor) -> Tensor:
    """A bias that a kernel can read: kernels convert half precision themselves, but not float64."""
    return convert_bias(x, torch.float32) if x.dtype == torch.float64 else x


def _batch_stride(bound: Tensor | None) -> int:
    if bound is None or bound.shape[0] == 1:
        return 0
    return bound.stride(0)
