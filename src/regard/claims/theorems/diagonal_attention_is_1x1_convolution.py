"""Checks that diagonal weights are a convolution of width 1, and when weights can be diagonal."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, largest_difference, random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.masks import Mask, Window

ONESELF = Window(0)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of ``x [..., n, d]`` along n with ``weight [out, d, taps]`` and zero padding."""
    return F.conv1d(x.mT, weight, padding=weight.shape[-1] // 2).mT


def missed_by_single_positions(x: Tensor, y: Tensor) -> float:
    """The relative error of the best linear map of single positions from x to y, by least squares over a batch."""
    inputs = x.flatten(0, 1)
    expected = y.flatten(0, 1)
    residual = expected - inputs @ torch.linalg.lstsq(inputs, expected, driver="gels").solution
    return float(residual.norm() / expected.norm())


def check(
    *, n: int = 8, d: int = 8, seed: int = 0, attention_fn: AttentionFn = attention, alone: Mask = ONESELF
) -> Evidence:
    """Measure the weights at finite β, at β = ∞ and under a mask; compare the layer with a convolution of width 1."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    keys = torch.linalg.qr(random_normal(generator, d, d))[0][:n]  # orthonormal rows
    matrix = random_normal(generator, d, d)
    kernel = matrix.mT.unsqueeze(-1)  # [out, d, 1]
    eye = torch.eye(n, dtype=torch.float64)

    def head(x: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attention_fn(x.view(1, 1, n, d), x.view(1, 1, n, d), v.view(1, 1, n, -1), **options)[0, 0]

    betas = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    off_diagonal = [float((head(keys, eye, scale=beta) * (1 - eye)).max()) for beta in betas]
    evidence.add_statement(
        "For orthonormal keys and Q = K, the softmax of finite scores is a diagonal matrix.",
        off_diagonal[-1] == 0,
        f"off the diagonal there is a weight of {off_diagonal[2]:.2g} at β = 4, and of {off_diagonal[-1]:.1e} even at "
        f"β = {betas[-1]:g}",
    )
    hard_weights = head(keys, eye, scale=math.inf)
    evidence.add_condition(
        "At β = ∞ the weights are diagonal; because rows sum to 1, they are the identity.",
        torch.equal(hard_weights, eye),
        f"at β = ∞ the weights are I, with an error of {largest_difference(hard_weights, eye):g}",
    )
    hard_error = largest_difference(head(keys, keys @ matrix, scale=math.inf), convolve(keys, kernel))
    evidence.add_condition(
        "At β = ∞ the layer is a convolution of width 1.", hard_error < 1e-12, f"within {hard_error:.1e}"
    )
    masked_error = 0.0
    for x in random_normal(generator, 3, n, d):
        masked_error = max(masked_error, largest_difference(head(x, x @ matrix, mask=alone), convolve(x, kernel)))
    evidence.add_condition(
        "With a mask that shows each position only itself, this is so for any input.",
        masked_error < 1e-12,
        f"with the mask, outputs agree within {masked_error:.1e}",
    )

    # A control: its statement must be false.
    # A map of single positions cannot see neighbours, so it must miss part of a wider convolution.
    wide_kernel = random_normal(generator, d, d, 3)
    batch = random_normal(generator, 40, n, d)
    missed = missed_by_single_positions(batch, convolve(batch, wide_kernel))
    evidence.add_control(
        "A map of single positions is any width-3 convolution.", missed < 1e-6, f"it misses {missed:.0%}"
    )
    predicted = [1 / (math.exp(beta) + n - 1) for beta in betas]
    if min(off_diagonal) > 0:  # zeros cannot be drawn on a logarithmic axis
        curves = {"measured": off_diagonal, "1/(e^β + n − 1)": predicted}
        evidence.add_curves("largest weight off the diagonal", betas, curves, x="β", y="weight", log="y")
    evidence.numbers |= {"weights off the diagonal": off_diagonal, "largest error under the mask": masked_error}
    evidence.numbers["missed of width 3"] = missed
    return evidence


CLAIM = Claim(
    id="diagonal-attention-is-1x1-convolution",
    title="Diagonal weights make attention a linear map of each position, a 1-D convolution",
    citations=(("homework-3", "1.3 (d)"),),
    statement="If the weights softmax(β KᵀQ) are a diagonal matrix, self-attention is one linear map applied to each "
    "position separately, and should be called a 1-D convolution.",
    formula=r"\operatorname{softmax}(\beta\, Q K^\top) = I \quad\Rightarrow\quad y_i = x_i W_V",
    refuted_by="Weights above 0 off the diagonal, or an output that is not x_i W_V.",
    control="A map of single positions: it must not be able to express every 1-D convolution of width 3.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="If each position sees only itself, by a mask or at β = ∞, attention is a convolution of width 1.",
    correction="β = ∞ and each position's own key has the largest score, or a mask shows each position only itself. "
    "The softmax of finite scores is positive everywhere, so at finite β the weights are never diagonal. Because rows "
    "sum to 1, diagonal weights are the identity, and the layer is a convolution of width 1 (usually called a 1×1 "
    "convolution). It cannot be any other 1-D convolution.",
    check=check,
)
