"""Checks that layer norm puts every vector on a sphere of radius |γ|√d around β."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.claims._check_helpers import random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.nn import LayerNorm


def radius(x: Tensor, gamma: float | Tensor, shift: float, eps: float, norm: Callable[..., Any]) -> Tensor:
    """``‖y − β1‖`` of each row, for a layer norm with scale γ and shift β."""
    layer = norm(x.shape[-1], eps=eps).double()
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(gamma, dtype=torch.float64).expand_as(layer.weight))
        layer.bias.fill_(shift)
        y: Tensor = layer(x)
    return (y - shift).norm(dim=-1)


def relative_error(radii: Tensor, expected: float) -> float:
    """The largest relative error, or −1 if it is not finite."""
    worst = float((radii / expected - 1).abs().max())
    return worst if math.isfinite(worst) else -1.0


def check(
    *,
    d: int = 16,
    rows: int = 200,
    gamma: float = 1.5,
    shift: float = 0.7,
    seed: int = 0,
    norm: Callable[..., Any] = LayerNorm,
) -> Evidence:
    """Measure radii for scales of both signs, constant vectors, one scale per feature, and ε above 0."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    # Rows with deviations from 0.01 to 100, so that ε matters for some of them.
    spread = 10 ** (torch.rand(rows, 1, generator=generator, dtype=torch.float64) * 4 - 2)
    x = random_normal(generator, rows, d) * spread + 3
    root = math.sqrt(d)
    positive = radius(x, gamma, shift, 0.0, norm)
    negative = radius(x, -gamma, shift, 0.0, norm)
    evidence.add_statement(
        "For any scale, ‖y − β1‖ = γ√d.",
        relative_error(negative, -gamma * root) < 1e-12,
        f"at γ = {-gamma:g} the radius is {float(negative.mean()):.4g}, but γ√d = {-gamma * root:.4g}",
    )
    constant = radius(torch.full((1, d), 3.0, dtype=torch.float64), gamma, shift, 0.0, norm)
    evidence.add_statement(
        "For any x, ‖y − β1‖ = γ√d.", 0 <= relative_error(constant, gamma * root) < 1e-12, "a constant x gives 0/0"
    )
    worst = max(relative_error(positive, gamma * root), relative_error(negative, gamma * root))
    evidence.add_condition(
        "If x is not constant, γ is one number and ε = 0, then ‖y − β1‖ = |γ|√d.",
        worst < 1e-11,
        f"for {rows} vectors and both signs it is |γ|√d = {gamma * root:.4g}, within {worst:.1e}",
    )
    scales = torch.linspace(0.5, 2, d, dtype=torch.float64) * gamma
    radii = radius(x, scales, shift, 0.0, norm)
    ratio = float(radii.max() / radii.min())
    inside = bool((radii >= scales.min() * root).all() and (radii <= scales.max() * root).all())
    evidence.add_condition(
        "With one scale per feature, radii differ, between min|γ_j|√d and max|γ_j|√d.",
        inside and ratio > 1.05,
        f"with γ_j from {scales[0]:.2g} to {scales[-1]:.2g}, radii differ by a factor of {ratio:.3g}",
    )
    relative_eps = [10 ** (power / 2) for power in range(-6, 7)]  # ε/σ²
    unit = (x[0] - x[0].mean()) / x[0].std(correction=0)
    measured = [float(radius(unit[None], gamma, shift, eps, norm)) / (gamma * root) for eps in relative_eps]
    formula = [1 / math.sqrt(1 + eps) for eps in relative_eps]
    difference = max(abs(a - b) for a, b in zip(measured, formula, strict=True))
    evidence.add_condition(
        "An ε above 0 multiplies the radius by 1/√(1 + ε/σ²).",
        difference < 1e-12,
        f"at ε = σ² it is {measured[6]:.4g} times as large",
    )

    # A control: its statement must be false. Some rows have a σ so small that ε = 1e-5 is not negligible beside σ².
    with_eps = relative_error(radius(x, gamma, shift, 1e-5, norm), gamma * root)
    evidence.add_control("With ε = 1e-5, the radius is γ√d up to rounding.", with_eps < 1e-11, f"error {with_eps:.1e}")
    curves = {"measured": measured, "1/√(1 + ε/σ²)": formula}
    evidence.add_curves("radius over |γ|√d", relative_eps, curves, x="ε/σ²", y="radius", log="x")
    evidence.numbers |= {"|γ|√d": gamma * root, "largest relative error": worst, "radii with γ_j": ratio}
    return evidence


CLAIM = Claim(
    id="layer-norm-radius",
    title="Layer norm with scale γ and shift β puts every x at the distance γ√d from β1",
    citations=(("solution-sheet", "3 (b)"),),
    papers=("ba-2016",),
    statement="Layer norm with scale γ, shift β and ε = 0 puts every x at the distance γ√d from β1.",
    formula=r"\lVert y - \beta \mathbf{1} \rVert_2 = \gamma \sqrt{d}",
    refuted_by="An x and a γ for which the distance is not γ√d.",
    control="ε = 1e-5, the usual value: the radius must differ from γ√d.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="With one scale γ and ε = 0, every x that is not constant is put at the distance |γ|√d from β1.",
    correction="x is not constant (then σ would be 0) and γ is one number that is not negative. For either sign the "
    "radius is |γ|√d. With one scale per feature, as layers have, radii differ and lie between min|γ_j|√d and "
    "max|γ_j|√d. An ε above 0 multiplies the radius by 1/√(1 + ε/σ²).",
    check=check,
)
