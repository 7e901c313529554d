"""Time by part: ``t = max(FLOPs / peak, bytes / bandwidth)`` a product, bytes / bandwidth for what lies between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from regard.budget.attending import Attention
from regard.budget.machine import Machine
from regard.budget.memory import bytes_of
from regard.budget.model import Lengths, Model, Placed
from regard.budget.parts import Call, FeedForward, Group, Norm, Part, Product

__all__ = ["Spent", "spent"]


@dataclass(frozen=True)
class Spent:
    """Seconds of one part, all its layers together, and which side of the roofline they lie on."""

    placed: Placed
    group: Group | str
    seconds: float
    arithmetic: float  # of those seconds, how many products are bound by arithmetic and not by memory


def spent(
    model: Model, lengths: Lengths, machine: Machine, dtype: str, weights: str | None = None, *, training: bool = False
) -> list[Spent]:
    """The seconds of a forward pass by part; with ``training`` of forward and backward pass together.

    Attention skips what its masks hide. A backward pass takes twice the forward's products, tiled attention half a
    forward more, because it computes its scores again.
    """
    size, stored = float(bytes_of(dtype)), float(bytes_of(weights or dtype))
    found = []
    for placed in model:
        call, times = placed.call(lengths), float(placed.times)
        if float(call.tokens) == 0:
            continue
        for group, seconds, arithmetic in _part(placed.part, call, machine, dtype, size, stored):
            more = (3.5 if group == "attention" else 3.0) if training else 1.0
            found.append(Spent(placed, group, times * seconds * more, times * arithmetic * more))
    return found


def _part(
    part: Part, call: Call, machine: Machine, dtype: str, size: float, stored: float
) -> Iterator[tuple[str, float, float]]:
    """(group, seconds, seconds bound by arithmetic) of one part in one layer."""
    products = part.products(call)
    if isinstance(part, Attention) and part.tiled:
        yield "attention", *_tiled(part, call, products, machine, dtype, size)
        products = tuple(product for product in products if product.learned)
    for product in products:
        if float(product.rows) * float(product.times) == 0:
            continue
        slow, moved = _product(product, machine, dtype, size, stored)
        yield product.group, max(slow, moved) + machine.call, slow if slow >= moved else 0.0
    between = float(part.moved(call)) * size / machine.bandwidth + float(part.activated(call)) / machine.activation
    yield _between(part), between + part.calls * machine.call, 0.0


def _between(part: Part) -> str:
    """Under which name the passes of a part that are no products are counted."""
    return {Norm: "norms", Attention: "projections", FeedForward: "feed-forward"}.get(type(part), "embedding")


def _product(product: Product, machine: Machine, dtype: str, size: float, stored: float) -> tuple[float, float]:
    times, rows, inner, columns = (float(x) for x in (product.times, product.rows, product.inner, product.columns))
    right = inner * columns * (stored if product.learned else size * times)
    moved = size * times * rows * (inner + columns) + right
    few = 1 + machine.rows / rows  # a product of few rows keeps the units waiting
    return float(product.needed) * few / machine.rate(dtype), moved / machine.bandwidth


def _tiled(
    part: Attention, call: Call, products: tuple[Product, ...], machine: Machine, dtype: str, size: float
) -> tuple[float, float]:
    """Scores and values in one kernel: q, k, v and the result are all that memory sees."""
    flops = sum(float(product.needed) for product in products if not product.learned)
    keys = float(call.batch * call.keys * part.kv_heads * (part.d_key + part.d_value))
    moved = size * (float(call.tokens * part.heads * (part.d_key + part.d_value)) + keys)
    slow, seen = flops / machine.attention_rate(dtype), moved / machine.bandwidth
    return max(slow, seen) + max(machine.call, machine.attention_call), slow if slow >= seen else 0.0
