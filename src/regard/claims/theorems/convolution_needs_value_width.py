"""Checks that K² heads can express any K × K convolution only if their values are wide enough."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import one_hot_layer, random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.convolution import to_convolution

KERNEL = 3  # K, the side of the kernel

Factors = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def best_factors(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """``W_v [D_in, D_o]`` and ``W_out [D_o, D_out]`` whose product is nearest to a matrix (Eckart and Young)."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u[..., :width] * s[..., None, :width], v[..., :width, :]


def other_factors(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best W_out for a W_v that keeps the first entries of the input."""
    first_entries = torch.eye(matrix.shape[-2], dtype=matrix.dtype)[:, :width].expand(len(matrix), -1, -1)
    return first_entries, matrix[:, :width]


def check(*, side: int = 6, d: int = 18, low: int = 4, seed: int = 0, factors: Factors = best_factors) -> Evidence:
    """Compare K² heads, built from the best factors, with convolutions of full rank and of rank ``low``."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    heads = KERNEL**2
    usual_width = d // KERNEL**2  # heads share the model width
    x = random_normal(generator, 1, side * side, d)
    low_rank = random_normal(generator, heads, d, low) @ random_normal(generator, heads, low, d)
    full_rank = random_normal(generator, heads, d, d)
    widths = sorted({1, usual_width, low - 1, low, d // 2, d - 1, d})
    errors = {}
    lines = {}
    for name, taps in (("full rank", full_rank), (f"rank {low}", low_rank)):
        errors[name] = {width: relative_errors(taps, width, side, x, factors) for width in widths}
        lines[name] = (widths, [max(error, 1e-16) for error, _ in errors[name].values()])
    bound = smallest_error(full_rank, usual_width)
    output_error, kernel_error = errors["full rank"][usual_width]
    evidence.add_statement(
        f"{heads} heads with D_o = D/K² = {usual_width} are any {KERNEL} × {KERNEL} convolution.",
        output_error < 1e-9,
        f"at D_o = {usual_width} the best layer misses {output_error:.0%} of a random convolution",
    )
    for name, rank in (("full rank", d), (f"rank {low}", low)):
        as_predicted = all((error < 1e-12) == (width >= rank) for width, (error, _) in errors[name].items())
        at_rank = errors[name][rank][0]
        below_rank = errors[name][rank - 1][0]
        evidence.add_condition(
            f"For a kernel of {name}, the layer is exact if and only if D_o ≥ rank W_Δ.",
            as_predicted,
            f"for rank {rank}, the error is {at_rank:.1e} at D_o = {rank} and {below_rank:.2g} at {rank - 1}",
        )
    evidence.add_condition(
        "Below that width, the kernel's error is exactly what the omitted singular values predict.",
        abs(kernel_error - bound) < 1e-9,
        f"the kernel's error is {kernel_error:.4f}, the omitted singular values give {bound:.4f}",
    )

    # A control: its statement must be false.
    # The SVD gives the smallest error of its width, so any other factors must be worse.
    other = relative_errors(full_rank, usual_width, side, x, other_factors)[1]
    evidence.add_control(
        "Other factors of the same width have as small an error.",
        other <= bound + 1e-9,
        f"their error is {other:.4f}, that of the best factors {bound:.4f}",
    )
    evidence.add_series("share of the convolution that the best layer misses", lines, x="D_o", y="error", log="y")
    evidence.numbers["D_o"] = list(map(float, widths))
    for name, by_width in errors.items():
        evidence.numbers[f"missed, {name}"] = [error for error, _ in by_width.values()]
    return evidence


def relative_errors(taps: Tensor, width: int, side: int, x: Tensor, factors: Factors) -> tuple[float, float]:
    """The relative errors of one-hot heads at all offsets of ``taps [K², D_in, D_out]``, with values of one width.

    Returns the error of the outputs, and the error of the kernel that ``to_convolution`` finds.
    """
    count, d_in, d_out = taps.shape
    size = round(count**0.5)
    offsets = range(-(size // 2), size // 2 + 1)
    value, out = factors(taps, width)
    layer = one_hot_layer(product(offsets, offsets), side, out, value)
    # At a border, one-hot heads read the nearest pixel: this is the padding mode "replicate".
    conv = nn.Conv2d(d_in, d_out, size, padding="same", padding_mode="replicate", bias=False).double()
    with torch.no_grad():
        conv.weight.copy_(taps.permute(2, 1, 0).unflatten(-1, (size, size)))
        expected = conv(x.mT.unflatten(-1, (side, side))).flatten(2).mT
        output_error = float((layer(x) - expected).norm() / expected.norm())
        kernel_error = float((to_convolution(layer).weight - conv.weight).norm() / conv.weight.norm())
    return output_error, kernel_error


def smallest_error(taps: Tensor, width: int) -> float:
    """``√(Σ_{Δ, r > D_o} σ_r(W_Δ)² / Σ σ²)``: the smallest error of any factors of that width."""
    squares = torch.linalg.svdvals(taps).square()
    return float((squares[:, width:].sum() / squares.sum()).sqrt())


CLAIM = Claim(
    id="convolution-needs-value-width",
    title="K² heads can express any K × K convolution",
    citations=(("assignment-6", "3.2"),),
    papers=("cordonnier-2020",),
    statement="Multi-head attention with K² heads can express any K × K convolution.",
    formula=r"W_\Delta = W_v^{(h)} W_{out}^{(h)}, \qquad \operatorname{rank} W_\Delta \le D_o",
    refuted_by="A convolution that the best layer of K² heads, with values of some width D_o, cannot express.",
    control="Other factors of the same width: their error must be larger than that of the best ones.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="K² heads can express every K × K convolution whose matrices W_Δ have a rank of at most D_o.",
    correction="Values are as wide as the rank of the kernel's matrices: D_o ≥ rank W_Δ at every offset. For an "
    "arbitrary convolution this is min(D_in, D_out). With the usual D_o = D/K², most of a random convolution is "
    "missed: the smallest relative error is the root of the share of the omitted squared singular values.",
    check=check,
)
