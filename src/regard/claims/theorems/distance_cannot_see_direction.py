"""A code of distances cannot tell a sequence from its reverse; a signed offset can, and so can a causal mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.statistics import slope
from regard.masks import Causal, Mask
from regard.nn import Encoder
from regard.positions import ALiBi, RelativeTable

SAME, CLEAR = 1e-10, 1e-4


def sloped(heads: int, reach: int, lean: float, seed: int) -> RelativeTable:
    """A table of random numbers by distance, plus ``lean`` times random numbers with the sign of the offset."""
    draw = torch.Generator().manual_seed(seed)
    even, odd = torch.randn(2, heads, reach, generator=draw, dtype=torch.float64).unbind()
    table = RelativeTable(heads, reach).double()
    zero = torch.zeros(heads, 1, dtype=torch.float64)
    table.weight.data = torch.cat([(even - lean * odd).flip(-1), zero, even + lean * odd], dim=-1)
    return table


class Seen:
    """Encoders with equal weights under different codes, and how far each is from treating two orders alike."""

    def __init__(self, d: int, heads: int, layers: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.d, self.heads, self.layers = d, heads, layers
        self.weights = Encoder(d, heads=heads, layers=layers).state_dict()

    def __call__(self, x: Tensor, way: Tensor, position: Any = None, mask: Mask | None = None) -> float:
        """``‖f(πX) − πf(X)‖ / ‖f(X)‖``: 0 where the order is not seen."""
        encoder = Encoder(self.d, heads=self.heads, layers=self.layers, position=position)
        encoder.load_state_dict(self.weights, strict=False)
        encoder.double().eval()
        with torch.no_grad():
            y, turned = encoder(x, mask=mask), encoder(x[way], mask=mask)
        return float((turned - y[way]).norm() / y.norm())


def check(
    *,
    n: int = 9,
    d: int = 16,
    heads: int = 2,
    layers: int = 3,
    seed: int = 0,
    distance: Callable[[int], Any] = lambda heads: ALiBi(heads=heads),
    offset: Callable[[int, int, float, int], Any] = sloped,
    causal: Callable[[], Mask] = Causal,
) -> Evidence:
    """A sequence and its reverse through encoders: by distance, by signed offset, under a causal mask."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    see = Seen(d, heads, layers, seed)
    back, swap = torch.arange(n).flip(0), torch.tensor([1, 0, *range(2, n)])
    blind = see(x, back, distance(heads))
    table = see(x, back, sloped(heads, n, 0.0, seed))
    found.written(
        "linear distances (ALiBi): the reverse is seen",
        blind > CLEAR,
        f"by distance a reversal makes a difference of {blind:.1e}",
    )
    found.written("any function of distance: the reverse is seen", table > CLEAR, f"a difference of {table:.1e}")
    signed, late = see(x, back, offset(heads, n, 1.0, seed)), see(x, back, distance(heads), causal())
    found.condition("signed offsets: the reverse is seen", signed > CLEAR, f"by signed offset one of {signed:.2g}")
    found.condition("distances under a causal mask: the reverse is seen", late > CLEAR, f"causal: {late:.2g}")
    leans = [10.0**-k for k in range(6, -1, -1)]
    seen = [see(x, back, offset(heads, n, lean, seed)) for lean in leans]
    floor = [max(one, 1e-18) for one in seen]  # for logarithms
    power = slope([math.log(lean) for lean in leans[:5]], [math.log(one) for one in floor[:5]]).value
    found.condition(
        "what is seen grows in proportion to the signed part",
        abs(power - 1) < 0.01,
        f"as its power {power:.4f}",
    )
    nothing, neighbours = see(x, back), see(x, swap, distance(heads))
    found.control("without any code: the reverse is seen", nothing > CLEAR, f"{nothing:.1e}")
    found.control("distances: a swap of two neighbours goes unseen too", neighbours < SAME, f"{neighbours:.2g}")
    lines = {"what a reversal changes": (leans, floor)}
    found.draw("distance plus a signed part", lines, x="size of the signed part", y="difference", log="xy")
    found.numbers |= {"distance": blind, "signed": signed, "causal": late, "swap of neighbours": neighbours}
    return found


CLAIM = Claim(
    id="distance-cannot-see-direction",
    sources=("000", "001"),
    statement="A relative encoding, scores by the distance between two positions, restores the order of a sequence.",
    formula=r"s_{ij} = q_i^\top k_j + b(|j - i|) \quad \Rightarrow \quad f(RX) \ne R f(X), \qquad (RX)_i = X_{n+1-i}",
    refuted="A sequence whose reverse gets the same vectors, in reverse.",
    control="No encoding, asked whether it sees a reversal; and distances, asked whether they miss a swap.",
    verdict=HOLDS_IF,
    correction="The scores must depend on the sign of the offset j − i, or a causal mask must add it. By distance "
    "alone every sequence and its reverse are treated alike, at any depth and with any weights, though other changes "
    "of order are seen; what is seen of a reversal grows in proportion to the signed part.",
    check=check,
)
