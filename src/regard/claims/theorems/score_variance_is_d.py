"""Checks that the variance of a score is d, which the factor 1/√d brings back to 1."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims._statistics import Interval, mean_interval

# Transformations of uniform numbers from 0 to 1 to distributions with mean 0 and variance 1.
LAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "Gaussian": lambda u: torch.erfinv(2 * u - 1) * math.sqrt(2),
    "uniform": lambda u: (2 * u - 1) * math.sqrt(3),
    "two-valued": lambda u: torch.where(u < 0.5, -1.0, 1.0).to(u),
}


def dot_product(q: Tensor, k: Tensor) -> Tensor:
    """``q·k``, one score per row."""
    return (q * k).sum(-1)


def check(
    *,
    largest: int = 256,
    samples: int = 20_000,
    seed: int = 0,
    score: Callable[[Tensor, Tensor], Tensor] = dot_product,
) -> Evidence:
    """Measure the mean and the variance of scores, and the variance after 1/√d, for several d and distributions."""
    evidence = Evidence()
    sizes = [d for d in (4, 16, 64, 256, 1024) if d <= largest]
    generator = torch.Generator().manual_seed(seed)
    variances: dict[str, list[Interval]] = {law: [] for law in LAWS}
    scaled: list[Interval] = []
    comparisons = 3 * len(LAWS) * len(sizes)  # all these intervals must contain their values
    for law, transform in LAWS.items():
        for d in sizes:
            q = transform(torch.rand(samples, d, generator=generator, dtype=torch.float64))
            k = transform(torch.rand(samples, d, generator=generator, dtype=torch.float64))
            s = score(q, k)
            mean = mean_interval(s, comparisons)
            variance = mean_interval(s**2, comparisons)
            evidence.add_statement(
                f"{law} entries, d = {d}: the variance is d.", variance.contains(d), f"variance {variance} at d = {d}"
            )
            evidence.add_statement(f"{law} entries, d = {d}: the mean is 0.", mean.contains(0), f"mean {mean}")
            variances[law].append(variance)
            scaled.append(mean_interval((s / math.sqrt(d)) ** 2, comparisons))
    evidence.add_statement(
        "Scaled by 1/√d, the variance is 1.", all(variance.contains(1) for variance in scaled), f"scaled: {scaled[-1]}"
    )

    # A control: its statement must be false. Unscaled scores have the variance d, and the largest d is far from 1.
    unscaled = variances["Gaussian"][-1]
    evidence.add_control("Unscaled scores have the variance 1.", unscaled.contains(1), f"variance {unscaled}")
    lines = {law: (sizes, *zip(*intervals, strict=True)) for law, intervals in variances.items()}
    evidence.add_series(
        "variance of q·k, with intervals that hold together with 99%", lines, x="d", y="variance", log="xy"
    )
    evidence.numbers["samples"] = samples
    return evidence


CLAIM = Claim(
    id="score-variance-is-d",
    title="The score q·k of random vectors has variance d",
    citations=(("exam-answers", "1 (a)"), ("solution-sheet", "1 (a)")),
    papers=("vaswani-2017",),
    statement="For q and k with independent entries of mean 0 and variance 1, q·k has mean 0 and variance d, so a "
    "standard deviation of √d. Divided by √d, its variance is 1.",
    formula=r"\operatorname{Var}(q^\top k) = \sum_{i=1}^{d} \operatorname{Var}(q_i k_i) = d, \qquad "
    r"\operatorname{Var}\!\left(\frac{q^\top k}{\sqrt{d}}\right) = 1",
    refuted_by="A 99% interval of the variance that does not contain d, for some d or some distribution of the "
    "entries.",
    control="Scores that are not divided by √d: their variance must not be 1.",
    verdict=HOLDS,
    check=check,
)
