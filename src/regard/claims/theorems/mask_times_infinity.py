"""Checks what a mask multiplied by −∞ does to the weights: 0 · (−∞) is NaN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import attention_weights, largest_difference, random_normal
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.masks import Causal


def as_written(scores: Tensor, mask: Tensor) -> Tensor:
    """The pseudocode: ``softmax(scores + mask × (−∞))``."""
    return (scores + mask * -torch.inf).softmax(-1)


def replace_hidden(scores: Tensor, hidden: Tensor) -> Tensor:
    """The intended formula: the softmax of scores in which hidden ones are replaced by −∞."""
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def check(
    *,
    n: int = 6,
    seed: int = 0,
    masked: Callable[[Tensor, Tensor], Tensor] = as_written,
    corrected: Callable[[Tensor, Tensor], Tensor] = replace_hidden,
) -> Evidence:
    """Apply a causal mask by multiplication and by replacement; compare the weights with the operator's."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    q = random_normal(generator, 1, 1, n, 4)
    k = random_normal(generator, 1, 1, n, 4)
    scores = (q @ k.mT)[0, 0] / 2
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    expected = attention_weights(attention, q, k, mask=Causal(), scale=0.5)[0, 0]

    weights = masked(scores, hidden.to(scores))
    nan_count = int(weights.isnan().sum())
    evidence.add_statement(
        "A mask of 1 for hidden keys and 0 for the others gives the causal weights.",
        bool(torch.allclose(weights, expected)),
        f"{nan_count} of {n * n} weights are NaN, because of 0 × (−∞)",
    )
    document_mask = torch.where(hidden, -torch.inf, 0.0).to(scores)  # the document builds this mask, then multiplies
    infinite = int((document_mask * -torch.inf == torch.inf).sum())
    evidence.add_statement(
        "The document's own mask, −∞ for hidden keys and 0 for the others, gives the causal weights.",
        bool(torch.allclose(masked(scores, document_mask), expected)),
        f"(−∞) × (−∞) = +∞: all {infinite} scores that should be hidden become the largest",
    )
    replaced = corrected(scores, hidden)
    error = largest_difference(replaced, expected)
    evidence.add_correction(
        "−∞ instead of the hidden scores gives the causal weights.",
        error < 1e-12 and not bool(replaced.isnan().any()),
        f"with −∞ instead of hidden scores, weights are within {error:.1e}",
    )

    # A control: its statement must be false. If nothing is hidden, later keys have weights above 0.
    unmasked = corrected(scores, torch.zeros_like(hidden))
    evidence.add_control("A mask that hides nothing gives causal weights.", bool(torch.allclose(unmasked, expected)))

    # A finite number instead of ∞ leaves hidden keys some weight, until rounding removes it.
    sizes = [float(size) for size in range(0, 41, 2)]
    leaks = [largest_difference((scores - size * hidden).softmax(-1), expected) for size in sizes]
    lines = {"mask × (−B)": (sizes, leaks)}
    evidence.add_series("distance to the causal weights with B for ∞", lines, x="B", y="largest difference", log="y")
    evidence.numbers |= {"weights": n * n, "NaN as written": nan_count, "largest error corrected": error}
    return evidence


CLAIM = Claim(
    id="mask-times-infinity",
    title="A mask is applied as scores + mask × (−∞)",
    citations=(("exam-answers", "2 (b)"),),
    statement="A mask is applied as scores + mask × (−∞), with −∞ in the mask for hidden keys and 0 for the others.",
    formula=r"\operatorname{softmax}\left(S + M \times (-\infty)\right)",
    refuted_by="A weight that is NaN, or a hidden key with a weight above 0.",
    control="The corrected formula with a mask that hides nothing: it must not give the causal weights.",
    verdict=FALSE_AS_STATED,
    what_holds="The scores of hidden keys are replaced by −∞, and all other scores stay as they are.",
    correction="0 × (−∞) is NaN, and the document's own mask of −∞ and 0 turns hidden scores into +∞. Hidden scores "
    "are replaced by −∞ instead: s_ij = −∞ if key j is hidden from query i, and all other scores stay as they are.",
    check=check,
)
