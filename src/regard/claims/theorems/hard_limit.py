"""β → ∞: softmax becomes argmax, where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.statistics import slope


def weights(scores: Tensor, beta: float, attend: Callable[..., Any]) -> Tensor:
    """``softmax(β s)`` by the operator: keys s, the query 1, values e_j."""
    n = len(scores)
    one, keys = scores.new_ones(1, 1, 1, 1), scores.view(1, 1, n, 1)
    out: Tensor = attend(one, keys, torch.eye(n).to(scores).view(1, 1, n, n), scale=beta)
    return out.flatten()


def check(*, n: int = 8, gap: float = 0.5, seed: int = 0, attend: Callable[..., Any] = attention) -> Evidence:
    """Weights against the one-hot argmax as β grows, without ties and with one."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(n, generator=draw, dtype=torch.float64) * 2 - 2 - 3 * gap
    scores[2] = 0.0  # the largest, by the gap at least
    scores[5] = -gap
    onehot = torch.eye(n, dtype=torch.float64)[2]
    betas = [(10.0 + 2 * k) / gap for k in range(8)]
    errors = [float((weights(scores, beta, attend) - onehot).abs().sum()) for beta in betas]
    rate = slope(betas, [math.log(x) for x in errors])
    limit = float((weights(scores, math.inf, attend) - onehot).abs().max())
    found.condition("one largest score: β = ∞ gives the one-hot argmax", limit == 0, f"error {limit:g} at β = ∞")
    found.condition(
        "one largest score: the error falls as exp(−β·gap)",
        abs(rate.value + gap) < 0.01 * gap,
        f"rate {rate} for a gap of {gap:g}",
    )
    tied = scores.clone()
    tied[5] = 0.0
    both = torch.zeros(n, dtype=torch.float64)
    both[[2, 5]] = 0.5
    at_tie = [float((weights(tied, beta, attend) - onehot).abs().sum()) for beta in (*betas, math.inf)]
    shared = float((weights(tied, math.inf, attend) - both).abs().max())
    said = f"under a tie the error stays {at_tie[-1]:g}"
    found.written("any scores: β → ∞ gives the one-hot argmax", at_tie[-1] < 1e-9, said)
    found.condition("ties share the weight equally in the limit", shared == 0, f"½ each, error {shared:g}")
    flat = float((weights(scores, 1.0, attend) - onehot).abs().sum())
    found.control("β = 1 gives the one-hot argmax", flat < 1e-9, f"error {flat:.3g} at β = 1")
    lines = {"one largest": (betas, errors), "a tie": (betas, at_tie[:-1])}
    found.draw("Σ |A − argmax| against β", lines, x="β", y="error", log="y")
    found.numbers |= {"gap": gap, "rate": rate.value}
    return found


CLAIM = Claim(
    id="hard-limit",
    sources=("000", "002"),
    statement="As the inverse temperature β grows, softmax(β s) becomes the one-hot argmax.",
    formula=r"\lim_{\beta \to \infty} \operatorname{softmax}(\beta s) = e_{\operatorname{argmax}_j s_j}",
    refuted="Scores for which the limit is not one-hot.",
    control="β = 1, asked whether it gives the argmax.",
    verdict=HOLDS_IF,
    correction="There must be one largest score. The error then falls as exp(−β·gap), the gap to the "
    "second largest; tied keys share the weight equally.",
    check=check,
)
