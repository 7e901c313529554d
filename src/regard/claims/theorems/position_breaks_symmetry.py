"""Learned, sinusoidal and relative positions restore order; a code of distances alone, half of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.nn import Encoder
from regard.positions import ALiBi, Learned, RelativeTable, Rotary, Sinusoidal

SAME = 1e-10


def strong(scheme: Any) -> Any:
    """The scheme with its learned tables as after training: entries of size 1, not of 0.02."""
    for table in scheme.parameters() if isinstance(scheme, nn.Module) else ():
        table.data = table.data * 50 if bool(table.any()) else table.data
    return scheme


def pooled(words: Tensor, position: Any, heads: int, seed: int) -> Tensor:
    """``[n!, d]``: every order of the words ``[n, d]`` through an encoder, the mean over positions."""
    torch.manual_seed(seed)  # one and the same weights for every scheme
    encoder = Encoder(words.shape[-1], heads=heads, layers=2)
    placed = Encoder(words.shape[-1], heads=heads, layers=2, position=position)
    placed.load_state_dict(encoder.state_dict(), strict=False)
    ways = torch.tensor(list(permutations(range(len(words)))))
    with torch.no_grad():
        out: Tensor = placed.double().eval()(words[ways])
    return out.mean(-2)


def distinct(rows: Tensor) -> int:
    """How many of the rows are different ones."""
    same = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") < SAME
    return round(float((1 / same.sum(-1)).sum()))


def check(
    *,
    longest: int = 5,
    d: int = 16,
    heads: int = 2,
    seed: int = 0,
    learned: Callable[[int, int], Any] = Learned,
    sinusoidal: Callable[[int], Any] = Sinusoidal,
    signed: Callable[[int, int], Any] = RelativeTable,
    rotary: Callable[[int], Any] = Rotary,
    distance: Callable[[], Any] = ALiBi,
) -> Evidence:
    """Into how many representations an encoder maps the n! orders of n words, under each scheme."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    longest = max(3, longest)  # the sentence of the document has three words
    words = torch.randn(longest, d, generator=draw, dtype=torch.float64)
    schemes: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "learned": lambda: learned(longest, d),
        "sinusoidal": lambda: sinusoidal(d),
        "relative, signed": lambda: signed(heads, longest),
        "rotary": lambda: rotary(d // heads),
        "relative, distance alone": distance,
    }
    sizes = list(range(2, longest + 1))
    told: dict[str, list[int]] = {name: [] for name in schemes}
    turned: dict[str, float] = {}
    for name, scheme in schemes.items():
        torch.manual_seed(seed + 1)
        position = strong(scheme())
        for n in sizes:
            rows = pooled(words[:n], position, heads, seed)
            told[name].append(distinct(rows))
            if n == 3:  # the first and the last order are each other's reverse: cat chased dog, dog chased cat
                turned[name] = float((rows[0] - rows[-1]).norm())
    every = [math.factorial(n) for n in sizes]
    answer(found, told, every, turned)
    lines = {name: (sizes, counts) for name, counts in told.items()}
    found.draw("orders of n words that are told apart, of n!", lines, x="words", y="representations", log="y")
    found.numbers |= {f"of {every[-1]} orders, {name}": counts[-1] for name, counts in told.items()}
    return found


def answer(found: Evidence, told: dict[str, list[int]], every: list[int], turned: dict[str, float]) -> None:
    """Whether each scheme tells all orders apart."""
    three = 1  # the place of n = 3
    for name, counts in told.items():
        said = (
            f"{name}: 'cat chased dog' and 'dog chased cat' differ by {turned[name]:.2g}, "
            f"{counts[three]} of 6 orders are told apart"
        )
        asked = f"{name}: all orders of the words are told apart"
        if name == "none":
            found.control(asked, counts == every, said)
        else:
            found.written(asked, counts == every, said)
    for name in ("relative, signed", "rotary", "learned", "sinusoidal"):
        said = f"{name}: {told[name][three]} of 6, the two differ by {turned[name]:.2g}"
        found.condition(f"{name}: all orders of the words are told apart", told[name] == every, said)
    half = [count // 2 for count in every]
    blind = told["relative, distance alone"]
    found.condition(
        "distance alone tells apart what is not each other's reverse", blind == half, f"{blind} of {every} orders"
    )


CLAIM = Claim(
    id="position-breaks-symmetry",
    sources=("001",),
    statement="Learned, sinusoidal and relative position encodings, the last of distances between positions, each "
    "restore the order of words: 'cat chased dog' and 'dog chased cat' get different representations.",
    formula=r"\frac{1}{n} \sum_i f(\pi X)_i \ne \frac{1}{n} \sum_i f(X)_i \quad \forall \pi \ne \operatorname{id}",
    refuted="Two orders of the same words with the same representation.",
    control="No position encoding at all, asked whether it tells orders apart.",
    verdict=HOLDS_IF,
    correction="A relative encoding must tell before from after. Learned, sinusoidal, rotary and signed relative codes "
    "tell all n! orders of n different words apart; a code of distances |j − i| alone tells n!/2, since it maps every "
    "sentence and its reverse to the same, and 'dog chased cat' is the reverse of 'cat chased dog'.",
    check=check,
)
