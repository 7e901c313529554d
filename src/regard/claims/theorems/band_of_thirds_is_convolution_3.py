"""Weights of one third on three neighbours: a box filter of width 3, and the borders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.convolution import to_attention
from regard.masks import Mask, Window

NEIGHBOURS = Window(1)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """``x [n, d]`` along n, with ``weight [out, d, 3]`` and zeros around."""
    return F.conv1d(x.mT.unsqueeze(0), weight, padding=1)[0].mT


def box(mix: Tensor) -> Tensor:
    """W/3 at each of three taps: ``[out, d, 3]``."""
    return (mix.mT / 3).unsqueeze(-1).expand(-1, -1, 3)


def check(
    *,
    n: int = 12,
    d: int = 6,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    band: Mask = NEIGHBOURS,
    kernel: Callable[[Tensor], Tensor] = box,
) -> Evidence:
    """Equal scores in a band of three, beside convolutions of width 3: inside, at the borders, with zeros around."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    mix = torch.randn(d, d, generator=draw, dtype=torch.float64)

    def averaged(v: Tensor) -> Tensor:
        flat = torch.zeros(1, 1, len(v), 1, dtype=v.dtype)
        out: Tensor = attend(flat, flat, v.view(1, 1, *v.shape), mask=band)
        return out[0, 0]

    weights = averaged(torch.eye(n, dtype=torch.float64))
    off = (averaged(x @ mix) - convolved(x, kernel(mix))).abs().amax(-1)
    found.written(
        "⅓ on i − 1, i, i + 1 at all positions: a convolution of width 3",
        float(off.max()) < 1e-12,
        f"at the borders the two weights are {float(weights[0, 0]):.3g} each, and outputs off by {float(off[0]):.2g}",
    )
    wanted = torch.ones(n, n, dtype=torch.float64).tril(1).triu(-1) / 3
    thirds = float((weights - wanted)[1:-1].abs().max())
    inner = float(off[1:-1].max())
    found.condition("inside, weights are ⅓ and the rest is 0", thirds < 1e-12, f"inside, ⅓ within {thirds:.1e}")
    found.condition("inside, the layer is the box filter W/3", inner < 1e-12, f"inside, within {inner:.1e}")
    padded = averaged(F.pad(x, (0, 0, 1, 1)) @ mix)[1:-1]
    rest = (padded - convolved(x, kernel(mix))).abs().amax(-1)
    far = float(rest.max())
    found.condition("with a zero at each end, at all positions", far < 1e-12, f"zeros around: within {far:.1e}")
    _any_filter(found, averaged, x, mix, draw)
    at = list(range(n))
    lines = {"without zeros around": (at, off.tolist()), "with": (at, rest.tolist())}
    found.draw("largest distance to the zero-padded convolution", lines, x="position", y="difference")
    found.numbers |= {"inside": inner, "at the border": float(off[0]), "border weight": float(weights[0, 0])}
    return found


def _any_filter(
    found: Evidence, averaged: Callable[[Tensor], Tensor], x: Tensor, mix: Tensor, draw: torch.Generator
) -> None:
    """One band cannot be a convolution whose taps differ; three heads of one tap each can."""
    d = x.shape[-1]
    conv = nn.Conv1d(d, d, 3, padding=1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        conv.weight.copy_(torch.randn(d, d, 3, generator=draw, dtype=torch.float64))
        many = torch.randn(30, *x.shape, generator=draw, dtype=torch.float64)
        wanted = conv(many.mT).mT[:, 1:-1].flatten(0, 1)
        seen = torch.stack([averaged(one) for one in many])[:, 1:-1].flatten(0, 1)
        rest = wanted - seen @ torch.linalg.lstsq(seen, wanted, driver="gels").solution
        missed = float(rest.norm() / wanted.norm())
        three = float((to_attention(conv)(many.mT) - conv(many.mT)).abs().max())
    found.control(
        "one band head, with the best W, is any convolution of width 3", missed < 1e-6, f"{missed:.0%} is missed"
    )
    found.condition("three heads of one tap each are any", three < 1e-12, f"three heads: within {three:.1e}")
    found.numbers |= {"missed by one band head": missed, "three heads": three}


CLAIM = Claim(
    id="band-of-thirds-is-convolution-3",
    sources=("002",),
    statement="Where each position gives weight ⅓ to itself and to both neighbours, attention acts as a convolution of "
    "width 3 with the same weight at each tap.",
    formula=r"A_{ij} = \frac{1}{3} \cdot 1[\,|i - j| \le 1\,] \quad\Rightarrow\quad "
    r"y_i = \sum_{\delta=-1}^{1} x_{i+\delta} \frac{W_V}{3}",
    refuted="A position where the output differs from that of the convolution.",
    control="One band head with the best W_V, asked whether it can be a convolution whose three taps differ.",
    verdict=HOLDS_IF,
    correction="It holds inside, or with a key of value 0 beside each end. At the borders softmax gives ½ to the two "
    "keys that are there, where a convolution padded with zeros has ⅓. The filter is a box, W_V/3 at each tap; "
    "taps that differ need a head each.",
    check=check,
)
