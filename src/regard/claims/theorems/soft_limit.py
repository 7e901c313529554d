"""β → 0: attention becomes the plain mean of the values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.claims.statistics import slope


def tilt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What comes first in β: the covariance of scores and values over the keys, one vector a query."""
    scores = q @ k.mT
    centred = scores - scores.mean(-1, keepdim=True)
    return centred @ v / k.shape[-2]


def check(
    *, n: int = 12, d: int = 8, seed: int = 0, largest: float = 1e-2, attend: Callable[..., Any] = attention
) -> Evidence:
    """Distance of the output to the mean value at β = 0 and as β falls; its rate, and what it is to first order."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, n, d, generator=draw, dtype=torch.float64) for _ in range(3))
    mean = v.mean(-2, keepdim=True).expand_as(v)

    def error(beta: float) -> float:
        out: Tensor = attend(q, k, v, scale=beta)
        return float((out - mean).norm(dim=-1).max())

    at_zero = error(0.0)
    betas = [largest / 2**step for step in range(8)]
    errors = [error(beta) for beta in betas]
    rate = slope([math.log(beta) for beta in betas], [math.log(max(x, 1e-300)) for x in errors])
    first = float(tilt(q, k, v).norm(dim=-1).max())
    ratio = errors[-1] / betas[-1] / first
    found.written("at β = 0 every output is the mean of the values", at_zero < 1e-12, f"error {at_zero:.1e} at β = 0")
    found.written(
        "the distance to the mean falls to 0 in proportion to β",
        abs(rate.value - 1) < 0.05,
        f"the distance falls as β^{rate.value:.3f}",
    )
    found.written(
        "divided by β it tends to the covariance of scores and values",
        abs(ratio - 1) < 0.01,
        f"{ratio:.4f} of it at β = {betas[-1]:.1e}",
    )
    usual = 1 / math.sqrt(d)
    flat = error(usual)
    found.control("β = 1/√d gives the mean of the values", flat < 1e-2, f"error {flat:.3g} at β = {usual:.3g}")
    shown = [2.0**step for step in range(-12, 5)]
    lines = {"measured": (shown, [error(beta) for beta in shown]), "first order": (shown, [b * first for b in shown])}
    found.draw("largest distance of an output to the mean value", lines, x="β", y="distance", log="xy")
    found.numbers |= {"error at 0": at_zero, "exponent of β": rate.value, "first-order coefficient": first}
    return found


CLAIM = Claim(
    id="soft-limit",
    sources=("002",),
    statement="As β goes to 0 all weights become equal, and every output becomes the plain average of the values.",
    formula=r"\lim_{\beta \to 0} \sum_{j=1}^{n} \operatorname{softmax}(\beta s)_j v_j "
    r"\allowbreak = \frac{1}{n} \sum_{j=1}^{n} v_j",
    refuted="An output that keeps a distance from the mean of the values as β falls, or one that differs at β = 0.",
    control="β = 1/√d, asked whether the outputs are the mean.",
    verdict=HOLDS,
    check=check,
)
