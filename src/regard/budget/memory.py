"""Bytes: of weights, gradients, optimizer state, activations and caches, and the most that a step holds at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sympy

from regard.budget.model import Lengths, Model, Placed, Stack
from regard.budget.parts import Embedding, Linear, Norm, largest, total
from regard.budget.symbols import Number

__all__ = ["BYTES", "OPTIMIZERS", "Memory", "bytes_of", "dtype_name", "kept", "kept_by", "memory", "peak"]

# Bytes a number. Quantised weights come with one float16 scale for each group of GROUP of them.
GROUP = 128
BYTES: dict[str, int | sympy.Rational] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1 + sympy.Rational(2, GROUP),
    "int4": sympy.Rational(1, 2) + sympy.Rational(2, GROUP),
}
COMPUTES = ("float64", "float32", "bfloat16", "float16")
# Numbers a parameter that an optimizer keeps, in the weights' dtype; adam32 keeps moments and a copy of the weights in
# float32, as training in half precision does.
OPTIMIZERS = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adam32": 3}
ALIASES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


@dataclass(frozen=True)
class Memory:
    """Bytes by what they hold. ``peak`` is what a step allocates above what was there before it.

    In training that is activations, gradients and what the worst moment needs beside; in inference what the worst layer
    needs. ``matrices``: the attention weights of all layers and heads, which plain attention stores in training.
    ``cache``: keys and values of all layers, of a model that writes. ``total``: weights, optimizer state and the peak,
    in which gradients are; for inference the cache too.

    >>> model = regard.budget.decoder(768, heads=12, layers=12, vocab=50257)
    >>> held = regard.budget.plan(model, tokens=1024, training=True).memory
    >>> held.weights == 4 * model.parameters, held.optimizer == 2 * held.weights  # Adam: two numbers a weight
    (True, True)
    >>> held.matrices == 12 * 12 * 1024**2 * 4  # layers × heads × n × n, which tiled attention never stores
    True
    """

    weights: Number
    gradients: Number
    optimizer: Number
    activations: Number
    recomputed: Number
    matrices: Number
    cache: Number
    peak: Number
    recomputed_peak: Number | None
    total: Number


def dtype_name(given: object) -> str:
    """``"bf16"``, ``"bfloat16"`` and ``torch.bfloat16`` as ``"bfloat16"``; what nobody knows as it is."""
    name = str(given).removeprefix("torch.")
    return ALIASES.get(name, name)


def bytes_of(dtype: str) -> int | sympy.Rational:
    """Bytes a number of this dtype."""
    if dtype not in BYTES:
        raise ValueError(f"{dtype!r} is no dtype here; known are {', '.join(BYTES)}")
    return BYTES[dtype]


def memory(
    model: Model,
    lengths: Lengths,
    *,
    dtype: str = "float32",
    weights: str | None = None,
    optimizer: str = "adam",
    training: bool = False,
) -> Memory:
    """What a call on ``lengths`` needs; ``weights`` is their dtype where it is another one (int8, int4)."""
    if dtype not in COMPUTES:
        raise ValueError(f"dtype is {dtype!r}; products are computed in {', '.join(COMPUTES)}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}; known are {', '.join(OPTIMIZERS)}")
    size, parameters = BYTES[dtype], model.parameters
    if training and weights not in (None, dtype):
        raise ValueError(f"weights in {weights} beside {dtype} are not trained here; give the dtype alone")
    state = 4 if optimizer == "adam32" else size
    stored = parameters * bytes_of(dtype if weights is None else weights)
    step = peak(model, lengths, size, training=training)
    moments = OPTIMIZERS[optimizer] * parameters * state if training else 0
    cached = size * _cached(model, lengths) if model.writes else 0
    widths = {True: size, False: largest(size, 4)}  # plain attention computes in float32 at least
    return Memory(
        weights=stored,
        gradients=parameters * size if training else 0,
        optimizer=moments,
        activations=kept(model, lengths, size),
        recomputed=kept(model, lengths, size, recompute=True),
        matrices=total(widths[part.tiled] * p.times * part.matrices(p.call(lengths)) for p, part in model.attentions),
        cache=cached,
        peak=step,
        recomputed_peak=peak(model, lengths, size, training=True, recompute=True) if training else None,
        total=stored + moments + step + (0 if training else cached),
    )


def _cached(model: Model, lengths: Lengths) -> Number:
    """Values of the keys and values of all layers after the call."""
    before = 0 if lengths.cached is None else lengths.cached
    return total(
        placed.times
        * part.cached(lengths.batch, before + lengths.n if placed.keys == "n" else placed.call(lengths).keys)
        for placed, part in model.attentions
        if placed.rows == "n"
    )


def kept(model: Model, lengths: Lengths, size: Number = 4, *, recompute: bool = False) -> Number:
    """Bytes of activations that a forward pass keeps for the backward pass, for values of ``size`` bytes.

    ``recompute``: of a block its input alone; the rest is computed again when its turn comes.
    """
    return total(_kept_in(stack, model, lengths, size, recompute) for stack in model.stacks)


def kept_by(placed: Placed, lengths: Lengths, size: Number) -> Number:
    """Bytes that one of these parts keeps for the backward pass."""
    return total(placed.part.kept(placed.call(lengths), size).values())


def peak(model: Model, lengths: Lengths, size: Number, *, training: bool, recompute: bool = False) -> Number:
    """The most bytes that a step holds at once above what was there before it."""
    return largest(*(_training(model, lengths, size, recompute) if training else _inference(model, lengths, size)))


def _inference(model: Model, lengths: Lengths, size: Number) -> Iterator[Number]:
    """Bytes at each part of a forward pass without gradients.

    The vectors that entered the stack and those that entered the block are held by their callers while a block runs.
    Where nothing embeds, the former are the model's input, which was there before.
    """
    context: Number = 0
    for stack in model.stacks:
        stream = _stream(stack, model, lengths, size)
        entered = stream if stack.before else 0
        for placed in stack.before:
            yield context + placed.part.work(placed.call(lengths), size)
        for at, placed in enumerate(p for p in stack.blocks if not isinstance(p.part, Norm)):
            own = (0 if stack.layers == 1 else stream) + (0 if at == 0 else stream)
            normed = stream if stack.order == "pre" else 0
            yield context + entered + own + normed + placed.part.work(placed.call(lengths), size)
        for placed in stack.after:
            # Whoever reads the first token alone holds all of them.
            held = stream if isinstance(placed.part, Linear) else entered + stream
            yield context + held + placed.part.work(placed.call(lengths), size)
        context = context + stream


def _training(model: Model, lengths: Lengths, size: Number, recompute: bool) -> Iterator[Number]:
    """Bytes at the loss, and at each part of the backward pass of the first and of the last block of each stack.

    What is kept falls from block to block and gradients grow, so that one of the two ends is the worst.
    """
    before = [_allocated_in(stack, model, lengths, size, recompute) for stack in model.stacks]
    done: Number = 0  # bytes of logits and gradients that are there already
    held = total(before)
    there = "head" if any(_tied(placed) for placed in model) else ""  # who has left a gradient of the embedding
    if model.vocab is not None:
        # Logits, which the caller holds to the end, their log-softmax, and the gradients of both.
        done = size * model.stacks[-1].after[-1].call(lengths).tokens * model.vocab
        yield held + 4 * done
    for stack, own in zip(reversed(model.stacks), reversed(before), strict=True):
        held = held - own
        stream = _stream(stack, model, lengths, size)
        for placed in reversed(stack.after):
            done = done + size * (placed.parameters + _tied(placed))
            own = own - kept_by(placed, lengths, size)
            yield held + own + done + placed.part.back(placed.call(lengths), size)
        for group in _groups(stack):
            yield from _blocks(stack, group, held + own, done, lengths, size, stream, recompute)
        done = done + size * total(placed.parameters for placed in stack.blocks)
        for placed in reversed(stack.before):
            # A look-up's gradient is as large as its table. A tied head has left one already, and their sum is a
            # third; another look-up's is added to in place.
            part, table = placed.part, size * placed.parameters
            if not isinstance(part, Embedding):
                done = done + table
                yield held + done + stream
                continue
            table = size * part.rows * part.d
            yield held + done + stream + (2 * table if there == "head" else table)
            done = done + (0 if there else table)
            there = "look-up"


def _blocks(
    stack: Stack,
    parts: tuple[Placed, ...],
    held: Number,
    done: Number,
    lengths: Lengths,
    size: Number,
    stream: Number,
    recompute: bool,
) -> Iterator[Number]:
    """Bytes while the backward pass goes through one block, the last or the first; ``held`` has all blocks' in it."""
    inside = [kept_by(placed, lengths, size) for placed in parts]
    learned = [size * placed.part.parameters for placed in parts]
    blocks = total(placed.times * kept_by(placed, lengths, size) for placed in stack.blocks)
    for first in (False, True):
        if recompute:  # then what blocks keep is their inputs, and this block has just been computed again
            outer = held - stack.layers * stream + (stream if first else stack.layers * stream)
        else:
            outer = held - (blocks if first else total(inside))
        ready = done + (size * total(p.parameters for p in stack.blocks) - total(learned) if first else 0)
        for at in reversed(range(len(parts))):
            now = total(inside[:at]) + parts[at].part.back(parts[at].call(lengths), size)
            yield outer + ready + total(learned[at:]) + stream + now
        if stack.layers == 1:
            return


def _groups(stack: Stack) -> Iterator[tuple[Placed, ...]]:
    """The parts of one block, for each kind of block: a stack may have some with a window and some without."""
    starts = [at for at, placed in enumerate(stack.blocks) if placed.name == stack.blocks[0].name]
    for start, end in zip(starts, [*starts[1:], len(stack.blocks)], strict=True):
        yield stack.blocks[start:end]


def _kept_in(stack: Stack, model: Model, lengths: Lengths, size: Number, recompute: bool) -> Number:
    stream = _stream(stack, model, lengths, size)
    found = total(kept_by(placed, lengths, size) for placed in (*stack.before, *stack.after))
    found = found + total(placed.part.kept_once(placed.call(lengths), size) for placed in stack.blocks)
    if recompute:
        return found + stack.layers * stream
    return found + total(placed.times * kept_by(placed, lengths, size) for placed in stack.blocks)


def _allocated_in(stack: Stack, model: Model, lengths: Lengths, size: Number, recompute: bool) -> Number:
    """What is kept, less what was there before: the model's own input and context.

    Norms do not keep an input, attention does.
    """
    found = _kept_in(stack, model, lengths, size, recompute)
    if not stack.before and (stack.order == "post" or recompute):
        found = found - _stream(stack, model, lengths, size)
    if len(model.stacks) == 1:
        found = found - total(placed.part.kept_once(placed.call(lengths), size) for placed in stack.blocks)
    return found


def _stream(stack: Stack, model: Model, lengths: Lengths, size: Number) -> Number:
    """Bytes of one vector a token."""
    return size * stack.blocks[0].call(lengths).tokens * model.d


def _tied(placed: Placed) -> Number:
    """Numbers of a head's matrix that is the embedding: its parameters are counted there, its gradient comes first."""
    part = placed.part
    return part.d_in * part.d_out if isinstance(part, Linear) and part.tied else 0
