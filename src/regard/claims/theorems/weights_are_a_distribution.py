"""Checks that attention weights are ≥ 0 and sum to 1, and what changes the sum: empty rows, sinks, dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, largest_difference, random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims._statistics import mean_interval


def is_distribution(a: Tensor) -> tuple[bool, float]:
    """Whether every row is a distribution, and the largest error of a row's sum."""
    error = float((a.sum(-1) - 1).abs().max())
    return bool((a >= 0).all()) and error < 1e-12, error


def check(
    *,
    n: int = 12,
    d: int = 8,
    heads: int = 3,
    dropout: float = 0.3,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
) -> Evidence:
    """Check sums and signs of the operator's weights: with and without a mask, an empty row, sinks and dropout."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (random_normal(generator, 2, heads, n, d) for _ in range(3))
    visible = torch.rand(2, heads, n, n, generator=generator) < 0.3
    visible[..., 0] = True
    with_empty_row = visible.clone()
    with_empty_row[1, 0, n // 2] = False  # a query that sees only padding
    sums = attention_weights(attention_fn, q, k, mask=with_empty_row).sum(-1)
    evidence.add_statement(
        "The weights of every query sum to 1, whatever is hidden from it.",
        bool((sums - 1).abs().max() < 1e-12),
        f"the weights of a query that sees no key sum to {float(sums[1, 0, n // 2]):g}",
    )

    worst = 0.0
    cases: dict[str, dict[str, Any]] = {
        "no mask": {},
        "a mask that leaves a key": {"mask": visible},
        "β = 9": {"scale": 9.0},
    }
    for name, options in cases.items():
        a = attention_weights(attention_fn, q, k, **options)
        holds, error = is_distribution(a)
        worst = max(worst, error)
        evidence.add_condition(
            f"With {name}, weights are ≥ 0 and sum to 1.", holds, f"with a visible key, sums are 1 within {error:.1e}"
        )
        difference = largest_difference(attention_fn(q, k, v, **options), a @ v)
        evidence.add_condition(
            f"With {name}, the output is the mean of values with these weights.",
            difference < 1e-12,
            f"outputs equal within {difference:.1e}",
        )

    # A sink lowers the sum of every row; dropout changes single rows, but not the mean.
    levels = [-4.0 + step for step in range(9)]
    logsumexp = (q @ k.mT / math.sqrt(d)).logsumexp(-1)
    mean_sums = []
    sink_error = 0.0
    for level in levels:
        sink_sums = attention_weights(attention_fn, q, k, sinks=q.new_full((heads,), level)).sum(-1)
        sink_error = max(sink_error, largest_difference(sink_sums, torch.sigmoid(logsumexp - level)))
        mean_sums.append(float(sink_sums.mean()))
    evidence.add_condition(
        "A sink with the logit c takes its share e^c / (e^c + Σ e^s) of the sum, so without a sink the sum is 1.",
        sink_error < 1e-12 and mean_sums[-1] < 0.9,
        f"with a sink of logit {levels[-1]:g} the mean sum is {mean_sums[-1]:.3g}, within {sink_error:.1e} of the "
        "formula",
    )
    torch.manual_seed(seed)
    row_sums = torch.stack([attention_weights(attention_fn, q, k, dropout=dropout).sum(-1) for _ in range(100)])
    dropout_error = float((row_sums - 1).abs().max())
    mean = mean_interval(row_sums.mean((1, 2, 3)), comparisons=10)
    evidence.add_condition(
        "With dropout the sum is 1 only in the mean, so without dropout each row has the sum 1.",
        dropout_error > 0.1 and mean.contains(1),
        f"with dropout {dropout:g} the sum of a row is wrong by up to {dropout_error:.3g}; the mean sum is {mean}",
    )
    title = "mean sum of a row's weights against a sink's logit"
    evidence.add_curves(title, levels, {"sum": mean_sums}, x="logit", y="sum")

    # A control: its statement must be false. A sigmoid of each score is positive, but nothing makes a row sum to 1.
    holds, error = is_distribution((q @ k.mT / math.sqrt(d)).sigmoid())
    evidence.add_control("A sigmoid of each score gives a distribution.", holds, f"sums are wrong by up to {error:.3g}")
    evidence.numbers |= {"queries": 2 * heads * n, "largest error of a sum": worst}
    evidence.numbers["sum of an empty row"] = float(sums.min())
    return evidence


CLAIM = Claim(
    id="weights-are-a-distribution",
    title="Attention weights are ≥ 0 and sum to 1 for every query",
    citations=(("assignment-6", "1.3"), ("exam-answers", "1 (b)"), ("worked-answers", "(a)")),
    statement="The attention weights of each query are ≥ 0 and sum to 1, so its output is a convex combination of the "
    "values.",
    formula=r"\alpha_{ij} \ge 0, \qquad \sum_{j=1}^{n} \alpha_{ij} = 1, \qquad z_i = \sum_{j=1}^{n} \alpha_{ij} v_j",
    refuted_by="A query with a negative weight, with weights that do not sum to 1, or with an output that is not the "
    "weighted mean of the values.",
    control="Weights by a sigmoid of each score, which need not sum to 1.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="The weights of a query that sees at least one key are ≥ 0 and sum to 1, if there is no sink and no "
    "dropout.",
    correction="The query must see at least one key: if all keys are hidden there is no distribution (the sum is 0 "
    "here, and 0/0 in the formula). Nothing else may take a share: a sink takes one, and with dropout the sum is 1 "
    "only in the mean. A hidden key has weight 0, so weights are ≥ 0 and not all positive.",
    check=check,
)
