"""The hinge: what masks and positions compile to, and what every kernel consumes.

The final logit of query i and key j in head h of batch entry b is

    s = softcap·tanh(scale·q_i·k_j / softcap) + bias[b, h, i, j] + Σ_terms table[b, h, i, t(j at − i at)]

and the key is hidden unless ``lo[b, i] ≤ j < hi[b, i]`` and ``mask[b, h, i, j]``. Nothing here has size n × m except
what a caller already gave at that size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.shapes import Shape, broadcasts, offset_of, readable
from regard.values import value

# A token that stands nowhere (a class token on a grid) gets this coordinate; no relative term reaches it.
NOWHERE = -(2**30)


@value
@dataclass(frozen=True)
class RelativeTerm:
    """One bias that depends on where a key stands relative to its query, stored by offset instead of by pair.

        bias[b, h, i, j] += table[b, h, i, clamp(key_at[j] − query_at[i] − first, 0, T − 1)]

    ``table [B or 1, H or 1, n or 1, T]``; ``query_at [n]`` and ``key_at [m]`` are whole coordinates on one axis, and
    ``first`` is the offset of the table's first column. A token at ``NOWHERE`` takes and gives no bias. One term is
    ALiBi, T5 or a clipped table; one with rows is Shaw's; two (one an axis) make a grid.
    """

    table: Tensor
    query_at: Tensor
    key_at: Tensor
    first: int


@dataclass(frozen=True)
class RowMask:
    """Which keys a query may see: a run of keys, a dense bool mask, or both at once.

    ``lo``/``hi``: whole numbers broadcastable to ``[*batch, n]``; None is 0 and m. ``dense``: bool broadcastable to
    ``[*batch, H, n, m]``, True = may attend; None hides nothing.
    """

    lo: Tensor | None = None
    hi: Tensor | None = None
    dense: Tensor | None = None

    def __and__(self, other: RowMask) -> RowMask:
        def both(a: Tensor | None, b: Tensor | None, join) -> Tensor | None:  # type: ignore[no-untyped-def]
            return b if a is None else a if b is None else join(a, b)

        check_masks_fit(self, other)
        return RowMask(
            both(self.lo, other.lo, torch.maximum),
            both(self.hi, other.hi, torch.minimum),
            both(self.dense, other.dense, torch.logical_and),
        )

    def union(self, other: RowMask, n: int, m: int) -> RowMask:
        """``self | other``: a run where the two runs start together, end together or touch in every row; else dense."""
        check_masks_fit(self, other)
        if self.dense is None and other.dense is None:
            if self.lo is None and other.lo is None:
                return RowMask(hi=None if self.hi is None or other.hi is None else torch.maximum(self.hi, other.hi))
            if self.hi is None and other.hi is None:
                return RowMask(lo=None if self.lo is None or other.lo is None else torch.minimum(self.lo, other.lo))
            if readable(*(x for x in (self.lo, self.hi, other.lo, other.hi) if x is not None)):
                joined = _join_runs(self, other, m)
                if joined is not None:
                    return joined
        return RowMask(dense=self.as_dense(n, m) | other.as_dense(n, m))

    def as_dense(self, n: int, m: int) -> Tensor:
        """The bool tensor ``[n, m]``, or ``[*batch, 1, n, m]`` where rows differ by batch entry; True = may attend."""
        tensors = [x for x in (self.lo, self.hi, self.dense) if x is not None]
        if not tensors:
            return torch.ones(n, m, dtype=torch.bool)
        j = torch.arange(m, device=tensors[0].device)
        see = torch.ones(n, m, dtype=torch.bool, device=j.device) if self.dense is None else self.dense
        for bound, inside in ((self.lo, torch.ge), (self.hi, torch.lt)):
            if bound is not None:
                part = inside(j, bound.unsqueeze(-1))  # [*batch, n or 1, m]
                see = see & (part if part.ndim == 2 else part.unsqueeze(-3))
        lead = see.shape[:-2]
        if all(size == 1 for size in lead):
            return see.expand(*lead, n, m).reshape(n, m)
        return see.expand(*lead, n, m)


def check_masks_fit(a: RowMask, b: RowMask) -> None:
    """Two masks that are joined broadcast against each other."""

    def leads(mask: RowMask) -> list[torch.Size]:
        bounds = [x.shape[:-1] for x in (mask.lo, mask.hi) if x is not None]
        return bounds if mask.dense is None else [*bounds, mask.dense.shape[:-3]]

    for x in leads(a):
        for y in leads(b):
            if not all(i == j or i == 1 or j == 1 for i, j in zip(reversed(x), reversed(y), strict=False)):
                raise ValueError(f"the masks joined here are made for batches of {list(x)} and {list(y)}")
    if a.dense is not None and b.dense is not None:
        x, y = a.dense.shape, b.dense.shape
        if not all(i == j or i == 1 or j == 1 for i, j in zip(reversed(x), reversed(y), strict=False)):
            raise ValueError(f"the masks joined here have shapes {list(x)} and {list(y)}, which do not broadcast")


def _join_runs(a: RowMask, b: RowMask, m: int) -> RowMask | None:
    """The union of two runs a row, or None if in some row a gap would have to be filled."""
    bounds = [x for x in (a.lo, a.hi, b.lo, b.hi) if x is not None]
    zero, end = torch.zeros_like(bounds[0]), torch.full_like(bounds[0], m)
    a_lo, b_lo = (torch.clamp(zero if x.lo is None else x.lo, 0, m) for x in (a, b))
    a_hi, b_hi = (torch.clamp(end if x.hi is None else x.hi, 0, m) for x in (a, b))
    a_empty, b_empty = a_lo >= a_hi, b_lo >= b_hi
    touch = (a_lo <= b_hi) & (b_lo <= a_hi)
    if not bool((touch | a_empty | b_empty).all()):
        return None
    lo = torch.where(a_empty, b_lo, torch.where(b_empty, a_lo, torch.minimum(a_lo, b_lo)))
    hi = torch.where(a_empty, b_hi, torch.where(b_empty, a_hi, torch.maximum(a_hi, b_hi)))
    return RowMask(lo, hi)


class Bias:
    """A value added to scores, given as terms stored by offset. ``a + b`` adds two of them.

    A scheme implements ``terms``; it may look at q (for forms that depend on the query) but never forms n × m.
    """

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        """The terms for ``q [B, H, n, d]`` and m keys; tables may require gradients."""
        raise TypeError(f"{type(self).__name__} is not a bias on scores")

    def __add__(self, other: Bias) -> Bias:
        if not isinstance(other, Bias):
            return NotImplemented
        return SumOfBiases((self, other))

    def dense(self, q: Tensor, m: int) -> Tensor:
        """The bias as one tensor ``[B or 1, H or 1, n, m]``: n × m, for small sizes, tests and pictures.

        In float64 for float64 queries, else in float32.
        """
        rows, keys = slice(0, q.shape[-2]), slice(0, m)
        tiles = (term_tile(term, rows, keys) for term in self.terms(q, m))
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        return sum(tiles, torch.zeros((), dtype=dtype, device=q.device)).to(dtype)


class SumOfBiases(nn.Module, Bias):
    """``a + b``: both are added to the scores. A module, so that learned parts train, save and move with it."""

    def __init__(self, parts: tuple[Bias, ...]) -> None:
        super().__init__()
        self.parts = parts
        self.learned = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        return tuple(term for part in self.parts for term in part.terms(q, m))


def positions_1d(n: int, m: int, offset: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Coordinates of queries and keys on a line: query i at i + offset, key j at j."""
    return torch.arange(n, device=device) + offset_of(n, m, offset), torch.arange(m, device=device)


def positions_2d(
    n: int, m: int, height: int, width: int, offset: int | None, device: torch.device
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``((query_y, key_y), (query_x, key_x))`` of a ``height × width`` grid read row by row.

    The grid is the last height·width keys; keys before it (class tokens) stand nowhere, and so do queries that the
    alignment rule puts before the grid or behind it.
    """
    cells = height * width
    if m < cells:
        raise ValueError(
            f"a {height} × {width} grid has {cells} cells, but there are {m} keys; m must be at least {cells}"
        )

    def cell(at: Tensor) -> tuple[Tensor, Tensor]:
        at = at - (m - cells)
        out = (at < 0) | (at >= cells)
        y, x = torch.div(at, width, rounding_mode="floor"), torch.remainder(at, width)
        return y.masked_fill(out, NOWHERE), x.masked_fill(out, NOWHERE)

    (query_y, query_x), (key_y, key_x) = (cell(at) for at in positions_1d(n, m, offset, device))
    return (query_y, key_y), (query_x, key_x)


def term_index(term: RelativeTerm, rows: slice | Tensor, keys: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Column of the table for each pair of a tile, and which pairs have one."""
    query_at, key_at = term.query_at[rows], term.key_at[keys]
    index = (key_at - query_at.unsqueeze(-1) - term.first).clamp_(0, term.table.shape[-1] - 1)
    somewhere = (key_at != NOWHERE) & (query_at != NOWHERE).unsqueeze(-1)
    return index, somewhere


def term_tile(term: RelativeTerm, rows: slice | Tensor, keys: slice | Tensor) -> Tensor:
    """The term's bias on a tile: ``[B or 1, H or 1, rows, keys]``."""
    index, somewhere = term_index(term, rows, keys)
    table = term.table if term.table.shape[2] == 1 else term.table[:, :, rows]
    if table.shape[2] == 1:
        tile = table[:, :, 0][:, :, index]
    else:
        tile = table.gather(-1, index.expand(*table.shape[:3], index.shape[-1]))
    return torch.where(somewhere, tile, 0)


@value
@dataclass(frozen=True)
class Scores:
    """Everything that turns q·k into logits, as tensors and numbers: one call's lowered options.

    ``lo, hi [B or 1, n]`` int64 or None; ``mask`` bool and ``bias`` float ``[B or 1, H or 1, n or 1, m or 1]``;
    ``sinks [H]``; ``softcap`` 0 for none; ``seed`` an int64 scalar tensor, given where ``dropout > 0``.
    """

    scale: float
    softcap: float = 0.0
    lo: Tensor | None = None
    hi: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    terms: tuple[RelativeTerm, ...] = ()
    sinks: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None

    def detach(self) -> Scores:
        """The same options without gradients and without dropout, for looking at later."""
        return replace(
            self,
            bias=None if self.bias is None else self.bias.detach(),
            terms=tuple(replace(t, table=t.table.detach()) for t in self.terms),
            sinks=None if self.sinks is None else self.sinks.detach(),
            dropout=0.0,
            seed=None,
        )

    def select(self, batch: int, head: int) -> Scores:
        """The same options for one head of one batch entry."""

        def one(x: Tensor) -> Tensor:
            return x[batch : batch + 1] if x.shape[0] > 1 else x

        chosen = self.of_heads([head])
        return replace(
            chosen,
            lo=None if self.lo is None else one(self.lo),
            hi=None if self.hi is None else one(self.hi),
            mask=None if chosen.mask is None else one(chosen.mask),
            bias=None if chosen.bias is None else one(chosen.bias),
            terms=tuple(replace(t, table=one(t.table)) for t in chosen.terms),
        )

    def of_rows(self, rows: slice) -> Scores:
        """The same options for a run of queries; each keeps its place, its keys and its bias."""

        def some(x: Tensor, dim: int) -> Tensor:
            return x if x.shape[dim] == 1 else x.narrow(dim, rows.start, rows.stop - rows.start)

        return replace(
            self,
            lo=None if self.lo is None else some(self.lo, 1),
            hi=None if self.hi is None else some(self.hi, 1),
            mask=None if self.mask is None else some(self.mask, 2),
            bias=None if self.bias is None else some(self.bias, 2),
            terms=tuple(replace(t, table=some(t.table, 2), query_at=t.query_at[rows]) for t in self.terms),
        )

    def of_heads(self, heads: list[int]) -> Scores:
        """The same options for some heads, in this order; dropout hashes a head's number and would change."""
        assert self.dropout == 0

        def some(x: Tensor) -> Tensor:
            return x[:, heads] if x.shape[1] > 1 else x

        return replace(
            self,
            mask=None if self.mask is None else some(self.mask),
            bias=None if self.bias is None else some(self.bias),
            terms=tuple(replace(t, table=some(t.table)) for t in self.terms),
            sinks=None if self.sinks is None else self.sinks[heads],
        )


def row_bounds(mask: RowMask, shape: Shape) -> tuple[Tensor | None, Tensor | None]:
    """``lo, hi`` of a mask as int64 ``[B or 1, n]`` within 0 … m, or None where they hide nothing."""

    def fit(bound: Tensor | None) -> Tensor | None:
        if bound is None:
            return None
        lead, rows = bound.shape[:-1], bound.shape[-1]
        padded = (1,) * (len(shape.batch) - len(lead)) + tuple(lead)
        if all(size == 1 for size in lead):
            bound = bound.reshape(1, rows)
        elif len(padded) == len(shape.batch) and all(map(broadcasts, padded, shape.batch)):
            bound = bound.expand(*shape.batch, rows).reshape(shape.batches, rows)
        else:
            raise ValueError(
                f"the mask is made for a batch of {list(lead)}, but q, k and v have {list(shape.batch)}; "
                "lengths are one number an entry, and a mask of 0 and 1 over keys must be bool"
            )
        if not broadcasts(rows, shape.n):
            raise ValueError(f"the mask is made for {rows} queries, but there are {shape.n}")
        return bound.clamp(0, shape.m).expand(bound.shape[0], shape.n)

    return fit(mask.lo), fit(mask.hi)


# --- dropout -------------------------------------------------------------------------------------------------------

_WORD = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """murmur3's 32-bit finaliser, on int64 tensors that hold 32-bit words (products wrap, then are cut to 32 bits)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def dropout_keep(seed: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor, p: float) -> Tensor:
    """Which weights survive dropout: a pure function of (seed, b, h, i, j), the same in every backend.

        r = mix(mix(mix(seed_lo ⊕ mix(seed_hi) ⊕ b·c₁) ⊕ h·c₂) ⊕ i·c₃);   keep ⇔ mix(r ⊕ mix(j + c₄)) ≥ p·2³²

    All words are 32 bits. The index tensors broadcast against each other.
    """
    seed = seed.to(torch.int64)
    r = _mix((seed & _WORD) ^ _mix((seed >> 32) & _WORD) ^ ((batch * 0x9E3779B1) & _WORD))
    r = _mix(r ^ ((head * 0x85EBCA77) & _WORD))
    r = _mix(r ^ ((i * 0xC2B2AE3D) & _WORD))
    return _mix(r ^ _mix((j + 0x27D4EB2F) & _WORD)) >= math.ceil(p * 2**32)
