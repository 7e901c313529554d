"""Caches of stacks: step by step equal to all at once, beams, steps that fail, and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.cache_cases import F64, HEADS, INSIDE, D, N, close

from regard.masks import Padding
from regard.nn import (
    BlockCache,
    Decoder,
    DecoderCache,
    EncoderDecoder,
    KeyValueCache,
    MultiHeadAttention,
    make_block,
)
from regard.positions import Learned, Rotary, Sinusoidal

pytestmark = pytest.mark.usefixtures("full_tiles")


@pytest.mark.parametrize("position", [*INSIDE, "sinusoidal", "learned"])
@torch.no_grad()
def test_decoding_step_by_step(position: str) -> None:
    torch.manual_seed(3)
    added = {"sinusoidal": lambda: Sinusoidal(D), "learned": lambda: Learned(N, D)}
    decoder = Decoder(D, HEADS, 2, vocab=13, kv_heads=1, position=({**INSIDE, **added}[position])()).to(F64).eval()
    ids = torch.randint(13, (2, N))
    cache = decoder.new_cache(capacity=4)
    parts = [decoder(piece, cache=cache) for piece in ids.split([4, 1, 1, 3, 2], dim=1)]
    close(torch.cat(parts, dim=1), decoder(ids))
    assert cache.length == N and repr(cache) == f"DecoderCache(2 layers, {N} tokens)"
    cache.crop(6)
    close(decoder(ids[:, 6:], cache=cache), decoder(ids)[:, 6:])
    cache.reset()
    close(decoder(ids[:, :5], cache=cache), decoder(ids[:, :5]))


@torch.no_grad()
def test_left_padding_step_by_step() -> None:
    torch.manual_seed(4)
    decoder = Decoder(D, HEADS, 2, vocab=13, position=Rotary(4)).to(F64).eval()
    ids = torch.randint(13, (2, N))
    real = torch.ones(2, N, dtype=torch.bool)
    real[1, :4] = False  # the second sample has 7 tokens
    cache, parts = decoder.new_cache(), []
    for at, size in ((0, 6), (6, 1), (7, 4)):
        mask = Padding(real[:, : at + size])
        parts.append(decoder(ids[:, at : at + size], mask=mask, cache=cache))
    steps = torch.cat(parts, dim=1)
    close(steps[0], decoder(ids[:1])[0])
    close(steps[1, 4:], decoder(ids[1:, 4:])[0])  # rotary sees distances alone


@torch.no_grad()
def test_beams() -> None:
    torch.manual_seed(5)
    model = EncoderDecoder(D, HEADS, 2, vocab=13, position=Sinusoidal(D)).to(F64).eval()
    source, target = torch.randint(13, (3, 5)), torch.randint(13, (3, N))
    lengths, order = torch.tensor([5, 2, 3]), torch.tensor([2, 0, 0])
    context, cache = model.encode(source, padding=lengths), model.new_cache()
    model.decode(target[:, :6], context, padding=lengths, cache=cache)
    cache.reorder(order)
    step = model.decode(target[:, 6:], context[order], padding=lengths[order], cache=cache)
    chosen = torch.cat([target[order, :6], target[:, 6:]], dim=1)
    close(step, model(source[order], chosen, padding=lengths[order])[:, 6:])


@torch.no_grad()
def test_a_stacks_failed_step_leaves_no_trace() -> None:
    torch.manual_seed(6)
    decoder = Decoder(D, HEADS, 2, vocab=13, position=Rotary(4), d_context=D).to(F64).eval()
    ids, context = torch.randint(13, (1, N)), torch.randn(1, 5, D, dtype=F64)
    cache = decoder.new_cache()
    wrong = Padding(torch.ones(1, 3, dtype=torch.bool))
    for options in ({"context_mask": wrong}, {"mask": wrong}, {"observe": "all"}):
        with pytest.raises((ValueError, TypeError)):
            decoder(ids[:, :4], context, cache=cache, **options)
        assert [(len(layer.attention), len(layer.cross)) for layer in cache.layers] == [(0, 0), (0, 0)]
    decoder(ids[:, :4], context, cache=cache)
    interrupted = decoder.norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        decoder(ids[:, 4:], context, cache=cache)
    interrupted.remove()
    assert [(len(layer.attention), len(layer.cross)) for layer in cache.layers] == [(4, 5), (4, 5)]
    close(decoder(ids[:, 4:], context, cache=cache), decoder(ids, context)[:, 4:])


@torch.no_grad()
def test_a_blocks_failed_step_leaves_no_trace() -> None:
    block, cache, x = make_block(D, HEADS, 11, d_context=D).to(F64), BlockCache(), torch.randn(1, 3, D, dtype=F64)
    with pytest.raises(ValueError, match="Padding has 2 keys"):
        block(x, x, context_mask=Padding(torch.ones(1, 2, dtype=torch.bool)), cache=cache)
    assert (len(cache.attention), len(cache.cross)) == (0, 0)


def test_caches_of_another_kind_are_refused() -> None:
    x = torch.zeros(1, 1, D)
    cases = (
        (MultiHeadAttention(D, HEADS), BlockCache(), "cache must be a KeyValueCache, got BlockCache"),
        (make_block(D, HEADS, 11), KeyValueCache(), "cache must be a BlockCache, got KeyValueCache"),
        (Decoder(D, HEADS, 2), [BlockCache()] * 2, "cache must be a DecoderCache, which new_cache.. makes, got"),
    )
    for model, cache, message in cases:
        with torch.no_grad(), pytest.raises(TypeError, match=message):
            model(x, cache=cache)


def test_cache_of_another_decoder_is_refused() -> None:
    decoder = Decoder(D, HEADS, 2)
    with pytest.raises(ValueError, match="cache is for 3 blocks, but this decoder has 2"):
        decoder(torch.zeros(1, 1, D), cache=DecoderCache(3))
