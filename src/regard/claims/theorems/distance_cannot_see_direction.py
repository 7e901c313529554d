"""Checks that distances cannot tell a sequence from its reverse, but signed offsets or a causal mask can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.claims._check_helpers import random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims._statistics import power_law_exponent
from regard.masks import Causal, Mask
from regard.nn import Encoder
from regard.positions import ALiBi, RelativeTable

SAME = 1e-10  # rounding
CLEAR = 1e-4  # far above rounding


def random_table(heads: int, reach: int, signed_part: float, seed: int) -> RelativeTable:
    """A table of random numbers by distance, plus ``signed_part`` times random numbers with the sign of the offset."""
    by_distance, by_sign = random_normal(torch.Generator().manual_seed(seed), 2, heads, reach).unbind()
    table = RelativeTable(heads, reach).double()
    zero = torch.zeros(heads, 1, dtype=torch.float64)
    negative = (by_distance - signed_part * by_sign).flip(-1)
    positive = by_distance + signed_part * by_sign
    table.weight.data = torch.cat([negative, zero, positive], dim=-1)
    return table


class OrderTest:
    """Measures how much encoders with equal weights, but different position codes, notice a change of order."""

    def __init__(self, d: int, heads: int, layers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.build_encoder = partial(Encoder, d, heads=heads, layers=layers)
        self.weights = self.build_encoder().state_dict()

    def __call__(self, x: Tensor, order: Tensor, position: Any = None, mask: Mask | None = None) -> float:
        """``‖f(πX) − πf(X)‖ / ‖f(X)‖``: 0 if the encoder does not notice the order."""
        encoder = self.build_encoder(position=position)
        encoder.load_state_dict(self.weights, strict=False)  # strict=False: the position code has parameters of its own
        encoder.double().eval()
        with torch.no_grad():
            y = encoder(x, mask=mask)
            reordered = encoder(x[order], mask=mask)
        return float((reordered - y[order]).norm() / y.norm())


def check(
    *,
    n: int = 9,
    d: int = 16,
    heads: int = 2,
    layers: int = 3,
    seed: int = 0,
    distance: Callable[[int], Any] = lambda heads: ALiBi(heads=heads),
    offset: Callable[[int, int, float, int], Any] = random_table,
    causal: Callable[[], Mask] = Causal,
) -> Evidence:
    """Run a sequence and its reverse through encoders: by distance, by signed offset, and under a causal mask."""
    evidence = Evidence()
    x = random_normal(torch.Generator().manual_seed(seed), n, d)
    measure = OrderTest(d, heads, layers, seed)
    reverse = torch.arange(n).flip(0)
    swap = torch.tensor([1, 0, *range(2, n)])  # only the first two change places
    linear = measure(x, reverse, distance(heads))
    table = measure(x, reverse, random_table(heads, n, 0.0, seed))
    evidence.add_statement(
        "Linear distances (ALiBi) notice a reversal.",
        linear > CLEAR,
        f"by distance, a reversal makes a difference of {linear:.1e}",
    )
    evidence.add_statement(
        "Any function of distance notices a reversal.", table > CLEAR, f"a difference of {table:.1e}"
    )
    signed = measure(x, reverse, offset(heads, n, 1.0, seed))
    masked = measure(x, reverse, distance(heads), causal())
    evidence.add_condition(
        "Signed offsets notice a reversal.", signed > CLEAR, f"by signed offset, a difference of {signed:.2g}"
    )
    evidence.add_condition(
        "Distances with a causal mask notice a reversal.", masked > CLEAR, f"a difference of {masked:.2g}"
    )
    signed_parts = [10.0**-k for k in range(6, -1, -1)]
    differences = []
    for signed_part in signed_parts:
        # The lower limit is for the logarithms.
        differences.append(max(measure(x, reverse, offset(heads, n, signed_part, seed)), 1e-18))
    power = power_law_exponent(signed_parts[:5], differences[:5])
    evidence.add_condition(
        "The difference is proportional to the signed part.", abs(power - 1) < 0.01, f"as its power {power:.4f}"
    )

    # Controls: their statements must be false.
    # Without positions all orders look alike. Distances do notice a swap, because it changes some distances.
    no_code = measure(x, reverse)
    swapped = measure(x, swap, distance(heads))
    evidence.add_control(
        "An encoder without any code notices a reversal.", no_code > CLEAR, f"a difference of {no_code:.1e}"
    )
    evidence.add_control(
        "Distances do not notice a swap of neighbours.", swapped < SAME, f"a difference of {swapped:.2g}"
    )
    lines = {"what a reversal changes": (signed_parts, differences)}
    evidence.add_series("distance plus a signed part", lines, x="size of the signed part", y="difference", log="xy")
    evidence.numbers |= {"distance": linear, "signed": signed, "causal": masked, "swap of neighbours": swapped}
    return evidence


CLAIM = Claim(
    id="distance-cannot-see-direction",
    title="Scores that depend on the distance of two positions restore the order",
    citations=(("assignment-6", "2.2"), ("exam-answers", "1 (d)")),
    papers=("shaw-2018",),
    statement="A relative encoding, which adds a score for the distance of two positions, restores the order of a "
    "sequence.",
    formula=r"s_{ij} = q_i^\top k_j + b(|j - i|) \quad \Rightarrow \quad f(RX) \ne R f(X), \qquad (RX)_i = X_{n+1-i}",
    refuted_by="A sequence whose reverse gets the same vectors, in reverse.",
    control="No encoding: it must not notice a reversal. Distances: they must notice a swap.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="Scores that depend on the sign of the offset restore the order, and so do distances with a causal "
    "mask.",
    correction="The scores depend on the sign of the offset j − i, or there is a causal mask. With distances alone, "
    "every sequence and its reverse are treated alike, at any depth and with any weights, although other changes of "
    "order are noticed. The effect of a reversal grows in proportion to the signed part.",
    check=check,
)
