"""Attention that looks at no query: where all pictures or texts of a batch have the same weights, they come once."""

from __future__ import annotations

from torch import Tensor

from regard.kernels import ops
from regard.scores import Scores

__all__ = ["run"]

WIDEST = 1024  # features of v side by side; beyond it a tile's rows no longer stay in the cache


def run(q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str) -> Tensor:
    """``ops.run``; at scale 0, with a bias and a mask that the batch shares, with values of several entries as one.

    A [H, n, m] v_b [m, e], b = 1 … F  →  A [v₁ … v_F] [m, F·e]
    """
    many = _together(v, scores)
    if many == 1:
        return ops.run(q, k, v, scores, backend)
    batch, heads, m, e = v.shape
    wide = v.unflatten(0, (-1, many)).permute(0, 2, 3, 1, 4).reshape(batch // many, heads, m, many * e)
    out = ops.run(q[: batch // many], k[: batch // many], wide, scores, backend)
    return out.unflatten(-1, (many, e)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _together(v: Tensor, scores: Scores) -> int:
    """How many entries of the batch, F, become one: a divisor of their number; 1 where their weights may differ."""
    if scores.scale != 0 or scores.dropout > 0 or not v.numel():
        return 1
    parts = (scores.lo, scores.hi, scores.mask, scores.bias, *(term.table for term in scores.terms))
    if any(part is not None and part.shape[0] > 1 for part in parts):
        return 1
    batch, most = v.shape[0], max(1, WIDEST // v.shape[-1])
    return max(f for f in range(1, min(batch, most) + 1) if batch % f == 0)
