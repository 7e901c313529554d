"""Checks that weights of one third on three neighbours are a box filter of width 3, except at the borders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, largest_difference, random_normal, randomize
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims.theorems.diagonal_attention_is_1x1_convolution import convolve, missed_by_single_positions
from regard.convolution import to_attention
from regard.masks import Mask, Window

NEIGHBOURS = Window(1)


def box_kernel(matrix: Tensor) -> Tensor:
    """W/3 at each of three taps: ``[out, d, 3]``."""
    return (matrix.mT / 3).unsqueeze(-1).expand(-1, -1, 3)


def check(
    *,
    n: int = 12,
    d: int = 6,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    band: Mask = NEIGHBOURS,
    kernel: Callable[[Tensor], Tensor] = box_kernel,
) -> Evidence:
    """Compare equal scores in a band of three with convolutions of width 3: inside, at the borders, with padding."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    x = random_normal(generator, n, d)
    matrix = random_normal(generator, d, d)

    def average_band(values: Tensor) -> Tensor:
        equal_scores = torch.zeros(1, 1, len(values), 1, dtype=values.dtype)
        return attention_fn(equal_scores, equal_scores, values.view(1, 1, *values.shape), mask=band)[0, 0]

    weights = average_band(torch.eye(n, dtype=torch.float64))
    difference = (average_band(x @ matrix) - convolve(x, kernel(matrix))).abs().amax(-1)
    evidence.add_statement(
        "Weights of ⅓ on i − 1, i, i + 1 are a convolution of width 3 at all positions.",
        float(difference.max()) < 1e-12,
        f"at the borders there are two weights of {float(weights[0, 0]):.3g}, and the outputs differ by "
        f"{float(difference[0]):.2g}",
    )
    expected = torch.ones(n, n, dtype=torch.float64).tril(1).triu(-1) / 3  # a band of three
    weight_error = largest_difference(weights[1:-1], expected[1:-1])
    inside = float(difference[1:-1].max())
    evidence.add_condition(
        "Inside, three weights are ⅓ and all others 0.", weight_error < 1e-12, f"inside, ⅓ within {weight_error:.1e}"
    )
    evidence.add_condition("Inside, the layer is the box filter W/3.", inside < 1e-12, f"inside, within {inside:.1e}")

    # With a zero key at each end, the border rows have three keys too.
    padded = average_band(F.pad(x, (0, 0, 1, 1)) @ matrix)[1:-1]
    padded_difference = (padded - convolve(x, kernel(matrix))).abs().amax(-1)
    padded_error = float(padded_difference.max())
    evidence.add_condition(
        "With a zero at each end, the layer is the box filter at all positions.",
        padded_error < 1e-12,
        f"with zeros at the ends, outputs agree within {padded_error:.1e}",
    )

    # One band cannot be a convolution whose taps differ, but three heads with one tap each can.
    conv = randomize(nn.Conv1d(d, d, 3, padding=1, bias=False), generator)
    with torch.no_grad():
        batch = random_normal(generator, 30, *x.shape)
        averages = torch.stack(list(map(average_band, batch)))
        missed = missed_by_single_positions(averages[:, 1:-1], conv(batch.mT).mT[:, 1:-1])  # without the borders
        three_heads = largest_difference(to_attention(conv)(batch.mT), conv(batch.mT))
    # A control: its statement must be false.
    # The band adds the three neighbours before the matrix is applied, so even the best matrix cannot separate them.
    evidence.add_control("One band head is any convolution of width 3.", missed < 1e-6, f"it misses {missed:.0%}")
    evidence.add_condition(
        "Three heads with one tap each are any convolution of width 3.",
        three_heads < 1e-12,
        f"three heads: outputs agree within {three_heads:.1e}",
    )
    evidence.numbers |= {"missed by one band head": missed, "three heads": three_heads}
    curves = {"without zeros": difference.tolist(), "with zeros": padded_difference.tolist()}
    title = "largest difference from the zero-padded convolution"
    evidence.add_curves(title, range(n), curves, x="position", y="difference")
    evidence.numbers |= {"inside": inside, "at the border": float(difference[0])}
    evidence.numbers["border weight"] = float(weights[0, 0])
    return evidence


CLAIM = Claim(
    id="band-of-thirds-is-convolution-3",
    title="Weights of ⅓ on a position and its neighbours act as a convolution of width 3",
    citations=(("homework-3", "1.3 (e)"),),
    statement="If each position gives weight ⅓ to itself and to both neighbours, attention acts as a convolution of "
    "width 3 with the same weight at each tap.",
    formula=r"A_{ij} = \frac{1}{3} \cdot 1[\,|i - j| \le 1\,] \quad\Rightarrow\quad "
    r"y_i = \sum_{\delta=-1}^{1} x_{i+\delta} \frac{W_V}{3}",
    refuted_by="A position at which the output differs from the convolution's.",
    control="One band head with the best W_V: it must not be able to express a convolution whose three taps differ.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="Away from the borders, such weights act as a box filter of width 3, with W_V/3 at each tap.",
    correction="The position is not at a border, or there is a key of value 0 beside each end. At a border, softmax "
    "gives ½ to each of the two keys that exist, whereas a zero-padded convolution has ⅓. The filter is a box, W_V/3 "
    "at each tap. Taps that differ need one head each.",
    check=check,
)
