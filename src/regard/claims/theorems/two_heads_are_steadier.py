"""Checks that the average of two heads varies less than one head only if the two heads query different keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.claims._statistics import Interval, mean_interval
from regard.claims.theorems.noisy_key_breaks_one_head import noisy_keys, weights

Pair = tuple[Tensor, Tensor]
Queries = Callable[[Tensor, Tensor, float], Pair]
COMPARISONS = 5  # the number of intervals that the verdict rests on


def equal_queries(a: Tensor, b: Tensor, t: float) -> Pair:
    """The document's queries: q₁ = q₂ = t(μ_a + μ_b)."""
    return t * (a + b), t * (a + b)


def parallel_queries(a: Tensor, b: Tensor, t: float) -> Pair:
    """Queries of different lengths in the same direction."""
    return t * (a + b), 2 * t * (a + b)


def separate_queries(a: Tensor, b: Tensor, t: float) -> Pair:
    """q₁ = tμ_a, q₂ = tμ_b."""
    return t * a, t * b


def average_output(queries: Pair, keys: Tensor, attention_fn: AttentionFn) -> Tensor:
    """``½(c₁ + c₂)`` with values e_j, as ``[samples, n]``. Both heads see the same keys."""
    return (weights(queries[0], keys, attention_fn) + weights(queries[1], keys, attention_fn)) / 2


def variance(c: Tensor) -> Interval:
    """``E‖c − E c‖²``."""
    return mean_interval((c - c.mean(0)).square().sum(-1), COMPARISONS)


def squared_error(c: Tensor) -> Interval:
    """``E‖c − ½(v_a + v_b)‖²``."""
    expected = torch.zeros(c.shape[-1], dtype=torch.float64)
    expected[:2] = 0.5
    return mean_interval((c - expected).square().sum(-1), COMPARISONS)


def expected_bias(n: int, t: float, along: float) -> float:
    """``½E[1 − α_a]`` for q = tμ_a, by summation over the normal law: how much the mean weight of a is below ½."""
    z = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2)
    # 1 − α_a with n − 1 other keys of score 0, and the score of a varying with z
    missing = torch.sigmoid(math.log(n - 1) - t * (1 + math.sqrt(along) * z))
    return float((density * missing).sum() / density.sum()) / 2


def check(
    *,
    n: int = 8,
    d: int = 16,
    alpha: float = 1e-6,
    along: float = 0.5,
    t: float = 20.0,
    samples: int = 8_000,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    proposed: Queries = equal_queries,
    different: Queries = parallel_queries,
    corrected: Queries = separate_queries,
) -> Evidence:
    """Measure the variance of the average for equal, parallel and separate queries, and the bias of separate ones."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    keys = noisy_keys(samples, n, d, alpha=alpha, along=along, generator=generator)
    a, b = torch.eye(d, dtype=torch.float64)[:2]
    single = weights(t * (a + b), keys, attention_fn)
    one_head = variance(single)
    smallest = 1e-300  # stands in for a variance of 0 as a divisor
    for name, queries in (("q₁ = q₂", proposed), ("q₁ ∥ q₂", different)):
        two_heads = variance(average_output(queries(a, b, t), keys, attention_fn))
        evidence.add_statement(
            f"Two heads with {name} have a lower variance than one.",
            two_heads.value < 0.9 * one_head.value,
            f"with {name} the variance is {two_heads.value / max(one_head.value, smallest):.3f} times that of one head",
        )
    average = average_output(corrected(a, b, t), keys, attention_fn)
    separate = variance(average)
    evidence.add_correction(
        "q₁ = tμ_a and q₂ = tμ_b lower the variance at least tenfold.",
        one_head.low > 10 * separate.high > 0,
        f"with q₁ ∝ μ_a and q₂ ∝ μ_b it is {one_head.value / max(separate.value, smallest):.1f} times lower: "
        f"{separate} instead of {one_head}",
    )
    bias = mean_interval(0.5 - average[:, 0], COMPARISONS)
    expected = expected_bias(n, t, along)
    evidence.add_correction(
        "The average is then biased: a has too little weight if k_a points against μ_a.",
        bias.contains(expected) and bias.low > 0,
        f"the mean weight of a is {bias} below ½; the normal law gives {expected:.4f}",
    )
    single_error = squared_error(single)
    separate_error = squared_error(average)
    evidence.add_correction(
        "Even with the bias, it is closer to ½(v_a + v_b).",
        single_error.low > 10 * separate_error.high,
        f"mean square error {separate_error} instead of {single_error}",
    )

    # A control: its statement must be false.
    # Two heads that both query a never see b, so their average is far from ½(v_a + v_b).
    both_a = squared_error(average_output((t * a, t * a), keys, attention_fn))
    evidence.add_control(
        "Two heads that both query a come closer to ½(v_a + v_b).",
        single_error.low > 10 * both_a.high,
        f"mean square error {both_a}",
    )

    # The queries rotate from μ_a + μ_b towards μ_a and μ_b.
    angles = [float(5 * step) for step in range(10)]
    ratios = []
    for angle in angles:
        cos = math.sqrt(2) * math.cos(math.radians(45 - angle))
        sin = math.sqrt(2) * math.sin(math.radians(45 - angle))
        rotated = (t * (cos * a + sin * b), t * (sin * a + cos * b))
        ratios.append(variance(average_output(rotated, keys, attention_fn)).value / max(one_head.value, smallest))
    title = "variance of two heads over that of one, both queries turned away from μ_a + μ_b"
    curves = {"two heads": ratios}
    evidence.add_curves(title, angles, curves, x="each query turned by (degrees)", y="variance ratio")
    evidence.numbers |= {"variance of one head": one_head.value, "of two separate heads": separate.value}
    evidence.numbers |= {"lack of a": bias.value, "samples": samples}
    return evidence


CLAIM = Claim(
    id="two-heads-are-steadier",
    title="The average of two heads with equal queries varies less than one head",
    citations=(("worked-answers", "(d)"),),
    statement="The average of two heads with q₁ = q₂ = t(μ_a + μ_b) varies less from sample to sample than one head, "
    "because their fluctuations cancel.",
    formula=r"q_1 = q_2 = t (\mu_a + \mu_b): \qquad \operatorname{Var}\left(\frac{1}{2} (c_1 + c_2)\right) < "
    r"\operatorname{Var}(c_1)",
    refuted_by="A variance of the average that is not lower than that of one head.",
    control="Two heads that both query a alone: they must not come closer to the average of the two values.",
    verdict=FALSE_AS_STATED,
    what_holds="Heads with equal queries give equal outputs. One query for each key, tμ_a and tμ_b, lowers the "
    "variance.",
    correction="Heads that see the same keys with equal queries give the same output, so their average is that output "
    "and nothing changes. Queries that differ only in length do not help either. One query for each key, q₁ = tμ_a and "
    "q₂ = tμ_b, lowers the variance about twentyfold, but adds a bias: if k_a points against μ_a (8% of the samples), "
    "the first head misses v_a.",
    check=check,
)
