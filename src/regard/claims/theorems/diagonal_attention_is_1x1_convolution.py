"""Diagonal weights: a convolution of width 1, where they can be had."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.masks import Mask, Window

ONESELF = Window(0)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """``[n, d]`` through a convolution along n, with ``weight [out, d, taps]`` and zeros around."""
    return F.conv1d(x.mT.unsqueeze(0), weight, padding=weight.shape[-1] // 2)[0].mT


def nearest(x: Tensor, y: Tensor, taps: int) -> float:
    """The share of y that the best convolution of so many taps misses, by least squares over a batch."""
    pad = F.pad(x.mT, (taps // 2, taps // 2))
    seen = pad.unfold(-1, taps, 1).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)  # [B·n, d·taps]
    wanted = y.flatten(0, 1)
    rest = wanted - seen @ torch.linalg.lstsq(seen, wanted, driver="gels").solution
    return float(rest.norm() / wanted.norm())


def check(
    *,
    n: int = 8,
    d: int = 8,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    alone: Mask = ONESELF,
) -> Evidence:
    """Weights at finite β, at β = ∞ and under a mask; and the layer beside a convolution of width 1."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    keys = torch.linalg.qr(torch.randn(d, d, generator=draw, dtype=torch.float64))[0][:n]
    mix = torch.randn(d, d, generator=draw, dtype=torch.float64)
    eye = torch.eye(n, dtype=torch.float64)

    def head(x: Tensor, v: Tensor, **how: Any) -> Tensor:
        out: Tensor = attend(x.view(1, 1, n, d), x.view(1, 1, n, d), v.view(1, 1, n, -1), **how)
        return out[0, 0]

    betas = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    beside = [float((head(keys, eye, scale=beta) * (1 - eye)).max()) for beta in betas]
    found.written(
        "softmax of finite scores is a diagonal matrix, of orthonormal keys and Q = K",
        beside[-1] == 0,
        f"beside the diagonal a weight of {beside[2]:.2g} at β = 4 and still {beside[-1]:.1e} at β = {betas[-1]:g}",
    )
    _reached(found, head, keys, mix, eye)
    x = torch.randn(3, n, d, generator=draw, dtype=torch.float64)
    masked = [head(one, one @ mix, mask=alone) for one in x]
    far = max(float((y - convolved(one, mix.mT.unsqueeze(-1))).abs().max()) for one, y in zip(x, masked, strict=True))
    found.condition("a mask of oneself alone: so for any input", far < 1e-12, f"masked, within {far:.1e}")
    other = torch.randn(d, d, 3, generator=draw, dtype=torch.float64)
    wide = torch.randn(40, n, d, generator=draw, dtype=torch.float64)
    missed = nearest(wide, torch.stack([convolved(one, other) for one in wide]), 1)
    found.control(
        "a map of single positions is a 1-D convolution of width 3", missed < 1e-6, f"{missed:.0%} of it is missed"
    )
    law = [1 / (math.exp(beta) + n - 1) for beta in betas]
    lines = {"measured": (betas, beside), "1/(e^β + n − 1)": (betas, law)}
    if min(beside) > 0:
        found.draw("largest weight beside the diagonal", lines, x="β", y="weight", log="y")
    found.numbers |= {"weights beside the diagonal": beside, "largest error under the mask": far, "width 3": missed}
    return found


def _reached(found: Evidence, head: Callable[..., Tensor], keys: Tensor, mix: Tensor, eye: Tensor) -> None:
    """β = ∞: the diagonal is 1, and the layer a convolution of width 1."""
    weights = head(keys, eye, scale=math.inf)
    found.condition(
        "β = ∞: the weights are a diagonal matrix, and as rows sum to 1 it is the identity",
        bool((weights == eye).all()),
        f"β = ∞: the weights are I, error {float((weights - eye).abs().max()):g}",
    )
    far = float((head(keys, keys @ mix, scale=math.inf) - convolved(keys, mix.mT.unsqueeze(-1))).abs().max())
    found.condition("β = ∞: the layer is a convolution of width 1", far < 1e-12, f"within {far:.1e}")


CLAIM = Claim(
    id="diagonal-attention-is-1x1-convolution",
    sources=("002",),
    statement="Where the weights softmax(β KᵀQ) are a diagonal matrix, self-attention is one linear map applied at "
    "each position by itself, and should be called a 1-D convolution.",
    formula=r"\operatorname{softmax}(\beta\, Q K^\top) = I \quad\Rightarrow\quad y_i = x_i W_V",
    refuted="Weights beside the diagonal above 0, or an output that is not x_i W_V.",
    control="A map of single positions, asked whether it can be any 1-D convolution of width 3.",
    verdict=HOLDS_IF,
    correction="Softmax of finite scores is positive everywhere, so that there is no diagonal at finite β: it takes "
    "β = ∞ with each position's own key the best, or a mask of oneself alone. As rows sum to 1 the diagonal is then "
    "the identity, and the layer is a convolution of width 1 (a 1×1 convolution, in its usual name): other 1-D "
    "convolutions it cannot be.",
    check=check,
)
