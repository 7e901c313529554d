"""Random layers and stacks of regard.nn in prime sizes, each with its description for regard.budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard import ALiBi, Learned, Quadratic, RelativeKeys, RelativeTable, Rotary, Sinusoidal, T5Buckets
from regard._hooks import observed
from regard.budget import _models_from_sizes as spec
from regard.budget._model import Lengths, Model, PlacedPart, Stack
from regard.budget._parts import FeedForward, Part
from regard.nn import Decoder, Encoder, EncoderDecoder, MultiHeadAttention, RMSNorm, VisionTransformer
from regard.nn import FeedForward as RealFeedForward
from regard.nn._block import make_block

PRIMES = (2, 3, 5, 7, 11, 13, 17)


@dataclass
class Pair:
    """A module, its description for the budget, the lengths of a call, and the inputs of that call."""

    module: nn.Module
    model: Model
    lengths: Lengths
    inputs: tuple[Tensor, ...]


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def alone(*parts: Part | PlacedPart, d: int = 1) -> Model:
    """A model that consists of these parts only."""
    placed = tuple(part if isinstance(part, PlacedPart) else PlacedPart("part", part) for part in parts)
    return Model("Part", "part", d, (Stack("part", (), placed, ()),))


def vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def one_of(rng: random.Random, *choices: Any) -> Any:
    return rng.choice(choices)


def heads_of(rng: random.Random) -> tuple[int, int]:
    """The numbers of query heads and of key heads, (N_h, N_kv)."""
    kv, each = one_of(rng, 1, 2, 3), one_of(rng, 1, 2, 3)
    return kv * each, kv


def sizes(rng: random.Random) -> tuple[int, int, int, int]:
    """Random sizes (batch, n, m, layers)."""
    return one_of(rng, 1, 2, 3), rng.choice(PRIMES), rng.choice(PRIMES), one_of(rng, 1, 2, 3)


def scheme(rng: random.Random, name: str, heads: int, d_key: int, d: int, n: int = 20) -> tuple[Any, int]:
    """The position scheme with this name, and its reach."""
    reach = {"t5": 2 * rng.choice(PRIMES)}.get(name, rng.choice(PRIMES))
    reach = n + reach if name == "learned" else reach
    builders: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "learned": lambda: Learned(reach, d),
        "sinusoidal": lambda: Sinusoidal(d),
        "rotary": lambda: Rotary(d_key),
        "alibi": lambda: ALiBi(heads=heads),
        "t5": lambda: T5Buckets(heads, buckets=max(reach, 4)),
        "table": lambda: RelativeTable(heads, reach),
        "shaw": lambda: RelativeKeys(d_key, reach),
        "quadratic": lambda: Quadratic(3, 5, heads),
    }
    return builders[name](), max(reach, 4) if name == "t5" else reach


def attention(rng: random.Random, *, cross: bool | None = None, position: str | None = None) -> Pair:
    """Attention with random dimensions. Positions only if requested, because their products are not counted."""
    heads, kv = heads_of(rng)
    cross = rng.random() < 0.5 if cross is None else cross
    d_in, d_key, d_value, d_out = (rng.choice(PRIMES) for _ in range(4))
    d_context = rng.choice(PRIMES) if cross else None
    name = position or "none"
    d_key = 2 * d_key if name == "rotary" else d_key
    b, n, m, _ = sizes(rng)
    options = {"qkv_bias": one_of(rng, True, False), "out_bias": one_of(rng, True, False)}
    options |= {"sinks": position is not None and one_of(rng, True, False)}
    normed = one_of(rng, True, False)
    place, reach = scheme(rng, name, heads, d_key, d_in)
    free = {"d_key": d_key, "d_value": d_value, "d_out": d_out, "d_context": d_context, "kv_heads": kv}
    module = MultiHeadAttention(d_in, heads, **free, **options, position=place, qk_norm=RMSNorm if normed else None)
    part = spec.attention(d_in, heads, **free, **options, qk_norm=normed, position=name, reach=reach)
    inputs = (vectors(b, n, d_in), vectors(b, m, d_context)) if d_context is not None else (vectors(b, n, d_in),)
    model = alone(PlacedPart("attention", part, keys="m" if cross else "n"), d=d_in)
    return Pair(module, model, Lengths(b, n, m if cross else None), inputs)


def feed_forward(rng: random.Random) -> Pair:
    d, hidden, gated, bias = rng.choice(PRIMES), rng.choice(PRIMES), one_of(rng, True, False), one_of(rng, True, False)
    b, n, _, _ = sizes(rng)
    module = RealFeedForward(d, hidden, gated=gated, bias=bias)
    return Pair(module, alone(FeedForward(d, hidden, gated, bias), d=d), Lengths(b, n), (vectors(b, n, d),))


def options(rng: random.Random, heads: int, kv: int, **fixed: Any) -> tuple[int, int, dict[str, Any]]:
    """(d, hidden, options of a block); the norm is given by its name."""
    d, width = one_of(rng, (heads * rng.choice(PRIMES), None), (rng.choice(PRIMES), 2 * rng.choice(PRIMES)))
    chosen = {"d_key": width, "kv_heads": kv, "qkv_bias": one_of(rng, True, False), "bias": one_of(rng, True, False)}
    chosen |= {
        "norm": one_of(rng, "layer", "rms"),
        "order": one_of(rng, "pre", "post"),
        "gated": one_of(rng, True, False),
    }
    return d, rng.choice(PRIMES), chosen | fixed


def real(given: dict[str, Any]) -> dict[str, Any]:
    """The same options for regard.nn, which takes the class of the norm."""
    return {name: value for name, value in given.items() if name != "norm"} | (
        {"norm": RMSNorm} if given.get("norm") == "rms" else {}
    )


def block(rng: random.Random, *, cross: bool = False, **fixed: Any) -> Pair:
    heads, kv = heads_of(rng)
    d, hidden, given = options(rng, heads, kv, **fixed)
    d_context = rng.choice(PRIMES) if cross else None
    b, n, m, _ = sizes(rng)
    module = make_block(d, heads, hidden, d_context=d_context, **real(given))
    model = alone(*spec.block(d, heads, hidden, d_context=d_context, **given), d=d)
    inputs = (vectors(b, n, d), vectors(b, m, d_context)) if d_context is not None else (vectors(b, n, d),)
    return Pair(module, model, Lengths(b, n, m if cross else None), inputs)


def llama_block(rng: random.Random) -> Pair:
    return block(rng, gated=True, norm="rms", order="pre", bias=False, qkv_bias=False)


def stack(rng: random.Random, kind: str, positions: tuple[str, ...] = ("none", "learned", "sinusoidal")) -> Pair:
    """An encoder, a decoder or both, with vectors or token ids as input."""
    heads, kv = heads_of(rng)
    d, hidden, given = options(rng, heads, kv, sinks="t5" in positions and one_of(rng, True, False))
    b, n, m, layers = sizes(rng)
    name = rng.choice(positions)
    if name == "rotary" and (given["d_key"] or d // heads) % 2:
        given["d_key"] = 2 * rng.choice(PRIMES)
    place, reach = scheme(rng, name, heads, given["d_key"] or d // heads, d)
    vocab = one_of(rng, None, 19, 23)
    sized = {"hidden": hidden, "vocab": vocab, **({} if kind == "encoder" else {"tied": one_of(rng, True, False)})}
    sized |= {"decoder_layers": one_of(rng, None, 1, 2)} if kind == "encoder_decoder" else {}
    cls = {"encoder": Encoder, "decoder": Decoder, "encoder_decoder": EncoderDecoder}[kind]
    module = cls(d, heads, layers, position=place, **sized, **real(given))
    model = getattr(spec, kind)(d, heads, layers, position=name, reach=reach, **sized, **given)
    lengths = [m, n] if kind == "encoder_decoder" else [n]
    inputs = tuple(vectors(b, x, d) if vocab is None else torch.randint(0, vocab, (b, x)) for x in lengths)
    return Pair(module, model, Lengths(b, n, m if kind == "encoder_decoder" else None), inputs)


def vit(rng: random.Random) -> Pair:
    heads, kv = heads_of(rng)
    d, hidden, given = options(rng, heads, kv)
    patch = (one_of(rng, 2, 3), one_of(rng, 2, 3))
    image = (patch[0] * one_of(rng, 1, 2, 3), patch[1] * one_of(rng, 1, 2, 3))
    sized = {"hidden": hidden, "channels": one_of(rng, 1, 3), "head": one_of(rng, "hidden", "linear")}
    b, _, _, layers = sizes(rng)
    classes = rng.choice(PRIMES)
    module = VisionTransformer(image, patch, classes, d, heads, layers, **sized, **real(given))
    model = spec.vision_transformer(image, patch, classes, d, heads, layers, **sized, **given)
    return Pair(module, model, Lengths(b, int(model.fixed_tokens)), (torch.randn(b, sized["channels"], *image),))


@contextmanager
def plain_attention(module: nn.Module) -> Iterator[None]:
    """Compute every attention of ``module`` with torch's plain operator, which stores weights and can be counted."""
    layers = [layer for layer in module.modules() if isinstance(layer, MultiHeadAttention)]
    for layer in layers:
        observed[layer] = _torch
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for layer in layers:
            del observed[layer]


def _torch(
    layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, mask: Any, scale: Any, **rest: Any
) -> tuple[Tensor, None]:
    hidden = None if mask is None else mask.dense(q.shape[-2], k.shape[-2])
    grouped = q.shape[-3] != k.shape[-3]
    return F.scaled_dot_product_attention(q, k, v, hidden, scale=scale, enable_gqa=grouped), None
