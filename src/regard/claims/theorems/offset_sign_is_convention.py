"""Checks that heads at q − Δ need the flipped kernel to give the output of heads at q + Δ."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import largest_difference, one_hot_layer, random_normal
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence

Shifts = list[tuple[int, int]]
SHIFTS: Shifts = list(product((-1, 0, 1), (-1, 0, 1)))


def negate(shifts: Shifts) -> Shifts:
    """−Δ for each head."""
    return [(-y, -x) for y, x in shifts]


def flip(taps: Tensor) -> Tensor:
    """W_{−Δ} instead of W_Δ."""
    return taps.flip(0)


def check(
    *,
    side: int = 6,
    d: int = 3,
    seed: int = 0,
    negated: Callable[[Shifts], Shifts] = negate,
    flipped: Callable[[Tensor], Tensor] = flip,
) -> Evidence:
    """Compare heads at q + Δ and at q − Δ: with any kernel, with the flipped one, and with symmetric ones."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    x = random_normal(generator, 1, side * side, d)
    taps = random_normal(generator, 9, d, d)  # one matrix per head
    conv = nn.Conv2d(d, d, 3, padding=1, padding_mode="replicate", bias=False).double()

    def difference(kernel: Tensor, other: Tensor) -> float:
        """The relative difference between heads at q + Δ with ``kernel`` and heads at q − Δ with ``other``."""
        with torch.no_grad():
            plus = one_hot_layer(SHIFTS, side, kernel)(x)
            minus = one_hot_layer(negated(SHIFTS), side, other)(x)
        return float((plus - minus).norm() / plus.norm())

    with torch.no_grad():
        conv.weight.copy_(taps.permute(2, 1, 0).unflatten(-1, (3, 3)))
        expected = conv(x.mT.unflatten(-1, (side, side))).flatten(2).mT
        conv_error = largest_difference(one_hot_layer(SHIFTS, side, taps)(x), expected)
    same_kernel = difference(taps, taps)
    evidence.add_statement(
        "The set of shifts is symmetric, so q − Δ gives the same output as q + Δ.",
        same_kernel < 1e-9,
        f"with the same kernel, outputs at q − Δ differ by {same_kernel:.0%} of their norm",
    )
    flipped_kernel = difference(taps, flipped(taps))
    evidence.add_correction(
        "q − Δ with the flipped kernel is q + Δ.",
        flipped_kernel < 1e-12,
        f"with the flipped kernel, they agree within {flipped_kernel:.1e}",
    )
    evidence.add_correction("q + Δ is what torch calls a convolution.", conv_error < 1e-12, f"within {conv_error:.1e}")

    # From a random kernel to one with W_Δ = W_{−Δ}, for which the sign does not matter.
    shares = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    even_part = (taps + taps.flip(0)) / 2
    odd_part = (taps - taps.flip(0)) / 2
    differences = []
    for share in shares:
        kernel = even_part + (1 - share) * odd_part
        differences.append(difference(kernel, kernel))
    evidence.add_correction(
        "With the same kernel, the sign does not matter if W_Δ = W_{−Δ}.",
        differences[-1] < 1e-12 and differences == sorted(differences, reverse=True),
        f"symmetric kernels: within {differences[-1]:.1e}",
    )

    # The edge filter, x_right − x_left, is antisymmetric: the opposite offsets must change its sign.
    edge = torch.zeros_like(taps)
    edge[3] = -torch.eye(taps.shape[1])
    edge[5] = torch.eye(taps.shape[1])
    negative_edge = difference(edge, -edge)
    evidence.add_correction(
        "An edge filter changes its sign with the sign of Δ.",
        negative_edge < 1e-12,
        f"it is −1 times itself within {negative_edge:.1e}",
    )
    same_edge = difference(edge, edge)
    # A control: its statement must be false.
    evidence.add_control(
        "An edge filter's output does not depend on the sign of Δ.", same_edge < 1e-9, f"difference {same_edge:.0%}"
    )
    evidence.add_series(
        "q + Δ against q − Δ", {"the same kernel": (shares, differences)}, x="how symmetric W is", y="difference"
    )
    evidence.numbers |= {"symmetric": differences[-1], "edge filter": same_edge}
    evidence.numbers |= {"difference, any kernel": same_kernel, "flipped": flipped_kernel}
    return evidence


CLAIM = Claim(
    id="offset-sign-is-convention",
    title="Attending to q + Δ or to q − Δ is a matter of convention",
    citations=(("assignment-6", "3.2"),),
    statement="Whether heads attend to q + Δ or to q − Δ is a matter of convention, because the set of shifts is "
    "symmetric.",
    formula=r"\sum_{\Delta} Z_{q+\Delta} W_\Delta = \sum_{\Delta} Z_{q-\Delta} W_\Delta",
    refuted_by="A kernel for which the two sums differ.",
    control="An edge filter: its output must depend on the sign of the offset.",
    verdict=FALSE_AS_STATED,
    what_holds="With the other sign, the kernel must be flipped: W_Δ ↔ W_{−Δ}.",
    correction="The set of shifts is symmetric, but the weights on it are not: with the other sign the kernel must be "
    "flipped, W_Δ ↔ W_{−Δ}. q + Δ is what neural networks call a convolution (a cross-correlation), q − Δ is the "
    "convolution of mathematics. Without the flip they agree only for kernels with W_Δ = W_{−Δ}.",
    check=check,
)
