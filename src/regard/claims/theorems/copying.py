"""Copying one value: how much larger than the others its score must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence


def gap_needed(n: int, short: float) -> float:
    """``ln((n − 1)(1 − ε)/ε)``: the lead in score that gives one of n keys the weight 1 − ε, whatever the others do."""
    return math.log((n - 1) * (1 - short) / short)


def output(scores: Tensor, values: Tensor, attend: Callable[..., Any]) -> Tensor:
    """The output at given scores, unscaled as in the document: keys (s_j, 0, 0, 0) and the query (1, 0, 0, 0)."""
    q, k = scores.new_zeros(1, 1, 1, 4), scores.new_zeros(1, 1, len(scores), 4)
    q[..., 0], k[..., 0] = 1.0, scores
    out: Tensor = attend(q, k, values[None, None], scale=1.0)
    return out.flatten()


def weight(scores: Tensor, attend: Callable[..., Any]) -> float:
    """The first key's weight: the output with values e_j."""
    return float(output(scores, torch.eye(len(scores)).to(scores), attend)[0])


def as_written(found: Evidence, n: int, short: float, draw: torch.Generator, attend: Callable[..., Any]) -> float:
    """A score many times the others; and a query that is aligned with one key. Gives the first one's weight."""
    many = torch.full((n,), 0.01, dtype=torch.float64)
    many[0] = 1.0
    got = weight(many, attend)
    found.written(
        "a score 100 times all others gives the copy",
        got >= 1 - short,
        f"a score 100 times the others (1 against 0.01) has the weight {got:.3f} among {n} keys",
    )
    direction = torch.randn(16, generator=draw, dtype=torch.float64)
    direction /= direction.norm()
    aside = torch.randn(16, generator=draw, dtype=torch.float64)
    aside -= (aside @ direction) * direction
    keys = torch.zeros(n, 16, dtype=torch.float64)
    keys[0] = direction  # cosine 1 with the query
    keys[1] = 3 * (direction * 0.6 + 0.8 * aside / aside.norm())  # cosine 0.6, three times as long
    eye = torch.eye(n, dtype=torch.float64).view(1, 1, n, n)
    out = attend(20 * direction.view(1, 1, 1, 16), keys.view(1, 1, n, 16), eye, scale=1.0).flatten()
    found.written(
        "a query in the direction of one key copies that key's value",
        float(out[0]) >= 1 - short,
        f"aligned weight {float(out[0]):.3f}; a key at cosine 0.6, three times as long, has {float(out[1]):.3f}",
    )
    return got


def check(
    *,
    n: int = 8,
    short: float = 0.01,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    needed: Callable[[int, float], float] = gap_needed,
) -> Evidence:
    """≫ as a ratio, as alignment, and as a difference: which of them gives the weight 1 − ε."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    ratio = as_written(found, n, short, draw, attend)
    sizes = [2, n, 8 * n, 64 * n]
    tied, less, spread = [], [], []
    for size in sizes:
        gap = needed(size, short)
        lead = torch.zeros(size, dtype=torch.float64)
        tied.append(weight(lead.index_fill(0, torch.tensor([0]), gap), attend))
        less.append(weight(lead.index_fill(0, torch.tensor([0]), gap - 0.1), attend))
        lower = -3 * torch.rand(size, generator=draw, dtype=torch.float64)  # no two alike, all at least the gap below
        spread.append(weight(lower.index_fill(0, torch.tensor([0]), gap), attend))
    worst = max(abs(x - (1 - short)) for x in tied)
    found.condition(
        "a lead of ln((n−1)(1−ε)/ε) over tied keys gives exactly 1 − ε",
        worst < 1e-9,
        f"a lead of {needed(n, short):.3f} gives {tied[1]:.6f} among {n} keys, error {worst:.0e} for all n",
    )
    found.condition("where the others lie lower, more", min(spread) >= 1 - short, f"{min(spread):.5f} at least")
    found.condition(
        "a lead smaller by 0.1 is not enough when the others tie", max(less) < 1 - short, f"{max(less):.5f} at most"
    )
    lower = -3 * torch.rand(n, generator=draw, dtype=torch.float64)
    lower[0] = needed(n, short)
    values = torch.randn(n, 16, generator=draw, dtype=torch.float64)
    far = float((output(lower, values, attend) - values[0]).norm() / (values - values[0]).norm(dim=-1).max())
    found.condition(
        "the output is then v_j but for ε of the distance between values", far <= short, f"but for {far:.4f}"
    )
    fixed = torch.zeros(64 * n, dtype=torch.float64)
    fixed[0] = needed(n, short)
    lost = weight(fixed, attend)
    found.control(
        f"the lead for {n} keys is enough among {64 * n}", lost >= 1 - short, f"weight {lost:.3f} among {64 * n}"
    )
    draw_curves(found, n, attend)
    found.numbers |= {"n": n, "ε": short, "lead needed": needed(n, short), "weight at a ratio of 100": ratio}
    found.numbers["leads for growing n"] = [needed(size, short) for size in sizes]
    return found


def draw_curves(found: Evidence, n: int, attend: Callable[..., Any]) -> None:
    """Weight of the leading key against its lead, for three numbers of keys."""
    leads = [0.5 * step for step in range(31)]
    lines = {}
    for size in (n, 8 * n, 64 * n):
        base = torch.zeros(size, dtype=torch.float64)
        at = [weight(base.index_fill(0, torch.tensor([0]), lead), attend) for lead in leads]
        lines[f"{size} keys"] = (leads, at)
    found.draw("weight of the leading key, the others tied", lines, x="lead in score", y="weight")


CLAIM = Claim(
    id="copying",
    sources=("004",),
    statement="If one key's score is much larger than all others, in other words if the query is highly aligned with "
    "that key, nearly all weight is on it and the output copies its value.",
    formula=r"k_j^\top q \gg k_i^\top q \ \forall i \ne j \quad \Rightarrow \quad "
    r"c = \sum_{i} \alpha_i v_i \approx v_j",
    refuted="A score many times the others, or a query aligned with one key, and yet a weight that is not close to 1.",
    control="The lead that is enough among n keys, asked of 64 n keys.",
    verdict=HOLDS_IF,
    correction="“Much larger” must mean a difference, not a ratio and not a small angle: the lead over every other "
    "score must be at least ln((n − 1)(1 − ε)/ε), which grows with the number of keys; then the weight is at "
    "least 1 − ε. A longer key at a wider angle outdoes an aligned one.",
    check=check,
)
