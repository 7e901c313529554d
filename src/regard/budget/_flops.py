"""FLOPs of whole models: matrix products only, two per multiply–add."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import sympy
from sympy import Expr, Symbol

from regard._errors import RegardError
from regard.budget._model import Lengths, Model, PlacedPart
from regard.budget._parts import GROUPS, Group, Patches, Product
from regard.budget._symbols import Number


def forward(model: Model, lengths: Lengths) -> Number:
    """FLOPs of one forward pass, masked pairs included."""
    return sum(by_group(model, lengths).values())


def unmasked(model: Model, lengths: Lengths) -> Number:
    """FLOPs of one forward pass that skips the pairs hidden by causal and window masks."""
    return sum(by_group(model, lengths, skip_masked=True).values())


def backward(model: Model, lengths: Lengths) -> Number:
    """FLOPs of the backward pass: two products for each product of the forward pass, one per factor.

    The gradient of the model's input counts, unless the input is token ids or an image. The scores that tiled attention
    computes again do not count, so that every implementation of attention has the same FLOPs.
    """
    flops: Number = 0
    for placed, product in _products(model, lengths):
        factors = 1 if isinstance(placed.part, Patches) else 2  # an image needs no gradient
        flops = flops + placed.repeats * product.flops * factors
    return flops


def recomputation(model: Model, lengths: Lengths) -> Number:
    """FLOPs of the second forward pass through all blocks, which activation checkpointing needs."""
    flops: Number = 0
    for stack in model.stacks:
        for placed, product in _products(stack.blocks, lengths):
            flops = flops + placed.repeats * product.flops
    return flops


def decode(model: Model, batch: Number, cached: Number, m: Number | None = None) -> Number:
    """FLOPs of generating one more token for each sequence, after `cached` tokens and a source of `m` tokens.

    Keys outside a window do not count. The new token sees all other cached keys.
    """
    if not model.generates:
        raise RegardError(f"{model.title} does not generate token by token: its attention is not causal")
    return unmasked(model, Lengths(batch, 1, m, cached))


def by_group(model: Model, lengths: Lengths, *, skip_masked: bool = False) -> dict[Group, Number]:
    """FLOPs of a forward pass by group: projections, attention, feed-forward, embedding, logits."""
    groups: dict[Group, Number] = dict.fromkeys(GROUPS, 0)
    for placed, product in _products(model, lengths):
        flops = product.unmasked_flops if skip_masked else product.flops
        groups[product.group] = groups[product.group] + placed.repeats * flops
    return {group: flops for group, flops in groups.items() if flops != 0}


def crossover(model: Model, *, skip_masked: bool = False) -> Expr | None:
    """The length n* at which attention costs as many FLOPs as everything that is linear in n; None if it never does.

    Source and target have the same length. For a block of width D, n* is ``2·D + D_ff``: 6·D with the usual D_ff = 4·D.

    - `skip_masked`: count only the pairs that causal masks do not hide. Models with windows have no such formula: None.
    """
    if skip_masked and any(
        (part.window, part.chunk, part.band) != (None, None, None) for _, part in model.attention_parts
    ):
        return None
    # Not an integer symbol: the two costs need not be equal at a whole number of tokens.
    n = Symbol("n", positive=True)
    groups = by_group(model, Lengths(1, n, n), skip_masked=skip_masked)
    quadratic = groups.pop("attention", 0)
    linear = sum(groups.values())

    # a·n² = b·n + c, where c is the cost of a part with a single row (a classifier).
    roots = [root for root in sympy.solve(sympy.Eq(quadratic, linear), n) if root != 0 and not root.is_negative]
    if not roots:
        return None
    return sympy.simplify(roots[-1])


def _products(parts: Iterable[PlacedPart], lengths: Lengths) -> Iterator[tuple[PlacedPart, Product]]:
    for placed in parts:
        for product in placed.part.products(placed.call(lengths)):
            yield placed, product
