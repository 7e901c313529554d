"""A key made longer: the change of the output to first order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import regard
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.claims.statistics import slope

Derivative = Callable[[Tensor, int, float], Tensor]


def of_softmax(a: Tensor, i: int, beta: float) -> Tensor:
    """``∂ softmax_β(s)_j / ∂s_i = β a_i(δ_ij − a_j)`` for rows of weights a: ``[n, m]``."""
    return beta * a[..., i : i + 1] * (torch.eye(a.shape[-1]).to(a)[i] - a)


def without_beta(a: Tensor, i: int, beta: float) -> Tensor:
    """The derivative of a softmax of β = 1, at the same weights."""
    return of_softmax(a, i, 1.0)


def check(
    *,
    n: int = 5,
    m: int = 7,
    d: int = 16,
    beta: float = 0.25,
    far: float = 1e4,
    seed: int = 0,
    attend: Callable[..., Any] = regard.attention,
    derivative: Derivative = of_softmax,
) -> Evidence:
    """The change of H for keys scaled by α against the first order, as α nears 1 from above and from below."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, rows, d, generator=draw, dtype=torch.float64) for rows in (n, m, m))
    i = 0

    def output(alpha: float, values: Tensor) -> Tensor:
        keys = k.clone()
        keys[:, :, i] *= alpha
        out: Tensor = attend(q, keys, values, scale=beta)
        return out[0, 0]

    eye = torch.eye(m, dtype=torch.float64).view(1, 1, m, m)
    score = q[0, 0] @ k[0, 0, i]

    def error(by: float, rule: Derivative) -> float:
        predicted = rule(output(1.0, eye), i, beta) * (by * score)[:, None] @ v[0, 0]
        return float((output(1 + by, v) - output(1.0, v) - predicted).norm())

    steps = [0.1 / 2**step for step in range(8)]
    logs = [math.log(by) for by in steps]
    for side, sign in (("longer", 1.0), ("shorter", -1.0)):
        errors = [error(sign * by, derivative) for by in steps]
        power = slope(logs, [math.log(max(x, 1e-300)) for x in errors])
        found.written(
            f"a {side} key: what the first order leaves falls as (α − 1)²",
            abs(power.value - 2) < 0.1,
            f"a {side} key: the error of the first order falls as |α − 1|^{power.value:.3f}",
        )
        found.numbers[f"exponent, {side}"] = power.value
    part = error(steps[-1], derivative) / float((output(1 + steps[-1], v) - output(1.0, v)).norm())
    found.written("it is the whole change as α → 1", part < 0.01, f"error {part:.1e} of the change at α − 1 = 8e-4")
    wrong = slope(logs, [math.log(max(error(by, without_beta), 1e-300)) for by in steps])
    found.control("so does it without the factor β", abs(wrong.value - 2) < 0.1, f"as |α − 1|^{wrong.value:.3f}")
    limit = (score > 0).to(score)
    weight = float((output(far, eye)[:, i] - limit).abs().max())
    off = error(far - 1, derivative)
    said = f"off by {off:.3g} at α = {far:g}; weights are within {weight:.0e} of 1 or 0, by the sign of k_iᵀq"
    moved = float((output(far, v) - output(1.0, v)).norm())
    found.control("the first order is right far from 1 too", off < 0.01 * moved, said)
    shown = [0.8 / 2**step for step in range(11)]
    lines = {
        "with the factor β": (shown, [max(error(by, derivative), 1e-16) for by in shown]),
        "without": (shown, [max(error(by, without_beta), 1e-16) for by in shown]),
    }
    found.draw("what the first order leaves of ΔH", lines, x="α − 1", y="error", log="xy")
    found.numbers |= {"distance of the weight to 1 or 0, far": weight, "exponent without β": wrong.value}
    return found


CLAIM = Claim(
    id="key-scaling-first-order",
    sources=("002",),
    statement="Scaling key i by α changes H, to first order, by the derivative of softmax_β with respect to the score "
    "k_iᵀq, times the change of that score, (α − 1)k_iᵀq, times the values.",
    formula=r"\Delta H \approx \frac{\partial \operatorname{softmax}_{\beta}(K^\top q)}{\partial (k_i^\top q)} "
    r"(\alpha - 1)\, k_i^\top q \, V = \beta a_i (\alpha - 1)\, k_i^\top q \, (v_i - H)",
    refuted="An error of the formula that does not shrink as (α − 1)² when α nears 1.",
    control="The derivative without the factor β, and an α far from 1, asked the same.",
    verdict=HOLDS,
    check=check,
)
