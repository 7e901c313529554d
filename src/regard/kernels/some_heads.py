"""Observed attention of some heads, plain attention of the others: what is not looked at runs at full speed."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels import ops
from regard.observables import Observe
from regard.scores import Scores

__all__ = ["of", "run"]


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    backend: str,
    real: Tensor | None,
    spec: list[int],
    observe: Observe,
) -> list[Tensor]:
    """As ``ops.run_observed``: out of all heads, then the sums and observables of ``observe.heads``, in their order."""
    heads, H = list(observe.heads or ()), q.shape[1]
    if max(heads) >= H:
        raise ValueError(f"Observe heads go up to {max(heads)}, but q has {H} heads, 0 … {H - 1}")
    if scores.dropout > 0:  # whose mask goes by a head's number among all
        out, *values = ops.run_observed(q, k, v, scores, backend, real, spec)
        names = ("high", "total", *ops.measured_names(observe))
        return [out, *(_picked(x, name, heads) for name, x in zip(names, values, strict=True))]
    others = [h for h in range(H) if h not in heads]
    groups = _groups(heads, q, k)
    seen, *values = ops.run_observed(
        q[:, heads], k[:, groups], v[:, groups], scores.of_heads(heads), backend, real, spec
    )
    if others:
        groups = _groups(others, q, k)
        rest = ops.run(q[:, others], k[:, groups], v[:, groups], scores.of_heads(others), backend)
        seen = torch.cat([seen, rest], 1)
    order = torch.argsort(torch.tensor(heads + others, device=q.device))
    return [seen[:, order], *values]


def of(heads: tuple[int, ...] | None, q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor, Scores]:
    """What belongs to these heads, each with a key head of its own; None is all, as they are."""
    if heads is None:
        return q, k, scores
    chosen = list(heads)
    return q[:, chosen], k[:, _groups(chosen, q, k)], scores.of_heads(chosen)


def _groups(heads: list[int], q: Tensor, k: Tensor) -> list[int]:
    return [h * k.shape[1] // q.shape[1] for h in heads]


def _picked(x: Tensor, name: str, heads: list[int]) -> Tensor:
    """Per-head values have their heads first, row values after the batch."""
    per_head = name in ("rows", "key_mass", "map", "map_rows", "profile", "profile_rows")
    return x[heads] if per_head else x[:, heads]
