"""Models from sizes: attention, block, encoder, decoder, encoder–decoder, vision transformer."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypedDict, Unpack

from sympy import Expr

from regard.budget.attending import Attention
from regard.budget.model import Axis, Model, Placed, Stack
from regard.budget.parts import Dropout, Embedding, FeedForward, Linear, Norm, Part, Patches, Table, Weight
from regard.budget.symbols import Number
from regard.shapes import integer

__all__ = [
    "KINDS",
    "POSITIONS",
    "Options",
    "attention",
    "block",
    "decoder",
    "encoder",
    "encoder_decoder",
    "vision_transformer",
]

KINDS = ("attention", "block", "encoder", "decoder", "encoder-decoder", "vit")
POSITIONS = ("none", "learned", "sinusoidal", "rotary", "alibi", "t5", "table", "shaw", "quadratic")


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
    dropout: bool = False,
    position: str = "none",
    reach: Number | None = None,
) -> Attention:
    """Multi-head attention with the theory's five dimensions; what is not given is D_in/N_h, and D_in.

    >>> attention(512, 8, out_bias=False).parameters
    1048576
    """
    d_in, heads = size("d_in", d_in), size("heads", heads)
    kv = size("kv_heads", heads if kv_heads is None else kv_heads)
    share = _shared(d_in, heads) if d_key is None or d_value is None else 0
    key = share if d_key is None else size("d_key", d_key)
    _check_attention(heads, kv, key, d_context, causal, window, position)
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
        dropout=dropout,
        relative=2 * _reach(reach) + 1 if position == "shaw" else 0,
        positions=on_scores(position, heads, key, reach),
    )


def _check_attention(
    heads: Number, kv: Number, key: Number, context: Number | None, causal: bool, window: Number | None, position: str
) -> None:
    """What ``regard.nn`` would refuse too."""
    if isinstance(heads, int) and isinstance(kv, int) and heads % kv:
        raise ValueError(f"kv_heads={kv} does not divide heads={heads}; each key head serves as many query heads")
    if position in ("learned", "sinusoidal"):
        raise ValueError(f"position={position} is added to the input of a stack; attention alone has no place for it")
    if window is not None and not causal:
        raise ValueError(f"window={window} counts keys up to the query's own: give causal=yes too, or no window")
    if position == "rotary" and context is not None:
        raise ValueError("position=rotary counts positions of one sequence, and a context is another; leave one out")
    if position == "rotary" and isinstance(key, int) and key % 2:
        raise ValueError(f"position=rotary turns pairs of numbers, and d_key={key} is odd; give an even one")


def _reach(given: Number | None) -> Number:
    return 32 if given is None else size("reach", given)


def on_scores(position: str, heads: Number, d_key: Number, reach: Number | None) -> tuple[Weight, ...]:
    """The learned tables of a scheme on scores; ``reach``: T5's buckets, or how far offsets are told apart (32)."""
    if position not in POSITIONS:
        raise ValueError(f"position is {position!r}; known are {', '.join(POSITIONS)}")
    reach = _reach(reach)
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
    position: str = "none",
    reach: Number | None = None,
    **options: Unpack[Options],
) -> tuple[Placed, ...]:
    """The parts of ``layers`` equal blocks: norm, attention, perhaps norm and cross-attention, norm, feed-forward.

    ``position`` is what acts inside attention; its learned table, one for all layers, is not among the parts.
    ``hidden`` is 4·D unless given.

    >>> parts = block(512, heads=8)
    >>> [part.name for part in parts]
    ['attention norm', 'attention', 'feed-forward norm', 'feed-forward']
    >>> regard.budget.plan(parts, tokens=512).parameters
    3150848
    """
    for name in options:
        if name not in Options.__annotations__:
            raise ValueError(f"unknown option {name!r}; a block takes {', '.join(Options.__annotations__)}")
    d, hidden = size("d", d), size("hidden", 4 * d if hidden is None else hidden)
    bias, kind = options.get("bias", True), options.get("norm", "layer")
    _one_of("norm", kind, "layer", "rms")
    _one_of("order", options.get("order", "pre"), "pre", "post")
    norm = Norm(d, kind)

    def attend(context: Number | None) -> Attention:
        made = attention(
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
            dropout=options.get("dropout", False),
            position=position if context is None else "none",
            reach=reach,
        )
        return replace(made, positions=())

    feed = FeedForward(d, hidden, options.get("gated", False), bias, options.get("dropout", False))
    first = options.get("order", "pre") == "pre"
    parts: list[tuple[str, Part, Axis]] = [("attention", attend(None), rows)]
    if d_context is not None:
        parts += [("cross-attention", attend(size("d_context", d_context)), "m")]
    parts += [("feed-forward", feed, rows)]
    placed = []
    for name, part, keys in parts:
        pair = [Placed(f"{name.removesuffix('-attention')} norm", norm, layers, rows, rows)]
        pair.insert(1 if first else 0, Placed(name, part, layers, rows, keys))
        placed += pair
    return tuple(placed)


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
    layers, heads = size("layers", layers), size("heads", heads)
    before = list(embeddings)
    tables = on_scores(position, heads, _key(d, heads, options.get("d_key")), reach)
    if position == "learned":
        if reach is None:
            raise ValueError("position=learned needs reach=1024 or another number of positions")
        before += [Placed("positions", Table("positions", (size("reach", reach), d), d), rows=rows, keys=rows)]
    elif position == "sinusoidal":
        before += [Placed("positions", Table("positions", None, d), rows=rows, keys=rows)]
    before += [Placed("positions on scores", Table(w.name, w.shape), rows=rows, keys=rows) for w in tables]
    before += [Placed("dropout", Dropout(d), rows=rows, keys=rows)] if options.get("dropout", False) else []
    blocks = block(
        d,
        heads,
        hidden,
        layers=layers,
        causal=causal,
        d_context=d_context,
        rows=rows,
        position="none" if position in ("learned", "sinusoidal") else position,
        reach=reach,
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
    """A stack in which every token sees every other; with ``vocab`` it embeds tokens, and has no logits.

    >>> encoder(768, heads=12, layers=12, vocab=30522, position="learned", reach=512).parameters
    108862464
    """
    d = size("d", d)
    words = _words(vocab, d, scaled)
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
    """A causal stack; with ``vocab`` it embeds tokens and gives logits, from the embedding itself where ``tied``.

    >>> gpt2 = decoder(768, heads=12, layers=12, vocab=50257, position="learned", reach=1024, qkv_bias=True)
    >>> gpt2.parameters
    124439808
    """
    d = size("d", d)
    words = _words(vocab, d, scaled)
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

    >>> encoder_decoder(512, heads=8, layers=6, vocab=37000).parameters
    63056896
    """
    d = size("d", d)
    words = _words(vocab, d, scaled, "m")
    reads = _stack("encoder", d, heads, layers, hidden, position, reach, embeddings=words, rows="m", **options)
    number = layers if decoder_layers is None else decoder_layers
    again = () if vocab is None else (Placed("target tokens", Embedding(vocab, d, scaled, shared=True)),)
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
    """Patches as tokens, a class token, learned positions, an encoder, and a classifier of the class token's vector.

    >>> vit = vision_transformer((224, 224), (16, 16), classes=1000, d=768, heads=12, layers=12, qkv_bias=True)
    >>> vit.parameters, vit.tokens  # 14 × 14 patches and the class token
    (86567656, 197)
    """
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
    stack = _stack("encoder", d, heads, layers, hidden, "none", None, **options)
    _one_of("head", head, "linear", "hidden")
    heads_: tuple[Placed, ...] = ()
    if classes is not None:
        last = Linear(d, size("classes", classes))
        if head == "hidden":
            heads_ = (
                Placed("hidden layer", Linear(d, d), rows="one"),
                Placed("classifier", last, rows="one", keys="one"),
            )
        else:
            heads_ = (Placed("classifier", last, rows="one"),)
    stack = replace(stack, before=(*before, *stack.before), after=(*stack.after, *heads_))
    return Model("Vision transformer", "vit", d, (stack,), classes, tokens=n)


def _words(vocab: Number | None, d: Number, scaled: bool, rows: Axis = "n") -> tuple[Placed, ...]:
    if vocab is None:
        return ()
    return (Placed("tokens", Embedding(size("vocab", vocab), d, scaled), rows=rows, keys=rows),)


def size(name: str, given: Number) -> Number:
    """A whole number ≥ 1, or a letter."""
    return given if isinstance(given, Expr) else integer(name, given, least=1)


def _one_of(name: str, given: str, *known: str) -> None:
    if given not in known:
        raise ValueError(f"{name} is {given!r}; known are {', '.join(known)}")


def _shared(d: Number, heads: Number) -> Number:
    if isinstance(d, int) and isinstance(heads, int):
        if d % heads:
            raise ValueError(f"heads={heads} does not divide d={d}; give heads that divide it, or d_key")
        return d // heads
    return d / heads


def _key(d: Number, heads: Number, given: Number | None) -> Number:
    return _shared(d, heads) if given is None else given
