"""Checks that orthonormal keys and the query β(k_a + k_b) give the average of two values."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, largest_difference, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims._statistics import exponential_rate


def orthonormal(n: int, d: int, generator: torch.Generator) -> Tensor:
    """n orthonormal rows."""
    return torch.linalg.qr(random_normal(generator, d, n))[0].mT.contiguous()


def unit_rows(n: int, d: int, generator: torch.Generator) -> Tensor:
    """n rows of length 1 that are not orthogonal."""
    rows = random_normal(generator, n, d)
    return rows / rows.norm(dim=-1, keepdim=True)


def predicted_weight(beta: float, n: int) -> float:
    """``e^β/(2e^β + n − 2)``, written so that it does not overflow."""
    return 1 / (2 + (n - 2) * math.exp(-beta))


def weights(keys: Tensor, beta: float, attention_fn: AttentionFn) -> Tensor:
    """The weights for q = β(k_0 + k_1), without a scale, as in the document."""
    q = beta * (keys[0] + keys[1])
    return attention_weights(attention_fn, q[None, None], keys[None], scale=1.0).flatten()


def formula_error(
    keys: Tensor, beta: float, attention_fn: AttentionFn, formula: Callable[[float, int], float]
) -> float:
    """The largest difference of a weight from the formula. The other keys share the remaining weight equally."""
    n = len(keys)
    weight = formula(beta, n)
    expected = torch.full((n,), (1 - 2 * weight) / max(n - 2, 1), dtype=torch.float64)
    expected[:2] = weight
    return largest_difference(weights(keys, beta, attention_fn), expected)


def check(
    *,
    n: int = 10,
    d: int = 16,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    keys: Callable[[int, int, torch.Generator], Tensor] = orthonormal,
    formula: Callable[[float, int], float] = predicted_weight,
) -> Evidence:
    """Compare the weights with the formula at many β and n, and the output with ½(v_a + v_b)."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    k = keys(n, d, generator)  # the first two are a and b
    betas = [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    worst = 0.0
    for beta in betas:
        for count in (2, 3, n):  # with 2 keys there are no others, with 3 only one
            worst = max(worst, formula_error(k[:count], beta, attention_fn, formula))
    evidence.add_statement(
        "Both weights are e^β/(2e^β + n − 2) at every β.",
        worst < 1e-12,
        f"weights agree with the formula within {worst:.1e} for β = 0 … {betas[-1]:g} and n = 2, 3, {n}",
    )

    # The output tends to the average of the two values, at the rate at which the other weights vanish.
    values = random_normal(generator, n, d)
    average = (values[0] + values[1]) / 2
    large_betas = list(map(float, range(8, 17)))
    errors = [float((weights(k, beta, attention_fn) @ values - average).norm()) for beta in large_betas]
    rate = exponential_rate(large_betas, errors)
    evidence.add_statement(
        "The output tends to ½(v_a + v_b).", errors[-1] < 1e-4 * average.norm(), f"error {errors[-1]:.1e} at β = 16"
    )
    evidence.add_statement("The error falls as exp(−β).", abs(rate.value + 1) < 0.01, f"rate {rate}")

    # A control: its statement must be false.
    # The formula needs orthogonal keys: otherwise the scores of the remaining keys are not equal.
    oblique = formula_error(unit_rows(n, d, generator), 4.0, attention_fn, formula)
    evidence.add_control(
        "Unit keys that are not orthogonal follow the formula.", oblique < 1e-12, f"off by {oblique:.3g}"
    )
    shown_betas = [0.25 * step for step in range(49)]
    table = torch.stack([weights(k, beta, attention_fn) for beta in shown_betas])
    curves = {"each of the two": table[:, 0].tolist(), "each of the others": table[:, -1].tolist()}
    evidence.add_curves(f"weights among {n} orthonormal keys", shown_betas, curves, x="β", y="weight")
    needed = 0.0
    if n > 2:
        needed = math.log((n - 2) * 0.99 / 0.01 / 2)
    evidence.numbers |= {"n": n, "largest error": worst, "rate": rate.value, "β for 99% on the two": needed}
    return evidence


CLAIM = Claim(
    id="average-of-two",
    title="The query β(k_a + k_b) averages two values as β grows",
    citations=(("worked-answers", "(b)"),),
    statement="With orthonormal keys and the query β(k_a + k_b), the keys a and b have equal weights of e^β/(2e^β + n "
    "− 2), which tend to ½ as β grows. The output tends to the average of the two values.",
    formula=r"\alpha_a = \alpha_b = \frac{e^{\beta}}{2 e^{\beta} + n - 2} \to \frac{1}{2}, \qquad "
    r"c \to \frac{1}{2} (v_a + v_b)",
    refuted_by="A β or a number of keys at which a weight differs from the formula, or an output that stays away from "
    "the average.",
    control="Unit keys that are not orthogonal: their weights must not follow the formula.",
    verdict=HOLDS,
    check=check,
)
