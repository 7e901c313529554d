"""Checks the cost of scores by relative position alone: N²D_p + N²D, plus the projection of the values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product, starmap

import torch
from torch import Tensor

from regard._operator import attention
from regard.budget import alternatives
from regard.claims._check_helpers import count_flops, fit_cost, largest_difference, random_normal
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.claims._statistics import power_law_exponent
from regard.claims.theorems.cost_absolute import projected_once
from regard.positions import Quadratic

TERMS = (lambda n, d, p: n * n * p, lambda n, d, p: n * n * d, lambda n, d, p: n * d * d)


def by_position(z: Tensor, value: Tensor, codes: Tensor, vector: Tensor) -> Tensor:
    """``softmax_k(v·r_{k−q}) (Z W_v)``: codes r ``[N, N, D_p]`` of every pair, one vector v ``[D_p]``."""
    n = len(z)
    scores = (codes.flatten(0, 1) @ vector.unsqueeze(-1)).view(n, n)
    return scores.softmax(-1) @ (z @ value)


def random_head(n: int, d: int, p: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random input, value projection, codes of all pairs, and head vector."""
    z = random_normal(generator, n, d)
    value = random_normal(generator, d, d)
    codes = random_normal(generator, n, n, p)
    return z, value, codes, random_normal(generator, p)


def difference_from_operator(n: int, d: int, generator: torch.Generator, relative: Callable[..., Tensor]) -> float:
    """How much the form v·r differs from the operator with the library's quadratic position, D_p = 3, on a line."""
    position = Quadratic(1, n, heads=1, centers=torch.tensor([[0.0, 1.0]], dtype=torch.float64), alpha=0.7).double()
    indices = torch.arange(n, dtype=torch.float64)
    offsets = torch.stack([torch.zeros(n, n, dtype=torch.float64), indices[None] - indices[:, None]], -1)
    z, value, _, _ = random_head(n, d, 3, generator)
    out = relative(z, value, position.features(offsets), position.vectors()[0])
    v = (z @ value)[None, None]
    expected = attention(torch.zeros_like(v), torch.zeros_like(v), v, scale=0.0, bias=position)[0, 0]
    return largest_difference(out, expected)


def check(*, largest: int = 32, seed: int = 0, relative: Callable[..., Tensor] = by_position) -> Evidence:
    """Count FLOPs over N, D and D_p: the coefficients of the terms, and the exponent of D if D is large."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    sides = [largest // 4, largest // 2, largest]
    sizes = list(product(sides, sides, (1, 3, 8)))

    def flops(n: int, d: int, p: int) -> int:
        return count_flops(lambda: relative(*random_head(n, d, p, generator)))["all"]

    counts = list(starmap(flops, sizes))
    widths = [4 * largest, 8 * largest, 16 * largest]  # far above N = 8, where the term ND² dominates
    power = power_law_exponent(widths, [flops(8, d, 3) for d in widths])
    evidence.add_statement(
        "At a fixed length the cost grows linearly with D.",
        power < 1.2,
        f"from D = {widths[0]} to {widths[-1]} at N = 8, the cost grows as D^{power:.2f}, because projecting the "
        f"values costs ND²",
    )
    stated_error = fit_cost(sizes, counts, TERMS[:2])[1]
    evidence.add_statement(
        "N²D_p + N²D, with factors, is the whole cost.", stated_error < 1e-9, f"off by up to {stated_error:.0%}"
    )
    factors, error = fit_cost(sizes, counts, TERMS)
    evidence.add_correction(
        "N²D_p + N²D + ND², with constant factors, is the whole cost.",
        error < 1e-9 and min(factors) > 0.5,
        f"counted {factors[0]:g}N²D_p + {factors[1]:g}N²D + {factors[2]:g}ND²",
    )
    plan = next(way for way in alternatives() if way.name == "relative, no content")
    agree = all(plan.at(n, d, p, 1)["flops"] == count for (n, d, p), count in zip(sizes, counts, strict=True))
    evidence.add_correction("The planner's formula gives the same counts.", agree, f"at {len(sizes)} sizes")
    difference = difference_from_operator(largest, largest // 2, generator, relative)
    evidence.add_correction(
        "The operator computes v·r with this position.", difference < 1e-12, f"within {difference:.0e}"
    )

    # A control: its statement must be false.
    # Scores by content need two more projections, so they must cost more than scores by position.
    z, value, _, _ = random_head(largest, largest, 1, generator)
    content = count_flops(lambda: projected_once(z, (value, value, value)))["all"]
    position = sum(factor * term(largest, largest, 3) for factor, term in zip(factors, TERMS, strict=True))
    evidence.add_control("Scores by content cost no more.", content <= position, f"{content:,} against {position:,.0f}")
    shown = [largest // 8, *sides, *widths]
    curves = {"counted": [flops(8, d, 3) for d in shown], "2N²D_p + 2N²D": [2 * 8 * 8 * (3 + d) for d in shown]}
    evidence.add_curves("FLOPs at N = 8, D_p = 3", shown, curves, x="D", y="FLOPs", log="xy")
    evidence.numbers |= {"N²D_p, N²D, ND²": factors, "exponent of D": power, "largest error as stated": stated_error}
    return evidence


CLAIM = Claim(
    id="cost-relative",
    title="Attention with relative positions costs N²D_p + N²D, which is linear in D",
    citations=(("assignment-6", "2.2"),),
    statement="Self-attention with scores by relative position costs O(N²D_p + N²D), which is linear in D.",
    formula=r"O\left(N^2 D_p + N^2 + N^2 D\right) = O\left(N^2 D_p + N^2 D\right)",
    refuted_by="Counted operations that grow faster than linearly with D at fixed N and D_p.",
    control="Attention with scores by content: it must cost more.",
    verdict=FALSE_AS_STATED,
    what_holds="With the projection of the values, the cost is Θ(N²D_p + N²D + ND²), which is quadratic in D.",
    correction="The projection of the values, ND², is left out, and it is most of the cost if D is larger than N. The "
    "order is Θ(N²D_p + N²D + ND²), quadratic in D. This is the cost of scores by position alone. Scores that depend "
    "on content too also need the projections of queries and keys.",
    check=check,
)
