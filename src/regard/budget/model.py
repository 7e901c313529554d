"""A model as data: which parts stand where, how often, and on how many rows they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from regard.budget.attending import Attention
from regard.budget.parts import Call, Part, total
from regard.budget.symbols import Number

__all__ = ["Axis", "Lengths", "Model", "Placed", "Stack", "as_model"]

Axis = Literal["n", "m", "one"]


@dataclass(frozen=True)
class Lengths:
    """How long a call is: ``batch`` sequences of ``n`` tokens, a source of ``m``, ``cached`` tokens read before.

    ``m`` is n unless given. With a cache the n tokens are new, and the context's keys are in the cache too.

    >>> model = regard.budget.encoder_decoder(512, heads=8, layers=6, vocab=37000)
    >>> plan = regard.budget.plan(model, tokens=64, source=100, batch=2)
    >>> plan.lengths
    Lengths(batch=2, n=64, m=100, cached=None)
    """

    batch: Number = 1
    n: Number = 1
    m: Number | None = None
    cached: Number | None = None


@dataclass(frozen=True)
class Placed:
    """A part, how many layers have it, and what its rows and keys are: the target (n), the source (m), one token."""

    name: str
    part: Part
    times: Number = 1
    rows: Axis = "n"
    keys: Axis = "n"

    @property
    def parameters(self) -> Number:
        """Of all of them."""
        return self.times * self.part.parameters

    def call(self, lengths: Lengths) -> Call:
        """What each of them is called on."""
        n, m = lengths.n, lengths.n if lengths.m is None else lengths.m
        if lengths.cached is None:
            sizes = {"n": n, "m": m, "one": 1}
            return Call(lengths.batch, sizes[self.rows], sizes[self.keys], sizes[self.keys])
        # Decoding: a source was read when the first token was written.
        rows = {"n": n, "m": 0, "one": 0}[self.rows]
        keys, fresh = {"n": (lengths.cached + n, n), "m": (m, 0), "one": (1, 1)}[self.keys]
        return Call(lengths.batch, rows, keys, fresh)


@dataclass(frozen=True)
class Stack:
    """Parts before the blocks, those of the blocks, and those after them; ``order`` is where norms stand."""

    name: str
    before: tuple[Placed, ...]
    blocks: tuple[Placed, ...]
    after: tuple[Placed, ...]
    order: Literal["pre", "post"] = "pre"
    layers: Number = 1

    def __iter__(self) -> Iterator[Placed]:
        yield from (*self.before, *self.blocks, *self.after)


@dataclass(frozen=True)
class Model:
    """One or two stacks, in the order in which they run, and the width of the residual stream.

    ``tokens``: the one length there is (an image's patches and class token), or None. ``longest``: what learned
    positions reach. ``vocab``: the width of the logits, where there are some.

    >>> model = regard.budget.decoder(768, heads=12, layers=12, vocab=50257, position="learned", reach=1024)
    >>> model.parameters, model.layers, model.longest, model.writes
    (124412160, 12, 1024, True)
    """

    title: str
    kind: str
    d: Number
    stacks: tuple[Stack, ...]
    vocab: Number | None = None
    tokens: Number | None = None
    longest: Number | None = None

    def __iter__(self) -> Iterator[Placed]:
        for stack in self.stacks:
            yield from stack

    @property
    def parameters(self) -> Number:
        """Of the whole model; what is shared counts once."""
        return total(placed.parameters for placed in self)

    @property
    def layers(self) -> Number:
        """Of the last stack, the one that writes."""
        return self.stacks[-1].layers

    @property
    def attentions(self) -> tuple[tuple[Placed, Attention], ...]:
        """Where attention stands."""
        return tuple((placed, placed.part) for placed in self if isinstance(placed.part, Attention))

    @property
    def writes(self) -> bool:
        """Whether it can decode token by token: self-attention of the last stack is causal."""
        own = [part for placed, part in self.attentions if placed.rows == placed.keys == "n"]
        return bool(own) and all(part.causal for part in own)

    def plain(self) -> Model:
        """The same with attention that stores its weights.

        >>> model = regard.budget.encoder(512, heads=8, layers=6)
        >>> tiled, plain = (regard.budget.plan(x, tokens=32768).memory.peak for x in (model, model.plain()))
        >>> plain // tiled
        105
        """

        def changed(placed: Placed) -> Placed:
            part = placed.part
            return replace(placed, part=replace(part, tiled=False)) if isinstance(part, Attention) else placed

        return replace(self, stacks=tuple(replace(s, blocks=tuple(map(changed, s.blocks))) for s in self.stacks))


def as_model(given: Model | Attention | tuple[Placed, ...]) -> Model:
    """One attention layer, or the parts of a block, as a model of its own."""
    if isinstance(given, Attention):
        placed = Placed("attention", given, keys="n" if given.d_context is None else "m")
        return Model("Multi-head attention", "attention", given.d_in, (Stack("attention", (), (placed,), (), "post"),))
    if isinstance(given, tuple) and given and all(isinstance(placed, Placed) for placed in given):
        widths = [placed.part.d_in for placed in given if isinstance(placed.part, Attention)]
        if not widths:
            raise ValueError("these parts have no attention among them; give all that block() returned")
        # Norms stand before what they norm, or after it.
        order: Literal["pre", "post"] = "post" if isinstance(given[0].part, Attention) else "pre"
        stack = Stack("block", (), given, (), order, given[0].times)
        return Model("Transformer block", "block", widths[0], (stack,))
    if isinstance(given, Model):
        return given
    raise TypeError(f"a model is needed, e.g. budget.decoder(512, heads=8, layers=6), got {type(given).__name__}")
