"""Confidence intervals of means and of regression slopes, which decide the statistical claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import mpmath
from torch import Tensor

from regard._errors import RegardError

SIGNIFICANCE = 0.01  # every interval has a confidence of 99%
NORMAL_FROM = 1000  # degrees of freedom above which Student's quantile is the normal one plus its first correction
SMALLEST = 1e-300  # stands in for 0, which has no logarithm


class Interval(NamedTuple):
    """An estimate and its confidence interval. The confidence is 99% or more."""

    value: float
    low: float
    high: float

    def contains(self, expected: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= expected <= self.high

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean_interval(samples: Tensor, comparisons: int = 1) -> Interval:
    """The mean of independent samples: ``x̄ ± t s/√n``.

    - ``samples``: the samples, of any shape.
    - ``comparisons``: how many intervals a verdict rests on. Each is widened (Bonferroni), so that all of them together
      contain their true values with a confidence of 99%. Default 1.
    """
    x = samples.double().flatten()
    center = float(x.mean())
    half = t_quantile(len(x) - 1, comparisons) * float(x.std()) / math.sqrt(len(x))
    return Interval(center, center - half, center + half)


def slope_interval(x: Sequence[float], y: Sequence[float], comparisons: int = 1) -> Interval:
    """The slope b of ``y = a + b x`` by least squares. Between logarithms it is the exponent of a power law.

    ``comparisons`` means the same as in ``mean_interval``. Raises ``RegardError`` for fewer than three points.
    """
    count = len(x)
    if count < 3 or len(y) != count:
        raise RegardError(f"a slope needs x and y of equal length, at least 3; got lengths {count} and {len(y)}")
    mean_x = sum(x) / count
    mean_y = sum(y) / count
    variation = 0.0
    covariation = 0.0
    for x_i, y_i in zip(x, y, strict=True):
        variation += (x_i - mean_x) ** 2
        covariation += (x_i - mean_x) * (y_i - mean_y)
    slope = covariation / variation

    # The residuals estimate the noise, and the noise gives the slope's standard error.
    residual = sum((y_i - mean_y - slope * (x_i - mean_x)) ** 2 for x_i, y_i in zip(x, y, strict=True))
    half = t_quantile(count - 2, comparisons) * math.sqrt(residual / (count - 2) / variation)
    return Interval(slope, slope - half, slope + half)


def exponential_rate(x: Sequence[float], y: Sequence[float]) -> Interval:
    """The rate r of ``y = c·exp(r x)``, by regression of log y on x."""
    return slope_interval(x, [math.log(max(value, SMALLEST)) for value in y])


def power_law_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of ``y = c·x^p``, by regression of log y on log x."""
    return exponential_rate(list(map(math.log, x)), y).value


@cache
def t_quantile(freedom: int, comparisons: int = 1) -> float:
    """The t with P(|T| > t) = 1%/comparisons, for Student's distribution with ``freedom`` degrees of freedom."""
    if freedom < 1:
        raise RegardError(f"degrees of freedom must be at least 1, got {freedom}; take more samples")
    if freedom > NORMAL_FROM:
        z = NormalDist().inv_cdf(1 - SIGNIFICANCE / comparisons / 2)
        return z + (z**3 + z) / (4 * freedom)

    # Bisection works because P(|T| > t) falls as t grows.
    low = 0.0
    high = 100.0 * comparisons
    for _ in range(60):
        t = (low + high) / 2
        beyond = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True)
        if beyond > SIGNIFICANCE / comparisons:
            low = t
        else:
            high = t
    return low
