"""What ``Observe(keep=True)`` holds: q, k, each row's softmax sums and the lowered options, enough for any exact weight later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.tiles import (
    Problem,
    best_products,
    full_precision,
    pick,
    result_dtype,
    score_tile,
    softmax_tile,
    tile_sides,
)
from regard.observables import Where
from regard.scores import Scores
from regard.values import value


@value
@dataclass(frozen=True)
class KeptCall:
    """One call's ``q [B, H, n, d]``, ``k [B, G, m, d]``, ``high`` and ``total [B, H, n]`` (kernels/tiles.py) and options.

    q and k are the caller's, not copies: to change them in place changes what is computed here later.
    """

    q: Tensor
    k: Tensor
    high: Tensor
    total: Tensor
    scores: Scores

    @property
    def batches(self) -> int:
        return self.q.shape[0]

    def _head(self, batch: int, head: int) -> tuple[Problem, Tensor, Tensor]:
        heads, groups = self.q.shape[1], self.k.shape[1]
        if not 0 <= head < heads:
            raise ValueError(f"head is {head}; this observation has heads 0 … {heads - 1}")
        group = head * groups // heads
        q, k = self.q[batch : batch + 1, head : head + 1], self.k[batch : batch + 1, group : group + 1]
        high, total = (x[batch : batch + 1, head : head + 1] for x in (self.high, self.total))
        return Problem(q, k, self.scores.select(batch, head)), high, total

    def weights(self, batch: int, head: int, rows: Where, keys: Where) -> Tensor:
        """``A[rows, keys]`` of one head."""
        at, keys_at = self._places(rows, keys)
        with full_precision(self.q):
            return _weights(*self._head(batch, head), at, keys_at).to(result_dtype(self.q.dtype))

    def _places(self, rows: Where, keys: Where) -> tuple[Tensor, Tensor]:
        device = self.q.device
        at, keys_at = places(rows, self.q.shape[2], "rows"), places(keys, self.k.shape[2], "keys")
        return at.to(device), keys_at.to(device)

    def tile(self, batch: int, head: int, rows: Where, keys: Where, size: int, counted: Tensor) -> Tensor:
        """A region pooled to at most size × size: the mean over its counted rows of the mass on a bin of keys."""
        problem, high, total = self._head(batch, head)
        at, keys_at = self._places(rows, keys)
        height, width = min(size, len(at)), min(size, len(keys_at))
        row_bin = torch.arange(len(at), device=at.device) * height // max(1, len(at))
        key_bin = torch.arange(len(keys_at), device=at.device) * width // max(1, len(keys_at))
        real = counted.to(at.device)[at]
        mass = torch.zeros(height, width, dtype=torch.float64, device=at.device)
        step_rows, step_keys = tile_sides(problem)
        for i in range(0, len(at), step_rows):
            for j in range(0, len(keys_at), step_keys):
                with full_precision(self.q):
                    part = _weights(problem, high, total, at[i : i + step_rows], keys_at[j : j + step_keys]).double()
                part = torch.where(real[i : i + step_rows, None], part, 0.0)
                pooled = part.new_zeros(part.shape[0], width).index_add_(1, key_bin[j : j + step_keys], part)
                mass.index_add_(0, row_bin[i : i + step_rows], pooled)
        rows_in = torch.zeros(height, dtype=torch.float64, device=at.device).index_add_(0, row_bin, real.double())
        return (mass / rows_in.clamp(min=1).unsqueeze(-1)).to(result_dtype(self.q.dtype))


def _weights(problem: Problem, high: Tensor, total: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    m = problem.k.shape[2]
    spans = [slice(j, min(j + 1024, m)) for j in range(0, m, 1024)] if problem.hard else []
    tile = score_tile(problem, rows, keys, best_products(problem, rows, spans))
    weights = softmax_tile(tile.logits, pick(high, rows).unsqueeze(-1), pick(total, rows).unsqueeze(-1))
    return (weights if tile.visible is None else torch.where(tile.visible, weights, 0.0))[0, 0]


def places(where: Where, size: int, name: str) -> Tensor:
    """Rows or keys as a vector of indices; None is all, negative numbers count from the end."""
    if where is None:
        return torch.arange(size)
    if isinstance(where, slice):
        return torch.arange(size)[where] if (where.step or 1) > 0 else torch.tensor(range(size)[where])
    at = torch.as_tensor([where] if isinstance(where, int) else list(where) if isinstance(where, range) else where)
    if at.dtype == torch.bool or at.is_floating_point() or at.ndim != 1:
        raise TypeError(f"{name} must be a whole number, a slice, a range or a list of whole numbers, got {where!r}")
    at = at.long()
    if bool(((at < -size) | (at >= size)).any()):
        raise ValueError(f"{name} {where!r} lie outside 0 … {size - 1}")
    return torch.where(at < 0, at + size, at)
