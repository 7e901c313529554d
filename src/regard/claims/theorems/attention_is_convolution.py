"""Checks that K² heads, each with all its weight at one offset, compute a K × K convolution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, largest_difference, random_normal, randomize
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.convolution import AttentionConvolution, to_attention
from regard.convolution._verify import verify
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic


def random_convolution(
    channels: int, out: int, size: int, generator: torch.Generator, mode: str = "zeros"
) -> nn.Conv2d:
    """A convolution with random weights in float64, padded so that the output has the size of the input."""
    return randomize(nn.Conv2d(channels, out, size, padding=size // 2, padding_mode=mode), generator)  # type: ignore[arg-type]


def one_hot_heads(x: Tensor, conv: nn.Conv2d, attention_fn: AttentionFn, last_offset_error: int = 0) -> Tensor:
    """Compute the document's sum over heads: head h reads the pixel at Δ_h with W_v^h = W_Δ. The bias comes last.

    ``last_offset_error``: error of the last head's offset, in columns.
    """
    height, width = x.shape[1:]
    size = conv.kernel_size[0]
    radius = size // 2
    # The zero padding has keys of its own, with value 0, because a softmax row must give its weight to some key.
    padded = F.pad(x, (radius, radius, radius, radius)).flatten(1).mT
    padded_width = width + 2 * radius
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    key_indices = []
    values = []
    for head in range(size * size):
        dy, dx = divmod(head, size)
        if head == size * size - 1:
            dx += last_offset_error
        key_indices.append((rows + dy) * padded_width + columns + dx)
        values.append(padded @ conv.weight[:, :, head // size, head % size].mT)

    # Scores are all 0: the mask alone puts each head's weight on one key.
    mask = F.one_hot(torch.stack(key_indices).flatten(1), len(padded)).bool().unsqueeze(0)  # [1, K², n, m]
    queries = x.new_zeros(1, len(values), height * width, 1)
    keys = x.new_zeros(1, len(values), len(padded), 1)
    out: Tensor = attention_fn(queries, keys, torch.stack(values).unsqueeze(0), mask=mask)
    assert conv.bias is not None
    return (out[0].sum(0) + conv.bias).mT.unflatten(-1, (height, width))


def check(
    *,
    size: int = 7,
    channels: int = 3,
    out: int = 4,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    convert: Callable[[nn.Conv2d], AttentionConvolution] = to_attention,
) -> Evidence:
    """Compare convolutions of several sizes and paddings with their attention form, in outputs and gradients."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    x = random_normal(generator, 2, channels, size, size)
    errors = []
    for kernel in (3, 5, 1):  # 1 is the case without a border
        conv = random_convolution(channels, out, kernel, generator)
        errors.append(largest_difference(one_hot_heads(x[0], conv, attention_fn), conv(x[0])))
        evidence.add_statement(
            f"K = {kernel}: K² one-hot heads with W_v = W_Δ sum to the convolution, also at the borders.",
            errors[-1] < 1e-12,
            f"{kernel**2} one-hot heads equal a {kernel} × {kernel} convolution within {errors[-1]:.1e}",
        )

    # The same for whole layers, which have keys for the padding.
    for mode in ("zeros", "reflect", "replicate", "circular"):
        conv = random_convolution(channels, out, 3, generator, mode)
        layer = convert(conv)
        verified = verify(conv, layer, x)
        worst = max(verified.outputs, verified.input_gradient, verified.kernel_gradient)
        evidence.add_statement(
            f"A MultiHeadAttention layer with padding {mode!r} has the same outputs and gradients.",
            worst < 1e-12,
            f"{mode}: outputs and gradients agree within {worst:.1e}",
        )

    # W_Δ = W_v W_out in the last of these layers.
    value = layer.attention.v_proj.weight  # [D_o, …]: all heads share it, and it selects the channels
    projection = layer.attention.out_proj.weight.unflatten(1, (9, -1))  # [out, heads, D_o]
    product = torch.einsum("ohe,ec->och", projection, value[:, :channels])
    error = largest_difference(product, conv.weight.flatten(2))
    evidence.add_statement("With an output projection, W_Δ = W_v W_out.", error < 1e-12, f"within {error:.1e}")

    # A control: its statement must be false.
    # Without keys for the padding, a head at the border must put its weight on a real pixel.
    position = Quadratic(x.shape[2], x.shape[3], 9, centers=list(map(list, layer.shifts)), alpha=1e3).double()
    bare = MultiHeadAttention(channels, 9, d_key=1, d_value=channels, d_out=out, scale=0.0, position=position)
    zeros = random_convolution(channels, out, 3, generator)
    with torch.no_grad():
        bare.double().v_proj.weight.copy_(torch.eye(channels).repeat(9, 1))
        bare.out_proj.weight.copy_(zeros.weight.permute(0, 2, 3, 1).flatten(1))
        bare.out_proj.bias.copy_(zeros.bias)  # type: ignore[arg-type]
        difference = (bare(x.flatten(2).mT).mT.view(2, -1, *x.shape[2:]) - zeros(x)).abs()
    inside = float(difference[..., 1:-1, 1:-1].max())  # here every offset lies in the image
    border = float(difference.max())
    evidence.add_control(
        "Without keys for the padding, the layer still equals a convolution with zero padding.",
        border < 1e-9,
        f"at the border the outputs differ by {border:.2g}",
    )
    evidence.numbers |= {"without padded keys, inside": inside, "without padded keys, at the border": border}

    # A control: its statement must be false.
    # A head at the wrong offset reads another pixel, so the comparison must notice it.
    conv = random_convolution(channels, out, 3, generator)
    shifted = largest_difference(one_hot_heads(x[0], conv, attention_fn, last_offset_error=-1), conv(x[0]))
    evidence.add_control(
        "One of the nine heads is one pixel beside its offset, and the sum is still the convolution.",
        shifted < 1e-9,
        f"the outputs differ by {shifted:.2g}",
    )
    evidence.numbers |= {"largest errors of K = 3, 5, 1": errors, "error with one shifted head": shifted}
    return evidence


CLAIM = Claim(
    id="attention-is-convolution",
    title="K² heads with one offset each compute a K × K convolution",
    citations=(("assignment-6", "3.2"),),
    papers=("cordonnier-2020",),
    statement="K² heads, each of which puts all its weight on the pixel at one offset of a K × K kernel, compute the "
    "convolution whose matrix at that offset is the head's value matrix.",
    formula=r"\sum_{h=1}^{K^2} \sum_k A^{(h)}_{qk} Z_k W_v^{(h)} + b \allowbreak = "
    r"\sum_{\Delta} Z_{q+\Delta} W_\Delta + b, \qquad W_\Delta = W_v^{(f^{-1}(\Delta))}",
    refuted_by="An output or a gradient that differs from the convolution's by more than rounding in float64.",
    control="One head is one pixel beside its offset; and zero padding without keys that stand for the padding.",
    verdict=HOLDS,
    check=check,
)
