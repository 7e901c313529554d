"""Checks that random heads have a composition score near 1/√D, and not 0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.claims._check_helpers import random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims._statistics import mean_interval

Score = Callable[[Tensor, Tensor], Tensor]
Heads = Callable[[torch.Generator, int, int, int], tuple[Tensor, Tensor]]


def composition(written: Tensor, read: Tensor) -> Tensor:
    """``‖A B‖ / (‖A‖ ‖B‖)`` of matrices ``[*, D, D]``."""
    return (written @ read).norm(dim=(-2, -1)) / (written.norm(dim=(-2, -1)) * read.norm(dim=(-2, -1)))


def random_heads(generator: torch.Generator, samples: int, d: int, d_head: int) -> tuple[Tensor, Tensor]:
    """The OV matrices of earlier heads and the QK matrices of later ones, products of random factors."""
    matrices = []
    for _ in range(2):
        left = random_normal(generator, samples, d, d_head)
        right = random_normal(generator, samples, d_head, d)
        matrices.append(left @ right)
    return matrices[0], matrices[1]


def check(
    *,
    d: int = 32,
    d_head: int = 4,
    samples: int = 400,
    seed: int = 0,
    score: Score = composition,
    heads: Heads = random_heads,
) -> Evidence:
    """Measure the composition of random heads, of heads that match, and of heads that cannot compose."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    written, read = heads(generator, samples, d, d_head)
    squares = score(written, read).square()
    root = float(squares.mean().sqrt())
    evidence.add_statement(
        "The root mean square of the scores of random heads is 1/√D, within 5%.",
        abs(root * d**0.5 - 1) < 0.05,
        f"{root:.3f} over {samples} pairs of heads of width {d_head}; 1/√{d} = {d**-0.5:.3f}",
    )
    # Controls: their statements must be false. The later head reads exactly what the earlier one writes …
    matched = float(score(written, written.mT).square().mean().sqrt())
    evidence.add_control(
        "A head that reads exactly what the earlier head writes has the same score.",
        abs(matched * d**0.5 - 1) < 0.05,
        f"it has {matched:.3f}",
    )
    # … or nothing of it.
    directions = torch.linalg.qr(written.mT[..., :d_head])[0]
    blind = read - directions @ (directions.mT @ read)
    unread = float(score(written, blind).square().mean().sqrt())
    evidence.add_control(
        "A head that reads nothing of what the earlier head writes has the same score.",
        abs(unread * d**0.5 - 1) < 0.05,
        f"it has {abs(round(unread, 9)):.3f}",
    )
    evidence.numbers |= {"root mean square": root, "1/√D": d**-0.5}
    widths = [max(d // 2, d_head), d, 2 * d]
    rows = []
    for width in widths:
        of_width = score(*heads(generator, samples // 4, width, d_head))
        rows.append((float(width), *mean_interval(of_width)))
    lines = {
        "random heads": list(map(list, zip(*rows, strict=True))),
        "1/√D": (widths, [width**-0.5 for width in widths]),
    }
    evidence.add_series("composition of random heads", lines, x="D", y="score", log="xy")
    return evidence


CLAIM = Claim(
    id="composition-has-a-baseline",
    title="Composition scores of random heads are not 0: their baseline is 1/√D",
    citations=(("circuits-article", "Two-layer model"),),
    statement="The composition of two heads, ‖W₁ W₂‖ / (‖W₁‖ ‖W₂‖), is not 0 for heads that have nothing to do with "
    "each other, so a random baseline has to be subtracted. The root mean square over random heads is 1/√D.",
    formula=r"\mathbb{E} \, \frac{\left\| W_1 W_2 \right\|^2}{\left\| W_1 \right\|^2 \left\| W_2 \right\|^2} = "
    r"\frac{1}{D}",
    refuted_by="Random heads whose root mean square score differs from 1/√D by more than 5%.",
    control="Heads that read exactly what the earlier ones write, and heads that read nothing of it.",
    verdict=HOLDS,
    check=check,
)
