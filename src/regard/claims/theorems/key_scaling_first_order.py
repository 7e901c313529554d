"""A key made longer: the change of the output to first order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.claims.statistics import slope

Derivative = Callable[[Tensor, int, float], Tensor]


def of_softmax(a: Tensor, i: int, beta: float) -> Tensor:
    """``∂ softmax_β(s)_j / ∂s_i = β a_i(δ_ij − a_j)`` for rows of weights a: ``[n, m]``."""
    return beta * a[..., i : i + 1] * (torch.eye(a.shape[-1]).to(a)[i] - a)


def without_beta(a: Tensor, i: int, beta: float) -> Tensor:
    """The derivative of a softmax of β = 1, at the same weights."""
    return of_softmax(a, i, 1.0)


class Setting(NamedTuple):
    """q, k and v ``[1, 1, rows, d]``, β, and the operator; it is key 0 that is scaled."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: float
    attend: Callable[..., Any]

    def output(self, alpha: float, values: Tensor | None = None) -> Tensor:
        """``[n, d]``: H with the key scaled by α; with values e_j the weights."""
        keys = self.k.clone()
        keys[:, :, 0] *= alpha
        out: Tensor = self.attend(self.q, keys, self.v if values is None else values, scale=self.beta)
        return out[0, 0]

    def weights(self, alpha: float) -> Tensor:
        """``[n, m]``"""
        m = self.k.shape[-2]
        return self.output(alpha, torch.eye(m).to(self.v).view(1, 1, m, m))

    def score(self) -> Tensor:
        """``[n]``: k_0ᵀq."""
        return self.q[0, 0] @ self.k[0, 0, 0]

    def moved(self, by: float) -> Tensor:
        """ΔH at α = 1 + by."""
        return self.output(1 + by) - self.output(1.0)

    def error(self, by: float, rule: Derivative) -> float:
        """What the first order leaves of ΔH."""
        predicted = rule(self.weights(1.0), 0, self.beta) * (by * self.score())[:, None] @ self.v[0, 0]
        return float((self.moved(by) - predicted).norm())

    def power(self, steps: Sequence[float], rule: Derivative) -> float:
        """As which power of |α − 1| that falls."""
        errors = [max(self.error(by, rule), 1e-300) for by in steps]
        return slope([math.log(abs(by)) for by in steps], [math.log(x) for x in errors]).value


def check(
    *,
    n: int = 5,
    m: int = 7,
    d: int = 16,
    beta: float = 0.25,
    far: float = 1e4,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    derivative: Derivative = of_softmax,
) -> Evidence:
    """The change of H for a key scaled by α against the first order, as α nears 1 from above and from below."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, rows, d, generator=draw, dtype=torch.float64) for rows in (n, m, m))
    setting = Setting(q, k, v, beta, attend)
    steps = [0.1 / 2**step for step in range(8)]
    for side, sign in (("longer", 1.0), ("shorter", -1.0)):
        power = setting.power([sign * by for by in steps], derivative)
        found.written(
            f"a {side} key: what the first order leaves falls as (α − 1)²",
            abs(power - 2) < 0.1,
            f"a {side} key: the error of the first order falls as |α − 1|^{power:.3f}",
        )
        found.numbers[f"exponent, {side}"] = power
    part = setting.error(steps[-1], derivative) / max(float(setting.moved(steps[-1]).norm()), 1e-300)
    found.written("it is the whole change as α → 1", part < 0.01, f"error {part:.1e} of the change at α − 1 = 8e-4")
    wrong = setting.power(steps, without_beta)
    found.control("so does it without the factor β", abs(wrong - 2) < 0.1, f"as |α − 1|^{wrong:.3f}")
    weight = float((setting.weights(far)[:, 0] - (setting.score() > 0).to(v)).abs().max())
    off = setting.error(far - 1, derivative)
    said = f"off by {off:.3g} at α = {far:g}; weights are within {weight:.0e} of 1 or 0, by the sign of k_iᵀq"
    found.control("the first order is right far from 1 too", off < 0.01 * float(setting.moved(far - 1).norm()), said)
    shown = [0.8 / 2**step for step in range(11)]
    lines = {
        "with the factor β": (shown, [max(setting.error(by, derivative), 1e-16) for by in shown]),
        "without": (shown, [max(setting.error(by, without_beta), 1e-16) for by in shown]),
    }
    found.draw("what the first order leaves of ΔH", lines, x="α − 1", y="error", log="xy")
    found.numbers |= {"distance of the weight to 1 or 0, far": weight, "exponent without β": wrong}
    return found


CLAIM = Claim(
    id="key-scaling-first-order",
    sources=("002",),
    statement="Scaling key i by α changes H, to first order, by the derivative of softmax_β with respect to the score "
    "k_iᵀq, times the change of that score, (α − 1)k_iᵀq, times the values.",
    formula=r"\Delta H \approx \frac{\partial \operatorname{softmax}_{\beta}(K^\top q)}{\partial (k_i^\top q)} "
    r"(\alpha - 1)\, k_i^\top q \, V \allowbreak = \beta a_i (\alpha - 1)\, k_i^\top q \, (v_i - H)",
    refuted="An error of the formula that does not shrink as (α − 1)² when α nears 1.",
    control="The derivative without the factor β, and an α far from 1, asked the same.",
    verdict=HOLDS,
    check=check,
)
