"""Checks how much larger than all others a score must be, so that the output copies one value."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence


def required_lead(n: int, short: float) -> float:
    """``ln((n − 1)(1 − ε)/ε)``: the lead in score that gives one of n keys at least the weight 1 − ε."""
    return math.log((n - 1) * (1 - short) / short)


def output_at(scores: Tensor, values: Tensor, attention_fn: AttentionFn) -> Tensor:
    """The output at given scores, without a scale: keys (s_j, 0, 0, 0) and the query (1, 0, 0, 0)."""
    q = scores.new_zeros(1, 1, 1, 4)
    k = scores.new_zeros(1, 1, len(scores), 4)
    q[..., 0] = 1.0
    k[..., 0] = scores
    return attention_fn(q, k, values[None, None], scale=1.0).flatten()


def first_weight(scores: Tensor, attention_fn: AttentionFn) -> float:
    """The weight of the first key: the output with values e_j."""
    return float(output_at(scores, torch.eye(len(scores)).to(scores), attention_fn)[0])


def weight_with_lead(others: Tensor, lead: float, attention_fn: AttentionFn) -> float:
    """The weight of the first key if its score is ``lead`` and the rest are as given."""
    return first_weight(others.index_fill(0, torch.tensor([0]), lead), attention_fn)


def check(
    *,
    n: int = 8,
    short: float = 0.01,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    needed: Callable[[int, float], float] = required_lead,
) -> Evidence:
    """Test three meanings of ≫: a ratio, an alignment, and a difference. Which of them gives the weight 1 − ε?"""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    scores = torch.full((n,), 0.01, dtype=torch.float64)
    scores[0] = 1.0
    ratio_weight = first_weight(scores, attention_fn)
    evidence.add_statement(
        "A score that is 100 times all others gives the copy.",
        ratio_weight >= 1 - short,
        f"a score of 1 against 0.01 for the others, 100 times as much, has the weight {ratio_weight:.3f} among {n} "
        "keys",
    )

    # The second key has a wider angle to the query, but its length gives it the larger score.
    direction = random_normal(generator, 16)
    direction /= direction.norm()
    aside = random_normal(generator, 16)
    aside -= (aside @ direction) * direction  # orthogonal to the query
    keys = torch.zeros(n, 16, dtype=torch.float64)
    keys[0] = direction  # cosine 1 with the query
    keys[1] = 3 * (direction * 0.6 + 0.8 * aside / aside.norm())  # cosine 0.6, three times as long
    out = attention_weights(attention_fn, 20 * direction.view(1, 1, 16), keys[None], scale=1.0).flatten()
    evidence.add_statement(
        "A query in the direction of one key copies that key's value.",
        float(out[0]) >= 1 - short,
        f"the aligned key has the weight {float(out[0]):.3f}; a key at cosine 0.6 that is three times as long has "
        f"{float(out[1]):.3f}",
    )

    # A difference: the lead over all other scores.
    counts = [2, n, 8 * n, 64 * n]
    leads = [needed(count, short) for count in counts]
    tied = []
    smaller_lead = []
    lower = []
    for count, lead in zip(counts, leads, strict=True):
        zeros = torch.zeros(count, dtype=torch.float64)
        tied.append(weight_with_lead(zeros, lead, attention_fn))
        smaller_lead.append(weight_with_lead(zeros, lead - 0.1, attention_fn))
        # These scores differ from each other, and all of them are below 0.
        scores = -3 * torch.rand(count, generator=generator, dtype=torch.float64)
        lower.append(weight_with_lead(scores, lead, attention_fn))
    worst = max(abs(weight - (1 - short)) for weight in tied)
    evidence.add_condition(
        "A lead of ln((n−1)(1−ε)/ε) over equal scores gives exactly the weight 1 − ε.",
        worst < 1e-9,
        f"a lead of {leads[1]:.3f} gives {tied[1]:.6f} among {n} keys, with an error of {worst:.0e} over all n",
    )
    evidence.add_condition("If others are lower, the weight is larger.", min(lower) >= 1 - short, f"≥ {min(lower):.5f}")
    evidence.add_condition(
        "A lead that is smaller by 0.1 is not enough.", max(smaller_lead) < 1 - short, f"≤ {max(smaller_lead):.5f}"
    )
    scores = -3 * torch.rand(n, generator=generator, dtype=torch.float64)
    scores[0] = needed(n, short)  # the exact lead
    values = random_normal(generator, n, 16)
    distance = (output_at(scores, values, attention_fn) - values[0]).norm() / (values - values[0]).norm(dim=-1).max()
    evidence.add_condition(
        "The output is then v_j, up to ε times the distance between values.",
        float(distance) <= short,
        f"the output is off by {float(distance):.4f} of that distance",
    )

    # A control: its statement must be false.
    # The required lead grows with the number of keys, so a lead that suffices for few keys is too small for many.
    weight_among_many = weight_with_lead(torch.zeros(64 * n, dtype=torch.float64), needed(n, short), attention_fn)
    evidence.add_control(
        f"The lead for {n} keys is enough among {64 * n} keys.",
        weight_among_many >= 1 - short,
        f"the weight is {weight_among_many:.3f} among {64 * n} keys",
    )
    shown_leads = [0.5 * step for step in range(31)]
    curves = {}
    for count in (n, 8 * n, 64 * n):
        zeros = torch.zeros(count, dtype=torch.float64)
        curves[f"{count} keys"] = [weight_with_lead(zeros, lead, attention_fn) for lead in shown_leads]
    evidence.add_curves(
        "weight of the leading key, the others equal", shown_leads, curves, x="lead in score", y="weight"
    )
    evidence.numbers |= {"n": n, "ε": short, "lead needed": needed(n, short), "weight at a ratio of 100": ratio_weight}
    evidence.numbers["leads for growing n"] = leads
    return evidence


CLAIM = Claim(
    id="copying",
    title="A query that is highly aligned with one key copies its value",
    citations=(("worked-answers", "(a)"),),
    statement="If one key's score is much larger than all others, that is, if the query is highly aligned with that "
    "key, nearly all weight is on it and the output copies its value.",
    formula=r"k_j^\top q \gg k_i^\top q \ \forall i \ne j \quad \Rightarrow \quad "
    r"c = \sum_{i} \alpha_i v_i \approx v_j",
    refuted_by="A score many times the others, or a query aligned with one key, with a weight that is not close to 1.",
    control="The lead that is enough among n keys: it must not be enough among 64 n keys.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="A key whose score leads all others by at least ln((n − 1)(1 − ε)/ε) has a weight of at least 1 − ε.",
    correction="“Much larger” means a difference, not a ratio and not a small angle: the lead over every other score "
    "is at least ln((n − 1)(1 − ε)/ε), which grows with the number of keys. Then the weight is at least 1 − ε. A "
    "longer key at a wider angle can have a larger score than an aligned one.",
    check=check,
)
