"""Build models from sizes: attention, block, encoder, decoder, encoder–decoder, vision transformer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack

from regard._errors import RegardError
from regard.budget._attention_parts import Attention, attention, check_size, head_width, position_tables
from regard.budget._model import Axis, Model, PlacedPart, Stack
from regard.budget._parts import Dropout, Embedding, FeedForward, Linear, Norm, Part, Patches, Table
from regard.budget._symbols import Number

KINDS = ("attention", "block", "encoder", "decoder", "encoder-decoder", "vit")
# Options of a block that `attention` takes under the same name, with the same default.
ATTENTION_OPTIONS = ("d_key", "kv_heads", "qkv_bias", "sinks", "qk_norm", "dropout")


class Options(TypedDict, total=False):
    """Options of a block besides its sizes; the defaults are those of ``regard.nn``."""

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
) -> tuple[PlacedPart, ...]:
    """Build the parts of `layers` equal blocks: attention, optional cross-attention and feed-forward, each with a norm.

    - `hidden`: width of the feed-forward network; default 4·d.
    - `d_context`: width of the context; default None, which means no cross-attention.
    - `position`: a scheme inside attention. All layers share its learned table, so the parts do not include it.
    - `options`: see `Options`.

    >>> parts = block(512, heads=8)
    >>> [part.name for part in parts]
    ['attention norm', 'attention', 'feed-forward norm', 'feed-forward']
    >>> regard.budget.plan(parts, tokens=512).parameters
    3150848
    """
    for name in options:
        if name not in Options.__annotations__:
            raise RegardError(f"unknown option {name!r}; a block takes {', '.join(Options.__annotations__)}")
    d = check_size("d", d)
    if hidden is None:
        hidden = 4 * d
    hidden = check_size("hidden", hidden)
    bias = options.get("bias", True)
    order = options.get("order", "pre")
    norm_kind = options.get("norm", "layer")
    _check_choice("norm", norm_kind, "layer", "rms")
    _check_choice("order", order, "pre", "post")
    norm = Norm(d, norm_kind)

    def make_attention(context: Number | None) -> Attention:
        own_options: dict[str, Any] = {name: value for name, value in options.items() if name in ATTENTION_OPTIONS}
        # Masks and positions apply to self-attention only; a context has its own positions.
        if context is None:
            own_options |= {"causal": causal, "window": options.get("window"), "position": position, "reach": reach}
        out_bias = options.get("out_bias", bias)
        part = attention(d, heads, d_value=options.get("d_key"), d_context=context, out_bias=out_bias, **own_options)
        return replace(part, positions=())  # all layers share one table

    parts: list[tuple[str, Part, Axis]] = [("attention", make_attention(None), rows)]
    if d_context is not None:
        parts.append(("cross-attention", make_attention(check_size("d_context", d_context)), "m"))
    feed_forward = FeedForward(d, hidden, options.get("gated", False), bias, options.get("dropout", False))
    parts.append(("feed-forward", feed_forward, rows))

    # Each part has a norm, before or after it.
    placed: list[PlacedPart] = []
    for name, part, keys in parts:
        placed_norm = PlacedPart(f"{name.removesuffix('-attention')} norm", norm, layers, rows, rows)
        placed_part = PlacedPart(name, part, layers, rows, keys)
        if order == "pre":
            placed += [placed_norm, placed_part]
        else:
            placed += [placed_part, placed_norm]
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
    embeddings: tuple[PlacedPart, ...] = (),
    rows: Axis = "n",
    **options: Any,
) -> Stack:
    """Build a stack: embeddings, positions, one learned table for all layers, blocks, the last norm.

    - `options`: arguments of `block`.
    """
    layers = check_size("layers", layers)
    heads = check_size("heads", heads)
    d_key = options.get("d_key")
    if d_key is None:
        d_key = head_width(d, heads)
    tables = position_tables(position, heads, d_key, reach)

    # Positions that are added to the input are parts of the stack, not of attention.
    before = list(embeddings)
    attention_position = position
    if position == "learned":
        attention_position = "none"
        if reach is None:
            raise RegardError("position=learned needs reach, the number of positions, for example reach=1024")
        before.append(_placed("positions", Table("positions", (check_size("reach", reach), d), d), rows))
    elif position == "sinusoidal":
        attention_position = "none"
        before.append(_placed("positions", Table("positions", None, d), rows))
    before += [_placed("positions on scores", Table(table.name, table.shape), rows) for table in tables]
    if options.get("dropout", False):
        before.append(_placed("dropout", Dropout(d), rows))

    blocks = block(d, heads, hidden, layers=layers, rows=rows, position=attention_position, reach=reach, **options)
    order = options.get("order", "pre")
    after: tuple[PlacedPart, ...] = ()
    if order == "pre":
        after = (_placed("last norm", Norm(d, options.get("norm", "layer")), rows),)
    return Stack(name, tuple(before), blocks, after, order, layers)


def _placed(name: str, part: Part, rows: Axis) -> PlacedPart:
    """Place a part that occurs once and whose keys are its own rows."""
    return PlacedPart(name, part, rows=rows, keys=rows)


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
    """Build a stack in which every token sees every other token.

    - `vocab`: size of the vocabulary, for a model that embeds tokens; the model has no logits.
    - `scaled`: whether embeddings are multiplied by √d.

    >>> encoder(768, heads=12, layers=12, vocab=30522, position="learned", reach=512).parameters
    108862464
    """
    d = check_size("d", d)
    embeddings = _token_embedding(vocab, d, scaled)
    stack = _stack("encoder", d, heads, layers, hidden, position, reach, embeddings=embeddings, **options)
    return Model("Encoder", "encoder", d, (stack,), max_tokens=_max_tokens(position, reach))


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
    """Build a causal stack.

    - `vocab`: size of the vocabulary, for a model that embeds tokens and returns logits.
    - `tied`: whether the output layer uses the embedding's matrix.
    - `scaled`: whether embeddings are multiplied by √d.

    >>> gpt2 = decoder(768, heads=12, layers=12, vocab=50257, position="learned", reach=1024, qkv_bias=True)
    >>> gpt2.parameters
    124439808
    """
    d = check_size("d", d)
    # A tied head has no matrix of its own: the embedding counts it.
    embeddings = _token_embedding(vocab, d, scaled)
    stack = _stack("decoder", d, heads, layers, hidden, position, reach, embeddings=embeddings, causal=True, **options)
    stack = _with_logits(stack, d, vocab, tied)
    return Model("Decoder", "decoder", d, (stack,), vocab, max_tokens=_max_tokens(position, reach))


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
    """Build an encoder that reads a source of m tokens, and a causal decoder of n tokens with cross-attention.

    - `decoder_layers`: default `layers`.
    - `vocab`, `tied`, `scaled`: as in `decoder`; both stacks share one embedding.

    >>> encoder_decoder(512, heads=8, layers=6, vocab=37000).parameters
    63056896
    """
    d = check_size("d", d)
    source = _token_embedding(vocab, d, scaled, "m")
    reader = _stack("encoder", d, heads, layers, hidden, position, reach, embeddings=source, rows="m", **options)
    # The target uses the same table as the source, so it adds no parameters.
    target: tuple[PlacedPart, ...] = ()
    if vocab is not None:
        target = (PlacedPart("target tokens", Embedding(vocab, d, scaled, shared=True)),)
    if decoder_layers is None:
        decoder_layers = layers
    sizes = (d, heads, decoder_layers, hidden, position, reach)
    writer = _stack("decoder", *sizes, embeddings=target, causal=True, d_context=d, **options)
    stacks = (reader, _with_logits(writer, d, vocab, tied))
    return Model("Encoder–decoder", "encoder-decoder", d, stacks, vocab, max_tokens=_max_tokens(position, reach))


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
    """Build a vision transformer: patches as tokens, a class token, learned positions, an encoder, a classifier.

    - `image`, `patch`: height and width.
    - `classes`: None for a model without a classifier.
    - `head`: "linear", or "hidden" for a classifier with a hidden layer.

    >>> vit = vision_transformer((224, 224), (16, 16), classes=1000, d=768, heads=12, layers=12, qkv_bias=True)
    >>> vit.parameters, vit.fixed_tokens  # 14 × 14 patches and the class token
    (86567656, 197)
    """
    d = check_size("d", d)
    for side, length, step in zip(("height", "width"), image, patch, strict=True):
        if isinstance(length, int) and isinstance(step, int) and length % check_size("patch", step):
            raise RegardError(f"image {side} must be divisible by patch {step}, got {length}")
    _check_choice("head", head, "linear", "hidden")
    n = (image[0] // patch[0]) * (image[1] // patch[1]) + 1  # with the class token
    options = {"qkv_bias": True, **options}
    stack = _stack("encoder", d, heads, layers, hidden, "none", None, **options)
    before = (
        PlacedPart("patches", Patches(check_size("channels", channels), patch, d)),
        PlacedPart("class token", Table("class token", (d,))),
        PlacedPart("positions", Table("positions", (n, d), d)),
    )

    # Only the class token is classified, so these parts have one row. The input of the first is a view of all rows.
    after: tuple[PlacedPart, ...] = ()
    if classes is not None:
        last = Linear(d, check_size("classes", classes))
        after = (PlacedPart("classifier", last, rows="one"),)
        if head == "hidden":
            hidden_layer = PlacedPart("hidden layer", Linear(d, d), rows="one")
            after = (hidden_layer, PlacedPart("classifier", last, rows="one", keys="one"))
    stack = replace(stack, before=(*before, *stack.before), after=(*stack.after, *after))
    return Model("Vision transformer", "vit", d, (stack,), classes, fixed_tokens=n)


def _token_embedding(vocab: Number | None, d: Number, scaled: bool, rows: Axis = "n") -> tuple[PlacedPart, ...]:
    if vocab is None:
        return ()
    return (_placed("tokens", Embedding(check_size("vocab", vocab), d, scaled), rows),)


def _with_logits(stack: Stack, d: Number, vocab: Number | None, tied: bool) -> Stack:
    if vocab is None:
        return stack
    logits = PlacedPart("logits", Linear(d, check_size("vocab", vocab), bias=False, tied=tied))
    return replace(stack, after=(*stack.after, logits))


def _max_tokens(position: str, reach: Number | None) -> Number | None:
    # Other schemes extend to any length.
    if position == "learned":
        return reach
    return None


def _check_choice(name: str, value: str, *choices: str) -> None:
    if value not in choices:
        raise RegardError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
