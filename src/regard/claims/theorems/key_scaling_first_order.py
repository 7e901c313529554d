"""Checks the first-order change of the output when one key is scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, largest_difference, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims._statistics import power_law_exponent

Derivative = Callable[[Tensor, int, float], Tensor]


def softmax_derivative(a: Tensor, i: int, beta: float) -> Tensor:
    """``∂ softmax_β(s)_j / ∂s_i = β a_i(δ_ij − a_j)`` for rows of weights a ``[n, m]``."""
    return beta * a[..., i : i + 1] * (torch.eye(a.shape[-1]).to(a)[i] - a)


def without_beta(a: Tensor, i: int, beta: float) -> Tensor:
    """The derivative of a softmax with β = 1 at the same weights."""
    return softmax_derivative(a, i, 1.0)


class Setting(NamedTuple):
    """q, k and v ``[1, 1, rows, d]``, β, and the operator. Key 0 is scaled."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: float
    attention_fn: AttentionFn

    def output(self, alpha: float, values: Tensor) -> Tensor:
        """The output ``[n, d]`` for given values, with key 0 scaled by α."""
        keys = self.k.clone()
        keys[:, :, 0] *= alpha
        return self.attention_fn(self.q, keys, values, scale=self.beta)[0, 0]

    def weights(self, alpha: float) -> Tensor:
        """The weights ``[n, m]`` with key 0 scaled by α."""
        m = self.k.shape[-2]
        return self.output(alpha, torch.eye(m).to(self.v).view(1, 1, m, m))

    def scores(self) -> Tensor:
        """The scores ``k_0ᵀq`` of key 0, ``[n]``."""
        return self.q[0, 0] @ self.k[0, 0, 0]

    def change(self, step: float) -> Tensor:
        """ΔH at α = 1 + step."""
        return self.output(1 + step, self.v) - self.output(1.0, self.v)

    def error(self, step: float, derivative: Derivative) -> float:
        """The norm of ΔH minus its first order."""
        predicted = derivative(self.weights(1.0), 0, self.beta) * (step * self.scores())[:, None] @ self.v[0, 0]
        return float((self.change(step) - predicted).norm())

    def exponent(self, steps: Sequence[float], derivative: Derivative) -> float:
        """The exponent p with which the error falls as ``|α − 1|^p``."""
        return power_law_exponent([abs(step) for step in steps], [self.error(step, derivative) for step in steps])


def check(
    *,
    n: int = 5,
    m: int = 7,
    d: int = 16,
    beta: float = 0.25,
    far: float = 1e4,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    derivative: Derivative = softmax_derivative,
) -> Evidence:
    """Compare the change of H with its first order, as α approaches 1 from above and from below."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    q = random_normal(generator, 1, 1, n, d)
    k = random_normal(generator, 1, 1, m, d)
    v = random_normal(generator, 1, 1, m, d)
    setting = Setting(q, k, v, beta, attention_fn)
    steps = [0.1 / 2**halvings for halvings in range(8)]  # α − 1; the second order dominates the error
    for side, sign in (("longer", 1.0), ("shorter", -1.0)):
        exponent = setting.exponent([sign * step for step in steps], derivative)
        evidence.add_statement(
            f"For a {side} key, the error of the first order falls as (α − 1)².",
            abs(exponent - 2) < 0.1,
            f"a {side} key: the error of the first order falls as |α − 1|^{exponent:.3f}",
        )
        evidence.numbers[f"exponent, {side}"] = exponent
    relative = setting.error(steps[-1], derivative) / max(float(setting.change(steps[-1]).norm()), 1e-300)
    evidence.add_statement(
        "As α → 1, the first order is the whole change.",
        relative < 0.01,
        f"the error is {relative:.1e} of the change at α − 1 = 8e-4",
    )

    # Controls: their statements must be false.
    # A wrong derivative leaves an error of first order, and far from 1 the weights are 0 or 1, not linear in α.
    wrong = setting.exponent(steps, without_beta)
    evidence.add_control("Without β, the error falls as (α − 1)² too.", abs(wrong - 2) < 0.1, f"as |α − 1|^{wrong:.3f}")
    distance = largest_difference(setting.weights(far)[:, 0], (setting.scores() > 0).to(v))
    far_error = setting.error(far - 1, derivative)
    evidence.add_control(
        "The first order is right far from 1 too.",
        far_error < 0.01 * float(setting.change(far - 1).norm()),
        f"the error is {far_error:.3g} at α = {far:g}, where weights are within {distance:.0e} of 1 or 0, depending on "
        "the sign of k_iᵀq",
    )
    plotted = [0.8 / 2**halvings for halvings in range(11)]
    lines = {}
    for name, rule in (("with the factor β", derivative), ("without", without_beta)):
        lines[name] = (plotted, [max(setting.error(step, rule), 1e-16) for step in plotted])
    evidence.add_series("what the first order leaves of ΔH", lines, x="α − 1", y="error", log="xy")
    evidence.numbers |= {"distance of the weight to 1 or 0, far": distance, "exponent without β": wrong}
    return evidence


CLAIM = Claim(
    id="key-scaling-first-order",
    title="To first order, scaling a key changes the output by the softmax derivative",
    citations=(("homework-3", "1.1 (f)"),),
    statement="Scaling key i by α changes H, to first order, by the derivative of softmax_β with respect to the score "
    "k_iᵀq, times the change (α − 1)k_iᵀq of that score, times the values.",
    formula=r"\Delta H \approx \frac{\partial \operatorname{softmax}_{\beta}(K^\top q)}{\partial (k_i^\top q)} "
    r"(\alpha - 1)\, k_i^\top q \, V \allowbreak = \beta a_i (\alpha - 1)\, k_i^\top q \, (v_i - H)",
    refuted_by="An error of the formula that does not shrink as (α − 1)² when α approaches 1.",
    control="The derivative without the factor β, and an α far from 1: both must leave a larger error.",
    verdict=HOLDS,
    check=check,
)
