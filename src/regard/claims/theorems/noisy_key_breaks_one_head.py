"""Checks that one head's output jumps between two values if the length of one key varies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims._statistics import mean_interval

ALMOST_ALL = 0.95  # above this weight, the output counts as a copy of one value


def noisy_keys(samples: int, n: int, d: int, *, alpha: float, along: float, generator: torch.Generator) -> Tensor:
    """Keys ``k_i ~ N(e_i, αI)`` as ``[samples, n, d]``; the covariance of k_0 is ``αI + along·e_0e_0ᵀ``."""
    keys = torch.eye(n, d, dtype=torch.float64) + math.sqrt(alpha) * random_normal(generator, samples, n, d)
    keys[:, 0, 0] += math.sqrt(along) * random_normal(generator, samples)
    return keys


def weights(q: Tensor, keys: Tensor, attention_fn: AttentionFn) -> Tensor:
    """The weights of one query for every sample of the keys, as ``[samples, n]``; unscaled, as in the document."""
    return attention_weights(attention_fn, q.expand(len(keys), 1, 1, -1), keys[:, None], scale=1.0)[:, 0, 0]


def normal_tail(x: float) -> float:
    """P(N > x) for a standard normal N."""
    return math.erfc(x / math.sqrt(2)) / 2


def histogram(weight: Tensor) -> tuple[list[float], list[float]]:
    """The centers of twenty equal bins of [0, 1], and the share of samples in each."""
    shares = torch.histc(weight, bins=20, min=0.0, max=1.0) / len(weight)
    return [(index + 0.5) / 20 for index in range(20)], shares.tolist()


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
) -> Evidence:
    """Measure the weight of a over samples of the keys, with and without the additional variance along μ_a."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    q = torch.zeros(d, dtype=torch.float64)
    q[:2] = t  # t(μ_a + μ_b)
    keys = noisy_keys(samples, n, d, alpha=alpha, along=along, generator=generator)
    w = weights(q, keys, attention_fn)

    # s_a − s_b is normal with variance t²(along + 4α), and a's weight is above 0.95 if the difference is above ln 19.
    expected = normal_tail(math.log(ALMOST_ALL / (1 - ALMOST_ALL)) / (t * math.sqrt(along + 4 * alpha)))
    for index, name in enumerate("ab"):
        share = mean_interval((w[:, index] > ALMOST_ALL).double(), 3)
        evidence.add_statement(
            f"The output is almost v_{name} in many of the samples.",
            share.low > 0.25 and share.contains(expected),
            f"v_{name} has more than 95% of the weight in {share} of the samples; the normal law gives {expected:.4f}",
        )
    mean = mean_interval(w[:, 0], 3)
    evidence.add_statement("Only its mean is ½(v_a + v_b).", mean.contains(0.5), f"mean weight of a: {mean}")
    deviation = float(w[:, 0].std())
    evidence.add_statement(
        "The weight has a deviation of almost ½.", deviation > 0.4, f"deviation {deviation:.3f}; at most ½ is possible"
    )

    # A control: its statement must be false. Without the variance along μ_a, the scores of a and b hardly differ.
    isotropic = weights(q, noisy_keys(samples, n, d, alpha=alpha, along=0.0, generator=generator), attention_fn)
    small_deviation = float(isotropic[:, 0].std())
    share_of_jumps = float((isotropic[:, :2] > ALMOST_ALL).double().mean(0).min())
    evidence.add_control(
        "With the covariance αI alone, the output jumps.",
        share_of_jumps > 0.25 or small_deviation > 0.4,
        f"deviation {small_deviation:.4f}",
    )
    lines = {"αI + ½ μ_a μ_aᵀ": histogram(w[:, 0]), "αI": histogram(isotropic[:, 0])}
    evidence.add_series("share of samples by the weight of a", lines, x="weight of a", y="share of samples")
    evidence.numbers |= {"deviation of the weight": deviation, "deviation with αI alone": small_deviation}
    evidence.numbers["samples"] = samples
    # The document says that k_a keeps the direction of μ_a, but in Φ(−√2) = 7.9% of the samples it does not.
    evidence.numbers["share of samples in which k_a points against μ_a"] = float((keys[:, 0, 0] < 0).double().mean())
    return evidence


CLAIM = Claim(
    id="noisy-key-breaks-one-head",
    title="Noise along one key makes a single head jump between two values",
    citations=(("worked-answers", "(c)"),),
    statement="If one of the two keys also varies along its own mean, with covariance αI + ½ μ_a μ_aᵀ, one head with "
    "the query t(μ_a + μ_b) does not average any more: from sample to sample, its output jumps between v_a and v_b.",
    formula=r"\Sigma_a = \alpha I + \frac{1}{2} \mu_a \mu_a^\top, \quad q = t (\mu_a + \mu_b): \qquad "
    r"\alpha_a - \frac{1}{2} \to \pm \frac{1}{2}",
    refuted_by="Weights that stay near ½ from sample to sample.",
    control="The same head with the covariance αI for all keys: its output must not jump.",
    verdict=HOLDS,
    check=check,
)
