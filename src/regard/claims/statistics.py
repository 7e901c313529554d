"""What statistical claims are decided by: intervals of means, and slopes by regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import mpmath
from torch import Tensor

__all__ = ["Interval", "mean", "slope"]

DOUBT = 0.01
MANY = 1000  # degrees of freedom from which Student's law is the normal one and its first correction


class Interval(NamedTuple):
    """An estimate, and where the true value lies with a confidence of 99%, or more where it is one among several."""

    value: float
    low: float
    high: float

    def holds(self, wanted: float) -> bool:
        """Whether the interval contains a value."""
        return self.low <= wanted <= self.high

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean(samples: Tensor, among: int = 1) -> Interval:
    """``x̄ ± t s/√n``: the mean of independent samples.

    ``among``: of how many intervals this is one, where a verdict asks that all hold: together they do with 99%.
    """
    x = samples.double().flatten()
    half = quantile(len(x) - 1, among) * float(x.std()) / math.sqrt(len(x))
    return Interval(float(x.mean()), float(x.mean()) - half, float(x.mean()) + half)


def slope(x: Sequence[float], y: Sequence[float], among: int = 1) -> Interval:
    """b of ``y = a + b x`` by least squares: of logarithms, the exponent of a power. ``among``: as in ``mean``."""
    many = len(x)
    if many < 3 or len(y) != many:
        raise ValueError(f"a slope needs three points or more, as many of x as of y; got {many} and {len(y)}")
    mx, my = sum(x) / many, sum(y) / many
    sxx = sum((a - mx) ** 2 for a in x)
    b = sum((a - mx) * (c - my) for a, c in zip(x, y, strict=True)) / sxx
    rest = sum((c - my - b * (a - mx)) ** 2 for a, c in zip(x, y, strict=True))
    half = quantile(many - 2, among) * math.sqrt(rest / (many - 2) / sxx)
    return Interval(b, b - half, b + half)


@cache
def quantile(freedom: int, among: int = 1) -> float:
    """t with P(|T| > t) = 1%/among for Student's law of that many degrees of freedom."""
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom; more samples are needed")
    if freedom > MANY:
        z = NormalDist().inv_cdf(1 - DOUBT / among / 2)
        return z + (z**3 + z) / (4 * freedom)
    low, high = 0.0, 100.0 * among
    for _ in range(60):  # halve the interval: P(|T| > t) falls in t
        t = (low + high) / 2
        beyond = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)
        low, high = (t, high) if beyond > DOUBT / among else (low, t)
    return low
