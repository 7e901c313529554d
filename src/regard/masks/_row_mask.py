"""``RowMask``: the lowered form of a mask, one run of keys per query, a dense bool mask, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._checks import can_read_values
from regard._errors import RegardError
from regard._shapes import Shape, broadcasts


@dataclass(frozen=True)
class RowMask:
    """Which keys a query may attend to: ``lo[i] ≤ j < hi[i]`` and ``dense[i, j]``.

    - ``lo``, ``hi``: integers broadcastable to ``[*batch, n]``; None means 0 for ``lo`` and m for ``hi``.
    - ``dense``: bool broadcastable to ``[*batch, H, n, m]``, True = may attend; None hides nothing.

    >>> regard.Causal().lower(2, 3).hi  # the first of two queries sees two of three keys
    tensor([2, 3])
    """

    lo: Tensor | None = None
    hi: Tensor | None = None
    dense: Tensor | None = None

    def __and__(self, other: RowMask) -> RowMask:
        check_masks_fit(self, other)
        return RowMask(
            combine(self.lo, other.lo, torch.maximum),
            combine(self.hi, other.hi, torch.minimum),
            combine(self.dense, other.dense, torch.logical_and),
        )

    def union(self, other: RowMask, n: int, m: int) -> RowMask:
        """``self | other``: one run per row if in every row the two runs overlap or touch, else a dense mask."""
        check_masks_fit(self, other)
        if self.dense is None and other.dense is None:
            # Runs that start or end together need no values, so these two cases work while tracing.
            if self.lo is None and other.lo is None:
                if self.hi is None or other.hi is None:
                    return RowMask()
                return RowMask(hi=torch.maximum(self.hi, other.hi))
            if self.hi is None and other.hi is None:
                if self.lo is None or other.lo is None:
                    return RowMask()
                return RowMask(lo=torch.minimum(self.lo, other.lo))

            bounds = [x for x in (self.lo, self.hi, other.lo, other.hi) if x is not None]
            if can_read_values(*bounds):
                joined = _join_runs(self, other, bounds[0], m)
                if joined is not None:
                    return joined
        return RowMask(dense=self.as_dense(n, m) | other.as_dense(n, m))

    def as_dense(self, n: int, m: int) -> Tensor:
        """The bool tensor ``[n, m]``, or ``[*batch, 1, n, m]`` where batch entries differ; True = may attend."""
        tensors = [x for x in (self.lo, self.hi, self.dense) if x is not None]
        if not tensors:
            return torch.ones(n, m, dtype=torch.bool)
        keys = torch.arange(m, device=tensors[0].device)
        visible = self.dense
        if visible is None:
            visible = torch.ones(n, m, dtype=torch.bool, device=keys.device)
        for bound, compare in ((self.lo, torch.ge), (self.hi, torch.lt)):
            if bound is not None:
                inside = compare(keys, bound.unsqueeze(-1))  # [*batch, n or 1, m]
                # Bounds have no head dimension.
                if inside.ndim > 2:
                    inside = inside.unsqueeze(-3)
                visible = visible & inside
        lead = visible.shape[:-2]
        visible = visible.expand(*lead, n, m)
        if all(size == 1 for size in lead):
            return visible.reshape(n, m)
        return visible


def combine(a: Tensor | None, b: Tensor | None, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
    """``join(a, b)``; if one of them is None, the other one."""
    if a is None:
        return b
    if b is None:
        return a
    return join(a, b)


def check_masks_fit(a: RowMask, b: RowMask) -> None:
    """Two masks can be combined only if their batches and their dense masks broadcast against each other."""
    for x in _batch_shapes(a):
        for y in _batch_shapes(b):
            if not _broadcast_together(x, y):
                raise RegardError(f"masks for batches of {list(x)} and {list(y)} cannot be combined")
    if a.dense is not None and b.dense is not None and not _broadcast_together(a.dense.shape, b.dense.shape):
        shapes = f"{list(a.dense.shape)} and {list(b.dense.shape)}"
        raise RegardError(f"masks of shapes {shapes} cannot be combined: they do not broadcast")


def _batch_shapes(mask: RowMask) -> list[torch.Size]:
    shapes = [x.shape[:-1] for x in (mask.lo, mask.hi) if x is not None]
    if mask.dense is not None:
        shapes.append(mask.dense.shape[:-3])
    return shapes


def _broadcast_together(x: Sequence[int], y: Sequence[int]) -> bool:
    pairs = zip(reversed(x), reversed(y), strict=False)
    return all(a == b or a == 1 or b == 1 for a, b in pairs)


def _join_runs(a: RowMask, b: RowMask, like: Tensor, m: int) -> RowMask | None:
    """The union of two runs per row, or None if in some row there is a gap between them."""
    a_lo, a_hi = _clamped_run(a, like, m)
    b_lo, b_hi = _clamped_run(b, like, m)
    a_empty = a_lo >= a_hi
    b_empty = b_lo >= b_hi
    # Runs that touch without overlapping still join to one run.
    touch = (a_lo <= b_hi) & (b_lo <= a_hi)
    if not bool((touch | a_empty | b_empty).all()):
        return None
    lo = torch.where(a_empty, b_lo, torch.where(b_empty, a_lo, torch.minimum(a_lo, b_lo)))
    hi = torch.where(a_empty, b_hi, torch.where(b_empty, a_hi, torch.maximum(a_hi, b_hi)))
    return RowMask(lo, hi)


def _clamped_run(mask: RowMask, like: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """``lo`` and ``hi`` of a mask within 0 … m. A bound that is None becomes 0 or m, with the shape of ``like``."""
    lo = torch.zeros_like(like) if mask.lo is None else mask.lo
    hi = torch.full_like(like, m) if mask.hi is None else mask.hi
    return lo.clamp(0, m), hi.clamp(0, m)


def row_bounds(mask: RowMask, shape: Shape) -> tuple[Tensor | None, Tensor | None]:
    """``lo`` and ``hi`` of a mask as int64 ``[B or 1, n]`` within 0 … m, or None where they hide nothing."""
    return _fit_bound(mask.lo, shape), _fit_bound(mask.hi, shape)


def _fit_bound(bound: Tensor | None, shape: Shape) -> Tensor | None:
    if bound is None:
        return None
    lead = bound.shape[:-1]
    rows = bound.shape[-1]
    # Leading dimensions may be missing, as in any broadcast.
    padded = (1,) * (len(shape.batch) - len(lead)) + tuple(lead)
    if all(size == 1 for size in lead):
        bound = bound.reshape(1, rows)
    elif len(padded) == len(shape.batch) and all(map(broadcasts, padded, shape.batch)):
        bound = bound.expand(*shape.batch, rows).reshape(shape.batch_size, rows)
    else:
        raise RegardError(
            f"the mask is for a batch of {list(lead)}, but q, k and v have {list(shape.batch)}; "
            "lengths are one number per batch entry, and a mask of 0 and 1 over keys must be bool"
        )
    if not broadcasts(rows, shape.n):
        raise RegardError(f"the mask is for {rows} queries, but there are {shape.n}")
    return bound.clamp(0, shape.m).expand(bound.shape[0], shape.n)
