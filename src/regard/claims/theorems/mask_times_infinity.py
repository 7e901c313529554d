"""A mask times −∞: 0 · (−∞) is no number."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import FAILS, Claim, Evidence
from regard.masks import Causal


def as_written(scores: Tensor, mask: Tensor) -> Tensor:
    """The pseudocode: ``softmax(scores + mask × (−∞))``."""
    return (scores + mask * -torch.inf).softmax(-1)


def filled(scores: Tensor, hidden: Tensor) -> Tensor:
    """What is meant: −∞ where hidden, the score elsewhere."""
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def check(
    *,
    n: int = 6,
    seed: int = 0,
    masked: Callable[[Tensor, Tensor], Tensor] = as_written,
    corrected: Callable[[Tensor, Tensor], Tensor] = filled,
) -> Evidence:
    """A causal mask by multiplication and by filling, beside the operator; and the document's own mask of −∞ and 0."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, 1, n, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    scores = (q @ k.mT)[0, 0] / 2
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    eye = torch.eye(n, dtype=torch.float64).view(1, 1, n, n)
    wanted = attention(q, k, eye, mask=Causal(), scale=0.5)[0, 0]

    weights = masked(scores, hidden.to(scores))
    lost = int(weights.isnan().sum())
    found.written(
        "a mask of 1 where hidden and 0 elsewhere gives the causal weights",
        bool(torch.allclose(weights, wanted)),
        f"{lost} of {n * n} weights are NaN: 0 × (−∞)",
    )
    own = torch.where(hidden, -torch.inf, 0.0).to(scores)  # the document builds this mask first, then multiplies
    raised = int((own * -torch.inf == torch.inf).sum())
    found.written(
        "the document's own mask, −∞ where hidden and 0 elsewhere, gives the causal weights",
        bool(torch.allclose(masked(scores, own), wanted)),
        f"(−∞) × (−∞) = +∞: all {raised} scores that should be hidden become the largest",
    )
    good = corrected(scores, hidden)
    far = float((good - wanted).abs().max())
    found.corrected(
        "−∞ in the place of hidden scores gives the causal weights",
        far < 1e-12 and not bool(good.isnan().any()),
        f"filled in, weights are within {far:.1e}",
    )
    found.control(
        "nothing hidden gives the causal weights", bool(torch.allclose(corrected(scores, hidden & False), wanted))
    )
    _draw(found, scores, hidden, wanted)
    found.numbers |= {"weights": n * n, "NaN as written": lost, "largest error corrected": far}
    return found


def _draw(found: Evidence, scores: Tensor, hidden: Tensor, wanted: Tensor) -> None:
    """Any finite number in the place of ∞ leaves something of what is hidden, until it is lost to rounding."""
    sizes = [float(step) for step in range(0, 41, 2)]
    leaks = [float(((scores - size * hidden).softmax(-1) - wanted).abs().max()) for size in sizes]
    lines = {"mask × (−B)": (sizes, leaks)}
    found.draw("distance to the causal weights with B for ∞", lines, x="B", y="largest difference", log="y")


CLAIM = Claim(
    id="mask-times-infinity",
    sources=("001",),
    statement="A mask is applied as scores + mask × (−∞), with −∞ in the mask where a key is hidden and 0 elsewhere.",
    formula=r"\operatorname{softmax}\left(S + M \times (-\infty)\right)",
    refuted="A weight that is not a number, or a hidden key with a weight above 0.",
    control="The corrected form with nothing hidden.",
    verdict=FAILS,
    correction="0 × (−∞) is not a number, and with the document's own mask of −∞ and 0 hidden scores become +∞. Hidden "
    "scores are replaced by −∞: s_ij = −∞ where key j is hidden from query i, and left alone elsewhere.",
    check=check,
)
