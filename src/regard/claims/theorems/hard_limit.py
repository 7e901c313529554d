"""Checks that softmax becomes argmax as β → ∞, if there is one largest score."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, largest_difference
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims._statistics import exponential_rate


def weights(scores: Tensor, beta: float, attention_fn: AttentionFn) -> Tensor:
    """``softmax(β s)`` by the operator: keys s, the query 1, values e_j."""
    return attention_weights(attention_fn, scores.new_ones(1, 1, 1), scores.view(1, -1, 1), scale=beta).flatten()


def check(*, n: int = 8, gap: float = 0.5, seed: int = 0, attention_fn: AttentionFn = attention) -> Evidence:
    """Compare the weights with the one-hot argmax as β grows, without a tie and with one."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(n, generator=generator, dtype=torch.float64) * 2 - 2 - 3 * gap
    scores[2] = 0.0  # the largest score
    scores[5] = -gap  # the second largest
    onehot = torch.eye(n, dtype=torch.float64)[2]

    def error(scores: Tensor, beta: float) -> float:
        return float((weights(scores, beta, attention_fn) - onehot).abs().sum())

    betas = [(10.0 + 2 * k) / gap for k in range(8)]  # large enough that only the second largest score matters
    errors = list(map(partial(error, scores), betas))
    rate = exponential_rate(betas, errors)
    limit = largest_difference(weights(scores, math.inf, attention_fn), onehot)
    evidence.add_condition("With one largest score, β = ∞ gives the argmax.", limit == 0, f"error {limit:g} at β = ∞")
    evidence.add_condition(
        "With one largest score, the error falls as exp(−β·gap).",
        abs(rate.value + gap) < 0.01 * gap,
        f"rate {rate} for a gap of {gap:g}",
    )
    tied = scores.clone()
    tied[5] = 0.0  # now equal to the largest
    half_each = torch.zeros(n, dtype=torch.float64)
    half_each[[2, 5]] = 0.5
    tied_errors = list(map(partial(error, tied), betas))
    tied_limit = error(tied, math.inf)
    shared = largest_difference(weights(tied, math.inf, attention_fn), half_each)
    evidence.add_statement(
        "For any scores, β → ∞ gives the argmax.", tied_limit < 1e-9, f"with a tie the error stays {tied_limit:g}"
    )
    evidence.add_condition("Tied keys share the weight equally in the limit.", shared == 0, f"½ each, error {shared:g}")

    # A control: its statement must be false. At β = 1 every key still has a clear weight.
    soft = error(scores, 1.0)
    evidence.add_control("β = 1 gives the one-hot argmax.", soft < 1e-9, f"error {soft:.3g} at β = 1")
    curves = {"one largest": errors, "a tie": tied_errors}
    evidence.add_curves("Σ |A − argmax| against β", betas, curves, x="β", y="error", log="y")
    evidence.numbers |= {"gap": gap, "rate": rate.value}
    return evidence


CLAIM = Claim(
    id="hard-limit",
    title="As β grows, softmax(β s) becomes the one-hot argmax",
    citations=(("assignment-6", "4.1"), ("homework-3", "1.1 (c)")),
    statement="As the inverse temperature β grows, softmax(β s) becomes the one-hot argmax.",
    formula=r"\lim_{\beta \to \infty} \operatorname{softmax}(\beta s) = e_{\operatorname{argmax}_j s_j}",
    refuted_by="Scores for which the limit is not one-hot.",
    control="β = 1: it must not give the argmax.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="With one largest score, softmax(β s) becomes the one-hot argmax. Tied keys share the weight equally.",
    correction="There is one largest score. The error then falls as exp(−β·gap), where the gap is the distance to the "
    "second largest score. Tied keys share the weight equally.",
    check=check,
)
