"""Checks whether a head corresponds to a kernel of a convolution: it is one tap of all kernels, times a matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import random_normal, randomize
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.convolution import AttentionConvolution, to_attention
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic

KERNELS = (1, 2, 4, 8, 16)  # numbers of kernels that are tried


def random_convolution(kernels: int, channels: int, size: int, generator: torch.Generator) -> nn.Conv2d:
    """A convolution of that many kernels with random weights."""
    return randomize(nn.Conv2d(channels, kernels, size, padding=size // 2, bias=False), generator)


def rows_per_tap(weight: Tensor) -> Tensor:
    """``[out, in, K, K]`` as one row per tap. A single head has the same row at every tap, up to a factor."""
    return weight.detach().flatten(2).permute(2, 0, 1).flatten(1)


def smallest_error(weight: Tensor, heads: int) -> float:
    """The smallest relative error of that many heads whose weights do not depend on content (Eckart and Young)."""
    squares = torch.linalg.svdvals(rows_per_tap(weight)) ** 2
    return round(float((squares[heads:].sum() / squares.sum()).sqrt()), 9)


def rank(rows: Tensor) -> int:
    return int(torch.linalg.matrix_rank(rows, rtol=1e-9))


def rank_of_heads(heads: int, generator: torch.Generator, n: int = 9, channels: int = 3) -> int:
    """The rank of the derivative of a layer's middle output, one row per tap. Its heads spread their weights."""
    centers = random_normal(generator, heads, 2) * 2
    position = Quadratic(1, n, heads, centers=centers, alpha=0.3)  # a small alpha spreads the weights over several taps
    layer = MultiHeadAttention(channels, heads, d_key=1, d_value=channels, scale=0.0, position=position).double()
    for weight in layer.parameters():
        if weight.ndim == 2 and weight.shape[-1] != 2:  # the position's centers stay as they are
            weight.data.copy_(random_normal(generator, *weight.shape))
    x = random_normal(generator, 1, n, channels).requires_grad_()
    middle = layer(x)[0, n // 2]
    derivative = torch.stack([torch.autograd.grad(y, x, retain_graph=True)[0][0] for y in middle])  # [out, n, in]
    return rank(derivative.permute(1, 0, 2).flatten(1))


def relative_difference(conv: nn.Conv2d, layer: nn.Module, x: Tensor) -> float:
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
    """Convert convolutions with several numbers of kernels, and compute what fewer heads can do at best."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # for the layers' own initialisation
    x = random_normal(generator, 1, channels, side, side)
    taps = size * size
    counts = range(1, taps + 1)
    convs = {c: random_convolution(c, channels, size, generator) for c in KERNELS}
    layers = {c: convert(conv) for c, conv in convs.items()}
    heads: dict[int, int] = {}
    errors: dict[int, float] = {}
    ranks: dict[int, int] = {}
    curves = {}
    worst = 0.0
    for c, conv in convs.items():
        heads[c] = layers[c].attention.heads
        errors[c] = smallest_error(conv.weight, c)
        ranks[c] = rank(rows_per_tap(conv.weight))
        curves[f"{c} kernels"] = [smallest_error(conv.weight, count) for count in counts]
        worst = max(worst, relative_difference(conv, layers[c], x))
    evidence.add_statement(
        "C kernels are C heads.",
        list(heads.values()) == list(KERNELS),
        f"1 or {KERNELS[-1]} kernels of {size} × {size}: {heads[1]} heads each time",
    )
    evidence.add_statement(
        "C heads can do what C kernels do.",
        max(errors.values()) < 1e-9,
        f"4 heads instead of 4 kernels have an error of at least {errors[4]:.0%}",
    )
    evidence.add_correction(
        "K² heads do what any number of K × K kernels does.",
        set(heads.values()) == {taps} and worst < 1e-12,
        f"{taps} heads, one per tap, agree with the convolution within {worst:.0e} for 1 to {KERNELS[-1]} kernels",
    )
    offsets, peak = layers[4].measured_offsets(x)
    evidence.add_correction(
        "Each head attends only to the offset of one tap.",
        torch.equal(offsets, torch.tensor(layers[4].shifts, dtype=offsets.dtype)) and float(peak.min()) == 1.0,
        f"offsets {layers[4].shifts[0]} … {layers[4].shifts[-1]}, with all weight there",
    )
    as_predicted = all(ranks[c] == min(taps, c * channels) for c in KERNELS)
    one_matrix_each = all(rank_of_heads(count, generator) == count for count in (1, 2, 3))
    evidence.add_correction(
        "Fewer heads than independent matrices of taps do not: a head has one matrix for all taps.",
        as_predicted and one_matrix_each,
        f"heads needed: {', '.join(f'{ranks[c]} for {c}' for c in KERNELS)} kernels of {channels} channels",
    )

    # A control: its statement must be false.
    # Each head carries one tap, so without the last head that tap must be missing.
    with torch.no_grad():
        layers[4].kernel.view(*layers[4].kernel.shape[:2], -1)[..., -1] = 0
    lost = relative_difference(convs[4], layers[4], x)
    evidence.add_control("Without one head, the rest are the convolution.", lost < 1e-12, f"off by {lost:.0%}")
    title = f"smallest error of heads for {size} × {size} kernels"
    evidence.add_curves(title, counts, curves, x="heads", y="relative error")
    evidence.numbers |= {"heads": heads[4], "taps": taps, "smallest error of C heads": list(errors.values())}
    return evidence


CLAIM = Claim(
    id="head-is-kernel-or-tap",
    title="A head plays the role of one kernel of a convolution",
    citations=(("assignment-6", "3.2.1"), ("homework-3", "1.2 (b)")),
    papers=("cordonnier-2020",),
    statement="Multi-head attention is like the many kernels of a convolution: a head plays the role of a kernel, so C "
    "kernels are C heads (Homework 3). In Assignment 6, a head plays the role of one position in the kernel instead.",
    formula=r"N_h = C",
    refuted_by="A convolution that needs another number of heads than it has kernels.",
    control="K² heads, one of which is silenced: they must not be the convolution.",
    verdict=FALSE_AS_STATED,
    what_holds="A head plays the role of one tap. K² heads do what any number of K × K kernels does.",
    correction="A head plays the role of one tap, as Assignment 6 says, with a matrix from all input to all output "
    "channels. K² heads do what any number C of K × K kernels does. Fewer heads do not, once input times output "
    "channels are K² or more, because a head with spread weights has the same matrix at every tap, up to a factor. By "
    "rank, at least as many heads are needed as the taps have independent matrices.",
    check=check,
)
