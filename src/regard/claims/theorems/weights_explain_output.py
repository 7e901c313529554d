"""Checks whether attention weights explain an output: whether other weights can give the same output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, largest_difference, random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence

Values = Callable[[int, int, torch.Generator], Tensor]


def random_values(m: int, d: int, generator: torch.Generator) -> Tensor:
    """Values in general position."""
    return random_normal(generator, m, d)


def append_one(v: Tensor) -> Tensor:
    """``[V 1]``: multiplied by weights it gives their output and their sum."""
    return torch.cat([v, torch.ones_like(v[:, :1])], -1)


def weights_and_outputs(
    v: Tensor, queries: int, generator: torch.Generator, attention_fn: AttentionFn
) -> tuple[Tensor, Tensor]:
    """Weights and outputs of random queries over random keys, with one key per value."""
    q = random_normal(generator, 1, queries, 16)
    k = random_normal(generator, 1, len(v), 16)
    return attention_weights(attention_fn, q, k)[0], attention_fn(q, k, v[None])[0]


def output_of_weights(a: Tensor, v: Tensor, attention_fn: AttentionFn) -> Tensor:
    """The operator's output for given weights: their logarithms as a bias, and scale 0."""
    zeros = v.new_zeros(1, max(a.shape), 1)
    return attention_fn(zeros[:, : len(a)], zeros[:, : len(v)], v[None], bias=a.log()[None], scale=0.0)[0]


def reversed_weights(a: Tensor, v: Tensor, expected: Tensor) -> Tensor:
    """Weights ``b ∝ exp(θ·v) / a`` with the output ``expected``: 1/a reverses the order of a, θ corrects the output.

    θ minimises the convex function logsumexp(v·θ − log a) − θ·expected; it is found by Newton's method.
    """
    theta = torch.zeros_like(expected)
    base = -a.log()

    def objective(theta: Tensor) -> Tensor:
        return (base + v @ theta).logsumexp(-1) - theta @ expected

    for _ in range(60):
        b = (base + v @ theta).softmax(-1)
        error = b @ v - expected
        if float(error.abs().max()) < 1e-13:
            break
        covariance = (v * b[:, None]).T @ v - torch.outer(b @ v, b @ v)
        step = torch.linalg.solve(covariance + 1e-14 * torch.eye(len(error), dtype=v.dtype), error)
        # A full step may overshoot far from the minimum, so it is halved until the objective decreases.
        size = 1.0
        while size > 1e-6 and objective(theta - size * step) > objective(theta):
            size /= 2
        theta = theta - size * step
    return (base + v @ theta).softmax(-1)


def other_weights(
    m: int, d: int, queries: int, generator: torch.Generator, attention_fn: AttentionFn, values: Values
) -> tuple[float, float, float]:
    """Other weights with the same output, for each query.

    Returns the mean total variation to the true weights, the largest error of the output, and the share of queries
    whose strongest key differs. If [V 1] has rank m there are no other weights, and all three are 0.
    """
    v = values(m, d, generator)
    a, out = weights_and_outputs(v, queries, generator, attention_fn)
    if int(torch.linalg.matrix_rank(append_one(v))) == m:
        return 0.0, 0.0, 0.0
    b = torch.stack([reversed_weights(weights, v, y) for weights, y in zip(a, out, strict=True)])
    error = largest_difference(output_of_weights(b, v, attention_fn), out)
    variation = float((a - b).abs().sum(-1).mean() / 2)
    return variation, error, float((a.argmax(-1) != b.argmax(-1)).double().mean())


def recovery_error(v: Tensor, queries: int, generator: torch.Generator, attention_fn: AttentionFn) -> float:
    """The largest error of weights that are computed from outputs alone, by ``[V 1]ᵀ a = [y 1]``."""
    a, out = weights_and_outputs(v, queries, generator, attention_fn)
    solved = torch.linalg.pinv(append_one(v).T) @ append_one(out).T
    return largest_difference(solved.T, a)


def disjoint_weights(v: Tensor, attention_fn: AttentionFn) -> tuple[float, float]:
    """Two distributions without a common key (Radon): their total variation, and the difference of their outputs."""
    null = torch.linalg.svd(append_one(v).T).Vh[-1]
    pair = torch.stack([null.clamp_min(0), (-null).clamp_min(0)])
    pair = pair / pair.sum(-1, keepdim=True)
    y = output_of_weights(pair, v, attention_fn)
    return float((pair[0] - pair[1]).abs().sum() / 2), largest_difference(y[0], y[1])


def check(
    *,
    keys: int = 64,
    d_value: int = 8,
    queries: int = 8,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    values: Values = random_values,
) -> Evidence:
    """Search for other weights with the same output: whether they exist, and how far they are from the true ones."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    variation, error, moved_peak = other_weights(keys, d_value, queries, generator, attention_fn, values)
    evidence.add_statement(
        f"With {keys} keys, no other weights give the same output of {d_value} numbers.",
        variation < 1e-6,
        f"{keys} keys, d_v = {d_value}: other weights, with {variation:.0%} of their mass on other keys, give the same "
        f"output within {error:.0e}; {moved_peak:.0%} of them have another strongest key",
    )
    few = values(d_value + 1, d_value, generator)
    recovered = recovery_error(few, queries, generator, attention_fn)
    evidence.add_condition(
        f"With m = d_v + 1 = {d_value + 1} keys, the weights can be computed from the output.",
        recovered < 1e-9,
        f"{d_value + 1} keys: weights computed from outputs alone are exact within {recovered:.0e}",
    )
    evidence.add_condition(
        f"With {keys} keys, the other weights do give the same output.", error < 1e-9, f"within {error:.0e}"
    )
    distance, difference = disjoint_weights(values(d_value + 2, d_value, generator), attention_fn)
    evidence.add_condition(
        f"With m = d_v + 2 = {d_value + 2} keys, two distributions without a common key give one output.",
        distance > 1 - 1e-9 and difference < 1e-9,
        f"{d_value + 2} keys: total variation {distance:.3g}, outputs equal within {difference:.0e}",
    )

    # A control: its statement must be false.
    # Two equal values are not affinely independent, so their weights cannot be separated.
    few[1] = few[0]
    twins = recovery_error(few, queries, generator, attention_fn)
    evidence.add_control(
        "With two equal values the weights can still be computed.", twins < 1e-9, f"they are wrong by {twins:.2g}"
    )

    sizes = [d_value + 1, d_value + 2, *(d_value * factor for factor in (2, 4, 8))]
    curve = [other_weights(m, d_value, queries, generator, attention_fn, values)[0] for m in sizes]
    curves = {"the order reversed": curve, "the most there is": [float(m > d_value + 1) for m in sizes]}
    evidence.add_curves("total variation to other weights with the same output", sizes, curves, x="keys", y="distance")
    evidence.numbers |= {"mean total variation": variation, "error of the output": error}
    evidence.numbers["another first key"] = moved_peak
    return evidence


CLAIM = Claim(
    id="weights-explain-output",
    title="The weights tell which values an output consists of",
    citations=(("exam-answers", "1 (b)"),),
    papers=("brunner-2020",),
    statement="Weights are a distribution over positions and make attention interpretable: they tell which values an "
    "output consists of.",
    formula=r"\sum_{j} \alpha_j v_j = \sum_{j} \alpha'_j v_j \quad \Rightarrow \quad \alpha = \alpha'",
    refuted_by="Other weights, far from the true ones, that give the same output.",
    control="The same number of keys, two of them with equal values: the weights must not be computable.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="An output determines its weights if the values are affinely independent, so with at most d_v + 1 "
    "visible keys.",
    correction="The values must be affinely independent, so at most d_v + 1 keys are visible. Then an output has one "
    "set of weights, which can be computed from it. From d_v + 2 keys on there are others, even two without a common "
    "key (Radon); with many keys every query has other weights with most of their mass on other keys.",
    check=check,
)
