"""The variance of a score is d: what 1/√d undoes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.claims.claim import HOLDS, Claim, Evidence
from regard.claims.statistics import Interval, mean

LAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "Gaussian": lambda u: torch.erfinv(2 * u - 1) * math.sqrt(2),
    "uniform": lambda u: (2 * u - 1) * math.sqrt(3),
    "two-valued": lambda u: torch.where(u < 0.5, -1.0, 1.0).to(u),
}


def product(q: Tensor, k: Tensor) -> Tensor:
    """``q·k``, one score a row."""
    return (q * k).sum(-1)


def check(
    *,
    largest: int = 256,
    samples: int = 20_000,
    seed: int = 0,
    score: Callable[[Tensor, Tensor], Tensor] = product,
) -> Evidence:
    """Scores of independent unit q and k: mean, variance, and variance after 1/√d, for several d and laws."""
    found = Evidence()
    sizes = [d for d in (4, 16, 64, 256, 1024) if d <= largest]
    draw = torch.Generator().manual_seed(seed)
    seen: dict[str, list[Interval]] = {law: [] for law in LAWS}
    scaled: list[Interval] = []
    many = 3 * len(LAWS) * len(sizes)  # intervals, all of which must hold
    for law, of in LAWS.items():
        for d in sizes:
            q, k = (of(torch.rand(samples, d, generator=draw, dtype=torch.float64)) for _ in range(2))
            s = score(q, k)
            centre, variance = mean(s, many), mean(s**2, many)
            found.written(f"{law}, d = {d}: the variance is d", variance.holds(d), f"variance {variance} at d = {d}")
            found.written(f"{law}, d = {d}: the mean is 0", centre.holds(0), f"mean {centre}")
            seen[law].append(variance)
            scaled.append(mean((s / math.sqrt(d)) ** 2, many))
    found.written("scaled by 1/√d the variance is 1", all(one.holds(1) for one in scaled), f"scaled: {scaled[-1]}")
    found.control("unscaled scores have variance 1", seen["Gaussian"][-1].holds(1), f"{seen['Gaussian'][-1]}")
    lines = {law: (sizes, *zip(*of, strict=True)) for law, of in seen.items()}
    found.draw("variance of q·k, with intervals that hold together with 99%", lines, x="d", y="variance", log="xy")
    found.numbers["samples"] = samples
    return found


CLAIM = Claim(
    id="score-variance-is-d",
    sources=("001", "003"),
    statement="For q and k with independent entries of mean 0 and variance 1, q·k has mean 0 and variance d, so a "
    "deviation of √d; divided by √d its variance is 1.",
    formula=r"\operatorname{Var}(q^\top k) = \sum_{i=1}^{d} \operatorname{Var}(q_i k_i) = d, \qquad "
    r"\operatorname{Var}\!\left(\frac{q^\top k}{\sqrt{d}}\right) = 1",
    refuted="A 99% interval of the variance that does not contain d, at some d or for some law of the entries.",
    control="Scores that are not divided by √d, asked whether their variance is 1.",
    verdict=HOLDS,
    check=check,
)
