"""What ``Observe(keep=True)`` holds: q, k and the lowered options, enough for any exact weight later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels import native
from regard.kernels.tiles import (
    Problem,
    best_products,
    bias_tile,
    full_precision,
    result_dtype,
    row_sums,
    score_tile,
    softmax_tile,
    tile_sides,
    visible_tile,
)
from regard.observables import Where
from regard.scores import Scores
from regard.shapes import as_tensor
from regard.values import value


@value
@dataclass(frozen=True, eq=False)
class KeptCall:
    """One call's ``q [B, H, n, d]``, ``k [B, G, m, d]`` and options.

    q and k are the caller's, not copies: to change them in place changes what is computed here later. The rows' sums
    are computed again, over all keys of the rows asked for: for weights in the reference's arithmetic, whatever kernel
    made the output, for tiles by the native kernel where it can. Either way rows add up to 1.
    """

    q: Tensor
    k: Tensor
    scores: Scores

    @property
    def batches(self) -> int:
        return self.q.shape[0]

    def _head(self, batch: int, head: int) -> Problem:
        group = head * self.k.shape[1] // self.q.shape[1]
        q, k = self.q[batch : batch + 1, head : head + 1], self.k[batch : batch + 1, group : group + 1]
        return Problem(q, k, self.scores.select(batch, head))

    def _places(self, rows: Where, keys: Where) -> tuple[Tensor, Tensor]:
        device = self.q.device
        at, keys_at = places(rows, self.q.shape[2], "rows"), places(keys, self.k.shape[2], "keys")
        return at.to(device), keys_at.to(device)

    def weights(self, batch: int, head: int, rows: Where, keys: Where) -> Tensor:
        """``A[rows, keys]`` of one head."""
        at, keys_at = self._places(rows, keys)
        problem = self._head(batch, head)
        found = torch.empty(len(at), len(keys_at), dtype=result_dtype(self.q.dtype), device=at.device)
        step = tile_sides(problem)[0]
        with full_precision(self.q):
            for i in range(0, len(at), step):
                found[i : i + step] = _Strip(problem, at[i : i + step]).weights(keys_at)
        return found

    def visible(self, batch: int, head: int, rows: Where, keys: Where) -> Tensor:
        """Which of these keys each row may attend to: not masked, and no bias of −inf."""
        at, keys_at = self._places(rows, keys)
        problem = self._head(batch, head)
        found = torch.ones(len(at), len(keys_at), dtype=torch.bool, device=at.device)
        step = tile_sides(problem)[0]
        for i in range(0, len(at), step):
            rows_here = at[i : i + step]
            seen = visible_tile(problem, rows_here, keys_at, bias_tile(problem, rows_here, keys_at))
            if seen is not None:
                found[i : i + step] = seen[0, 0]
        return found

    def sums(self, batch: int, head: int, rows: slice | None = None) -> tuple[Tensor, Tensor] | None:
        """``high`` and ``total`` of a head's rows, by the native kernel; None where it cannot, or finds no number."""
        problem = _rows_of(self._head(batch, head), rows)
        if native.refusal(problem.q):
            return None
        found = native.row_sums(problem.q, problem.k, problem.scores)
        return None if found is None else (found[0][0, 0], found[1][0, 0])

    def masses(
        self, batch: int, head: int, rows: slice, edges: Tensor, sums: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | None:
        """``[rows, bins]``: the weight of each row on the keys ``edges[t] ≤ j < edges[t + 1]``, as ``sums``.

        ``sums``: the rows' own, where they are known from before.
        """
        sums = self.sums(batch, head, rows) if sums is None else sums
        if sums is None:
            return None
        part = _rows_of(self._head(batch, head), rows)
        high, total = (x.reshape(1, 1, -1) for x in sums)
        return native.row_bins(part.q, part.k, high, total, part.scores, edges)[0, 0]

    def tile(self, batch: int, head: int, rows: Where, keys: Where, size: int, counted: Tensor) -> Tensor:
        """A region pooled to at most size × size: the mean over its counted rows of the mass on a bin of keys."""
        at, keys_at = self._places(rows, keys)
        height, width = min(size, len(at)), min(size, len(keys_at))
        if height and width and _is_run(at) and _is_run(keys_at):
            edges = int(keys_at[0]) + -(-torch.arange(width + 1) * len(keys_at) // width)  # ⌈t·len/w⌉: where bins begin
            masses = self.masses(batch, head, slice(int(at[0]), int(at[-1]) + 1), edges)
            if masses is not None:
                return pooled_rows(masses, height, counted[at])
        problem = self._head(batch, head)
        row_bin = torch.arange(len(at), device=at.device) * height // max(1, len(at))
        key_bin = torch.arange(len(keys_at), device=at.device) * width // max(1, len(keys_at))
        real = counted.to(at.device)[at]
        mass = torch.zeros(height, width, dtype=torch.float64, device=at.device)
        step_rows, step_keys = tile_sides(problem)
        with full_precision(self.q):
            for i in range(0, len(at), step_rows):
                rows_here = slice(i, i + step_rows)
                strip = _Strip(problem, at[rows_here])
                for j in range(0, len(keys_at), step_keys):
                    part = strip.weights(keys_at[j : j + step_keys]).double()
                    part = torch.where(real[rows_here, None], part, 0.0)
                    pooled = part.new_zeros(part.shape[0], width).index_add_(1, key_bin[j : j + step_keys], part)
                    mass.index_add_(0, row_bin[rows_here], pooled)
        rows_in = torch.zeros(height, dtype=torch.float64, device=at.device).index_add_(0, row_bin, real.double())
        return (mass / rows_in.clamp(min=1).unsqueeze(-1)).to(result_dtype(self.q.dtype))


def pooled_rows(masses: Tensor, height: int, counted: Tensor) -> Tensor:
    """``[rows, w] → [height, w]``: row bin ⌊i·height/rows⌋, the mean over the rows that count."""
    bins = torch.arange(len(masses)) * height // len(masses)
    kept = masses if bool(counted.all()) else torch.where(counted[:, None], masses, 0.0)
    if height == len(masses):
        return kept
    sums = torch.zeros(height, masses.shape[1], dtype=torch.float64).index_add_(0, bins, kept.double())
    rows = torch.zeros(height, dtype=torch.float64).index_add_(0, bins, counted.double())
    return (sums / rows.clamp(min=1).unsqueeze(-1)).to(masses.dtype)


def _rows_of(problem: Problem, rows: slice | None) -> Problem:
    if rows is None:
        return problem
    return Problem(problem.q[:, :, rows], problem.k, problem.scores.of_rows(rows))


def _is_run(at: Tensor) -> bool:
    """Whether places follow one another."""
    return int(at[-1]) - int(at[0]) + 1 == len(at) and bool((at.diff() == 1).all())


class _Strip:
    """A few rows of one head, with their sums over all keys."""

    def __init__(self, problem: Problem, rows: Tensor) -> None:
        m, step = problem.k.shape[2], tile_sides(problem)[1]
        spans = [slice(j, min(j + step, m)) for j in range(0, m, step)]
        self.problem, self.rows = problem, rows
        self.best = best_products(problem, rows, spans)
        self.high, self.total = row_sums(problem, rows, spans, self.best)

    def weights(self, keys: Tensor) -> Tensor:
        """``A [rows, keys]``."""
        tile = score_tile(self.problem, self.rows, keys, self.best)
        weights = softmax_tile(tile.logits, self.high, self.total)
        return (weights if tile.visible is None else torch.where(tile.visible, weights, 0.0))[0, 0]


def places(where: Where, size: int, name: str) -> Tensor:
    """Rows or keys as a vector of indices; None is all, negative numbers count from the end."""
    if where is None:
        return torch.arange(size)
    if isinstance(where, slice):
        return torch.tensor(range(size)[where], dtype=torch.int64)
    at = as_tensor(name, list(where) if isinstance(where, range) else where)
    at = at.reshape(1) if at.ndim == 0 else at
    if at.dtype == torch.bool or (at.is_floating_point() and at.numel()) or at.is_complex() or at.ndim != 1:
        raise TypeError(f"{name} must be a whole number, a slice, a range or a list of whole numbers, got {where!r}")
    at = at.long()
    if bool(((at < -size) | (at >= size)).any()):
        raise ValueError(f"{name} {where!r} lie outside 0 … {size - 1}")
    return torch.where(at < 0, at + size, at)
