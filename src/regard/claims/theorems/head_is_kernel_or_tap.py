"""Heads like the kernels of a convolution: a head is one tap of all kernels, times a matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims.claim import FAILS, Claim, Evidence
from regard.convolution import AttentionConvolution, to_attention
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic


def kernels(out: int, channels: int, size: int, draw: torch.Generator) -> nn.Conv2d:
    """A convolution of ``out`` kernels with random weights."""
    conv = nn.Conv2d(channels, out, size, padding=size // 2, bias=False).double()
    conv.weight.data.copy_(torch.randn(conv.weight.shape, generator=draw, dtype=torch.float64))
    return conv


def by_tap(weight: Tensor) -> Tensor:
    """``[out, in, K, K]`` as one row for each tap: a head has the same row, times a number, at every tap."""
    return weight.detach().flatten(2).permute(2, 0, 1).flatten(1)


def best(weight: Tensor, heads: int) -> float:
    """The least relative error of any so many heads whose weights do not depend on content (Eckart and Young)."""
    values = torch.linalg.svdvals(by_tap(weight)) ** 2
    return round(float((values[heads:].sum() / values.sum()).sqrt()), 9)


def rank(rows: Tensor) -> int:
    return int(torch.linalg.matrix_rank(rows, rtol=1e-9))


def of_heads(heads: int, draw: torch.Generator, n: int = 9, channels: int = 3) -> int:
    """The rank, tap by tap, of what a layer of heads with spread weights does: its derivative at the middle output."""
    centers = torch.randn(heads, 2, generator=draw, dtype=torch.float64) * 2
    place = Quadratic(1, n, heads, centers=centers, alpha=0.3)
    layer = MultiHeadAttention(channels, heads, d_key=1, d_value=channels, scale=0.0, position=place).double()
    for weight in layer.parameters():
        if weight.ndim == 2 and weight.shape[-1] != 2:
            weight.data.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float64))
    x = torch.randn(1, n, channels, generator=draw, dtype=torch.float64, requires_grad=True)
    middle = layer(x)[0, n // 2]
    slopes = torch.stack([torch.autograd.grad(y, x, retain_graph=True)[0][0] for y in middle])  # [out, n, in]
    return rank(slopes.permute(1, 0, 2).flatten(1))


def off(conv: nn.Conv2d, layer: nn.Module, x: Tensor) -> float:
    """The largest relative difference of outputs."""
    with torch.no_grad():
        return float((layer(x) - conv(x)).abs().max() / conv(x).abs().max())


def check(
    *,
    channels: int = 4,
    size: int = 3,
    side: int = 6,
    seed: int = 0,
    convert: Callable[[nn.Conv2d], AttentionConvolution] = to_attention,
) -> Evidence:
    """Heads of the library's conversion for several numbers of kernels; what fewer heads can do at best."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = torch.randn(1, channels, side, side, generator=draw, dtype=torch.float64)
    many = [1, 2, 4, 8, 16]
    convs = {c: kernels(c, channels, size, draw) for c in many}
    layers = {c: convert(conv) for c, conv in convs.items()}
    heads = {c: layer.attention.heads for c, layer in layers.items()}
    error = {c: best(convs[c].weight, c) for c in many}
    taps = size * size
    found.written(
        "C kernels are C heads",
        all(heads[c] == c for c in many),
        f"{many[0]} or {many[-1]} kernels of {size} × {size}: {heads[many[0]]} heads each time",
    )
    found.written(
        "C heads can do what C kernels do",
        all(error[c] < 1e-9 for c in many),
        f"4 heads in place of 4 kernels are off by {error[4]:.0%} at best",
    )
    found.corrected(
        "K² heads do what any number of K × K kernels does",
        set(heads.values()) == {taps} and max(off(convs[c], layers[c], x) for c in many) < 1e-12,
        f"{taps} heads, one a tap, are the convolution within {max(off(convs[c], layers[c], x) for c in many):.0e} for "
        f"{many[0]} to {many[-1]} kernels",
    )
    _taps(found, layers[4], x)
    least = {c: rank(by_tap(convs[c].weight)) for c in many}
    found.corrected(
        "fewer than the taps have independent matrices do not: a head has one matrix for all taps",
        all(least[c] == min(taps, c * channels) for c in many) and all(of_heads(h, draw) == h for h in (1, 2, 3)),
        f"heads needed at least: {', '.join(f'{least[c]} for {c}' for c in many)} kernels of {channels} channels",
    )
    _without(found, convs[4], layers[4], x)
    counts = list(range(1, taps + 1))
    lines = {f"{c} kernels": (counts, [best(convs[c].weight, h) for h in counts]) for c in many}
    found.draw(f"least error of so many heads for {size} × {size} kernels", lines, x="heads", y="relative error")
    found.numbers |= {"heads": heads[4], "taps": taps, "least error of C heads": list(error.values())}
    return found


def _taps(found: Evidence, layer: AttentionConvolution, x: Tensor) -> None:
    where, peak = layer.looks(x)
    wanted = torch.tensor(layer.shifts, dtype=where.dtype)
    found.corrected(
        "each head looks at one tap's offset alone",
        bool(torch.equal(where, wanted)) and float(peak.min()) == 1.0,
        f"offsets {layer.shifts[0]} … {layer.shifts[-1]}, all their weight there",
    )


def _without(found: Evidence, conv: nn.Conv2d, layer: AttentionConvolution, x: Tensor) -> None:
    """The conversion without its last head."""
    with torch.no_grad():
        layer.kernel.view(*layer.kernel.shape[:2], -1)[..., -1] = 0
    lost = off(conv, layer, x)
    found.control("without one of them they are still the convolution", lost < 1e-12, f"off by {lost:.0%}")


CLAIM = Claim(
    id="head-is-kernel-or-tap",
    sources=("000", "002"),
    statement="Multi-head attention is like the many kernels of a convolution: a head takes the part of a kernel, so "
    "that C kernels are C heads (002). For 000 a head takes the part of one position in the kernel instead.",
    formula=r"N_h = C",
    refuted="A convolution that needs another number of heads than it has kernels.",
    control="K² heads one of which is silenced, asked whether they are the convolution.",
    verdict=FAILS,
    correction="A head takes the part of one tap, as 000 says, with a matrix from all input to all output channels: "
    "K² heads do what any number C of K × K kernels does, and fewer do not once input times output channels are K² or "
    "more, because a head with spread weights has the same matrix at every tap, up to a factor. By rank, at least as "
    "many heads are needed as the taps have independent matrices.",
    check=check,
)
