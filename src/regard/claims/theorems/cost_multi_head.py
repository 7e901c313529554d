"""Multi-head attention takes Θ(n_t d² + n_s d² + n_t n_s d), line by line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from regard.budget import register
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention

LINES = {
    "q_proj": ("queries, line 2: 2·n_t·d²", lambda t, s, d: 2 * t * d * d),
    "k_proj": ("keys, line 3: 2·n_s·d²", lambda t, s, d: 2 * s * d * d),
    "v_proj": ("values, line 4: 2·n_s·d²", lambda t, s, d: 2 * s * d * d),
    "": ("scores and their mean of values, line 15: 4·n_t·n_s·d", lambda t, s, d: 4 * t * s * d),
    "out_proj": ("output, line 18: 2·n_t·d²", lambda t, s, d: 2 * t * d * d),
}
TERMS: tuple[Callable[..., float], ...] = (
    lambda t, s, d: t * d * d,
    lambda t, s, d: s * d * d,
    lambda t, s, d: t * s * d,
)


def flops(call: Callable[[], Any]) -> dict[str, int]:
    """FLOPs of a call, two a multiply–add, by the last name of the module that took them; "all": together."""
    register()
    with torch.no_grad(), FlopCounterMode(display=False) as seen:
        call()
    found = {str(path).rpartition(".")[2]: sum(ops.values()) for path, ops in seen.get_flop_counts().items()}
    return found | {"all": seen.get_total_flops()}


def fit(
    sizes: Sequence[tuple[int, ...]], counts: Sequence[float], terms: Sequence[Callable[..., float]]
) -> tuple[list[float], float]:
    """The coefficients of ``count = Σ c·term(sizes)`` and the largest relative error that is left.

    Both are rounded: the last bits depend on where in memory the solver works.
    """
    rows = [[term(*size) / count for term in terms] for size, count in zip(sizes, counts, strict=True)]
    given = torch.tensor(rows, dtype=torch.float64)
    ones = torch.ones(len(counts), 1, dtype=torch.float64)
    found = torch.linalg.lstsq(given, ones, driver="gels").solution
    return [round(float(c), 6) + 0.0 for c in found.flatten()], round(float((given @ found - 1).abs().max()), 10)


def by_line(layer: nn.Module, n_t: int, n_s: int, d: int) -> dict[str, int]:
    """Counted FLOPs of cross-attention by line of the program; "": what no projection took."""
    found = flops(lambda: layer(torch.zeros(1, n_t, d), torch.zeros(1, n_s, d)))
    maps = {name: found.get(name, 0) for name in LINES if name}
    return maps | {"": found["all"] - sum(maps.values()), "all": found["all"]}


def as_said(seen: Mapping[tuple[int, int, int], dict[str, int]], line: str) -> bool:
    return all(counted[line] == LINES[line][1](*size) for size, counted in seen.items())


def check(
    *, heads: int = 4, largest: int = 64, seed: int = 0, layer: Callable[..., nn.Module] = MultiHeadAttention
) -> Evidence:
    """Counted FLOPs of the layer with queries and keys of different lengths, beside the document's lines."""
    found = Evidence()
    torch.manual_seed(seed)
    lengths, widths = [(8, 6), (8, 48), (24, 20), (64, 6), (64, 48)], [largest // 4, largest // 2, largest]
    sizes = [(t, s, d) for t, s in lengths for d in widths]
    seen = {(t, s, d): by_line(layer(d, heads), t, s, d) for t, s, d in sizes}
    factors, rest = fit(sizes, [seen[size]["all"] for size in sizes], TERMS)
    found.written(
        "the total is c₁·n_t·d² + c₂·n_s·d² + c₃·n_t·n_s·d and nothing else, with all c above 0",
        rest < 1e-9 and min(factors) > 0.5,
        f"counted FLOPs are {factors[0]:g}·n_t·d² + {factors[1]:g}·n_s·d² + {factors[2]:g}·n_t·n_s·d at "
        f"all of {len(sizes)} sizes",
    )
    for line, (said, _) in LINES.items():
        found.written(said, as_said(seen, line), f"{seen[sizes[-1]][line]:,} at {sizes[-1]}")
    t, s, d = sizes[-1]
    others = {h: by_line(layer(d, h), t, s, d)["all"] for h in (1, 2, d)}
    found.written(
        "with d = h·d_head the number of heads does not matter",
        set(others.values()) == {seen[sizes[-1]]["all"]},
        f"{others[1]:,} with 1 head, {others[d]:,} with {d}",
    )
    shared = {size: by_line(layer(size[2], heads, kv_heads=1), *size) for size in sizes[-3:]}
    found.control("the same lines where all heads share one key head", all(as_said(shared, line) for line in LINES))
    square = [8, 16, 32, 64, 128, 256]
    whole = [by_line(layer(largest, heads), n, n, largest) for n in square]
    names = {"projections": [x["all"] - x[""] for x in whole], "scores and values": [x[""] for x in whole]}
    lines = {name: (square, y) for name, y in names.items()} | {"all": (square, [x["all"] for x in whole])}
    found.draw(f"counted FLOPs, n_t = n_s = n, d = {largest}", lines, x="n", y="FLOPs", log="xy")
    found.numbers |= {"coefficients": factors, "relative error": rest, "sizes": len(sizes)}
    return found


CLAIM = Claim(
    id="cost-multi-head",
    sources=("003",),
    statement="Multi-head attention of n_t queries and n_s keys of width d = h·d_head takes time of the order n_t d² + "
    "n_s d² + n_t n_s d: projections of queries and output, projections of keys and values, scores and weighted sums.",
    formula=r"\Theta\left(n_t d^2 + n_s d^2 + n_t n_s d\right), \qquad d = h d_{head}",
    refuted="A size at which the counted operations of the layer are not this sum with constant factors, or a line of "
    "the program that costs something else.",
    control="A layer whose heads share one key and value head, asked for the same count of each line.",
    verdict=HOLDS,
    check=check,
)
