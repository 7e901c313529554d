"""Softmax keeps order and differences of scores, not their ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import FAILS, Claim, Evidence


def weights(scores: Tensor, attend: Callable[..., Any]) -> Tensor:
    """``softmax(s)`` of each row by the operator: one query 1 a row, its keys the scores, values e_j."""
    rows, n = scores.shape
    eye = torch.eye(n, dtype=scores.dtype).expand(rows, 1, n, n)
    out: Tensor = attend(scores.new_ones(rows, 1, 1, 1), scores.view(rows, 1, n, 1), eye, scale=1.0)
    return out[:, 0, 0]


def ratios(x: Tensor) -> Tensor:
    """``x_i / x_j`` for all pairs."""
    return x.unsqueeze(-1) / x.unsqueeze(-2)


def same_order(scores: Tensor, a: Tensor) -> bool:
    """Whether i is before j in one where it is in the other, and equal where equal."""
    sign = (scores.unsqueeze(-1) - scores.unsqueeze(-2)).sign()
    return bool((sign == (a.unsqueeze(-1) - a.unsqueeze(-2)).sign()).all())


def check(
    *, n: int = 8, rows: int = 50, shift: float = 5.0, seed: int = 0, attend: Callable[..., Any] = attention
) -> Evidence:
    """Ratios, order and differences of scores before and after softmax; scores are positive, so that ratios exist."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, n, generator=draw, dtype=torch.float64) * 3 + 0.5
    a = weights(scores, attend)
    off = float((ratios(a) / ratios(scores) - 1).abs().max())
    pair = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
    two, later = (float(ratios(weights(s, attend))[0, 0, 1]) for s in (pair, pair + shift))
    found.written(
        "weights are to each other as their scores",
        off < 1e-9,
        f"scores 2 : 1 give weights {two:.3f} : 1, and scores {2 + shift:g} : {1 + shift:g} give {later:.3f} : 1",
    )
    found.corrected(
        "the order is kept, and equal scores stay equal",
        same_order(scores, a) and same_order(scores[:, :1].expand(-1, n), weights(scores[:, :1].expand(-1, n), attend)),
        f"all {rows * n * (n - 1)} pairs stay in order",
    )
    gap = scores.unsqueeze(-1) - scores.unsqueeze(-2)
    far = float((ratios(a).log() - gap).abs().max())
    found.corrected("a_i / a_j = exp(s_i − s_j)", far < 1e-12, f"log-ratios are the differences within {far:.1e}")
    moved = float((weights(scores + shift, attend) - a).abs().max())
    lost = float((ratios(scores + shift) / ratios(scores) - 1).abs().max())
    found.corrected(
        "scores moved together have other ratios and the same weights",
        moved < 1e-12 and lost > 0.1,
        f"scores + {shift:g}: ratios change by up to {lost:.0%}, weights by {moved:.1e}",
    )
    folded = weights((scores - scores.mean()).square(), attend)
    found.control("weights by squares of centred scores keep the order", same_order(scores, folded))
    levels = [step / 4 for step in range(2, 17)]
    steps = torch.tensor([[level, 1.0] for level in levels], dtype=torch.float64)
    measured = ratios(weights(steps, attend))[:, 0, 1].tolist()
    lines = {
        "weights": (levels, measured),
        "scores": (levels, levels),
        "exp(s − 1)": (levels, [math.exp(x - 1) for x in levels]),
    }
    found.draw("the ratio of two weights whose scores are s and 1", lines, x="s", y="ratio", log="y")
    found.numbers |= {"ratio of weights for 2 : 1": two, "largest error of a log-ratio": far}
    return found


CLAIM = Claim(
    id="softmax-keeps-order",
    sources=("001",),
    statement="Softmax makes scores a distribution while it preserves their relative magnitudes.",
    formula=r"\frac{\alpha_i}{\alpha_j} = \frac{s_i}{s_j}",
    refuted="Scores whose weights are in another ratio.",
    control="Weights by the squares of centred scores, asked whether they keep the order.",
    verdict=FAILS,
    correction="Softmax keeps the order of scores, and turns their differences into ratios: α_i/α_j = exp(s_i − s_j). "
    "Ratios of scores are lost: adding one number to all scores changes them and leaves every weight as it was.",
    check=check,
)
