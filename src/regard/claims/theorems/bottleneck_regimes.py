"""Checks which part of attention costs most: projections up to n* = 2d, scores and weighted sums beyond."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sympy import Symbol
from torch import nn

from regard import budget
from regard.budget import _flops as planned
from regard.budget._model import as_model
from regard.claims._check_helpers import count_flops, projection_flops
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims.theorems.cost_multi_head import flops_by_line
from regard.nn import MultiHeadAttention


def projection_share(layer: nn.Module, n: int, d: int) -> float:
    """The share of a layer's FLOPs that its four projections take."""
    flops = count_flops(lambda: layer(torch.zeros(1, n, d)))
    return projection_flops(flops) / flops["all"]


def crossover_length(layer: nn.Module, d: int) -> int:
    """The smallest n at which projections take at most half of the FLOPs, by bisection; 0 if there is none up to 4d."""
    low = 0
    high = 4 * d  # twice the predicted crossover
    if projection_share(layer, high, d) > 0.5:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        if projection_share(layer, middle, d) > 0.5:
            low = middle
        else:
            high = middle
    return high


def check(
    *,
    heads: int = 4,
    largest: int = 32,
    ratio: int = 8,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
) -> Evidence:
    """Measure shares of counted FLOPs at n far below and far above d, and the length at which both parts are equal."""
    evidence = Evidence()
    torch.manual_seed(seed)
    widths = [largest // 4, largest // 2, largest]
    lengths = [max(largest * k // 8, 1) for k in (1, 4, 16, 64)]
    short = []
    long = []
    crossovers = []
    lines = {}
    for d in widths:
        attention = layer(d, heads)
        short.append(projection_share(attention, max(d // ratio, 1), d))
        long.append(projection_share(attention, ratio * d, d))
        crossovers.append(crossover_length(attention, d))
        lines[f"d = {d}"] = (lengths, [projection_share(attention, n, d) for n in lengths])
    evidence.add_statement(
        f"For large d and short sequences (n = d/{ratio}), projections take most of the FLOPs.",
        min(short) > 0.75,
        f"projections take {min(short):.0%} of the FLOPs at n = d/{ratio} and {max(long):.0%} at n = {ratio}d; they "
        f"take half at n* = {crossovers[-1]} for d = {largest}",
    )
    evidence.add_statement(
        f"For long sequences and small d (n = {ratio}d), scores and weighted sums take most of the FLOPs.",
        max(long) < 0.25,
        f"scores and weighted sums take {1 - max(long):.0%} at n = {ratio}d",
    )
    evidence.add_statement(
        "In between, both take half at n* = 2d.",
        crossovers == [2 * d for d in widths],
        f"n* = {', '.join(map(str, crossovers))} for d = {', '.join(map(str, widths))}",
    )
    symbol = Symbol("D", positive=True)  # the planner works with symbols
    formula = planned.crossover(as_model(budget.attention(symbol, 1)))
    evidence.add_statement("The planner gives the same n*.", formula == 2 * symbol, f"n* = {formula}")

    # A control: its statement must be false.
    # Few queries make scores cheap, but every key and value must still be projected.
    flops = flops_by_line(layer(largest, heads), largest // 2, 64 * largest, largest)
    share = flops[""] / flops["all"]
    evidence.add_control(
        "With few queries (n_t = d/2) on very many keys (n_s = 64d), scores and weighted sums take most of the FLOPs.",
        share > 0.5,
        f"they take {share:.0%}: with n_t ≤ d queries, projecting the keys and values always costs more",
    )
    evidence.add_series("share of the projections in counted FLOPs", lines, x="n", y="share", log="x")
    evidence.numbers |= {"n*": list(map(float, crossovers)), "d": list(map(float, widths))}
    evidence.numbers |= {"short": short, "long": long}
    return evidence


CLAIM = Claim(
    id="bottleneck-regimes",
    title="Projections cost most for short sequences, scores and weighted sums for long ones",
    citations=(("solution-sheet", "2 (d)"),),
    statement="If d is large and sequences are short, the projections of queries, keys, values and output cost most. "
    "If sequences are long and d is small, scores and the weighted sums of values cost most.",
    formula=r"8 n d^2 \ge 4 n^2 d, \qquad n \le n^{*} = 2 d",
    refuted_by="A short sequence at large d for which projections are the smaller part of the counted operations, or "
    "a long sequence at small d for which they are the larger part.",
    control="Cross-attention of few queries on very many keys: scores and weighted sums must not cost most.",
    verdict=HOLDS,
    check=check,
)
