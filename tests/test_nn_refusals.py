"""Every mistake is answered in one line that says what was given and what fits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from regard.masks import Dense
from regard.nn import (
    Block,
    Decoder,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    VisionTransformer,
    make_block,
)

D, HEADS, N = 6, 3, 5
x = torch.zeros(2, N, D)
bits = torch.ones(2, N, dtype=torch.int64)


def block(**options) -> Block:
    parts = {"attention": MultiHeadAttention(D, HEADS), "feedforward": FeedForward(D, 7), **options}
    return Block(**parts)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (
            lambda: block(attention=nn.Linear(D, D)),
            TypeError,
            "attention must be regard.nn.MultiHeadAttention, got Lin",
        ),
        (
            lambda: block(feedforward=nn.Linear(D, D)),
            TypeError,
            "feedforward must be regard.nn.FeedForward, got Linear",
        ),
        (lambda: block(cross=FeedForward(D, 7)), TypeError, "cross must be .*MultiHeadAttention, got FeedForward"),
        (lambda: block(norm=LayerNorm(D)), TypeError, "norm must make a norm from its width, .* got LayerNorm"),
        (lambda: block(norm="rms"), TypeError, "norm must make a norm .* got 'rms'"),
        (lambda: block(norm=float), TypeError, "norm must make a norm .* got the class float"),
        (lambda: block(dropout=math.nan), ValueError, "dropout must be a number ≥ 0.0, got nan"),
        (lambda: block(dropout=1.5), ValueError, "dropout must be between 0 and 1, got 1.5"),
        (lambda: Encoder(D, HEADS, 1, norm=LayerNorm(D)), TypeError, "norm must make a norm .* got LayerNorm"),
        (lambda: Encoder(D, HEADS, 1, dropout=math.nan), ValueError, "dropout must be a number ≥ 0.0, got nan"),
        (lambda: FeedForward(D, 7, activation=["relu"]), TypeError, r"activation must be a name .* got \['relu'\]"),
        (lambda: FeedForward(D, 7, dropout=2.0), ValueError, "dropout must be between 0 and 1, got 2.0"),
        (lambda: Encoder.from_blocks([nn.Linear(D, D)]), TypeError, "blocks.0 must be regard.nn.Block, got Linear"),
        (
            lambda: Decoder.from_blocks([block()], norm=LayerNorm),
            TypeError,
            "norm must be a module, .* the class LayerNorm",
        ),
        (
            lambda: EncoderDecoder.from_stacks(nn.Linear(D, D), None),
            TypeError,
            "encoder must be regard.nn.Encoder, got Linear",
        ),
        (lambda: VisionTransformer((6, 6, 3), 2, 5, 6, 3, 1), ValueError, r"image must be .*got \(6, 6, 3\)"),
    ],
)
def test_refused_when_built(wrong, error, says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        (
            lambda: Decoder(D, HEADS, 1)(x, mask=[3, 4]),
            TypeError,
            r"mask must be a mask value .* got \[3, 4\]",
        ),
        (lambda: Decoder(D, HEADS, 1)(x, padding=bits), ValueError, r"padding is torch.int64 \[2, 5\].*\.bool\(\)"),
        (
            lambda: Encoder(D, HEADS, 1)(x, mask=torch.zeros(N, N)),
            TypeError,
            "mask must be bool .*torch.float32",
        ),
        (
            lambda: Encoder(D, HEADS, 1)(x, padding=Dense(bits.bool())),
            TypeError,
            "padding must be lengths .* got Dense",
        ),
        (lambda: Encoder(D, HEADS, 1)(x, padding="5"), TypeError, "padding must be lengths .* got '5'"),
        (lambda: Encoder(D, HEADS, 1)(x, padding=bits), ValueError, r"padding is torch.int64 .*attention_mask.bool"),
        (lambda: Encoder(D, HEADS, 1)(x, padding=bits.tolist()), ValueError, "a mask of 0 and 1 must be bool"),
        (lambda: Encoder(D, HEADS, 1).bfloat16()(x), TypeError, "x is torch.float32, but .* tor"),
        (
            lambda: FeedForward(D, 7).bfloat16()(x),
            TypeError,
            "x is torch.float32, but .* torch.bf",
        ),
        (
            lambda: make_block(D, HEADS, 7, d_context=D)(x, x, context_mask=x),
            TypeError,
            "mask must be bool .*torch.float32",
        ),
        (
            lambda: VisionTransformer(4, 2, 5, 6, 3, 1).double()(torch.zeros(1, 3, 4, 4)),
            TypeError,
            "images is torch.float32, but .* torch.float64",
        ),
    ],
)
def test_refused_when_called(wrong, error, says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)


def test_padding_of_every_batch_shape() -> None:
    """Lengths may be as many-dimensional as the batch; a mask of 0 and 1 has one dimension more."""
    encoder, y = Encoder(D, HEADS, 1), torch.randn(2, 3, N, D)
    lengths = torch.tensor([[5, 2, 3], [1, 4, 5]])
    expected = encoder(y, padding=torch.arange(N) < lengths.unsqueeze(-1))
    torch.testing.assert_close(encoder(y, padding=lengths), expected)
    with pytest.raises(ValueError, match="a mask of 0 and 1 must be bool"):
        encoder(y, padding=torch.ones(2, 3, N, dtype=torch.int64))


def test_a_decoder_takes_padding_as_an_encoder_does() -> None:
    decoder, y = Decoder(D, HEADS, 2), torch.randn(2, N, D)
    real = torch.arange(N) >= torch.tensor([[0], [2]])
    torch.testing.assert_close(decoder(y, padding=real)[1, 2:], decoder(y[1:, 2:])[0])
    torch.testing.assert_close(decoder(y, padding=[N, 3])[1, :3], decoder(y[1:, :3])[0])
