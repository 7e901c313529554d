"""The quadratic encoding: one-hot attention at an offset as α grows, where that pixel exists."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.statistics import slope
from regard.convolution import leak, to_attention
from regard.positions import Quadratic

CENTERS = [[float(y), float(x)] for y in (-1, 0, 1) for x in (-1, 0, 1)]


def weights(
    side: int, alpha: float, attend: Callable[..., Any], make: Callable[..., Any], centers: list[list[float]] = CENTERS
) -> Tensor:
    """``[heads, n, n]``: softmax of the encoding alone."""
    n, heads = side * side, len(centers)
    bias = make(side, side, heads=heads, centers=centers, alpha=alpha).double()
    nothing = torch.zeros(1, heads, n, 1, dtype=torch.float64)
    eye = torch.eye(n, dtype=torch.float64).expand(1, heads, n, n)
    with torch.no_grad():
        out: Tensor = attend(nothing, nothing, eye, bias=bias, scale=0.0)
    return out[0]


def one_hot(side: int, clamped: bool) -> Tensor:
    """``[heads, n, n]``: 1 at the pixel at the offset; where there is none, 0s, or the nearest one if ``clamped``."""
    at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).view(-1, 2)
    there = at + torch.tensor(CENTERS).long().unsqueeze(1)  # [heads, n, 2]
    inside = ((there >= 0) & (there < side)).all(-1)
    there = there.clamp(0, side - 1)
    hot = F.one_hot(there[..., 0] * side + there[..., 1], side * side).double()
    return hot if clamped else hot * inside.unsqueeze(-1)


def check(
    *,
    side: int = 6,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    make: Callable[..., Any] = Quadratic,
    convert: Callable[..., Any] = to_attention,
) -> Evidence:
    """The distance to one-hot weights against α: inside, at the border, with padded keys, and at half a pixel."""
    found = Evidence()
    alphas = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]
    empty, nearest = one_hot(side, False), one_hot(side, True)
    there = empty.sum(-1) > 0  # which head has a pixel at its offset from which query
    inside, border, replaced = [], [], []
    for alpha in alphas:
        A = weights(side, alpha, attend, make)
        off = (A - empty).abs().sum(-1)
        inside.append(float(off[there].max()))
        border.append(float(off[~there].max()))
        replaced.append(float((A - nearest).abs().sum(-1).max()))
    found.written(
        "at every query the weights tend to one-hot at the offset, or to nothing where there is no pixel",
        max(inside[-1], border[-1]) < 1e-4,
        f"at the border Σ|A − one-hot| stays {border[-1]:.3g}: the head takes the nearest pixel",
    )
    rate = slope(alphas[3:], [math.log(max(x, 1e-300)) for x in inside[3:]])
    found.condition(
        "where the pixel exists the distance falls as exp(−α)",
        abs(rate.value + 1) < 0.01,
        f"where the pixel exists it is {inside[-1]:.1e} at α = {alphas[-1]:g}, falling as exp({rate.value:.4f} α)",
    )
    bounded = all(x <= 2 * leak(a, 2) + 1e-12 for a, x in zip(alphas, inside, strict=True))
    found.condition("the weight beside is at most 1 − θ(α)^−2 (`leak`)", bounded, f"leak {leak(alphas[-1], 2):.1e}")
    found.condition("at the border the limit is the nearest pixel", replaced[-1] < 1e-5, f"within {replaced[-1]:.1e}")
    _padded(found, convert, side, seed)
    _other(found, attend, make, side)
    lines = {"the pixel exists": (alphas, inside), "it does not": (alphas, border), "nearest pixel": (alphas, replaced)}
    found.draw("Σ|A − one-hot| of the worst row", lines, x="α", y="distance", log="y")
    found.numbers |= {"rate": rate.value, "inside": inside[-1], "border": border[-1]}
    return found


def _padded(found: Evidence, convert: Callable[..., Any], side: int, seed: int) -> None:
    """With keys for the padding the limit is the zero-padded convolution."""
    draw = torch.Generator().manual_seed(seed)
    conv = nn.Conv2d(2, 3, 3, padding=1).double()
    x = torch.randn(1, 2, side, side, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
        far = float((convert(conv, alpha=40.0)(x) - conv(x)).abs().max())
    found.condition("with padded keys: the zero-padded convolution", far < 1e-12, f"padded, within {far:.1e} at α = 40")
    found.numbers["padded keys, α = 40"] = far


def _other(found: Evidence, attend: Callable[..., Any], make: Callable[..., Any], side: int) -> None:
    """D_p = 3, and an offset between two pixels, which has no limit of one."""
    bias = make(side, side, heads=9, centers=CENTERS, alpha=3.0).double()
    delta = torch.tensor([[y, x] for y in range(-2, 3) for x in range(-2, 3)], dtype=torch.float64)
    with torch.no_grad():
        product = bias.vectors() @ bias.features(delta).mT  # [H, δ]
        squares = (delta - bias.centers.unsqueeze(1)).square().sum(-1) * -bias.alpha.unsqueeze(1)
        spread = product - squares
    constant = float((spread - spread[:, :1]).abs().max())
    found.condition("a product of width D_p = 3, up to a constant a head", constant < 1e-12, f"within {constant:.1e}")
    half = weights(side, 16.0, attend, make, [[0.0, 0.5]])[0]
    found.control(
        "half a pixel to the right: one-hot as well",
        float(half[0].max()) > 1 - 1e-4,
        f"two pixels share, {float(half[0].max()):.3f} each",
    )


CLAIM = Claim(
    id="quadratic-encoding-realises-offsets",
    sources=("000",),
    statement="Scores −α‖δ − Δ‖², with δ the offset of a key from its query, tend to one-hot attention at the offset Δ "
    "as α grows, which is what makes a head one tap of a convolution.",
    formula=r"\lim_{\alpha \to \infty} "
    r"\operatorname{softmax}_k\left(-\alpha \lVert \delta_{qk} - \Delta \rVert^2\right)"
    r" \allowbreak = 1[\, k = q + \Delta \,]",
    refuted="A query at which the weights do not tend to the pixel at the offset Δ.",
    control="An offset of half a pixel, asked for one-hot weights: two pixels are equally near.",
    verdict=HOLDS_IF,
    correction="Δ must be whole and the pixel q + Δ must be there: the distance then falls as exp(−α), with codes of "
    "width D_p = 3. At the border a head takes the nearest pixel that is there (the padding called replicate); zero "
    "padding needs keys for the padded pixels.",
    check=check,
)
