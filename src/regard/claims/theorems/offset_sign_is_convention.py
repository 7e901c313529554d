"""q + Δ or q − Δ: the kernel must be flipped with the sign."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims.claim import FAILS, Claim, Evidence
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic

SHIFTS = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]


def opposite(shifts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """−Δ of each head."""
    return [(-y, -x) for y, x in shifts]


def layer_at(shifts: list[tuple[int, int]], taps: Tensor, side: int) -> MultiHeadAttention:
    """Head h looks at q + shifts[h], with W_v W_out = taps[h], ``taps [9, D_in, D_out]``."""
    many, d_in, d_out = taps.shape
    near = Quadratic(side, side, many, centers=[list(s) for s in shifts], alpha=1e4)
    layer = MultiHeadAttention(
        d_in, many, d_key=1, d_value=d_in, d_out=d_out, out_bias=False, scale=0.0, position=near
    ).double()
    with torch.no_grad():
        layer.v_proj.weight.copy_(torch.eye(d_in).repeat(many, 1))
        layer.out_proj.weight.copy_(taps.flatten(0, 1).mT)
    return layer


def flip(taps: Tensor) -> Tensor:
    """W_{−Δ} in the place of W_Δ."""
    return taps.flip(0)


def check(
    *,
    side: int = 6,
    d: int = 3,
    seed: int = 0,
    turned: Callable[[list[tuple[int, int]]], list[tuple[int, int]]] = opposite,
    flipped: Callable[[Tensor], Tensor] = flip,
) -> Evidence:
    """The same heads at q + Δ and at q − Δ: with any kernel, with the flipped one, and with symmetric ones."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(1, side * side, d, generator=draw, dtype=torch.float64)
    taps = torch.randn(9, d, d, generator=draw, dtype=torch.float64)
    conv = nn.Conv2d(d, d, 3, padding=1, padding_mode="replicate", bias=False).double()

    def apart(kernel: Tensor, other: Tensor) -> float:
        """Between heads at q + Δ with one kernel and heads at q − Δ with another, relative to the former."""
        with torch.no_grad():
            plus, minus = layer_at(SHIFTS, kernel, side)(x), layer_at(turned(SHIFTS), other, side)(x)
        return float((plus - minus).norm() / plus.norm())

    with torch.no_grad():
        conv.weight.copy_(taps.permute(2, 1, 0).unflatten(-1, (3, 3)))
        off = float(
            (layer_at(SHIFTS, taps, side)(x) - conv(x.mT.unflatten(-1, (side, side))).flatten(2).mT).abs().max()
        )
    same = apart(taps, taps)
    found.written(
        "the set of shifts is symmetric, so that q − Δ gives what q + Δ does",
        same < 1e-9,
        f"with the same kernel, outputs at q − Δ differ by {same:.0%} of their norm",
    )
    back = apart(taps, flipped(taps))
    found.corrected("q − Δ with the flipped kernel is q + Δ", back < 1e-12, f"flipped, they agree within {back:.1e}")
    found.corrected("q + Δ is what torch calls convolution", off < 1e-12, f"nn.Conv2d within {off:.1e}")
    _symmetric(found, taps, apart)
    found.numbers |= {"difference, any kernel": same, "flipped": back}
    return found


def _symmetric(found: Evidence, taps: Tensor, apart: Callable[[Tensor, Tensor], float]) -> None:
    """From the drawn kernel to W_Δ = W_{−Δ}, which is blind to the sign; and an edge filter, which is not."""
    shares, seen = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], []
    even, odd = (taps + taps.flip(0)) / 2, (taps - taps.flip(0)) / 2
    for share in shares:
        kernel = even + (1 - share) * odd
        seen.append(apart(kernel, kernel))
    found.corrected(
        "with the same kernel the sign does not matter where W_Δ = W_{−Δ}",
        seen[-1] < 1e-12 and seen == sorted(seen, reverse=True),
        f"symmetric kernels: within {seen[-1]:.1e}",
    )
    edge = torch.zeros_like(taps)
    edge[3], edge[5] = -torch.eye(taps.shape[1]), torch.eye(taps.shape[1])  # x_{right} − x_{left}
    turn = apart(edge, -edge)
    found.corrected(
        "an edge filter changes its sign with that of Δ", turn < 1e-12, f"−1 times itself within {turn:.1e}"
    )
    kept = apart(edge, edge)
    found.control("an edge filter does not see the sign of Δ", kept < 1e-9, f"it differs by {kept:.0%}")
    found.draw("q + Δ against q − Δ", {"the same kernel": (shares, seen)}, x="how symmetric W is", y="difference")
    found.numbers |= {"symmetric": seen[-1], "edge filter": kept}


CLAIM = Claim(
    id="offset-sign-is-convention",
    sources=("000",),
    statement="Whether heads look at q + Δ or q − Δ is a matter of convention, as the set of shifts is symmetric.",
    formula=r"\sum_{\Delta} Z_{q+\Delta} W_\Delta = \sum_{\Delta} Z_{q-\Delta} W_\Delta",
    refuted="A kernel for which both sums differ.",
    control="An edge filter, asked whether it is blind to the sign of the offset.",
    verdict=FAILS,
    correction="The set of shifts is symmetric, the weights on it are not: with the other sign the kernel must be "
    "flipped, W_Δ ↔ W_{−Δ}. q + Δ is what neural networks call convolution (a cross-correlation), q − Δ convolution in "
    "mathematics. Unflipped they agree only for kernels with W_Δ = W_{−Δ}.",
    check=check,
)
