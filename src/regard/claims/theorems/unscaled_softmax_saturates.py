"""Checks that softmax without 1/√d saturates as d grows: quickly for a typical query, slowly in the mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard._observables import Observe
from regard._operator import attention
from regard.claims._check_helpers import AttentionFn
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims._statistics import exponential_rate, mean_interval, power_law_exponent
from regard.nn import MultiHeadAttention

QUERIES = 16  # the number of queries for each set of keys


class SaturationSamples(NamedTuple):
    """Measurements at one d, one value per set of keys: the mean over its queries."""

    rest: Tensor  # 1 − max
    unsaturated: Tensor  # the share of queries with 1 − max ≥ ε
    jacobian: Tensor  # the squared norm of diag(a) − aaᵀ
    jacobian_median: float  # over all queries


def sample_saturation(
    n: int, d: int, sets: int, eps: float, scale: float | None, generator: torch.Generator, attention_fn: AttentionFn
) -> SaturationSamples:
    """Weights of random queries and keys with entries of variance 1, by the operator."""
    q = torch.randn(sets, 1, QUERIES, d, generator=generator)
    k = torch.randn(sets, 1, n, d, generator=generator)
    # In float64: the smallest weights are exp(−100) and less, which float32 rounds to 0.
    values = torch.eye(n, dtype=torch.float64).expand(sets, 1, n, n)
    a = attention_fn(q.double(), k.double(), values, scale=scale)[:, 0]
    # ‖diag(a) − aaᵀ‖² = Σ a_i²(1 − a_i)² + Σ_{i≠j} a_i²a_j². The largest weight m is apart, because 1 − m, the sum of
    # the others, may be far below the rounding error of 1.
    ordered = a.sort(-1).values
    largest = ordered[..., -1]
    others = ordered[..., :-1]
    rest = others.sum(-1)
    square = others.square()
    jacobian = (largest * rest).square() + (square * (1 - others).square()).sum(-1)
    jacobian = jacobian + 2 * largest.square() * square.sum(-1) + square.sum(-1).square() - square.square().sum(-1)
    unsaturated = (rest >= eps).double()
    return SaturationSamples(rest.mean(-1), unsaturated.mean(-1), jacobian.mean(-1), float(jacobian.median()))


def squared_gradients(n: int, d: int, batch: int, scale: float | None, seed: int, make: Any) -> Tensor:
    """The mean squared entry of ∂loss/∂q for each query of a new layer of width d."""
    with torch.random.fork_rng(devices=[]):  # the layer must not change the caller's random numbers
        torch.manual_seed(seed)
        layer = make(d, heads=1, scale=scale)
        x = torch.randn(batch, n, d)
        direction = torch.randn(batch, n, d)  # the loss is the output times a random direction
    gradients: list[Tensor] = []
    layer.q_proj.register_full_backward_hook(lambda module, grad_input, grad_output: gradients.append(grad_output[0]))
    (layer(x.requires_grad_()) * direction).sum().backward()
    return gradients[0].double().square().mean(-1).flatten()


def check_layers(evidence: Evidence, n: int, batch: int, seed: int, make: Any) -> None:
    """Compare the gradients that reach the queries of a layer, with and without the scale."""
    narrow = 32
    wide = 256
    unscaled_narrow = squared_gradients(n, narrow, batch, 1.0, seed, make)
    unscaled = squared_gradients(n, wide, batch, 1.0, seed, make)
    scaled = squared_gradients(n, wide, batch, None, seed, make)
    fall = float(unscaled.median() / unscaled_narrow.median())
    median_ratio = float(unscaled.median() / scaled.median())
    mean_ratio = float(unscaled.mean() / scaled.mean())
    evidence.add_condition(
        f"In a layer, the typical gradient of a query vanishes: from d = {narrow} to {wide}, and compared "
        "with a scaled layer.",
        fall < 0.1 and median_ratio < 0.5,
        f"the median squared gradient falls by a factor of {fall:.1e}, to {median_ratio:.1e} of the scaled layer's",
    )
    evidence.add_condition(
        "The mean does not: a few unsaturated queries keep it above that of the scaled layer.",
        mean_ratio > 1,
        f"the mean squared gradient is {mean_ratio:.3g} times the scaled layer's",
    )
    evidence.numbers["median squared gradient, unscaled over scaled"] = median_ratio
    evidence.numbers["mean squared gradient, same"] = mean_ratio


def largest_weights_of_many_keys(sizes: tuple[int, ...], seed: int, attention_fn: AttentionFn) -> list[float]:
    """The mean largest weight for each d, if the number of keys grows as e^d."""
    generator = torch.Generator().manual_seed(seed)
    means = []
    for d in sizes:
        q = torch.randn(1, 1, 64, d, generator=generator)
        k = torch.randn(1, 1, round(math.exp(d)), d, generator=generator)
        _, observation = attention_fn(q, k, k, scale=1.0, observe=Observe())
        means.append(float(observation.peak.mean()))
    return means


def check(
    *,
    n: int = 8,
    largest: int = 1024,
    sets: int = 250,
    eps: float = 0.1,
    batch: int = 40,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    layer: Callable[..., Any] = MultiHeadAttention,
) -> Evidence:
    """Measure 1 − max, the Jacobian and gradients as d grows at fixed n, unscaled and scaled; and with n = e^d."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    sizes = [d for d in (64, 128, 256, 512, 1024, 2048) if d <= largest]
    unscaled = [sample_saturation(n, d, sets, eps, 1.0, generator, attention_fn) for d in sizes]
    scaled_first = sample_saturation(n, sizes[0], sets, eps, None, generator, attention_fn)
    scaled_last = sample_saturation(n, sizes[-1], sets, eps, None, generator, attention_fn)
    rest = [mean_interval(samples.rest) for samples in unscaled]
    unsaturated = [mean_interval(samples.unsaturated) for samples in unscaled]
    jacobian = [mean_interval(samples.jacobian) for samples in unscaled]
    medians = [samples.jacobian_median for samples in unscaled]
    evidence.add_statement(
        "From some d on, the largest weight is above 1 − ε for every query.",
        unsaturated[-1].value == 0,
        f"{unsaturated[-1].value:.1%} of queries at d = {sizes[-1]} have a largest weight ≤ {1 - eps:g}",
    )
    for name, means in {"mean of 1 − max": rest, "share of such queries": unsaturated, "mean ‖J‖²": jacobian}.items():
        exponent = power_law_exponent(sizes, [mean.value for mean in means])
        evidence.add_condition(
            f"The {name} → 0, about as d^−½.", abs(exponent + 0.5) < 0.15, f"the {name} falls as d^{exponent:.2f}"
        )
    rate = exponential_rate([math.sqrt(d) for d in sizes], medians)
    evidence.add_condition(
        "The median of ‖J‖² falls as exp(−c√d).",
        rate.high < -0.2 and medians[-1] < 1e-6,
        f"median {medians[-1]:.1e} at d = {sizes[-1]}, c = {-rate.value:.2f}",
    )
    check_layers(evidence, n, batch, seed, layer)
    many_keys = largest_weights_of_many_keys((2, 4, 6, 8), seed, attention_fn)
    evidence.add_condition(
        "n must stay far below e^(d/2): with e^d keys, the largest weight falls.",
        many_keys[-1] < many_keys[0],
        f"with e^d keys, the mean largest weight goes from {many_keys[0]:.2f} to {many_keys[-1]:.2f}",
    )

    # A control: its statement must be false.
    # Scaled scores have variance 1 for every d, so their softmax must not saturate.
    first = mean_interval(scaled_first.rest)
    last = mean_interval(scaled_last.rest)
    evidence.add_control("Scaled by 1/√d, 1 − max falls too.", last.high < 0.8 * first.value, f"{first} to {last}")
    lines = {
        "1 − max": (sizes, *zip(*rest, strict=True)),
        "‖J‖²": (sizes, *zip(*jacobian, strict=True)),
        "d^−½": (sizes, [rest[0].value * math.sqrt(sizes[0] / d) for d in sizes]),
    }
    evidence.add_series("unscaled, means with 99% intervals", lines, x="d", y="mean", log="xy")
    evidence.numbers |= {"draws at each d": sets * QUERIES, "1 − max, scaled": last.value}
    return evidence


CLAIM = Claim(
    id="unscaled-softmax-saturates",
    title="Without 1/√d, one weight tends to 1 and gradients vanish as d grows",
    citations=(("exam-answers", "1 (a)"), ("solution-sheet", "1 (a)")),
    papers=("vaswani-2017",),
    statement="Without 1/√d, for any ε and large enough d the largest weight is above 1 − ε; the Jacobian of softmax "
    "goes to 0 and gradients vanish.",
    formula=r"d \to \infty: \quad \max_i a_i \to 1, \qquad \lVert \operatorname{diag}(a) - a a^\top \rVert_F^2 \to 0, "
    r"\qquad a = \operatorname{softmax}(K q)",
    refuted_by="Queries whose largest weight stays below 1 − ε however large d is, or gradients that do not vanish.",
    control="Scores scaled by 1/√d: their 1 − max must not fall with d.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="For a fixed number of keys, the largest weight tends to 1 in probability, and the typical gradient "
    "vanishes.",
    correction="“The largest weight is above 1 − ε” is meant in probability, and n is fixed (ln n far below d/2). At "
    "every d some queries have two nearly equal best keys. Their share, the mean of 1 − max and the mean squared "
    "Jacobian fall only about as d^−½, while the median falls as exp(−c√d). So the typical gradient vanishes. The "
    "mean squared gradient of a query comes from the few unsaturated ones and is even larger than with the scale, "
    "which itself multiplies gradients by 1/√d.",
    check=check,
)
