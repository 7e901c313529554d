"""Layer norm puts every vector on a sphere of radius |γ|√d around β."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.nn import LayerNorm


def radius(x: Tensor, gamma: float | Tensor, shift: float, eps: float, norm: Callable[..., Any]) -> Tensor:
    """``‖y − β1‖`` of each row, for a layer with scale γ and shift β."""
    layer = norm(x.shape[-1], eps=eps).double()
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(gamma, dtype=torch.float64).expand_as(layer.weight))
        layer.bias.fill_(shift)
        y: Tensor = layer(x)
    return (y - shift).norm(dim=-1)


def error(seen: Tensor, wanted: float) -> float:
    """The largest relative error; −1 for what is no number."""
    worst = float((seen / wanted - 1).abs().max())
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
    """Radii for scales of both signs, constant vectors, one scale for each feature, and ε above 0."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    spread = 10 ** (torch.rand(rows, 1, generator=draw, dtype=torch.float64) * 4 - 2)
    x = torch.randn(rows, d, generator=draw, dtype=torch.float64) * spread + 3
    sphere = math.sqrt(d)
    down = float(radius(x, -gamma, shift, 0.0, norm).mean())
    found.written(
        "for any scale: ‖y − β1‖ = γ√d",
        error(radius(x, -gamma, shift, 0.0, norm), -gamma * sphere) < 1e-12,
        f"at γ = {-gamma:g} the radius is {down:.4g}, γ√d = {-gamma * sphere:.4g}",
    )
    flat = radius(torch.full((1, d), 3.0, dtype=torch.float64), gamma, shift, 0.0, norm)
    found.written("for any x: ‖y − β1‖ = γ√d", 0 <= error(flat, gamma * sphere) < 1e-12, "a constant x gives 0/0")
    both = max(error(radius(x, sign * gamma, shift, 0.0, norm), gamma * sphere) for sign in (1, -1))
    found.condition(
        "x not constant, one scale, ε = 0: ‖y − β1‖ = |γ|√d",
        both < 1e-11,
        f"{rows} vectors, both signs: |γ|√d = {gamma * sphere:.4g} within {both:.1e}",
    )
    each = torch.linspace(0.5, 2, d, dtype=torch.float64) * gamma
    seen = radius(x, each, shift, 0.0, norm)
    ratio = float(seen.max() / seen.min())
    inside = bool((seen >= each.min() * sphere).all() and (seen <= each.max() * sphere).all())
    found.condition("a scale for each feature gives no one radius", inside and ratio > 1.05,
                    f"with γ_j from {each[0]:.2g} to {each[-1]:.2g} radii differ by a factor {ratio:.3g}")  # fmt: skip
    shares = [10 ** (power / 2) for power in range(-6, 7)]
    unit = (x[0] - x[0].mean()) / x[0].std(correction=0)
    small = [float(radius(unit[None], gamma, shift, one, norm)) / (gamma * sphere) for one in shares]
    formula = [1 / math.sqrt(1 + one) for one in shares]
    off = max(abs(a - b) for a, b in zip(small, formula, strict=True))
    found.condition("ε > 0 shortens it by 1/√(1 + ε/σ²)", off < 1e-12, f"ε = σ²: {small[6]:.4g} of it")
    loose = error(radius(x, gamma, shift, 1e-5, norm), gamma * sphere)
    found.control("with ε = 1e-5 it is γ√d to rounding", loose < 1e-11, f"off by up to {loose:.1e} where σ is small")
    lines = {"measured": (shares, small), "1/√(1 + ε/σ²)": (shares, formula)}
    found.draw("radius over |γ|√d", lines, x="ε/σ²", y="radius", log="x")
    found.numbers |= {"|γ|√d": gamma * sphere, "largest relative error": both, "radii with γ_j": ratio}
    return found


CLAIM = Claim(
    id="layer-norm-radius",
    sources=("003",),
    statement="Layer norm with scale γ, shift β and ε = 0 puts every x at the distance γ√d from β1.",
    formula=r"\lVert y - \beta \mathbf{1} \rVert_2 = \gamma \sqrt{d}",
    refuted="An x and a γ with another distance.",
    control="ε = 1e-5, the layer's usual value, asked whether the radius is γ√d.",
    verdict=HOLDS_IF,
    correction="x must not be constant (its σ is 0), and γ must be one number ≥ 0; for either sign the radius is "
    "|γ|√d. With a scale for each feature, as layers have, there is no one radius, only bounds min|γ_j|√d and "
    "max|γ_j|√d; ε > 0 shortens it by 1/√(1 + ε/σ²).",
    check=check,
)
