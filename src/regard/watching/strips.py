"""Exact weights of a few rows in all heads at once, A and A' together; see ``scoring``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.kept import KeptCall
from regard.kernels.tiles import Problem, best_products, full_precision, score_tile
from regard.observables import Observation
from regard.watching.places import Where

__all__ = ["Strip", "strips"]

LEAST = 1e-3  # of a row's weight must lie outside the sinks for the rest to mean anything
FAR, FAINT = -700.0, 1e-300  # e^x is less than that there, and taken for 0; processors are slow at smaller numbers


@dataclass(frozen=True)
class Strip:
    """A few rows of one text in all heads. Weights are ``e^x``, with 0 at the sinks, which ``sunk`` has.

    Of a pair of tensors the first is of A, and the second of A'.
    """

    rows: slice
    rest: Tensor  # [H, r, m]
    sunk: Tensor  # [H, r, S]
    left: Tensor  # [H, r] Σ rest
    taken: Tensor  # [H, r] Σ sunk
    entropy: Tensor  # [2, H, r] −Σ A ln A
    scale: Tensor  # [2, H, r] what makes e^x weights; 0 for rows that do not count
    counts: Tensor  # [2, H, r] bool, rows that count
    visible: Tensor  # [2, H, r] how many keys
    see: Tensor  # [2, 1 or H, r, m] bool

    def summed(self, rest: Tensor, sunk: Tensor) -> Tensor:
        """Values of rows ``[H, r]``, of the rest and of the sinks → sums over rows of A and A', ``[2, H]``."""
        return torch.stack([(self.scale[0] * (rest + sunk)).sum(-1), (self.scale[1] * rest).sum(-1)])


def strips(observation: Observation, batch: int, where: Where, sinks: Tensor, cells: int) -> Iterator[Strip]:
    """The rows of one text, a few at a time: about ``cells`` weights. ``sinks [S]``: the sink keys."""
    assert observation.counted is not None
    call, entry = observation._call(batch)
    assert isinstance(call, KeptCall)
    problem = _one(call, entry)
    heads, n, m = len(observation.heads), where.n, where.m
    # A head's own empty rows are told by what it sees; a class token's row stands nowhere.
    counted = observation.counted[batch].any(0).cpu() & ~where.nowhere()
    step = max(1, cells // (heads * m * (problem.q.shape[3] if problem.hard else 1)))
    for i in range(0, n, step):
        rows = slice(i, min(i + step, n))
        x, see, own = _logits(problem, rows)
        x, see, own = x.cpu().double(), see.cpu(), own.cpu().double()
        rest = torch.threshold_(x.exp(), FAINT, 0.0)
        sunk = rest[..., sinks]
        rest.index_fill_(2, sinks, 0.0)
        logs, sunk_logs = torch.linalg.vecdot(rest, x), torch.linalg.vecdot(sunk, x[..., sinks])  # Σ e^x x
        left, taken = rest.sum(-1), sunk.sum(-1)
        total = left + taken + own
        total = torch.where(total > 0, total, 1.0)
        see = torch.stack([see, see.index_fill(2, sinks, False)])
        visible = see.sum(-1).double().expand(2, heads, -1)
        some = counted[rows] & (visible[0] > 0)
        counts = torch.stack([some, some & (left / total >= LEAST)])
        # Rows of A add up to total, and rows of A' to what is left: −Σ A ln A = ln total · Σ A − Σ A x.
        totals = torch.stack([total, left.clamp(min=LEAST * total)])
        within = torch.stack([left + taken, left])
        entropy = (within * totals.log() - torch.stack([logs + sunk_logs, logs])) / totals
        yield Strip(rows, rest, sunk, left, taken, entropy, counts / totals, counts, visible, see)


def _one(call: KeptCall, entry: int) -> Problem:
    """One entry of a call's batch, all heads."""

    def one(x: Tensor) -> Tensor:
        return x if x.shape[0] == 1 else x[entry : entry + 1]

    found = {name: getattr(call.scores, name) for name in ("lo", "hi", "mask", "bias")}
    own: dict[str, Any] = {name: one(x) for name, x in found.items() if x is not None}
    terms = tuple(replace(term, table=one(term.table)) for term in call.scores.terms)
    scores = replace(call.scores, **own, terms=terms)
    return Problem(call.q[entry : entry + 1], call.k[entry : entry + 1], scores)


def _logits(problem: Problem, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """``x [H, r, m]``, logits less their row's largest one; who sees whom; ``e^x [H, r]`` of learned sinks."""
    keys = slice(0, problem.k.shape[2])
    with full_precision(problem.q):
        tile = score_tile(problem, rows, keys, best_products(problem, rows, [keys]))
    logits = tile.logits[0]
    high = logits.amax(-1, keepdim=True)
    sinks = problem.scores.sinks
    if sinks is not None:
        high = torch.maximum(high, sinks.to(high.dtype).view(-1, 1, 1))
    high = torch.where(high == -torch.inf, 0.0, high)
    own = torch.zeros_like(high) if sinks is None else (sinks.to(high.dtype).view(-1, 1, 1) - high).exp()
    x = logits.sub_(high).clamp_(min=FAR)
    see = torch.ones_like(x[:1], dtype=torch.bool) if tile.visible is None else tile.visible[0]
    return x, see.expand(-1, *x.shape[1:]), own.squeeze(-1)
