"""A model as data: which parts it has, how often, and on how many rows each part runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from regard._errors import RegardError, RegardTypeError
from regard.budget._attention_parts import Attention
from regard.budget._parts import Call, Part
from regard.budget._symbols import Number

# The target's tokens, the source's tokens, one token, or a fixed number of patches of an image.
Axis = Literal["n", "m", "one"] | int


@dataclass(frozen=True)
class Lengths:
    """The lengths of one call of a model.

    - `batch`: number of sequences.
    - `n`: tokens per sequence; with a cache, new tokens.
    - `m`: tokens of the source that an encoder reads; None means n.
    - `cached`: tokens that are already in the cache; None means no cache.

    >>> model = regard.budget.encoder_decoder(512, heads=8, layers=6, vocab=37000)
    >>> plan = regard.budget.plan(model, tokens=64, source=100, batch=2)
    >>> plan.lengths
    Lengths(batch=2, n=64, m=100, cached=None)
    """

    batch: Number = 1
    n: Number = 1
    m: Number | None = None
    cached: Number | None = None

    @property
    def source(self) -> Number:
        """Tokens of the source: m, or n if there is no m."""
        return self.n if self.m is None else self.m


@dataclass(frozen=True)
class PlacedPart:
    """A part at its place in a model.

    - `repeats`: the number of layers that have this part.
    - `rows`, `keys`: whether its rows and its keys are the target's tokens, the source's tokens or one token; or the
      number of patches of one image, which each sequence has.
    """

    name: str
    part: Part
    repeats: Number = 1
    rows: Axis = "n"
    keys: Axis = "n"

    @property
    def parameters(self) -> Number:
        """Parameters of all repeats."""
        return self.repeats * self.part.parameters

    def call(self, lengths: Lengths) -> Call:
        """The sizes of one call of the part when the model is called on `lengths`."""
        n = lengths.n
        m = lengths.source
        if lengths.cached is None:
            sizes: dict[Axis, Number] = {"n": n, "m": m, "one": 1}
            rows = sizes.get(self.rows, self.rows)  # a number of patches is itself the size
            keys = sizes.get(self.keys, self.keys)
            return Call(lengths.batch, rows, keys, keys)

        # Decoding: image and source were read when the first token was generated; the source's keys are in the cache.
        if isinstance(self.rows, int) or isinstance(self.keys, int):
            return Call(lengths.batch, 0, 0, 0)
        rows = {"n": n, "m": 0, "one": 0}[self.rows]
        keys, new_keys = {"n": (lengths.cached + n, n), "m": (m, 0), "one": (1, 1)}[self.keys]
        return Call(lengths.batch, rows, keys, new_keys)


@dataclass(frozen=True)
class Stack:
    """The parts before, in and after the blocks; `order` says where the norms are ("pre" or "post").

    - `name`: what precedes the names of its parts if a model has several stacks; "" for the main one.
    """

    name: str
    before: tuple[PlacedPart, ...]
    blocks: tuple[PlacedPart, ...]
    after: tuple[PlacedPart, ...]
    order: Literal["pre", "post"] = "pre"
    layers: Number = 1

    @property
    def block_parameters(self) -> Number:
        """Parameters of all blocks."""
        return sum(placed.parameters for placed in self.blocks)

    def __iter__(self) -> Iterator[PlacedPart]:
        yield from (*self.before, *self.blocks, *self.after)


@dataclass(frozen=True)
class Model:
    """One or two stacks, in the order in which they run.

    - `title`, `kind`: the name to print, and one of the kinds that `build_model` takes.
    - `d`: width of the residual stream.
    - `vocab`: width of the logits; None if the model has no logits.
    - `fixed_tokens`: the only possible length (patches of an image and the class token), or None.
    - `max_tokens`: the number of learned positions, or None.
    - `image_tokens`: tokens of n that are those of the image, for a model of images and text; None for other models.
    - `default_tokens`: the length that `plan` uses if none is given; None for 512, or fewer learned positions.
    - `context_length`: the length that the model is made for, if positions do not limit it: that of its preset, or that
      of its config; None if unknown. Longer lengths are counted too.
    - `architecture`: the class in transformers if the model was read from a config; None otherwise.

    >>> model = regard.budget.decoder(768, heads=12, layers=12, vocab=50257, position="learned", reach=1024)
    >>> model.parameters, model.layers, model.max_tokens, model.generates
    (124412160, 12, 1024, True)
    """

    title: str
    kind: str
    d: Number
    stacks: tuple[Stack, ...]
    vocab: Number | None = None
    fixed_tokens: Number | None = None
    max_tokens: Number | None = None
    image_tokens: int | None = None
    default_tokens: int | None = None
    context_length: int | None = None
    architecture: str | None = None

    def __iter__(self) -> Iterator[PlacedPart]:
        for stack in self.stacks:
            yield from stack

    @property
    def parameters(self) -> Number:
        """Parameters of the whole model; shared weights count once."""
        return sum(placed.parameters for placed in self)

    @property
    def active_parameters(self) -> Number:
        """Parameters without the experts that a token does not use; tables of embeddings count whole."""
        return sum(placed.repeats * placed.part.active_parameters for placed in self)

    @property
    def layers(self) -> Number:
        """Layers of the last stack."""
        return self.stacks[-1].layers

    @property
    def attention_parts(self) -> tuple[tuple[PlacedPart, Attention], ...]:
        """All attention parts, as pairs (placed part, attention)."""
        return tuple((placed, placed.part) for placed in self if isinstance(placed.part, Attention))

    @property
    def is_tiled(self) -> bool:
        """Whether attention never stores its weights."""
        return all(part.tiled for _, part in self.attention_parts)

    @property
    def has_source(self) -> bool:
        """Whether some part reads a second sequence, of m tokens."""
        return any("m" in (placed.rows, placed.keys) for placed in self)

    @property
    def generates(self) -> bool:
        """Whether the model can decode token by token: the self-attention of its last stack is causal."""
        own = [part.causal for placed, part in self.attention_parts if placed.rows == placed.keys == "n"]
        return bool(own) and all(own)  # an encoder's self-attention is on m, so it does not count here

    def with_plain_attention(self) -> Model:
        """The same model with attention that stores its weights.

        >>> model = regard.budget.encoder(512, heads=8, layers=6)
        >>> models = (model, model.with_plain_attention())
        >>> tiled, plain = (regard.budget.plan(x, tokens=32768).memory.peak for x in models)
        >>> plain // tiled
        105
        """
        stacks = [replace(stack, blocks=tuple(map(_plain, stack.blocks))) for stack in self.stacks]
        return replace(self, stacks=tuple(stacks))


def _plain(placed: PlacedPart) -> PlacedPart:
    if isinstance(placed.part, Attention):
        return replace(placed, part=replace(placed.part, tiled=False))
    return placed


def as_model(parts: Model | Attention | tuple[PlacedPart, ...]) -> Model:
    """Return one attention layer, or the parts that `block` returned, as a model."""
    if isinstance(parts, Model):
        return parts
    if isinstance(parts, Attention):
        keys: Axis = "n" if parts.d_context is None else "m"
        placed = PlacedPart("attention", parts, keys=keys)
        return Model("Multi-head attention", "attention", parts.d_in, (Stack("attention", (), (placed,), (), "post"),))
    if isinstance(parts, tuple) and parts and all(isinstance(placed, PlacedPart) for placed in parts):
        widths = [placed.part.d_in for placed in parts if isinstance(placed.part, Attention)]
        if not widths:
            raise RegardError("model must have an attention part; pass all parts that block() returned")
        # In a pre-norm block the first part is a norm.
        order: Literal["pre", "post"] = "pre"
        if isinstance(parts[0].part, Attention):
            order = "post"
        stack = Stack("block", (), parts, (), order, parts[0].repeats)
        return Model("Transformer block", "block", widths[0], (stack,))
    raise RegardTypeError(
        f"model must be a budget model such as budget.decoder(512, heads=8, layers=6), got {type(parts).__name__}"
    )
