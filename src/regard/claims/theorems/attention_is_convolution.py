"""K² heads, each with all its weight at one offset, are a K × K convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.convolution import AttentionConvolution, to_attention
from regard.convolution.verify import verify
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic


def convolution(channels: int, out: int, size: int, draw: torch.Generator, mode: str = "zeros") -> nn.Conv2d:
    """One with drawn weights, padded so that outputs are as many as inputs, in float64."""
    conv = nn.Conv2d(channels, out, size, padding=size // 2, padding_mode=mode, dtype=torch.float64)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return conv


def one_hot_heads(x: Tensor, conv: nn.Conv2d, attend: Callable[..., Any], moved: int = 0) -> Tensor:
    """The document's sum over heads: head h takes the pixel at Δ_h, W_v^h = W_Δ and nothing after it, plus b_out.

    ``moved``: how far the last head's offset is wrong, in columns.
    """
    (_, height, width), size = x.shape, conv.kernel_size[0]
    r = size // 2
    # Zero padding is keys of their own, of value 0: a row of softmax has to give its weight to something.
    padded = F.pad(x, (r, r, r, r)).flatten(1).mT
    side = width + 2 * r
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places, values = [], []
    for h in range(size * size):
        dy, dx = divmod(h, size)
        dx += moved if h == size * size - 1 else 0
        places.append((rows + dy) * side + columns + dx)
        values.append(padded @ conv.weight[:, :, h // size, h % size].mT)
    sees = F.one_hot(torch.stack(places).flatten(1), len(padded)).bool().unsqueeze(0)  # [1, K², n, m]
    flat = x.new_zeros(1, len(places), height * width, 1)
    keys = x.new_zeros(1, len(places), len(padded), 1)
    out: Tensor = attend(flat, keys, torch.stack(values).unsqueeze(0), mask=sees)
    assert conv.bias is not None
    return (out[0].sum(0) + conv.bias).mT.unflatten(-1, (height, width))


def check(
    *,
    size: int = 7,
    channels: int = 3,
    out: int = 4,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    convert: Callable[[nn.Conv2d], AttentionConvolution] = to_attention,
) -> Evidence:
    """Convolutions of several sizes and paddings beside their attention, outputs and gradients; and the proof's sum."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, channels, size, size, generator=draw, dtype=torch.float64)
    errors = []
    for kernel in (3, 5, 1):
        conv = convolution(channels, out, kernel, draw)
        with torch.no_grad():
            errors.append(float((one_hot_heads(x[0], conv, attend) - conv(x[0])).abs().max()))
        found.written(
            f"K = {kernel}: K² one-hot heads with W_v = W_Δ sum to the convolution, borders too",
            errors[-1] < 1e-12,
            f"one-hot heads, {kernel**2} of them, are a {kernel} × {kernel} convolution within {errors[-1]:.1e}",
        )
    _converted(found, convert, x, (channels, out), draw)
    conv = convolution(channels, out, 3, draw)
    with torch.no_grad():
        moved = float((one_hot_heads(x[0], conv, attend, moved=-1) - conv(x[0])).abs().max())
    found.control("one of nine heads a pixel beside its offset: the same", moved < 1e-9, f"off by {moved:.2g}")
    found.numbers |= {"largest errors of K = 3, 5, 1": errors, "one head moved": moved}
    return found


def _converted(
    found: Evidence,
    convert: Callable[[nn.Conv2d], AttentionConvolution],
    x: Tensor,
    sizes: tuple[int, int],
    draw: torch.Generator,
) -> None:
    """The layer of queries and keys: outputs, gradients, W_Δ = W_v W_out, and what is missed without padded keys."""
    for mode in ("zeros", "reflect", "replicate", "circular"):
        conv = convolution(*sizes, 3, draw, mode)
        layer = convert(conv)
        seen = verify(conv, layer, x)
        worst = max(seen.outputs, seen.input_gradient, seen.kernel_gradient)
        found.written(
            f"a MultiHeadAttention with padding {mode!r}: the same outputs and gradients",
            worst < 1e-12,
            f"{mode}: outputs and gradients within {worst:.1e}",
        )
    value = layer.attention.v_proj.weight  # [D_o, …], one for all heads: the channels
    after = layer.attention.out_proj.weight.unflatten(1, (9, -1))  # [out, heads, D_o]
    product = torch.einsum("ohe,ec->och", after, value[:, : sizes[0]]).detach()
    far = float((product - conv.weight.detach().flatten(2)).abs().max())
    found.written("with an output projection W_Δ = W_v W_out", far < 1e-12, f"W_v W_out is W_Δ within {far:.1e}")
    near = Quadratic(x.shape[2], x.shape[3], 9, centers=[list(s) for s in layer.shifts], alpha=1e3).double()
    bare = MultiHeadAttention(sizes[0], 9, d_key=1, d_value=sizes[0], d_out=sizes[1], scale=0.0, position=near)
    zeros = convolution(*sizes, 3, draw)
    with torch.no_grad():
        bare.double().v_proj.weight.copy_(torch.eye(sizes[0]).repeat(9, 1))
        bare.out_proj.weight.copy_(zeros.weight.permute(0, 2, 3, 1).flatten(1))
        bare.out_proj.bias.copy_(zeros.bias)  # type: ignore[arg-type]
        apart = (bare(x.flatten(2).mT).mT.view(2, -1, *x.shape[2:]) - zeros(x)).abs()
    inside, border = float(apart[..., 1:-1, 1:-1].max()), float(apart.max())
    found.control(
        "without keys for the padding: zero padding all the same", border < 1e-9, f"border off by {border:.2g}"
    )
    found.numbers |= {"without padded keys, inside": inside, "without padded keys, at the border": border}


CLAIM = Claim(
    id="attention-is-convolution",
    sources=("000",),
    statement="K² heads, each of which puts all its weight on the pixel at one offset of a K × K kernel, compute the "
    "convolution whose matrix at that offset is the head's value matrix.",
    formula=r"\sum_{h=1}^{K^2} \sum_k A^{(h)}_{qk} Z_k W_v^{(h)} + b \allowbreak = "
    r"\sum_{\Delta} Z_{q+\Delta} W_\Delta + b, \qquad W_\Delta = W_v^{(f^{-1}(\Delta))}",
    refuted="An output, or a gradient, that differs from the convolution's by more than rounding in float64.",
    control="One head a pixel beside its offset; and zero padding without keys that stand for the padding.",
    verdict=HOLDS,
    check=check,
)
