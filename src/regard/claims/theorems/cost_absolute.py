"""Absolute positions: N²D² is the cost of one order of evaluation, not of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regard.attention import attention
from regard.budget import ways
from regard.claims.claim import FAILS, Claim, Evidence
from regard.claims.statistics import slope
from regard.claims.theorems.cost_multi_head import fit, flops

Maps = tuple[Tensor, Tensor, Tensor]
TERMS: tuple[Callable[..., float], ...] = (
    lambda n, d: n * n * d * d,
    lambda n, d: n * d * d,
    lambda n, d: n * n * d,
)


def mixed(scores: Tensor, z: Tensor, value: Tensor) -> Tensor:
    """``softmax(scores) (Z W_v)``: the values are projected once in every order."""
    return (scores / math.sqrt(z.shape[-1])).softmax(-1) @ (z @ value)


def entry_by_entry(z: Tensor, maps: Maps) -> Tensor:
    """The document's order: both vectors of every pair are projected for that pair alone."""
    n, d = z.shape
    q = z[:, None].expand(n, n, d).reshape(n * n, d) @ maps[0]
    k = z[None].expand(n, n, d).reshape(n * n, d) @ maps[1]
    return mixed(torch.bmm(q.unsqueeze(1), k.unsqueeze(2)).view(n, n), z, maps[2])


def projected_once(z: Tensor, maps: Maps) -> Tensor:
    """Q = Z W_q and K = Z W_k first, then the operator."""
    q, k, v = (z @ one for one in maps)
    return attention(q[None, None], k[None, None], v[None, None])[0, 0]


def given(n: int, d: int, draw: torch.Generator) -> tuple[Tensor, Maps]:
    """An input and the three matrices of a head."""
    z, *maps = (torch.randn(size, d, generator=draw, dtype=torch.float64) for size in (n, d, d, d))
    query, key, value = (one / math.sqrt(d) for one in maps)  # scores then have a variance of about 1
    return z, (query, key, value)


def check(
    *,
    largest: int = 32,
    seed: int = 0,
    naive: Callable[[Tensor, Maps], Tensor] = entry_by_entry,
    once: Callable[[Tensor, Maps], Tensor] = projected_once,
) -> Evidence:
    """Counted FLOPs of both orders on a grid of N and D: exponents, coefficients, and whether results agree."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    sides = [largest // 8, largest // 4, largest // 2, largest]
    orders = {"entry by entry": naive, "projected once": once}
    counts: dict[str, dict[tuple[int, int], int]] = {name: {} for name in orders}
    far = 0.0
    for n in sides:
        for d in sides:
            z, maps = given(n, d, draw)
            for name, order in orders.items():
                counts[name][n, d] = flops(partial(order, z, maps))["all"]
            far = max(far, float((naive(z, maps) - once(z, maps)).abs().max()))
    _ask(found, sides, counts, far)
    lines = {name: (sides, [counts[name][s, s] for s in sides]) for name in orders}
    found.draw("counted FLOPs of one head, N = D", lines, x="N = D", y="FLOPs", log="xy")
    return found


def _exponent(sides: list[int], counts: list[int]) -> float:
    return slope([math.log(s) for s in sides], [math.log(c) for c in counts]).value


def _ask(found: Evidence, sides: list[int], counts: dict[str, dict[tuple[int, int], int]], far: float) -> None:
    sizes = [(n, d) for n in sides for d in sides]
    fits = {name: fit(sizes, [each[size] for size in sizes], TERMS) for name, each in counts.items()}
    grows = {name: _exponent(sides, [each[s, s] for s in sides]) for name, each in counts.items()}
    once, naive = "projected once", "entry by entry"
    found.written(
        "attention with absolute positions costs N²D² + N²D: with N = D it grows as N⁴",
        grows[once] > 3.5,
        f"projected once the cost grows as N^{grows[once]:.2f} with N = D, not N⁴: as an order it is too large",
    )
    (pairs, maps, scores), rest = fits[once]
    found.corrected(
        "projected once it is Θ(ND² + N²D): no term N²D²",
        rest < 1e-9 and abs(pairs) < 1e-6 and min(maps, scores) > 0.5,
        f"counted {maps:g}ND² + {scores:g}N²D, and {abs(pairs):g}N²D²",
    )
    (pairs, maps, scores), left = fits[naive]
    found.corrected(
        "entry by entry it is Θ(N²D² + N²D)",
        left < 1e-9 and pairs > 0.5 and grows[naive] > 3.5,
        f"entry by entry {pairs:g}N²D² + {maps:g}ND² + {scores:g}N²D",
    )
    found.corrected("both orders give the same outputs", far < 1e-12, f"within {far:.0e}")
    plans = {way.name: way for way in ways()}
    agree = all(
        plans[f"absolute, {name}"].at(n, d, 1, 1)["flops"] == counts[name][n, d] for name in counts for n, d in sizes
    )
    found.corrected("the planner's formulas give the same counts", agree, f"{len(sizes)} sizes")
    found.control(
        "entry by entry it is Θ(ND² + N²D) too",
        fit(sizes, [counts[naive][size] for size in sizes], TERMS[1:])[1] < 1e-9,
        f"it grows as N^{grows[naive]:.2f}",
    )
    found.numbers |= {f"N²D², ND², N²D {name}": fits[name][0] for name in fits}
    found.numbers |= {f"exponent with N = D, {name}": grows[name] for name in grows}


CLAIM = Claim(
    id="cost-absolute",
    sources=("000",),
    statement="Self-attention with absolute positions costs O(N²D² + N²D): D² for each of N² scores, then N²D for the "
    "weighted sums.",
    formula=r"O\left(N^2 D^2 + N^2 + N^2 D\right) = O\left(N^2 D^2 + N^2 D\right)",
    refuted="An order of evaluation with the same outputs whose cost has no term N²D².",
    control="The entry-by-entry order, asked whether ND² + N²D covers its cost.",
    verdict=FAILS,
    correction="N²D² + N²D is the order of one way to evaluate it, which projects both vectors again for every pair. "
    "Projecting queries and keys once gives the same outputs for Θ(ND² + N²D), 6ND² + 4N²D FLOPs for one head with its "
    "values; the document's O is an upper bound on it, and not a tight one.",
    check=check,
)
