"""Weights are ≥ 0 and sum to 1: where there is a key to attend to, and nothing else takes a share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.statistics import mean


def weights(q: Tensor, k: Tensor, attend: Callable[..., Any], **options: Any) -> Tensor:
    """The weights themselves: what attention gives for values e_j."""
    eye = torch.eye(k.shape[-2], dtype=q.dtype).expand(*k.shape[:-2], -1, -1)
    out: Tensor = attend(q, k, eye, **options)
    return out


def is_distribution(a: Tensor) -> tuple[bool, float]:
    """Whether all rows are, and by how much a sum is off 1 at most."""
    off = float((a.sum(-1) - 1).abs().max())
    return bool((a >= 0).all()) and off < 1e-12, off


def sinks_and_dropout(
    found: Evidence, q: Tensor, k: Tensor, attend: Callable[..., Any], dropout: float, seed: int
) -> None:
    """What takes a share of the weights: a sink, by just that share; dropout, in single rows but not in the mean."""
    levels = [-4.0 + step for step in range(9)]
    plain = (q @ k.mT / math.sqrt(q.shape[-1])).logsumexp(-1)
    measured, worst = [], 0.0
    for level in levels:
        sums = weights(q, k, attend, sinks=q.new_full((q.shape[-3],), level)).sum(-1)
        worst = max(worst, float((sums - torch.sigmoid(plain - level)).abs().max()))
        measured.append(float(sums.mean()))
    found.condition(
        "a sink takes its share e^c / (e^c + Σ e^s) from the sum, so that without one it is 1",
        worst < 1e-12 and measured[-1] < 0.9,
        f"with a sink of logit {levels[-1]:g} the mean sum is {measured[-1]:.3g}, within {worst:.1e} of the formula",
    )
    torch.manual_seed(seed)
    kept = torch.stack([weights(q, k, attend, dropout=dropout).sum(-1) for _ in range(100)])
    far, centre = float((kept - 1).abs().max()), mean(kept.mean((1, 2, 3)), among=10)
    found.condition(
        "dropout leaves the sum at 1 in the mean only, so that without it each row has it",
        far > 0.1 and centre.holds(1),
        f"under dropout {dropout:g} a row is off by up to {far:.3g}, the mean sum is {centre}",
    )
    found.draw("mean sum of a row's weights against a sink's logit", {"sum": (levels, measured)}, x="logit", y="sum")


def check(
    *,
    n: int = 12,
    d: int = 8,
    heads: int = 3,
    dropout: float = 0.3,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
) -> Evidence:
    """Sums and signs of the operator's weights, unmasked and masked, with an empty row, with sinks, with dropout."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, n, d, generator=draw, dtype=torch.float64) for _ in range(3))
    seen = torch.rand(2, heads, n, n, generator=draw) < 0.3
    seen[..., 0] = True
    empty = seen.clone()
    empty[1, 0, n // 2] = False  # a query that only sees padding
    sums = weights(q, k, attend, mask=empty).sum(-1)
    found.written(
        "every query's weights sum to 1, whatever is hidden from it",
        bool((sums - 1).abs().max() < 1e-12),
        f"a query from which every key is hidden has weights that sum to {float(sums[1, 0, n // 2]):g}",
    )
    worst = 0.0
    ways: dict[str, dict[str, Any]] = {
        "no mask": {},
        "a mask that leaves a key": {"mask": seen},
        "β = 9": {"scale": 9.0},
    }
    for name, options in ways.items():
        a = weights(q, k, attend, **options)
        holds, off = is_distribution(a)
        worst = max(worst, off)
        found.condition(f"{name}: weights are ≥ 0 and sum to 1", holds, f"with a key to see sums are within {off:.1e}")
        apart = float((attend(q, k, v, **options) - a @ v).abs().max())
        found.condition(f"{name}: the output is their mean of values", apart < 1e-12, f"outputs within {apart:.1e}")
    sinks_and_dropout(found, q, k, attend, dropout, seed)
    scores = q @ k.mT / math.sqrt(d)
    raw, off = is_distribution(scores.sigmoid())
    found.control("weights by a sigmoid of each score are a distribution", raw, f"sums are off by up to {off:.3g}")
    found.numbers |= {
        "queries": 2 * heads * n,
        "largest error of a sum": worst,
        "sum of an empty row": float(sums.min()),
    }
    return found


CLAIM = Claim(
    id="weights-are-a-distribution",
    sources=("000", "001", "004"),
    statement="The attention weights of each query are ≥ 0 and sum to 1, so that its output is a convex combination of "
    "the values.",
    formula=r"\alpha_{ij} \ge 0, \qquad \sum_{j=1}^{n} \alpha_{ij} = 1, \qquad z_i = \sum_{j=1}^{n} \alpha_{ij} v_j",
    refuted="A query with a negative weight, with weights that do not sum to 1, or with an output that is not their "
    "mean of the values.",
    control="Weights by a sigmoid of each score, which nothing makes sum to 1.",
    verdict=HOLDS_IF,
    correction="The query must see a key: one from which all are hidden has no distribution (its sum is 0 here, 0/0 in "
    "the formula). And nothing else may take a share: a sink takes its own, and dropout leaves the sum at 1 in the "
    "mean only. A hidden key has weight 0, so weights are ≥ 0, not all positive.",
    check=check,
)
