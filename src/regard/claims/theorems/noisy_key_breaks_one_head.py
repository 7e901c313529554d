"""A key whose length varies: one head's output swings between two values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.claims.statistics import Interval, mean


def noisy_keys(samples: int, n: int, d: int, *, alpha: float, along: float, draw: torch.Generator) -> Tensor:
    """``[samples, n, d]``: k_i ~ N(μ_i, αI) with means e_i, and k_0 with ``along``·μ_0μ_0ᵀ more in its covariance."""
    keys = torch.eye(n, d, dtype=torch.float64) + math.sqrt(alpha) * torch.randn(
        samples, n, d, generator=draw, dtype=torch.float64
    )
    keys[:, 0, 0] += math.sqrt(along) * torch.randn(samples, generator=draw, dtype=torch.float64)
    return keys


def weights(q: Tensor, keys: Tensor, attend: Callable[..., Any]) -> Tensor:
    """``[samples, n]``: the weights of one query for every sample of the keys, unscaled as in the document."""
    samples, n, d = keys.shape
    eye = torch.eye(n).to(keys).expand(samples, 1, n, n)
    out: Tensor = attend(q.expand(samples, 1, 1, d), keys[:, None], eye, scale=1.0)
    return out[:, 0, 0]


def tail(x: float) -> float:
    """P(N > x) for a standard normal N."""
    return math.erfc(x / math.sqrt(2)) / 2


def bins(weight: Tensor) -> tuple[list[float], list[float]]:
    """Twenty equal bins of [0, 1]: their centres and shares."""
    counts = torch.histc(weight, bins=20, min=0.0, max=1.0) / len(weight)
    return [(at + 0.5) / 20 for at in range(20)], counts.tolist()


def check(
    *,
    n: int = 8,
    d: int = 16,
    alpha: float = 1e-6,
    along: float = 0.5,
    t: float = 20.0,
    samples: int = 8_000,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
) -> Evidence:
    """The weight of a over samples of the keys, with the extra variance along μ_a and without."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    q = torch.zeros(d, dtype=torch.float64)
    q[:2] = t
    keys = noisy_keys(samples, n, d, alpha=alpha, along=along, draw=draw)
    w = weights(q, keys, attend)
    almost = 0.95
    shares = [mean((w[:, at] > almost).double(), 3) for at in (0, 1)]
    # s_a − s_b is normal with variance t²(along + 4α), and a's weight passes 0.95 where it passes ln 19
    wanted = tail(math.log(almost / (1 - almost)) / (t * math.sqrt(along + 4 * alpha)))
    for name, got in zip("ab", shares, strict=True):
        found.written(
            f"the output is almost v_{name} in a large part of the samples",
            got.low > 0.25 and got.holds(wanted),
            f"v_{name} has more than 95% of the weight in {got} of the samples; by the normal law {wanted:.4f}",
        )
    centre: Interval = mean(w[:, 0], 3)
    found.written("only on average it is ½(v_a + v_b)", centre.holds(0.5), f"mean weight of a: {centre}")
    spread = float(w[:, 0].std())
    found.written(
        "the weight fluctuates by nearly ½", spread > 0.4, f"deviation {spread:.3f}; ½ is the largest possible"
    )
    steady = weights(q, noisy_keys(samples, n, d, alpha=alpha, along=0.0, draw=draw), attend)
    rest = float(steady[:, 0].std())
    swings = min(float((steady[:, at] > almost).double().mean()) for at in (0, 1))
    found.control("with αI alone the output swings", swings > 0.25 or rest > 0.4, f"deviation {rest:.4f}")
    lines = {"αI + ½ μ_a μ_aᵀ": bins(w[:, 0]), "αI": bins(steady[:, 0])}
    found.draw("share of samples by the weight of a", lines, x="weight of a", y="share of samples")
    found.numbers |= {"deviation of the weight": spread, "deviation with αI alone": rest, "samples": samples}
    # The document says that k_a keeps the direction of μ_a: in Φ(−√2) = 7.9% of the samples it does not.
    found.numbers["share of samples in which k_a points against μ_a"] = float((keys[:, 0, 0] < 0).double().mean())
    return found


CLAIM = Claim(
    id="noisy-key-breaks-one-head",
    sources=("004",),
    statement="If one of the two keys also varies along its own mean, with covariance αI + ½ μ_a μ_aᵀ, one head with "
    "the query t(μ_a + μ_b) no longer averages: from sample to sample its output swings between v_a and v_b.",
    formula=r"\Sigma_a = \alpha I + \frac{1}{2} \mu_a \mu_a^\top, \quad q = t (\mu_a + \mu_b): \qquad "
    r"\alpha_a - \frac{1}{2} \to \pm \frac{1}{2}",
    refuted="Weights that stay near ½ from sample to sample.",
    control="The same head with covariance αI for all keys, asked whether it swings.",
    verdict=HOLDS,
    check=check,
)
