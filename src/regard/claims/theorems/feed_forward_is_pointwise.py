"""The feed-forward network: one two-layer map, at every position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.claims.claim import HOLDS, Claim, Evidence
from regard.nn import Encoder, FeedForward, MultiHeadAttention


def blocks(layer: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """``‖∂y_i / ∂x_j‖`` as ``[n, n]``."""
    jacobian: Any = torch.autograd.functional.jacobian(layer, x)
    found: Tensor = jacobian.square().sum((1, 3)).sqrt()
    return found


def separate(layer: Callable[[Tensor], Any], x: Tensor) -> tuple[bool, float]:
    """Whether no position looks at another while each looks at itself, and the largest look at another."""
    seen = blocks(layer, x)
    own, others = seen.diagonal(), seen - seen.diagonal().diag()
    return bool((own > 0).all()) and float(others.max()) == 0, float(others.max())


def distances(seen: Tensor) -> list[float]:
    """The mean of ``seen`` at each |i − j|."""
    n = len(seen)
    return [float(torch.cat([seen.diagonal(k), seen.diagonal(-k)]).mean()) for k in range(n)]


def ask_formula(found: Evidence, net: Any, x: Tensor) -> float:
    """The two-layer formula, and the convolution of width 1 that it is."""
    w1, b1, w2, b2 = net.up.weight, net.up.bias, net.down.weight, net.down.bias
    with torch.no_grad():
        y = net(x)
        formula = F.relu(x @ w1.T + b1) @ w2.T + b2
        swept = F.conv1d(F.relu(F.conv1d(x.T, w1[..., None], b1)), w2[..., None], b2).T
    off, conv = float((y - formula).abs().max()), float((y - swept).abs().max())
    found.written("it is W₂ relu(W₁ x + b₁) + b₂", off < 1e-12, f"formula within {off:.1e}")
    found.written("so it is two convolutions of width 1", conv < 1e-12, f"convolutions within {conv:.1e}")
    return off


def check(
    *,
    n: int = 7,
    d: int = 6,
    hidden: int = 20,
    seed: int = 0,
    make: Callable[[int, int], Any] = FeedForward,
    stack: Callable[..., Any] = Encoder,
) -> Evidence:
    """Jacobian between positions, the same vector at every position, the formula, and parameters of two layers."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    torch.manual_seed(seed)
    net = make(d, hidden).double()
    alone, most = separate(net, x)
    found.written("separately: y_i depends on x_i alone", alone, f"∂y_i/∂x_j is {most:g} for all i ≠ j")
    with torch.no_grad():
        same = net(x[:1].expand(n, d))
        moved = net(x.flip(0)).flip(0)
        spread, turned = float((same - same[0]).abs().max()), float((moved - net(x)).abs().max())
    found.written("identically: a vector gives the same at every position", spread < 1e-12, f"differs by {spread:.1e}")
    found.written("moved positions move their results", turned < 1e-12, f"reversed: within {turned:.1e}")
    off = ask_formula(found, net, x)
    first, second = (block.feedforward.up.weight for block in stack(d, heads=2, layers=2, hidden=hidden).blocks)
    apart = float((first - second).detach().abs().max())
    found.written("other layers have other parameters", first is not second and apart > 0.01, f"differ by {apart:.2g}")
    attention = MultiHeadAttention(d, heads=2).double()
    mixed, look = separate(attention, x)
    found.control("self-attention treats positions separately", mixed, f"∂y_i/∂x_j reaches {look:.2g}")
    steps = list(range(n))
    lines = {"feed-forward": (steps, distances(blocks(net, x))), "attention": (steps, distances(blocks(attention, x)))}
    found.draw("mean ‖∂y_i/∂x_j‖ against the distance of positions", lines, x="|i − j|", y="norm")
    found.numbers |= {"largest ‖∂y_i/∂x_j‖, i ≠ j": most, "of attention": look, "error of the formula": off}
    return found


CLAIM = Claim(
    id="feed-forward-is-pointwise",
    sources=("002",),
    statement="The feed-forward network is the same map at every position and treats each separately: two linear maps "
    "with a ReLU between; other layers have other parameters.",
    formula=r"y_i = W_2 \operatorname{relu}(W_1 x_i + b_1) + b_2, \qquad \frac{\partial y_i}{\partial x_j} = 0 "
    r"\quad (i \ne j)",
    refuted="A derivative of one position's result by another position, or a vector with different results at two "
    "positions.",
    control="Self-attention, asked whether it treats positions separately.",
    verdict=HOLDS,
    check=check,
)
