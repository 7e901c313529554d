"""The time of each part on a machine: ``t = max(FLOPs / peak, bytes / bandwidth)`` for every matrix product.

Operators that are not matrix products take bytes / bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from regard.budget._attention_parts import Attention
from regard.budget._experts_part import Experts
from regard.budget._latent_attention import LatentAttention
from regard.budget._machine import Machine
from regard.budget._memory import bytes_per_value, optimizer_bytes
from regard.budget._model import Lengths, Model, PlacedPart
from regard.budget._parts import Call, Dropout, FeedForward, Group, Norm, Part, Product

# Type of part → the group of its operators that are not matrix products.
OTHER_OPERATORS = {
    Norm: "norms",
    Attention: "projections",
    LatentAttention: "projections",
    FeedForward: "feed-forward",
    Experts: "feed-forward",
}


class PartTime(NamedTuple):
    """The time of some operators of one part.

    - `seconds`: the total time; `compute_bound`: the share of it, in seconds, that arithmetic limits, not memory.
    - `placed`: the part; None for the optimizer's update.
    """

    group: Group | str
    seconds: float
    compute_bound: float
    placed: PlacedPart | None = None


class _Setting(NamedTuple):
    """A machine and the dtype in use, with the bytes of a value and of a stored weight."""

    machine: Machine
    dtype: str
    value_bytes: float
    weight_bytes: float


def time_parts(
    model: Model, lengths: Lengths, machine: Machine, dtype: str, weight_dtype: str, *, training: bool = False
) -> list[PartTime]:
    """The time of a forward pass by part; with `training`, the time of forward and backward pass together.

    Tiled attention skips masked pairs, plain attention does not. A backward pass has twice the products of the forward
    pass. That of tiled attention takes another half of a forward pass, because it computes the scores again.
    """
    setting = _Setting(machine, dtype, float(bytes_per_value(dtype)), float(bytes_per_value(weight_dtype)))
    times = []
    for placed in model:
        call = placed.call(lengths)
        skipped = isinstance(placed.part, Dropout) and not training
        if float(call.tokens) == 0 or skipped:  # an encoder does not run while a decoder generates
            continue
        repeats = float(placed.repeats)
        for time in _part_times(placed.part, call, setting):
            passes = 1.0
            if training:
                tiled = time.group == "attention" and isinstance(placed.part, Attention) and placed.part.tiled
                passes = 3.5 if tiled else 3.0
            seconds = repeats * time.seconds * passes
            times.append(PartTime(time.group, seconds, repeats * time.compute_bound * passes, placed))

    if training and model.vocab is not None:
        # The log-softmax reads and writes the logits; so do its gradient and the gradient of the loss.
        last = model.stacks[-1].after[-1]
        logits = float(last.call(lengths).tokens * model.vocab)
        seconds = 5 * setting.value_bytes * logits / machine.bandwidth + logits / machine.activation
        times.append(PartTime("logits", seconds, 0.0, last))
    return times


def time_update(parameters: int, optimizer: str, dtype: str, machine: Machine) -> PartTime:
    """The time of an optimizer's step: it reads weights, gradients and its state, and writes weights and state."""
    size = float(bytes_per_value(dtype))
    bytes_moved = 0.0
    if optimizer != "none":  # three passes over weights and gradients, two over the state
        bytes_moved = parameters * (3 * size + 2 * float(optimizer_bytes(optimizer, bytes_per_value(dtype))))
    return PartTime("update", bytes_moved / machine.bandwidth, 0.0)


def bytes_read(model: Model, lengths: Lengths, value_bytes: float, weight_bytes: float) -> float:
    """Bytes of weights, keys and values that a pass reads. With few rows, reading them takes most of the time."""
    result = 0.0
    for placed in model:
        call = placed.call(lengths)
        part_bytes = 0.0
        for product in placed.part.products(call):
            if product.learned and float(product.rows) > 0:
                elements = float(product.matrices) * float(product.inner) * float(product.columns)
                part_bytes += weight_bytes * elements
        if isinstance(placed.part, Attention) and float(call.rows) > 0:
            part_bytes += value_bytes * float(placed.part.visible_cache_elements(call))
        result += float(placed.repeats) * part_bytes
    return result


def _part_times(part: Part, call: Call, setting: _Setting) -> Iterator[PartTime]:
    """The times of one part in one layer, by group; without `placed`."""
    machine = setting.machine
    products = part.products(call)
    if isinstance(part, Attention):
        if part.tiled:
            # One kernel computes scores and weighted sums; only the projections are separate products.
            yield _tiled_attention_time(part, call, products, setting)
            products = tuple(product for product in products if product.learned)
        else:
            # The softmax reads scores and writes weights, at least in float32.
            weights = float(part.weight_elements(call))
            seconds = 2 * max(setting.value_bytes, 4.0) * weights / machine.bandwidth + weights / machine.activation
            yield PartTime("attention", seconds, 0.0)
    for product in products:
        if float(product.rows) * float(product.repeats) > 0:
            yield _product_time(product, setting)

    # All other operators.
    bytes_moved = setting.value_bytes * float(part.elements_moved(call))
    seconds = bytes_moved / machine.bandwidth + float(part.activation_elements(call)) / machine.activation
    yield PartTime(OTHER_OPERATORS.get(type(part), "embedding"), seconds + part.operator_calls * machine.call, 0.0)


def _product_time(product: Product, setting: _Setting) -> PartTime:
    repeats = float(product.repeats)
    rows = float(product.rows)
    inner = float(product.inner)
    columns = float(product.columns)

    # A weight is read once for all repeats; other right factors are different in each repeat.
    right_factor = inner * columns
    if product.learned:
        right_factor *= setting.weight_bytes * float(product.matrices)
    else:
        right_factor *= setting.value_bytes * repeats
    bytes_moved = setting.value_bytes * repeats * rows * (inner + columns) + right_factor

    # A product of few rows does not use all arithmetic units.
    slowdown = 1 + setting.machine.rows * float(product.matrices) / rows
    flops = float(product.flops) * slowdown
    return _roofline_time(product.group, flops / setting.machine.rate(setting.dtype), bytes_moved, setting, 0.0)


def _tiled_attention_time(part: Attention, call: Call, products: tuple[Product, ...], setting: _Setting) -> PartTime:
    """The time of the kernel that computes scores and weighted sums: it reads q, k, v and writes only the result."""
    flops = sum(float(product.unmasked_flops) for product in products if not product.learned)
    elements = call.tokens * part.heads * (part.d_key + part.d_value) + part.visible_cache_elements(call)
    bytes_moved = setting.value_bytes * float(elements)
    arithmetic = flops / setting.machine.attention_rate(setting.dtype)
    return _roofline_time("attention", arithmetic, bytes_moved, setting, setting.machine.attention_call)


def _roofline_time(group: str, arithmetic: float, bytes_moved: float, setting: _Setting, least_call: float) -> PartTime:
    """The larger of arithmetic and memory time, and the overhead of a call."""
    memory = bytes_moved / setting.machine.bandwidth
    overhead = max(setting.machine.call, least_call)  # a call that does almost nothing still takes this long
    compute_bound = arithmetic if arithmetic >= memory else 0.0
    return PartTime(group, max(arithmetic, memory) + overhead, compute_bound)
