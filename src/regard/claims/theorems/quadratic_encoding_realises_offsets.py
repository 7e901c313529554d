"""Checks that the quadratic encoding gives one-hot attention at an offset as α grows, if that pixel exists."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, largest_difference, random_normal, randomize
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims._statistics import exponential_rate
from regard.convolution import leak, to_attention
from regard.positions import Quadratic

CENTERS = [[float(y), float(x)] for y, x in product((-1, 0, 1), (-1, 0, 1))]


def encoding_weights(
    side: int, alpha: float, attention_fn: AttentionFn, make: Callable[..., Any], centers: list[list[float]]
) -> Tensor:
    """The softmax of the encoding alone, ``[heads, n, n]``."""
    bias = make(side, side, heads=len(centers), centers=centers, alpha=alpha).double()
    zeros = torch.zeros(1, len(centers), side * side, 1, dtype=torch.float64)
    with torch.no_grad():
        return attention_weights(attention_fn, zeros, zeros, bias=bias, scale=0.0)[0]


def one_hot_at_offsets(side: int) -> tuple[Tensor, Tensor]:
    """One-hot weights at the nearest pixel to q + Δ, ``[heads, n, n]``; and whether q + Δ exists, ``[heads, n]``."""
    pixels = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    targets = pixels + torch.tensor(CENTERS).long().unsqueeze(1)  # [heads, n, 2]
    exists = ((targets >= 0) & (targets < side)).all(-1)
    targets = targets.clamp(0, side - 1)
    return F.one_hot(targets[..., 0] * side + targets[..., 1], side * side).double(), exists


def check(
    *,
    side: int = 6,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    make: Callable[..., Any] = Quadratic,
    convert: Callable[..., Any] = to_attention,
) -> Evidence:
    """Measure the distance to one-hot weights inside, at the border, with padded keys, and at half a pixel."""
    evidence = Evidence()
    alphas = [1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0]
    nearest, exists = one_hot_at_offsets(side)
    zero_padded = nearest * exists.unsqueeze(-1)
    inside = []
    border = []
    to_nearest = []
    for alpha in alphas:
        weights = encoding_weights(side, alpha, attention_fn, make, CENTERS)
        distances = (weights - zero_padded).abs().sum(-1)
        inside.append(float(distances[exists].max()))
        border.append(float(distances[~exists].max()))
        to_nearest.append(float((weights - nearest).abs().sum(-1).max()))
    evidence.add_statement(
        "At every query the weights tend to one-hot at the offset, or to 0 if there is no pixel.",
        max(inside[-1], border[-1]) < 1e-4,
        f"at the border Σ|A − one-hot| stays {border[-1]:.3g}: the head attends to the nearest pixel",
    )
    # For small α several other pixels have weight, and the distance is not yet a single exponential.
    rate = exponential_rate(alphas[3:], inside[3:]).value
    evidence.add_condition(
        "If the pixel exists, the distance falls as exp(−α).",
        abs(rate + 1) < 0.01,
        f"if the pixel exists, it is {inside[-1]:.1e} at α = {alphas[-1]:g} and falls as exp({rate:.4f} α)",
    )
    bounded = all(distance <= 2 * leak(alpha, 2) + 1e-12 for alpha, distance in zip(alphas, inside, strict=True))
    evidence.add_condition(
        "The weight of the other pixels is at most 1 − θ(α)^−2 (`leak`).", bounded, f"leak {leak(alphas[-1], 2):.1e}"
    )
    evidence.add_condition(
        "The limit at the border is the nearest pixel.", to_nearest[-1] < 1e-5, f"within {to_nearest[-1]:.1e}"
    )

    # With keys for the padding, a head at the border can attend to a key of value 0.
    generator = torch.Generator().manual_seed(seed)
    x = random_normal(generator, 1, 2, side, side)
    conv = randomize(nn.Conv2d(2, 3, 3, padding=1), generator)
    with torch.no_grad():
        error = largest_difference(convert(conv, alpha=40.0)(x), conv(x))
    evidence.add_condition(
        "With padded keys, the limit is the zero-padded convolution.", error < 1e-12, f"within {error:.1e} at α = 40"
    )
    evidence.numbers["padded keys, α = 40"] = error

    # −α‖δ − Δ‖² = −α‖δ‖² + 2αΔ·δ + constant, so a code of ‖δ‖² and the two parts of δ is enough.
    bias = make(side, side, heads=9, centers=CENTERS, alpha=3.0).double()
    delta = torch.cartesian_prod(torch.arange(-2, 3), torch.arange(-2, 3)).double()
    with torch.no_grad():
        products = bias.vectors() @ bias.features(delta).mT  # [heads, offsets]
        scores = (delta - bias.centers.unsqueeze(1)).square().sum(-1) * -bias.alpha.unsqueeze(1)
        constants = products - scores  # softmax ignores a constant per head
    spread = largest_difference(constants, constants[:, :1])
    evidence.add_condition(
        "The scores are products of width D_p = 3, up to a constant per head.", spread < 1e-12, f"within {spread:.1e}"
    )

    # A control: its statement must be false.
    # Two pixels are equally near to half a pixel, so each must get half of the weight.
    largest = float(encoding_weights(side, 16.0, attention_fn, make, [[0.0, 0.5]])[0, 0].max())
    evidence.add_control(
        "Half a pixel to the right, the weights are one-hot as well.", largest > 1 - 1e-4, f"weights {largest:.3f}"
    )
    curves = {"the pixel exists": inside, "it does not": border, "nearest pixel": to_nearest}
    evidence.add_curves("Σ|A − one-hot| of the worst row", alphas, curves, x="α", y="distance", log="y")
    evidence.numbers |= {"rate": rate, "inside": inside[-1], "border": border[-1]}
    return evidence


CLAIM = Claim(
    id="quadratic-encoding-realises-offsets",
    title="Scores −α‖δ − Δ‖² become one-hot at the offset Δ as α grows",
    citations=(("assignment-6", "4.1"),),
    papers=("cordonnier-2020",),
    statement="Scores −α‖δ − Δ‖², with δ the offset of a key from its query, tend to one-hot attention at the offset "
    "Δ as α grows. This makes a head one tap of a convolution.",
    formula=r"\lim_{\alpha \to \infty} "
    r"\operatorname{softmax}_k\left(-\alpha \lVert \delta_{qk} - \Delta \rVert^2\right)"
    r" \allowbreak = 1[\, k = q + \Delta \,]",
    refuted_by="A query at which the weights do not tend to the pixel at the offset Δ.",
    control="An offset of half a pixel, for which two pixels are equally near: the weights must not be one-hot.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="Scores −α‖δ − Δ‖² become one-hot at Δ if Δ consists of integers and the pixel q + Δ exists.",
    correction="Δ consists of integers and the pixel q + Δ exists. Then the distance falls as exp(−α), with codes of "
    "width D_p = 3. At the border a head attends to the nearest pixel that exists (“replicate” padding); zero padding "
    "needs keys for the padded pixels.",
    check=check,
)
