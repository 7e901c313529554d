"""Checks that, with absolute positions, N²D² is the cost of one order of evaluation and not of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from regard._operator import attention
from regard.budget import alternatives
from regard.claims._check_helpers import count_flops, fit_cost, largest_difference, random_normal
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.claims._statistics import power_law_exponent

Projections = tuple[Tensor, Tensor, Tensor]
Counts = dict[tuple[int, int], int]  # FLOPs by (N, D)
TERMS = (lambda n, d: n * n * d * d, lambda n, d: n * d * d, lambda n, d: n * n * d)


def weighted_values(scores: Tensor, z: Tensor, value: Tensor) -> Tensor:
    """``softmax(scores) (Z W_v)``: every order of evaluation projects the values once."""
    return (scores / math.sqrt(z.shape[-1])).softmax(-1) @ (z @ value)


def entry_by_entry(z: Tensor, maps: Projections) -> Tensor:
    """The document's order: both vectors of every pair are projected for that pair alone."""
    n, d = z.shape
    q = z[:, None].expand(n, n, d).reshape(n * n, d) @ maps[0]
    k = z[None].expand(n, n, d).reshape(n * n, d) @ maps[1]
    return weighted_values(torch.bmm(q.unsqueeze(1), k.unsqueeze(2)).view(n, n), z, maps[2])


def projected_once(z: Tensor, maps: Projections) -> Tensor:
    """Q = Z W_q and K = Z W_k first, then the operator."""
    q = (z @ maps[0])[None, None]
    k = (z @ maps[1])[None, None]
    v = (z @ maps[2])[None, None]
    return attention(q, k, v)[0, 0]


def random_head(n: int, d: int, generator: torch.Generator) -> tuple[Tensor, Projections]:
    """A random input and the three projections of a head."""
    z = random_normal(generator, n, d)
    query, key, value = (random_normal(generator, 3, d, d) / math.sqrt(d)).unbind()  # scores have a variance of about 1
    return z, (query, key, value)


def check(
    *,
    largest: int = 32,
    seed: int = 0,
    naive: Callable[[Tensor, Projections], Tensor] = entry_by_entry,
    once: Callable[[Tensor, Projections], Tensor] = projected_once,
) -> Evidence:
    """Count FLOPs of both orders on a grid of N and D: exponents, coefficients, and whether the results agree."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    sides = [largest // 8, largest // 4, largest // 2, largest]
    counts_naive: Counts = {}
    counts_once: Counts = {}
    difference = 0.0
    for n in sides:
        for d in sides:
            z, maps = random_head(n, d, generator)
            counts_naive[n, d] = count_flops(partial(naive, z, maps))["all"]
            counts_once[n, d] = count_flops(partial(once, z, maps))["all"]
            difference = max(difference, largest_difference(naive(z, maps), once(z, maps)))
    squares_naive = [counts_naive[side, side] for side in sides]  # at N = D
    squares_once = [counts_once[side, side] for side in sides]
    sizes = list(counts_once)
    power_naive = power_law_exponent(sides, squares_naive)
    power_once = power_law_exponent(sides, squares_once)
    evidence.add_statement(
        "Attention with absolute positions costs N²D² + N²D: with N = D, the cost grows as N⁴.",
        power_once > 3.5,
        f"projected once, the cost grows as N^{power_once:.2f} with N = D, not as N⁴: the stated order is too large",
    )
    once_factors, once_error = fit_cost(sizes, list(counts_once.values()), TERMS)
    evidence.add_correction(
        "Projected once, the cost is Θ(ND² + N²D), without a term N²D².",
        once_error < 1e-9 and abs(once_factors[0]) < 1e-6 and min(once_factors[1:]) > 0.5,
        f"counted {once_factors[1]:g}ND² + {once_factors[2]:g}N²D, and {abs(once_factors[0]):g}N²D²",
    )
    naive_factors, naive_error = fit_cost(sizes, list(counts_naive.values()), TERMS)
    evidence.add_correction(
        "Entry by entry, the cost is Θ(N²D² + N²D).",
        naive_error < 1e-9 and naive_factors[0] > 0.5 and power_naive > 3.5,
        f"entry by entry, counted {naive_factors[0]:g}N²D² + {naive_factors[1]:g}ND² + {naive_factors[2]:g}N²D",
    )
    evidence.add_correction("Both orders give the same outputs.", difference < 1e-12, f"within {difference:.0e}")
    planned = {way.name: way for way in alternatives()}  # the formulas of the budget planner
    agree = True
    for name, counts in (("absolute, entry by entry", counts_naive), ("absolute, projected once", counts_once)):
        for (n, d), count in counts.items():
            agree = agree and planned[name].at(n, d, 1, 1)["flops"] == count
    evidence.add_correction("The planner's formulas give the same counts.", agree, f"at {len(sizes)} sizes")

    # A control: its statement must be false.
    # The entry-by-entry order really has the term N²D², so a fit without it must leave an error.
    error = fit_cost(sizes, list(counts_naive.values()), TERMS[1:])[1]
    evidence.add_control(
        "Entry by entry, the cost is Θ(ND² + N²D) too.", error < 1e-9, f"it grows as N^{power_naive:.2f}"
    )
    evidence.numbers |= {"N²D², ND², N²D entry by entry": naive_factors, "N²D², ND², N²D projected once": once_factors}
    evidence.numbers["exponent with N = D, entry by entry"] = power_naive
    evidence.numbers["exponent with N = D, projected once"] = power_once
    curves = {"entry by entry": squares_naive, "projected once": squares_once}
    evidence.add_curves("counted FLOPs of one head, N = D", sides, curves, x="N = D", y="FLOPs", log="xy")
    return evidence


CLAIM = Claim(
    id="cost-absolute",
    title="Attention with absolute positions costs N²D² + N²D",
    citations=(("assignment-6", "2.1"),),
    statement="Self-attention with absolute positions costs O(N²D² + N²D): D² for each of N² scores, then N²D for the "
    "weighted sums.",
    formula=r"O\left(N^2 D^2 + N^2 + N^2 D\right) = O\left(N^2 D^2 + N^2 D\right)",
    refuted_by="An order of evaluation with the same outputs whose cost has no term N²D².",
    control="The entry-by-entry order: ND² + N²D must not cover its cost.",
    verdict=FALSE_AS_STATED,
    what_holds="Projecting queries and keys once costs Θ(ND² + N²D). N²D² comes from projecting them again for every "
    "pair.",
    correction="N²D² + N²D is the cost of one order of evaluation, which projects both vectors again for every pair. "
    "Projecting queries and keys once gives the same outputs in Θ(ND² + N²D), 6ND² + 4N²D FLOPs for one head with its "
    "values. The document's O is an upper bound on that, but not a tight one.",
    check=check,
)
