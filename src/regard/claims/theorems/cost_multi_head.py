"""Checks, line by line of the document's program, that multi-head attention takes Θ(n_t d² + n_s d² + n_t n_s d)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from regard.claims._check_helpers import count_flops, fit_cost
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention

LINES = {
    "q_proj": ("The queries, line 2, take 2·n_t·d² FLOPs.", lambda t, s, d: 2 * t * d * d),
    "k_proj": ("The keys, line 3, take 2·n_s·d² FLOPs.", lambda t, s, d: 2 * s * d * d),
    "v_proj": ("The values, line 4, take 2·n_s·d² FLOPs.", lambda t, s, d: 2 * s * d * d),
    "": ("The scores and weighted sums, line 15, take 4·n_t·n_s·d FLOPs.", lambda t, s, d: 4 * t * s * d),
    "out_proj": ("The output, line 18, takes 2·n_t·d² FLOPs.", lambda t, s, d: 2 * t * d * d),
}
TERMS = (lambda t, s, d: t * d * d, lambda t, s, d: s * d * d, lambda t, s, d: t * s * d)
Size = tuple[int, int, int]  # n_t, n_s, d


def flops_by_line(layer: nn.Module, n_t: int, n_s: int, d: int) -> dict[str, int]:
    """Counted FLOPs of cross-attention by line of the program; "" is everything outside of the projections."""
    flops = count_flops(lambda: layer(torch.zeros(1, n_t, d), torch.zeros(1, n_s, d)))
    by_line = {name: flops.get(name, 0) for name in LINES if name}
    by_line[""] = flops["all"] - sum(by_line.values())  # what is left is the attention itself
    by_line["all"] = flops["all"]
    return by_line


def matches_formula(counts: Mapping[Size, dict[str, int]], line: str) -> bool:
    """Whether the count of one line equals its formula at every size."""
    return all(by_line[line] == LINES[line][1](*size) for size, by_line in counts.items())


def check(
    *, heads: int = 4, largest: int = 64, seed: int = 0, layer: Callable[..., nn.Module] = MultiHeadAttention
) -> Evidence:
    """Count FLOPs of the layer with queries and keys of different lengths; compare with the document's lines."""
    evidence = Evidence()
    torch.manual_seed(seed)
    counts: dict[Size, dict[str, int]] = {}
    for n_t, n_s in ((8, 6), (8, 48), (24, 20), (64, 6), (64, 48)):
        for d in (largest // 4, largest // 2, largest):
            counts[n_t, n_s, d] = flops_by_line(layer(d, heads), n_t, n_s, d)
    sizes = list(counts)
    last = sizes[-1]
    factors, error = fit_cost(sizes, [by_line["all"] for by_line in counts.values()], TERMS)
    evidence.add_statement(
        "The total is c₁·n_t·d² + c₂·n_s·d² + c₃·n_t·n_s·d and nothing else, with all c above 0.",
        error < 1e-9 and min(factors) > 0.5,
        f"counted FLOPs are {factors[0]:g}·n_t·d² + {factors[1]:g}·n_s·d² + {factors[2]:g}·n_t·n_s·d at "
        f"all of {len(sizes)} sizes",
    )
    for line, (question, _) in LINES.items():
        evidence.add_statement(question, matches_formula(counts, line), f"{counts[last][line]:,} at {last}")
    n_t, n_s, d = last  # the largest size
    totals = {count: flops_by_line(layer(d, count), n_t, n_s, d)["all"] for count in (1, 2, d)}
    evidence.add_statement(
        "With d = h·d_head, the number of heads does not change the total.",
        set(totals.values()) == {counts[last]["all"]},
        f"{totals[1]:,} with 1 head, {totals[d]:,} with {d}",
    )

    # A control: its statement must be false.
    # One shared key head has fewer keys and values to project, so lines 3 and 4 must not match.
    shared = {size: flops_by_line(layer(size[2], heads, kv_heads=1), *size) for size in sizes[-3:]}
    evidence.add_control(
        "The lines are the same if all heads share one key head.", all(matches_formula(shared, line) for line in LINES)
    )
    lengths = [8, 16, 32, 64, 128, 256]
    curves: dict[str, list[int]] = {"projections": [], "scores and values": [], "all": []}
    for n in lengths:
        by_line = flops_by_line(layer(largest, heads), n, n, largest)
        curves["projections"].append(by_line["all"] - by_line[""])
        curves["scores and values"].append(by_line[""])
        curves["all"].append(by_line["all"])
    evidence.add_curves(f"counted FLOPs, n_t = n_s = n, d = {largest}", lengths, curves, x="n", y="FLOPs", log="xy")
    evidence.numbers |= {"coefficients": factors, "relative error": error, "sizes": len(sizes)}
    return evidence


CLAIM = Claim(
    id="cost-multi-head",
    title="Multi-head attention takes Θ(n_t d² + n_s d² + n_t n_s d) operations",
    citations=(("solution-sheet", "2 (c)"),),
    statement="Multi-head attention of n_t queries and n_s keys of width d = h·d_head takes time of the order n_t d² + "
    "n_s d² + n_t n_s d: projections of queries and output, projections of keys and values, scores and weighted sums.",
    formula=r"\Theta\left(n_t d^2 + n_s d^2 + n_t n_s d\right), \qquad d = h d_{head}",
    refuted_by="A size at which the counted operations of the layer are not this sum with constant factors, or a line "
    "of the program with another cost.",
    control="A layer whose heads share one key and value head: its lines must not have the same counts.",
    verdict=HOLDS,
    check=check,
)
