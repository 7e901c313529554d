"""The families people load are compositions of these parts: their published sizes come out, by options alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from regard.masks import Padding
from regard.nn import Decoder, Encoder, EncoderDecoder, LayerNorm, RMSNorm, VisionTransformer
from regard.positions import Learned, Rotary, T5Buckets

BARE = {"bias": False, "norm": RMSNorm}
SWIGLU = {**BARE, "activation": "swiglu", "tied": False}
FAMILIES = {
    "BERT-base's blocks": (
        lambda: Encoder(768, 12, 12, order="post", qkv_bias=True, norm=partial(LayerNorm, eps=1e-12)),
        85_054_464,
    ),
    "GPT-2": (
        lambda: Decoder(768, 12, 12, vocab=50257, position=Learned(1024, 768), qkv_bias=True, activation="gelu_tanh"),
        124_439_808,
    ),
    "Llama 2 7B": (
        lambda: Decoder(4096, 32, 32, hidden=11008, vocab=32000, position=Rotary(128), **SWIGLU),
        6_738_415_616,
    ),
    "Llama 3 8B": (
        lambda: Decoder(
            4096, 32, 32, hidden=14336, kv_heads=8, vocab=128256, position=Rotary(128, base=500000.0), **SWIGLU
        ),
        8_030_261_248,
    ),
    "T5-small": (
        lambda: EncoderDecoder(512, 8, 6, vocab=32128, position=T5Buckets(8), scale=1.0, activation="relu", **BARE),
        60_506_624,
    ),
    "ViT-B/16": (
        lambda: VisionTransformer(224, 16, 1000, 768, 12, 12, head="linear", norm=partial(LayerNorm, eps=1e-12)),
        86_567_656,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_published_sizes(family: str) -> None:
    make, size = FAMILIES[family]
    with torch.device("meta"):
        model = make()
    assert sum(p.numel() for p in model.parameters()) == size


@torch.no_grad()
def test_a_small_t5_decodes_step_by_step() -> None:
    """Shared learned buckets, no biases, scale 1, heads of their own width; the target looks back only."""
    torch.manual_seed(0)
    options = {**BARE, "activation": "gelu_tanh", "gated": True, "scale": 1.0, "d_key": 5}
    position, backwards = T5Buckets(3, buckets=8, max_distance=6), T5Buckets(3, 8, 6, bidirectional=False)
    model = EncoderDecoder(12, 3, 2, vocab=13, position=position, target_position=backwards, **options).double().eval()
    source, target = torch.randint(13, (2, 7)), torch.randint(13, (2, 11))
    context, cache = model.encode(source, padding=[7, 3]), model.new_cache(capacity=11)
    steps = [model.decode(t, context, padding=Padding([7, 3]), cache=cache) for t in target.split(1, dim=1)]
    expected = model(source, target, padding=[7, 3])
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=0, atol=1e-12)
    alone = model(source[1:, :3], target[1:])
    torch.testing.assert_close(alone, expected[1:], rtol=0, atol=1e-12)


def test_built_without_memory_then_given_weights() -> None:
    make = partial(Decoder, 12, 3, 2, vocab=13, position=Rotary(4), **SWIGLU)
    model = make()
    with torch.device("meta"):
        empty = make()
    empty.load_state_dict(model.state_dict(), assign=True)
    ids = torch.randint(13, (2, 7))
    torch.testing.assert_close(empty(ids), model(ids), rtol=0, atol=0)


def test_under_autocast() -> None:
    model, ids = Decoder(12, 3, 2, vocab=13, position=Rotary(4), **SWIGLU), torch.randint(13, (2, 7))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)
        with torch.no_grad():
            cache = model.new_cache()
            steps = torch.cat([model(piece, cache=cache) for piece in ids.split([4, 3], dim=1)], dim=1)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(steps, logits, rtol=0.1, atol=0.1)
    torch.testing.assert_close(logits.float(), model(ids), rtol=0.1, atol=0.2)
