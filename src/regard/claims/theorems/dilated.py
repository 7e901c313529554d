"""A dilated convolution: heads at offsets that are spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from regard.claims.claim import HOLDS, Claim, Evidence
from regard.convolution import AttentionConvolution, to_attention, to_convolution
from regard.convolution.verify import verify
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic

Offsets = Callable[[int], Sequence[tuple[int, int]]]


def spread(dilation: int) -> list[tuple[int, int]]:
    """The offsets of a 3 × 3 kernel, that far apart."""
    return [(dilation * y, dilation * x) for y in (-1, 0, 1) for x in (-1, 0, 1)]


def layer_at(offsets: Sequence[tuple[int, int]], weight: Tensor, side: int) -> MultiHeadAttention:
    """One hard head an offset, W_v W_out = W_Δ, bare of padding: at a border the nearest pixel is taken."""
    out, channels = weight.shape[:2]
    near = Quadratic(side, side, len(offsets), centers=[list(x) for x in offsets], alpha=1e4)
    layer = MultiHeadAttention(
        channels, len(offsets), d_key=1, d_value=channels, d_out=out, out_bias=False, scale=0.0, position=near
    ).double()
    with torch.no_grad():
        layer.v_proj.weight.copy_(torch.eye(channels).repeat(len(offsets), 1))
        layer.out_proj.weight.copy_(weight.permute(0, 2, 3, 1).flatten(1))
    return layer


def reach(layer: nn.Module, side: int, channels: int) -> list[float]:
    """How much the middle pixel's output depends on its row, pixel by pixel: Σ |∂y/∂x| over channels."""
    x = torch.zeros(1, side * side, channels, dtype=torch.float64, requires_grad=True)
    middle = side // 2 * side + side // 2
    moved = torch.zeros(side * side, dtype=torch.float64)
    for value in layer(x)[0, middle]:
        moved += torch.autograd.grad(value, x, retain_graph=True)[0][0].abs().sum(-1)
    return [float(a) for a in moved.view(side, side)[side // 2]]


def check(
    *,
    side: int = 9,
    channels: int = 3,
    seed: int = 0,
    offsets: Offsets = spread,
    convert: Callable[[nn.Conv2d], AttentionConvolution] = to_attention,
) -> Evidence:
    """Dilations 1 to 3: heads put at spread offsets by hand, and converted ones, beside torch's dilated convolution."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, channels, side, side, generator=draw, dtype=torch.float64)
    weight = torch.randn(4, channels, 3, 3, generator=draw, dtype=torch.float64)
    lines, errors = {}, []
    for dilation in (2, 3, 1):
        conv = nn.Conv2d(channels, 4, 3, padding=dilation, dilation=dilation, padding_mode="replicate", bias=False)
        conv = conv.double()
        with torch.no_grad():
            conv.weight.copy_(weight)
            layer = layer_at(offsets(dilation), weight, side)
            y = layer(x.flatten(2).mT).mT.unflatten(-1, (side, side))
            errors.append(float((y - conv(x)).abs().max()))
        found.written(
            f"heads at 0 and ±{dilation} are the convolution of dilation {dilation}",
            errors[-1] < 1e-12,
            f"offsets 0 and ±{dilation}: within {errors[-1]:.1e} of the convolution of dilation {dilation}",
        )
        conv.padding_mode = "zeros"
        seen = verify(conv, convert(conv), x)
        worst = max(seen.outputs, seen.input_gradient, seen.kernel_gradient)
        found.written(f"dilation {dilation}, converted: outputs and gradients", worst < 1e-12, f"within {worst:.1e}")
        there = list(range(-(side // 2), side - side // 2))
        lines[f"dilation {dilation}"] = (there, reach(layer, side, channels))
    _controls(found, x, weight)
    found.draw("what the middle pixel's output depends on, along its row", lines, x="offset", y="Σ |∂y/∂x|")
    found.numbers |= {"largest errors of dilations 2, 3, 1": errors}
    return found


def _controls(found: Evidence, x: Tensor, weight: Tensor) -> None:
    """Contiguous heads asked for dilation 2; and what a layer of spread heads is said to be by the way back."""
    side, conv = x.shape[-1], nn.Conv2d(x.shape[1], 4, 3, padding=2, dilation=2, padding_mode="replicate", bias=False)
    conv = conv.double()
    with torch.no_grad():
        conv.weight.copy_(weight)
        y = layer_at(spread(1), weight, side)(x.flatten(2).mT).mT.unflatten(-1, (side, side))
        off = float((y - conv(x)).abs().max())
    found.control("heads at 0 and ±1 are the convolution of dilation 2", off < 1e-9, f"off by {off:.2g}")
    back = to_convolution(layer_at(spread(2), weight, side))
    same = back.dilation == (2, 2) and bool(torch.allclose(back.weight, conv.weight, rtol=0, atol=1e-12))
    found.written("a layer of heads at 0 and ±2 reads back as dilation 2, with the same kernel", same)
    found.numbers["contiguous heads, off by"] = off


CLAIM = Claim(
    id="dilated",
    sources=("000",),
    statement="A convolution with dilation is attention whose heads look at offsets that are spread: −2, 0, 2 in place "
    "of −1, 0, 1.",
    formula=r"y_q = \sum_{\Delta \in \{-1,0,1\}^2} Z_{q + r\Delta} W_\Delta",
    refuted="A dilated convolution whose outputs or gradients differ from those of heads at its spread offsets.",
    control="Heads at contiguous offsets with the same matrices, asked for the convolution of dilation 2.",
    verdict=HOLDS,
    check=check,
)
