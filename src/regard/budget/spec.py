"""Models as data: which parts stand where, how often, and on how many rows they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, Unpack

from sympy import Expr

from regard.budget.parts import (
    Attention,
    Call,
    Embedding,
    FeedForward,
    Linear,
    Norm,
    Part,
    Patches,
    Table,
    Weight,
    total,
)
from regard.budget.symbols import Number
from regard.shapes import integer

__all__ = [
    "KINDS",
    "POSITIONS",
    "Lengths",
    "Model",
    "Options",
    "Placed",
    "Stack",
    "attention",
    "block",
    "decoder",
    "encoder",
    "encoder_decoder",
    "vision_transformer",
]

KINDS = ("attention", "block", "encoder", "decoder", "encoder-decoder", "vit")
POSITIONS = ("none", "learned", "sinusoidal", "rotary", "alibi", "t5", "table", "shaw", "quadratic")

Axis = Literal["n", "m", "one"]


@dataclass(frozen=True)
class Lengths:
    """How long a call is: ``batch`` sequences of ``n`` tokens, a source of ``m``, ``cached`` tokens read before.

    ``m`` is n unless given. With a cache the n tokens are new, and the context's keys are in the cache too.
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
        """The same with attention that stores its weights."""

        def changed(placed: Placed) -> Placed:
            part = placed.part
            return replace(placed, part=replace(part, tiled=False)) if isinstance(part, Attention) else placed

        return replace(self, stacks=tuple(replace(s, blocks=tuple(map(changed, s.blocks))) for s in self.stacks))


class Options(TypedDict, total=False):
    """What blocks may have beside their sizes; defaults are those of ``regard.nn``."""

    d_key: Number | None
    kv_heads: Number | None
    qkv_bias: bool
    bias: bool
    out_bias: bool
    norm: Literal["layer", "rms"]
    order: Literal["pre", "post"]
    gated: bool
    sinks: bool
    qk_norm: bool
    dropout: bool
    window: Number | None


def attention(
    d_in: Number,
    heads: Number,
    *,
    d_key: Number | None = None,
    d_value: Number | None = None,
    d_out: Number | None = None,
    d_context: Number | None = None,
    kv_heads: Number | None = None,
    qkv_bias: bool = False,
    out_bias: bool = True,
    causal: bool = False,
    window: Number | None = None,
    sinks: bool = False,
    qk_norm: bool = False,
    position: str = "none",
    reach: Number | None = None,
    tiled: bool = True,
) -> Attention:
    """Multi-head attention with the theory's five dimensions; what is not given is D_in/N_h, and D_in.

    >>> attention(512, 8, out_bias=False).parameters
    1048576
    """
    d_in, heads = size("d_in", d_in), size("heads", heads)
    if position in ("learned", "sinusoidal"):
        raise ValueError(f"position={position} is added to the input of a stack; attention alone has no place for it")
    if window is not None and not causal:
        raise ValueError(f"window={window} counts keys up to the query's own: give causal=yes too, or no window")
    if d_key is None or d_value is None:
        share = _shared(d_in, heads)
    kv = size("kv_heads", heads if kv_heads is None else kv_heads)
    if isinstance(heads, int) and isinstance(kv, int) and heads % kv:
        raise ValueError(f"kv_heads={kv} does not divide heads={heads}; each key head serves as many query heads")
    key = share if d_key is None else size("d_key", d_key)
    return Attention(
        d_in,
        heads,
        key,
        share if d_value is None else size("d_value", d_value),
        d_in if d_out is None else size("d_out", d_out),
        kv,
        None if d_context is None else size("d_context", d_context),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        causal=causal,
        window=None if window is None else size("window", window),
        sinks=sinks,
        qk_norm=qk_norm,
        rotary=position == "rotary",
        tiled=tiled,
        positions=on_scores(position, heads, key, reach),
    )


def on_scores(position: str, heads: Number, d_key: Number, reach: Number | None) -> tuple[Weight, ...]:
    """The learned tables of a scheme on scores; ``reach``: T5's buckets, or how far offsets are told apart (32)."""
    if position not in POSITIONS:
        raise ValueError(f"position is {position!r}; known are {', '.join(POSITIONS)}")
    reach = 32 if reach is None else size("reach", reach)
    shapes: dict[str, tuple[tuple[Number, ...], ...]] = {
        "t5": ((reach, heads),),
        "table": ((heads, 2 * reach + 1),),
        "shaw": ((2 * reach + 1, d_key),),
        "quadratic": ((heads, 2), (heads,)),
    }
    return tuple(Weight("position", shape) for shape in shapes.get(position, ()))


def block(
    d: Number,
    heads: Number,
    hidden: Number | None = None,
    *,
    layers: Number = 1,
    causal: bool = False,
    d_context: Number | None = None,
    rows: Axis = "n",
    rotary: bool = False,
    **options: Unpack[Options],
) -> tuple[Placed, ...]:
    """The parts of ``layers`` equal blocks: norm, attention, perhaps norm and cross-attention, norm, feed-forward."""
    for name in options:
        if name not in Options.__annotations__:
            raise ValueError(f"unknown option {name!r}; a block takes {', '.join(Options.__annotations__)}")
    d, hidden = size("d", d), size("hidden", 4 * d if hidden is None else hidden)
    bias, kind = options.get("bias", True), options.get("norm", "layer")
    norm = Norm(d, kind, bias=True)

    def attend(context: Number | None) -> Attention:
        return attention(
            d,
            heads,
            d_key=options.get("d_key"),
            d_value=options.get("d_key"),
            d_context=context,
            kv_heads=options.get("kv_heads"),
            qkv_bias=options.get("qkv_bias", False),
            out_bias=options.get("out_bias", bias),
            causal=causal and context is None,
            window=options.get("window") if context is None else None,
            sinks=options.get("sinks", False),
            qk_norm=options.get("qk_norm", False),
            position="rotary" if rotary and context is None else "none",
        )

    feed = FeedForward(d, hidden, options.get("gated", False), bias, options.get("dropout", False))
    parts = [("attention norm", norm, rows, rows), ("attention", attend(None), rows, rows)]
    if d_context is not None:
        cross = attend(size("d_context", d_context))
        parts += [("cross norm", norm, rows, rows), ("cross-attention", cross, rows, "m")]
    parts += [("feed-forward norm", norm, rows, rows), ("feed-forward", feed, rows, rows)]
    return tuple(Placed(name, part, layers, at, keys) for name, part, at, keys in parts)


def _stack(
    name: str,
    d: Number,
    heads: Number,
    layers: Number,
    hidden: Number | None,
    position: str,
    reach: Number | None,
    *,
    embeddings: tuple[Placed, ...] = (),
    causal: bool = False,
    d_context: Number | None = None,
    rows: Axis = "n",
    **options: Unpack[Options],
) -> Stack:
    """Blocks with what stands around them: positions, one learned table for all layers, and the last norm."""
    layers = size("layers", layers)
    before = list(embeddings)
    tables = on_scores(position, heads, _key(d, heads, options.get("d_key")), reach)
    if position == "learned":
        if reach is None:
            raise ValueError("position=learned needs reach=1024 or another number of positions")
        before += [Placed("positions", Table("positions", (size("reach", reach), d), d), rows=rows, keys=rows)]
    elif position == "sinusoidal":
        before += [Placed("positions", Table("positions", (0,), d), rows=rows, keys=rows)]
    before += [Placed("positions on scores", Table(w.name, w.shape), rows=rows, keys=rows) for w in tables]
    blocks = block(
        d,
        heads,
        hidden,
        layers=layers,
        causal=causal,
        d_context=d_context,
        rows=rows,
        rotary=position == "rotary",
        **options,
    )
    order = options.get("order", "pre")
    last = (Placed("last norm", Norm(d, options.get("norm", "layer")), rows=rows, keys=rows),) if order == "pre" else ()
    return Stack(name, tuple(before), blocks, last, order, layers)


def encoder(
    d: Number,
    heads: Number,
    layers: Number,
    *,
    hidden: Number | None = None,
    vocab: Number | None = None,
    scaled: bool = True,
    position: str = "none",
    reach: Number | None = None,
    **options: Unpack[Options],
) -> Model:
    """A stack in which every token sees every other; with ``vocab`` it embeds tokens, and has no logits."""
    d = size("d", d)
    words = () if vocab is None else (Placed("tokens", Embedding(size("vocab", vocab), d, scaled=scaled)),)
    stack = _stack("encoder", d, heads, layers, hidden, position, reach, embeddings=words, **options)
    return Model("Encoder", "encoder", d, (stack,), longest=reach if position == "learned" else None)


def decoder(
    d: Number,
    heads: Number,
    layers: Number,
    *,
    hidden: Number | None = None,
    vocab: Number | None = None,
    tied: bool = True,
    scaled: bool = True,
    position: str = "none",
    reach: Number | None = None,
    **options: Unpack[Options],
) -> Model:
    """A causal stack; with ``vocab`` it embeds tokens and gives logits, from the embedding itself where ``tied``."""
    d = size("d", d)
    words = () if vocab is None else (Placed("tokens", Embedding(size("vocab", vocab), d, scaled=scaled)),)
    stack = _stack("decoder", d, heads, layers, hidden, position, reach, embeddings=words, causal=True, **options)
    if vocab is not None:
        stack = replace(stack, after=(*stack.after, Placed("logits", Linear(d, vocab, bias=False, tied=tied))))
    return Model("Decoder", "decoder", d, (stack,), vocab, longest=reach if position == "learned" else None)


def encoder_decoder(
    d: Number,
    heads: Number,
    layers: Number,
    *,
    decoder_layers: Number | None = None,
    hidden: Number | None = None,
    vocab: Number | None = None,
    tied: bool = True,
    scaled: bool = True,
    position: str = "none",
    reach: Number | None = None,
    **options: Unpack[Options],
) -> Model:
    """A source of m tokens read by an encoder, a target of n written by a causal decoder with cross-attention.

    Both share one embedding of ``vocab`` words.
    """
    d = size("d", d)
    own = Embedding(size("vocab", vocab), d, scaled=scaled) if vocab is not None else None
    words = () if own is None else (Placed("tokens", own, rows="m", keys="m"),)
    reads = _stack("encoder", d, heads, layers, hidden, position, reach, embeddings=words, rows="m", **options)
    number = layers if decoder_layers is None else decoder_layers
    # The target's look-up reads the same table, which has been counted.
    again = () if vocab is None else (Placed("target tokens", Table("tokens", (0,), d)),)
    writes = _stack(
        "decoder", d, heads, number, hidden, position, reach, embeddings=again, causal=True, d_context=d, **options
    )
    if vocab is not None:
        head = Placed("logits", Linear(d, size("vocab", vocab), bias=False, tied=tied))
        writes = replace(writes, after=(*writes.after, head))
    longest = reach if position == "learned" else None
    return Model("Encoder–decoder", "encoder-decoder", d, (reads, writes), vocab, longest=longest)


def vision_transformer(
    image: tuple[Number, Number],
    patch: tuple[Number, Number],
    classes: Number | None,
    d: Number,
    heads: Number,
    layers: Number,
    *,
    hidden: Number | None = None,
    channels: Number = 3,
    head: Literal["hidden", "linear"] = "linear",
    **options: Unpack[Options],
) -> Model:
    """Patches as tokens, a class token, learned positions, an encoder, and a classifier of the class token's vector."""
    d = size("d", d)
    for side, whole, step in zip(("height", "width"), image, patch, strict=True):
        if isinstance(whole, int) and isinstance(step, int) and whole % size("patch", step):
            raise ValueError(f"image {side} {whole} is not divisible by patch {step}; patches must tile the image")
    n = (image[0] // patch[0]) * (image[1] // patch[1]) + 1
    options = {"qkv_bias": True, **options}
    before = (
        Placed("patches", Patches(size("channels", channels), patch, d)),
        Placed("class token", Table("class token", (d,))),
        Placed("positions", Table("positions", (n, d), d)),
    )
    stack = _stack("encoder", d, heads, layers, hidden, "none", 0, **options)
    heads_: tuple[Placed, ...] = ()
    if classes is not None:
        last = Linear(d, size("classes", classes))
        dense = (Placed("hidden layer", Linear(d, d), rows="one", keys="one"),) if head == "hidden" else ()
        heads_ = (*dense, Placed("classifier", last, rows="one", keys="one"))
    stack = replace(stack, before=before, after=(*stack.after, *heads_))
    return Model("Vision transformer", "vit", d, (stack,), classes, tokens=n)


def size(name: str, given: Number) -> Number:
    """A whole number ≥ 1, or a letter."""
    return given if isinstance(given, Expr) else integer(name, given, least=1)


def _shared(d: Number, heads: Number) -> Number:
    if isinstance(d, int) and isinstance(heads, int):
        if d % heads:
            raise ValueError(f"heads={heads} does not divide d={d}; give heads that divide it, or d_key")
        return d // heads
    return d / heads


def _key(d: Number, heads: Number, given: Number | None) -> Number:
    return _shared(d, heads) if given is None else given
