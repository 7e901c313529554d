"""Checks that a dilated convolution is attention with heads at offsets that are spread apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import largest_difference, one_hot_layer, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.convolution import AttentionConvolution, to_attention, to_convolution
from regard.convolution._verify import verify

Offsets = Callable[[int], Sequence[tuple[int, int]]]


def spread_offsets(dilation: int) -> list[tuple[int, int]]:
    """The offsets of a 3 × 3 kernel with that dilation."""
    steps = (-dilation, 0, dilation)
    return list(product(steps, steps))


def run_on_image(layer: nn.Module, x: Tensor) -> Tensor:
    """A layer of tokens, applied to the pixels of an image ``[B, C, side, side]``."""
    out: Tensor = layer(x.flatten(2).mT).mT.unflatten(-1, x.shape[2:])
    return out


def dilated_convolution(weight: Tensor, dilation: int) -> nn.Conv2d:
    """A 3 × 3 convolution with the given weight and dilation, which repeats the border pixels."""
    out, channels = weight.shape[:2]
    conv = nn.Conv2d(channels, out, 3, padding=dilation, dilation=dilation, padding_mode="replicate", bias=False)
    with torch.no_grad():
        conv.double().weight.copy_(weight)
    return conv


def influence_on_middle(layer: nn.Module, side: int, channels: int) -> list[float]:
    """How much the middle pixel's output depends on each pixel of its row: Σ |∂y/∂x| over channels."""
    x = torch.zeros(1, side * side, channels, dtype=torch.float64, requires_grad=True)
    middle = side // 2 * side + side // 2
    influence = torch.zeros(side * side, dtype=torch.float64)
    for value in layer(x)[0, middle]:
        influence += torch.autograd.grad(value, x, retain_graph=True)[0][0].abs().sum(-1)
    row: list[float] = influence.view(side, side)[side // 2].tolist()
    return row


def check(
    *,
    side: int = 9,
    channels: int = 3,
    seed: int = 0,
    offsets: Offsets = spread_offsets,
    convert: Callable[[nn.Conv2d], AttentionConvolution] = to_attention,
) -> Evidence:
    """Compare heads at spread offsets, built by hand and converted, with torch's convolution of dilation 1 to 3."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    x = random_normal(generator, 1, channels, side, side)
    weight = random_normal(generator, 4, channels, 3, 3)  # the same kernel for all dilations
    taps = weight.flatten(2).permute(2, 1, 0)  # [9, D_in, D_out], one matrix per head
    influences = {}
    errors = []
    for dilation in (2, 3, 1):
        conv = dilated_convolution(weight, dilation)
        layer = one_hot_layer(offsets(dilation), side, taps)
        errors.append(largest_difference(run_on_image(layer, x), conv(x)))
        evidence.add_statement(
            f"Heads at 0 and ±{dilation} are the convolution of dilation {dilation}.",
            errors[-1] < 1e-12,
            f"heads at 0 and ±{dilation} agree with the convolution of dilation {dilation} within {errors[-1]:.1e}",
        )
        conv.padding_mode = "zeros"  # the usual padding, which the converted layer has keys for
        converted = verify(conv, convert(conv), x)
        worst = max(converted.outputs, converted.input_gradient, converted.kernel_gradient)
        evidence.add_statement(
            f"Converted from dilation {dilation}, the layer has the same outputs and gradients.",
            worst < 1e-12,
            f"they agree within {worst:.1e}",
        )
        influences[f"dilation {dilation}"] = influence_on_middle(layer, side, channels)

    # A control: its statement must be false. Heads at adjacent pixels read other pixels than the dilated kernel does.
    conv = dilated_convolution(weight, 2)
    adjacent = largest_difference(run_on_image(one_hot_layer(spread_offsets(1), side, taps), x), conv(x))
    evidence.add_control("Heads at 0 and ±1 give dilation 2 too.", adjacent < 1e-9, f"off by {adjacent:.2g}")
    back = to_convolution(one_hot_layer(spread_offsets(2), side, taps))
    is_same = back.dilation == (2, 2) and torch.allclose(back.weight, conv.weight, rtol=0, atol=1e-12)
    evidence.add_statement("A layer with heads at 0 and ±2 converts back to dilation 2 with the same kernel.", is_same)
    row_offsets = range(-(side // 2), side - side // 2)
    title = "what the middle pixel's output depends on, along its row"
    evidence.add_curves(title, row_offsets, influences, x="offset", y="Σ |∂y/∂x|")
    evidence.numbers |= {"adjacent heads, difference": adjacent, "largest errors of dilations 2, 3, 1": errors}
    return evidence


CLAIM = Claim(
    id="dilated",
    title="A dilated convolution is attention at offsets that are spread apart",
    citations=(("assignment-6", "3.3"),),
    statement="A convolution with dilation is attention whose heads attend to offsets that are spread apart: −2, 0, 2 "
    "instead of −1, 0, 1.",
    formula=r"y_q = \sum_{\Delta \in \{-1,0,1\}^2} Z_{q + r\Delta} W_\Delta",
    refuted_by="A dilated convolution whose outputs or gradients differ from those of heads at its offsets.",
    control="Heads at adjacent offsets with the same matrices: they must not be the convolution of dilation 2.",
    verdict=HOLDS,
    check=check,
)
