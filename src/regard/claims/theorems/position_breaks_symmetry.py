"""Checks that learned, sinusoidal and relative positions show the order of words; distances alone hide direction."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.nn import Encoder
from regard.positions import ALiBi, Learned, RelativeTable, Rotary, Sinusoidal

SAME = 1e-10  # representations closer than this count as equal
DISTANCE = "relative, distance alone"


def enlarge_tables(position: Any) -> Any:
    """The position encoding with learned tables as large as after training: entries of size 1, not 0.02."""
    if isinstance(position, nn.Module):
        for table in position.parameters():
            table.data = table.data * 50
    return position


def pooled_outputs(words: Tensor, position: Any, heads: int, seed: int) -> Tensor:
    """The outputs ``[n!, d]`` of an encoder for every order of the words ``[n, d]``, averaged over positions."""
    torch.manual_seed(seed)  # the same weights for every position encoding
    encoder = Encoder(words.shape[-1], heads=heads, layers=2)
    with_position = Encoder(words.shape[-1], heads=heads, layers=2, position=position)
    with_position.load_state_dict(encoder.state_dict(), strict=False)
    orders = torch.tensor(list(permutations(range(len(words)))))
    with torch.no_grad():
        out: Tensor = with_position.double().eval()(words[orders])
    return out.mean(-2)


def count_distinct(rows: Tensor) -> int:
    """How many different rows there are."""
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
    """Count the different representations of the n! orders of n words, for each position encoding."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    longest = max(3, longest)  # the sentence of the document has three words
    words = random_normal(generator, longest, d)
    encodings: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "learned": lambda: learned(longest, d),
        "sinusoidal": lambda: sinusoidal(d),
        "relative, signed": lambda: signed(heads, longest),
        "rotary": lambda: rotary(d // heads),
        DISTANCE: distance,
    }
    sizes = list(range(2, longest + 1))
    distinct: dict[str, list[int]] = {}
    reversal: dict[str, float] = {}
    for name, make in encodings.items():
        torch.manual_seed(seed + 1)
        position = enlarge_tables(make())
        outputs = [pooled_outputs(words[:n], position, heads, seed) for n in sizes]
        distinct[name] = [count_distinct(rows) for rows in outputs]
        # The first and the last order of three words are each other's reverse: cat chased dog, dog chased cat.
        three_words = outputs[1]
        reversal[name] = float((three_words[0] - three_words[-1]).norm())

    total = [math.factorial(n) for n in sizes]
    for name, counts in distinct.items():
        question = f"{name}: all orders of the words have different representations."
        description = (
            f"{name}: 'cat chased dog' and 'dog chased cat' differ by {reversal[name]:.2g}, and {counts[1]} of 6 "
            "orders are distinguished"
        )
        if name == "none":  # without positions an encoder sees only the set of words
            # A control: its statement must be false.
            evidence.add_control(question, counts == total, description)
        else:
            evidence.add_statement(question, counts == total, description)
    for name in ("relative, signed", "rotary", "learned", "sinusoidal"):
        evidence.add_condition(
            f"{name}: all orders of the words have different representations.",
            distinct[name] == total,
            f"{name}: {distinct[name][1]} of 6, and the two sentences differ by {reversal[name]:.2g}",
        )
    evidence.add_condition(
        "Distances alone distinguish all orders that are not each other's reverse.",
        distinct[DISTANCE] == [count // 2 for count in total],
        f"{distinct[DISTANCE]} of {total} orders",
    )
    title = "orders of n words that are told apart, of n!"
    evidence.add_curves(title, sizes, distinct, x="words", y="representations", log="y")
    evidence.numbers |= {f"of {total[-1]} orders, {name}": counts[-1] for name, counts in distinct.items()}
    return evidence


CLAIM = Claim(
    id="position-breaks-symmetry",
    title="Learned, sinusoidal and relative positions each restore the order of words",
    citations=(("exam-answers", "1 (d)"),),
    papers=("vaswani-2017", "shaw-2018"),
    statement="Learned, sinusoidal and relative position encodings (relative ones use distances between positions) "
    "each restore the order of words: 'cat chased dog' and 'dog chased cat' get different representations.",
    formula=r"\frac{1}{n} \sum_i f(\pi X)_i \ne \frac{1}{n} \sum_i f(X)_i \quad \forall \pi \ne \operatorname{id}",
    refuted_by="Two orders of the same words with the same representation.",
    control="No position encoding at all: it must not distinguish orders.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="Learned, sinusoidal and signed relative positions restore the order of words. Distances alone miss a "
    "reversal.",
    correction="A relative encoding distinguishes before from after. Learned, sinusoidal, rotary and signed relative "
    "encodings distinguish all n! orders of n different words. An encoding of distances |j − i| alone distinguishes "
    "n!/2, because it gives every sentence and its reverse the same representation, and 'dog chased cat' is the "
    "reverse of 'cat chased dog'.",
    check=check,
)
