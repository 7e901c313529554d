"""Short and wide: projections cost most; long and narrow: scores and weighted sums. They meet at n* = 2d."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sympy import Symbol
from torch import nn

from regard import budget
from regard.budget import flops as planned
from regard.budget.model import as_model
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.claims.theorems.cost_multi_head import by_line, flops
from regard.nn import MultiHeadAttention


def share(layer: nn.Module, n: int, d: int) -> float:
    """The part of a layer's FLOPs that its four projections take."""
    found = flops(lambda: layer(torch.zeros(1, n, d)))
    return sum(found.get(f"{name}_proj", 0) for name in ("q", "k", "v", "out")) / found["all"]


def meet(layer: nn.Module, d: int) -> int:
    """The least n at which projections take no more than half, by halving the interval; 0 where there is none."""
    low, high = 0, 4 * d
    if share(layer, high, d) > 0.5:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if share(layer, middle, d) > 0.5 else (low, middle)
    return high


def check(
    *,
    heads: int = 4,
    largest: int = 32,
    ratio: int = 8,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
) -> Evidence:
    """Shares of counted FLOPs at n far below and far above d, and where the two halves meet."""
    found = Evidence()
    torch.manual_seed(seed)
    widths = [largest // 4, largest // 2, largest]
    short = [share(layer(d, heads), max(d // ratio, 1), d) for d in widths]
    long = [share(layer(d, heads), ratio * d, d) for d in widths]
    meets = [meet(layer(d, heads), d) for d in widths]
    found.written(
        f"large d, short sequences (n = d/{ratio}): projections take most",
        min(short) > 0.75,
        f"projections take {min(short):.0%} of the FLOPs at n = d/{ratio} and {max(long):.0%} at n = {ratio}d; halves "
        f"meet at n* = {meets[-1]} for d = {largest}",
    )
    found.written(
        f"long sequences, small d (n = {ratio}d): scores and weighted sums take most",
        max(long) < 0.25,
        f"scores and weighted sums take {1 - max(long):.0%} at n = {ratio}d",
    )
    found.written(
        "between the two they meet once, at n* = 2d",
        meets == [2 * d for d in widths],
        f"n* = {', '.join(map(str, meets))} for d = {', '.join(map(str, widths))}",
    )
    letter = Symbol("D", positive=True)
    formula = planned.crossover(as_model(budget.attention(letter, 1)))
    found.written("the planner's n* is the same", formula == 2 * letter, f"n* = {formula}")
    few = by_line(layer(largest, heads), largest // 2, 64 * largest, largest)
    part = few[""] / few["all"]
    found.control(
        "few queries (n_t = d/2) on very many keys (n_s = 64d): scores and weighted sums take most",
        part > 0.5,
        f"{part:.0%}: keys and values are projected too, and with n_t ≤ d queries that is always more",
    )
    lengths = [max(largest * k // 8, 1) for k in (1, 4, 16, 64)]
    lines = {}
    for d in widths:
        lines[f"d = {d}"] = (lengths, [share(layer(d, heads), n, d) for n in lengths])
    found.draw("share of the projections in counted FLOPs", lines, x="n", y="share", log="x")
    found.numbers |= {"n*": [float(n) for n in meets], "d": [float(d) for d in widths], "short": short, "long": long}
    return found


CLAIM = Claim(
    id="bottleneck-regimes",
    sources=("003",),
    statement="Where d is large and sequences are short, the projections of queries, keys, values and output cost "
    "most; where sequences are long and d is small, scores and the weighted sums of values do.",
    formula=r"8 n d^2 \ge 4 n^2 d, \qquad n \le n^{*} = 2 d",
    refuted="A short sequence at large d for which projections are the smaller part of the counted operations, or "
    "a long one at small d for which they are the larger part.",
    control="Cross-attention of few queries on very many keys, asked whether scores and sums cost most.",
    verdict=HOLDS,
    check=check,
)
