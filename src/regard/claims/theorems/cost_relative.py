"""Scores by relative position alone: N²D_p + N²D, and the projection of values that was left out."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.attention import attention
from regard.budget import ways
from regard.claims.claim import FAILS, Claim, Evidence
from regard.claims.statistics import slope
from regard.claims.theorems.cost_absolute import projected_once
from regard.claims.theorems.cost_multi_head import fit, flops
from regard.positions import Quadratic

TERMS: tuple[Callable[..., float], ...] = (
    lambda n, d, p: n * n * p,
    lambda n, d, p: n * n * d,
    lambda n, d, p: n * d * d,
)


def by_position(z: Tensor, value: Tensor, codes: Tensor, vector: Tensor) -> Tensor:
    """``softmax_k(v·r_{k−q}) (Z W_v)``: codes r ``[N, N, D_p]`` of every pair, one vector v ``[D_p]``."""
    n = len(z)
    scores = (codes.flatten(0, 1) @ vector.unsqueeze(-1)).view(n, n)
    return scores.softmax(-1) @ (z @ value)


def given(n: int, d: int, p: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An input, the matrix of values, codes of all pairs and a head's vector."""
    shapes = ((n, d), (d, d), (n, n, p), (p,))
    z, value, codes, vector = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return z, value, codes, vector


def as_operator(n: int, d: int, draw: torch.Generator, relative: Callable[..., Tensor]) -> float:
    """How far the form v·r is from the operator with the library's quadratic position, D_p = 3, on a line."""
    place = Quadratic(1, n, heads=1, centers=torch.tensor([[0.0, 1.0]], dtype=torch.float64), alpha=0.7).double()
    at = torch.arange(n, dtype=torch.float64)
    delta = torch.stack([torch.zeros(n, n, dtype=torch.float64), at[None] - at[:, None]], -1)
    z, value, _, _ = given(n, d, 3, draw)
    out = relative(z, value, place.features(delta), place.vectors()[0])
    v = (z @ value)[None, None]
    wanted = attention(torch.zeros_like(v), torch.zeros_like(v), v, scale=0.0, bias=place)[0, 0]
    return float((out - wanted).detach().abs().max())


def check(*, largest: int = 32, seed: int = 0, relative: Callable[..., Tensor] = by_position) -> Evidence:
    """Counted FLOPs over N, D and D_p: coefficients, and the exponent of D where D is large."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    sides = [largest // 4, largest // 2, largest]
    sizes = [(n, d, p) for n in sides for d in sides for p in (1, 3, 8)]

    def counted(n: int, d: int, p: int) -> int:
        return flops(lambda: relative(*given(n, d, p, draw)))["all"]

    counts = [counted(*size) for size in sizes]
    widths = [4 * largest, 8 * largest, 16 * largest]
    wide = [counted(8, d, 3) for d in widths]
    power = slope([math.log(d) for d in widths], [math.log(c) for c in wide]).value
    found.written(
        "at a fixed length the cost grows linearly with D",
        power < 1.2,
        f"from D = {widths[0]} to {widths[-1]} at N = 8 it grows as D^{power:.2f}: the values' projection, ND²",
    )
    bare = fit(sizes, counts, TERMS[:2])[1]
    found.written("N²D_p + N²D, with constant factors, is the whole cost", bare < 1e-9, f"off by up to {bare:.0%}")
    factors, rest = fit(sizes, counts, TERMS)
    found.corrected(
        "N²D_p + N²D + ND², with constant factors, is the whole cost",
        rest < 1e-9 and min(factors) > 0.5,
        f"counted {factors[0]:g}N²D_p + {factors[1]:g}N²D + {factors[2]:g}ND²",
    )
    plan = {way.name: way for way in ways()}["relative, no content"]
    agree = all(plan.at(n, d, p, 1)["flops"] == count for (n, d, p), count in zip(sizes, counts, strict=True))
    found.corrected("the planner's formula gives the same counts", agree, f"{len(sizes)} sizes")
    far = as_operator(largest, largest // 2, draw, relative)
    found.corrected("v·r is what the operator computes with this position", far < 1e-12, f"within {far:.0e}")
    z, value, _, _ = given(largest, largest, 1, draw)
    content = flops(lambda: projected_once(z, (value, value, value)))["all"]
    bound = sum(c * term(largest, largest, 3) for c, term in zip(factors, TERMS, strict=True))
    found.control("scores of content cost no more", content <= bound, f"{content:,} FLOPs against {bound:,.0f}")
    _draw(found, [largest // 8, *sides, *widths], counted)
    found.numbers |= {"N²D_p, N²D, ND²": factors, "exponent of D": power, "largest error as written": bare}
    return found


def _draw(found: Evidence, widths: list[int], counted: Callable[[int, int, int], int]) -> None:
    n, p = 8, 3
    whole = [counted(n, d, p) for d in widths]
    said = [2 * n * n * (p + d) for d in widths]
    lines = {"counted": (widths, whole), "2N²D_p + 2N²D": (widths, said)}
    found.draw(f"FLOPs at N = {n}, D_p = {p}", lines, x="D", y="FLOPs", log="xy")


CLAIM = Claim(
    id="cost-relative",
    sources=("000",),
    statement="Self-attention with scores by relative position costs O(N²D_p + N²D), which is linear in D.",
    formula=r"O\left(N^2 D_p + N^2 + N^2 D\right) = O\left(N^2 D_p + N^2 D\right)",
    refuted="Counted operations that grow faster than linearly with D at fixed N and D_p.",
    control="Attention whose scores come from content, asked whether it costs no more.",
    verdict=FAILS,
    correction="The projection of the values, ND², is left out, and it is most of the cost where D is larger than "
    "N: the order is Θ(N²D_p + N²D + ND²), quadratic in D. It is also the cost of scores that know positions "
    "alone; scores that look at content as well cost the projections of queries and keys on top.",
    check=check,
)
