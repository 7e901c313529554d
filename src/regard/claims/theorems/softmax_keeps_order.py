"""Checks what softmax preserves: the order and the differences of scores, but not their ratios."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, largest_difference
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence


def weights(scores: Tensor, attention_fn: AttentionFn) -> Tensor:
    """``softmax(s)`` of each row by the operator: query 1, the scores as keys, unit vectors as values."""
    queries = scores.new_ones(len(scores), 1, 1, 1)
    return attention_weights(attention_fn, queries, scores[:, None, :, None], scale=1.0)[:, 0, 0]


def ratios(x: Tensor) -> Tensor:
    """``x_i / x_j`` for all pairs."""
    return x.unsqueeze(-1) / x.unsqueeze(-2)


def differences(x: Tensor) -> Tensor:
    """``x_i − x_j`` for all pairs."""
    return x.unsqueeze(-1) - x.unsqueeze(-2)


def same_order(scores: Tensor, a: Tensor) -> bool:
    """Whether all pairs of scores and of weights have the same order; equal scores need equal weights."""
    return bool((differences(scores).sign() == differences(a).sign()).all())


def check(
    *, n: int = 8, rows: int = 50, shift: float = 5.0, seed: int = 0, attention_fn: AttentionFn = attention
) -> Evidence:
    """Compare ratios, order and differences of scores before and after softmax. Positive scores always have ratios."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, n, generator=generator, dtype=torch.float64) * 3 + 0.5
    a = weights(scores, attention_fn)
    ratio_error = float((ratios(a) / ratios(scores) - 1).abs().max())
    pair = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
    first_ratio = float(ratios(weights(pair, attention_fn))[0, 0, 1])
    shifted_ratio = float(ratios(weights(pair + shift, attention_fn))[0, 0, 1])
    evidence.add_statement(
        "Weights have the same ratios as their scores.",
        ratio_error < 1e-9,
        f"scores 2 : 1 give weights {first_ratio:.3f} : 1, and scores {2 + shift:g} : {1 + shift:g} give "
        f"{shifted_ratio:.3f} : 1",
    )
    equal = scores[:, :1].expand(-1, n)
    evidence.add_correction(
        "The order is kept, and equal scores have equal weights.",
        same_order(scores, a) and same_order(equal, weights(equal, attention_fn)),
        f"all {rows * n * (n - 1)} pairs keep their order",
    )
    log_error = largest_difference(ratios(a).log(), differences(scores))
    evidence.add_correction(
        "a_i / a_j = exp(s_i − s_j)", log_error < 1e-12, f"log-ratios equal the differences within {log_error:.1e}"
    )
    weight_change = largest_difference(weights(scores + shift, attention_fn), a)
    ratio_change = float((ratios(scores + shift) / ratios(scores) - 1).abs().max())
    evidence.add_correction(
        "Adding one number to all scores changes their ratios, but not the weights.",
        weight_change < 1e-12 and ratio_change > 0.1,
        f"scores + {shift:g}: ratios change by up to {ratio_change:.0%}, weights by {weight_change:.1e}",
    )

    # A control: its statement must be false. Squaring centred scores reverses the order of the scores below the mean.
    squared = weights((scores - scores.mean()).square(), attention_fn)
    evidence.add_control("Softmax of the squared centred scores keeps the order.", same_order(scores, squared))
    levels = [step / 4 for step in range(2, 17)]
    pairs = torch.tensor([[level, 1.0] for level in levels], dtype=torch.float64)
    measured = ratios(weights(pairs, attention_fn))[:, 0, 1].tolist()
    curves = {"weights": measured, "scores": levels, "exp(s − 1)": [math.exp(level - 1) for level in levels]}
    evidence.add_curves("the ratio of two weights whose scores are s and 1", levels, curves, x="s", y="ratio", log="y")
    evidence.numbers |= {"ratio of weights for 2 : 1": first_ratio, "largest error of a log-ratio": log_error}
    return evidence


CLAIM = Claim(
    id="softmax-keeps-order",
    title="Softmax preserves the relative magnitudes of scores",
    citations=(("exam-answers", "1 (b)"),),
    statement="Softmax turns scores into a distribution and preserves their relative magnitudes.",
    formula=r"\frac{\alpha_i}{\alpha_j} = \frac{s_i}{s_j}",
    refuted_by="Scores whose weights have another ratio.",
    control="Softmax of the squares of centred scores: the order must not be kept.",
    verdict=FALSE_AS_STATED,
    what_holds="Softmax keeps the order of scores, and turns their differences into ratios of weights.",
    correction="Softmax keeps the order of scores, and turns their differences into ratios: α_i/α_j = exp(s_i − s_j). "
    "Ratios of scores are lost: adding one number to all scores changes their ratios and leaves every weight "
    "unchanged.",
    check=check,
)
