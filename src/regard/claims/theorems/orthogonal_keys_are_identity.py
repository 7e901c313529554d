"""Checks that self-attention with orthonormal keys as queries approaches an identity layer only as β grows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.claims._check_helpers import largest_difference, random_normal
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.claims._statistics import exponential_rate
from regard.claims.theorems.average_of_two import orthonormal, unit_rows
from regard.nn import MultiHeadAttention

Make = Callable[[int, float, Tensor], MultiHeadAttention]


def layer_with_values(d: int, beta: float | None, value: Tensor) -> MultiHeadAttention:
    """One head of self-attention with W_Q = W_K = W_out = I and a given W_V, so that Q = K = X."""
    layer = MultiHeadAttention(d, heads=1, out_bias=False, scale=beta).double()
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.out_proj):
            projection.weight.copy_(torch.eye(d))
        layer.v_proj.weight.copy_(value.mT)
    return layer


def distance_to_identity(layer: MultiHeadAttention, x: Tensor) -> float:
    """``‖layer(X) − X‖ / ‖X‖``."""
    with torch.no_grad():
        return float((layer(x) - x).norm() / x.norm())


def predicted_output(x: Tensor, beta: float) -> Tensor:
    """``softmax(βI) X``: each row times e^β − 1, plus the sum of all rows, divided by e^β + n − 1."""
    return (math.expm1(beta) * x + x.sum(0)) / (math.exp(beta) + len(x) - 1)


def check(
    *,
    n: int = 10,
    d: int = 16,
    seed: int = 0,
    make: Make = layer_with_values,
    items: Callable[[int, int, torch.Generator], Tensor] = orthonormal,
) -> Evidence:
    """Measure the distance of a layer with orthonormal Q = K to the identity against β, for W_V = I and another W_V."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    x = items(n, d, generator)
    eye = torch.eye(d, dtype=torch.float64)

    def distance(beta: float, rows: Tensor = x) -> float:
        return distance_to_identity(make(d, beta, eye), rows)

    for name, beta in (("1/√d", 1 / math.sqrt(d)), ("1", 1.0), ("5", 5.0)):
        evidence.add_statement(
            f"At β = {name}, the layer is the identity.",
            distance(beta) < 1e-9,
            f"at β = {name}, the output differs from X by {distance(beta):.1%} of ‖X‖ (n = {n})",
        )
        evidence.numbers[f"distance at β = {name}"] = distance(beta)
    betas = [float(beta) for beta in range(8, 17)]  # large enough for the other weights to be negligible
    rate = exponential_rate(betas, [distance(beta) for beta in betas]).value
    evidence.add_correction(
        "The distance to the identity falls as exp(−β).",
        abs(rate + 1) < 0.01,
        f"the distance to the identity falls as exp({rate:.4f} β), and is 0 only at β = ∞",
    )
    with torch.no_grad():
        error = max(largest_difference(make(d, b, eye)(x), predicted_output(x, b)) for b in (0.25, 1.0, 3.0, 10.0))
    evidence.add_correction(
        "The weights are softmax(βI): e^β/(e^β + n − 1) on the diagonal, 1/(e^β + n − 1) elsewhere.",
        error < 1e-12,
        f"the weights are softmax(βI), with an error of {error:.1e}",
    )
    limit = distance(math.inf)
    evidence.add_correction("At β = ∞ the layer is the identity.", limit < 1e-12, f"error {limit:.1e}")
    value = random_normal(generator, d, d)
    other = make(d, math.inf, value)
    with torch.no_grad():
        value_error = largest_difference(other(x), x @ value)
    evidence.add_correction("With another W_V, it is X W_V at β = ∞.", value_error < 1e-12, f"error {value_error:.1e}")
    unit_keys = unit_rows(d + 4, d, generator)
    smallest = float(torch.linalg.eigvalsh(unit_keys @ unit_keys.mT)[0])
    hard = distance(math.inf, unit_keys)
    evidence.add_correction(
        "More than d keys cannot be orthonormal, but at β = ∞ keys of length 1 are enough.",
        abs(smallest) < 1e-9 and hard < 1e-12,
        f"{d + 4} keys in {d} dimensions: KᵀK has an eigenvalue {smallest:.0e}, not 1; error at β = ∞ {hard:.1e}",
    )

    # A control: its statement must be false. Even one-hot weights copy X W_V, which is not X.
    changed = distance_to_identity(other, x)
    evidence.add_control("With another W_V, it is the identity at β = ∞.", changed < 1e-9, f"distance {changed:.2g}")
    plotted = [0.5 * step for step in range(41)]
    lines = {}
    for size in dict.fromkeys((2, n, d)):
        rows = items(size, d, generator)
        lines[f"n = {size}"] = (plotted, [max(distance(beta, rows), 1e-16) for beta in plotted])
    evidence.add_series("distance to the identity, ‖layer(X) − X‖ / ‖X‖", lines, x="β", y="distance", log="y")
    evidence.numbers["rate"] = rate
    return evidence


CLAIM = Claim(
    id="orthogonal-keys-are-identity",
    title="Orthonormal keys with Q = K make self-attention an identity layer",
    citations=(("homework-3", "1.3 (c)"),),
    statement="If the keys are orthonormal and the queries equal them, the scores are the identity matrix and "
    "self-attention is an identity layer.",
    formula=r"Q = K, \quad K^\top K = I \quad \Rightarrow \quad K^\top Q = I, \quad H = V",
    refuted_by="An output that differs from the input.",
    control="A layer with another W_V at β = ∞: it must not be the identity.",
    verdict=FALSE_AS_STATED,
    what_holds="The weights are softmax(βI), so the layer is the identity only in the limit β → ∞, and only with W_V = "
    "I.",
    correction="The scores are I, but the weights are softmax(βI): e^β/(e^β + n − 1) on the diagonal and 1/(e^β + n − "
    "1) elsewhere, which pulls each output towards the mean. The distance to the identity falls as exp(−β), so the "
    "layer is the identity only in the limit β → ∞, and only with W_V = I. Orthonormal keys need n ≤ d; in the limit, "
    "any distinct keys of equal length are enough.",
    check=check,
)
