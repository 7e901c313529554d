"""Time by part: ``t = max(FLOPs / peak, bytes / bandwidth)`` a product, bytes / bandwidth for what lies between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from regard.budget.attending import Attention
from regard.budget.machine import Machine
from regard.budget.memory import OPTIMIZERS, bytes_of
from regard.budget.model import Lengths, Model, Placed
from regard.budget.parts import Call, Dropout, FeedForward, Group, Norm, Part, Product

__all__ = ["Spent", "read", "spent", "update"]


@dataclass(frozen=True)
class Spent:
    """Seconds of one part, all its layers together, and which side of the roofline they lie on."""

    placed: Placed | None  # None: the optimizer's update
    group: Group | str
    seconds: float
    arithmetic: float  # of those seconds, how many products are bound by arithmetic and not by memory


def spent(
    model: Model, lengths: Lengths, machine: Machine, dtype: str, weights: str | None = None, *, training: bool = False
) -> list[Spent]:
    """The seconds of a forward pass by part; with ``training`` of forward and backward pass together.

    Tiled attention skips what its masks hide, plain attention does not. A backward pass takes twice the forward's
    products, tiled attention half a forward more, because it computes its scores again.
    """
    size, stored = float(bytes_of(dtype)), float(bytes_of(dtype if weights is None else weights))
    found = []
    for placed in model:
        call, times = placed.call(lengths), float(placed.times)
        if float(call.tokens) == 0:
            continue
        if isinstance(placed.part, Dropout) and not training:
            continue
        for group, seconds, arithmetic in _part(placed.part, call, machine, dtype, size, stored):
            more = (3.5 if group == "attention" and _is_tiled(placed.part) else 3.0) if training else 1.0
            found.append(Spent(placed, group, times * seconds * more, times * arithmetic * more))
    if training and model.vocab is not None:
        # The log-softmax reads and writes logits, and so do its gradient and that of the loss.
        last = model.stacks[-1].after[-1]
        logits = float(last.call(lengths).tokens * model.vocab)
        found.append(Spent(last, "head", 5 * size * logits / machine.bandwidth + logits / machine.activation, 0.0))
    return found


def update(parameters: int, optimizer: str, dtype: str, machine: Machine) -> Spent:
    """An optimizer's step: weights and gradients are read, its state read and written, weights written."""
    size = float(bytes_of(dtype))
    state = 4.0 if optimizer == "adam32" else size
    moved = parameters * (3 * size + 2 * OPTIMIZERS[optimizer] * state) if optimizer != "none" else 0.0
    return Spent(None, "update", moved / machine.bandwidth, 0.0)


def _part(
    part: Part, call: Call, machine: Machine, dtype: str, size: float, stored: float
) -> Iterator[tuple[str, float, float]]:
    """(group, seconds, seconds bound by arithmetic) of one part in one layer."""
    products = part.products(call)
    if isinstance(part, Attention):
        if part.tiled:
            yield "attention", *_tiled(part, call, products, machine, dtype, size)
            products = tuple(product for product in products if product.learned)
        else:
            # The softmax reads scores and writes weights, in float32 at least; the products' own share is theirs.
            weights = float(part.matrices(call))
            yield "attention", 2 * max(size, 4.0) * weights / machine.bandwidth + weights / machine.activation, 0.0
    for product in products:
        if float(product.rows) * float(product.times) == 0:
            continue
        slow, moved = _product(product, machine, dtype, size, stored)
        yield product.group, max(slow, moved) + machine.call, slow if slow >= moved else 0.0
    between = float(part.moved(call)) * size / machine.bandwidth + float(part.activated(call)) / machine.activation
    yield _between(part), between + part.calls * machine.call, 0.0


def read(model: Model, lengths: Lengths, size: float, stored: float) -> float:
    """Bytes of weights, keys and values that a pass reads: all that sets the time where few rows share them."""
    found = 0.0
    for placed in model:
        call = placed.call(lengths)
        learned = (p for p in placed.part.products(call) if p.learned and float(p.rows) > 0)
        bytes_ = stored * sum(float(p.inner) * float(p.columns) for p in learned)
        if isinstance(placed.part, Attention) and float(call.rows) > 0:
            bytes_ += size * float(placed.part.looked_at(call))
        found += float(placed.times) * bytes_
    return found


def _is_tiled(part: Part) -> bool:
    return isinstance(part, Attention) and part.tiled


def _between(part: Part) -> str:
    """Under which name the passes of a part that are no products are counted."""
    return {Norm: "norms", Attention: "projections", FeedForward: "feed-forward"}.get(type(part), "embedding")


def _product(product: Product, machine: Machine, dtype: str, size: float, stored: float) -> tuple[float, float]:
    times, rows, inner, columns = (float(x) for x in (product.times, product.rows, product.inner, product.columns))
    right = inner * columns * (stored if product.learned else size * times)
    moved = size * times * rows * (inner + columns) + right
    few = 1 + machine.rows / rows  # a product of few rows keeps the units waiting
    return float(product.flops) * few / machine.rate(dtype), moved / machine.bandwidth


def _tiled(
    part: Attention, call: Call, products: tuple[Product, ...], machine: Machine, dtype: str, size: float
) -> tuple[float, float]:
    """Scores and values in one kernel: q, k, v and the result are all that memory sees."""
    flops = sum(float(product.needed) for product in products if not product.learned)
    moved = size * float(call.tokens * part.heads * (part.d_key + part.d_value) + part.looked_at(call))
    slow, seen = flops / machine.attention_rate(dtype), moved / machine.bandwidth
    return max(slow, seen) + max(machine.call, machine.attention_call), slow if slow >= seen else 0.0
