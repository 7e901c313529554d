"""Checks that attention with β → 0 becomes the plain mean of the values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims._statistics import power_law_exponent


def covariance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The derivative of the output at β = 0: the covariance of scores and values over the keys, per query."""
    scores = q @ k.mT
    centred = scores - scores.mean(-1, keepdim=True)
    return centred @ v / k.shape[-2]


def check(
    *, n: int = 12, d: int = 8, seed: int = 0, largest: float = 1e-2, attention_fn: AttentionFn = attention
) -> Evidence:
    """Measure the distance of the output from the mean value: at β = 0, as a power of β, and in first order."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (random_normal(generator, 1, 1, n, d) for _ in range(3))
    mean = v.mean(-2, keepdim=True).expand_as(v)

    def distance(beta: float) -> float:
        return float((attention_fn(q, k, v, scale=beta) - mean).norm(dim=-1).max())

    at_zero = distance(0.0)
    betas = [largest / 2**step for step in range(8)]
    distances = list(map(distance, betas))
    power = power_law_exponent(betas, distances)
    coefficient = float(covariance(q, k, v).norm(dim=-1).max())
    ratio = distances[-1] / betas[-1] / coefficient
    evidence.add_statement(
        "At β = 0 every output is the mean of the values.", at_zero < 1e-12, f"the error is {at_zero:.1e} at β = 0"
    )
    evidence.add_statement(
        "The distance from the mean goes to 0 in proportion to β.",
        abs(power - 1) < 0.05,
        f"the distance is proportional to β^{power:.3f}",
    )
    evidence.add_statement(
        "Divided by β, the distance converges to the covariance of scores and values.",
        abs(ratio - 1) < 0.01,
        f"the ratio is {ratio:.4f} at β = {betas[-1]:.1e}",
    )

    # A control: its statement must be false.
    # At the usual scale weights differ between keys, so the output must not be the mean.
    usual = 1 / math.sqrt(d)
    error = distance(usual)
    evidence.add_control(
        "With β = 1/√d outputs are the mean of the values.", error < 1e-2, f"error {error:.3g} at β = {usual:.3g}"
    )
    shown = [2.0**step for step in range(-12, 5)]
    curves = {"measured": list(map(distance, shown)), "first order": [beta * coefficient for beta in shown]}
    evidence.add_curves("largest distance of an output to the mean value", shown, curves, x="β", y="distance", log="xy")
    evidence.numbers |= {"error at 0": at_zero, "exponent of β": power, "first-order coefficient": coefficient}
    return evidence


CLAIM = Claim(
    id="soft-limit",
    title="As β goes to 0, every output becomes the plain average of the values",
    citations=(("homework-3", "1.1 (d)"),),
    statement="As β goes to 0 all weights become equal, and every output becomes the plain average of the values.",
    formula=r"\lim_{\beta \to 0} \sum_{j=1}^{n} \operatorname{softmax}(\beta s)_j v_j "
    r"\allowbreak = \frac{1}{n} \sum_{j=1}^{n} v_j",
    refuted_by="An output that keeps a distance from the mean of the values as β falls, or one that differs at β = 0.",
    control="β = 1/√d: the outputs must not be the mean.",
    verdict=HOLDS,
    check=check,
)
