"""FLOPs of whole models: matrix products, two a multiply–add, masks not exploited unless asked."""

from __future__ import annotations

from collections.abc import Iterator

import sympy
from sympy import Expr, Symbol

from regard.budget.model import Lengths, Model, Placed
from regard.budget.parts import GROUPS, Group, Patches, Product, total
from regard.budget.symbols import Number

__all__ = ["backward", "by_group", "crossover", "decode", "forward", "needed", "recomputation"]


def forward(model: Model, lengths: Lengths) -> Number:
    """FLOPs of one forward pass."""
    return total(times * product.flops for _, times, product in _all(model, lengths))


def needed(model: Model, lengths: Lengths) -> Number:
    """``forward`` on the pairs alone that causal and window masks leave: what a kernel that skips has to do."""
    return total(times * product.needed for _, times, product in _all(model, lengths))


def backward(model: Model, lengths: Lengths) -> Number:
    """FLOPs of the gradients: two products for each one of the forward pass, one for each factor.

    The gradient of the model's input is among them, unless that is token ids or an image. What tiled attention computes
    a second time (its scores) is not: every way to compute attention has the same count.
    """
    return total(
        times * product.flops * (1 if isinstance(placed.part, Patches) else 2)
        for placed, times, product in _all(model, lengths)
    )


def recomputation(model: Model, lengths: Lengths) -> Number:
    """FLOPs of computing every block's forward pass again, which keeping its input alone costs."""
    inside = {id(placed) for stack in model.stacks for placed in stack.blocks}
    return total(times * product.flops for placed, times, product in _all(model, lengths) if id(placed) in inside)


def decode(model: Model, batch: Number, cached: Number, m: Number | None = None) -> Number:
    """FLOPs of one more token for each sequence, after ``cached`` tokens (and a source of m that has been read).

    A new token meets no key that a causal mask would hide, and none beyond its window.
    """
    if not model.writes:
        raise ValueError(f"{model.title} does not write token by token: its attention is not causal")
    return needed(model, Lengths(batch, 1, m, cached))


def by_group(model: Model, lengths: Lengths, *, exploited: bool = False) -> dict[Group, Number]:
    """FLOPs of a forward pass by what they are for: projections, attention, feed-forward, embedding, head."""
    found: dict[Group, Number] = dict.fromkeys(GROUPS, 0)
    for _, times, product in _all(model, lengths):
        found[product.group] = found[product.group] + times * (product.needed if exploited else product.flops)
    return {group: flops for group, flops in found.items() if flops != 0}


def crossover(model: Model, *, exploited: bool = False) -> Expr | None:
    """n* at which attention (scores and values) costs as many FLOPs as everything that is linear in n; None: never.

    ``exploited``: on the pairs alone that causal masks leave; there is no formula for windows then.

    Source and target are equally long. For a block of width D it is ``2·D + D_ff``: 6·D with the usual D_ff = 4·D.
    """
    n = Symbol("n", positive=True)  # not whole: where the two meet need not be a whole number of tokens
    if exploited and any(part.window is not None for _, part in model.attentions):
        return None
    groups = by_group(model, Lengths(1, n, n), exploited=exploited)
    quadratic = groups.pop("attention", 0)
    linear = total(groups.values())
    # a·n² = b·n + c, where c is what a single token costs (a classifier).
    found = [root for root in sympy.solve(sympy.Eq(quadratic, linear), n) if root != 0 and not root.is_negative]
    return sympy.simplify(found[-1]) if found else None


def _all(model: Model, lengths: Lengths) -> Iterator[tuple[Placed, Number, Product]]:
    for placed in model:
        for product in placed.part.products(placed.call(lengths)):
            yield placed, placed.times, product
