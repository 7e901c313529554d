"""Encoder, decoder, encoder–decoder: how they are built, tokens, positions, observations, and what they refuse."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import regard
from regard.nn import (
    Block,
    Decoder,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    RMSNorm,
    TokenEmbedding,
    make_block,
)
from regard.positions import ALiBi, Learned, RelativeTable, Rotary, Sinusoidal, T5Buckets

pytestmark = pytest.mark.usefixtures("full_tiles")
F64 = torch.float64
B, N, M, D, HEADS, LAYERS, VOCAB = 2, 7, 5, 12, 3, 2, 13


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def vectors(n: int = N, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(B, n, D, dtype=F64)


# --- how they are built --------------------------------------------------------------------------------------------


def test_sized_and_made_of_blocks_are_the_same() -> None:
    torch.manual_seed(0)
    sized = Encoder(D, HEADS, LAYERS, hidden=11, vocab=VOCAB, position=Learned(N, D), norm=partial(RMSNorm, eps=1e-3))
    torch.manual_seed(1)
    made = Encoder.from_blocks(
        [
            Block(MultiHeadAttention(D, HEADS), FeedForward(D, 11, activation="gelu"), norm=partial(RMSNorm, eps=1e-3))
            for _ in range(LAYERS)
        ],
        norm=RMSNorm(D, eps=1e-3),
        tokens=TokenEmbedding(VOCAB, D, head=None),
        position=Learned(N, D),
    )
    made.load_state_dict(sized.state_dict())
    ids = torch.randint(VOCAB, (B, N))
    torch.testing.assert_close(made(ids), sized(ids), rtol=0, atol=0)


def test_the_last_norm_is_for_pre_norm_alone() -> None:
    assert isinstance(Encoder(D, HEADS, 1).norm, LayerNorm)
    assert isinstance(Decoder(D, HEADS, 1, norm=RMSNorm).norm, RMSNorm)
    assert Encoder(D, HEADS, 1, order="post").norm is None


@pytest.mark.parametrize("stack", [Encoder, Decoder])
def test_positions_go_where_they_act(stack) -> None:
    for added in (Sinusoidal(D), Learned(N, D)):
        model = stack(D, HEADS, LAYERS, position=added)
        assert model.position is added and all(block.attention.position is None for block in model.blocks)
    for inside in (Rotary(4), ALiBi(heads=HEADS), T5Buckets(HEADS)):
        model = stack(D, HEADS, LAYERS, position=inside)
        assert model.position is None and all(block.attention.position is inside for block in model.blocks)


def test_an_added_position_is_added_once() -> None:
    position = Sinusoidal(D)
    model = Encoder(D, HEADS, LAYERS, position=position).to(F64)
    bare, x = copy.deepcopy(model), vectors()
    bare.position = None
    close(model(x), bare(position(x)))


def test_a_shared_table_counts_once() -> None:
    table = RelativeTable(HEADS, 2)
    bare = sum(p.numel() for p in Encoder(D, HEADS, LAYERS).parameters())
    assert sum(p.numel() for p in Encoder(D, HEADS, LAYERS, position=table).parameters()) == bare + HEADS * 5
    model = EncoderDecoder(D, HEADS, LAYERS, position=table)  # each stack has one of its untied
    assert model.encoder.blocks[0].attention.position is table
    assert model.decoder.blocks[0].attention.position is not table
    assert model.decoder.blocks[0].attention.position is model.decoder.blocks[1].attention.position
    assert all(block.cross.position is None for block in model.decoder.blocks)
    other = T5Buckets(HEADS, bidirectional=False)
    model = EncoderDecoder(D, HEADS, LAYERS, position=table, target_position=other)
    assert model.decoder.blocks[1].attention.position is other


def test_positions_matter() -> None:
    x, shuffled = vectors(), [3, 0, 6, 2, 5, 1, 4]
    for position in (Sinusoidal(D), Rotary(4), ALiBi(heads=HEADS)):
        model = Encoder(D, HEADS, LAYERS, position=position).to(F64)
        assert not torch.allclose(model(x[:, shuffled]), model(x)[:, shuffled])
    model = Encoder(D, HEADS, LAYERS).to(F64)
    close(model(x[:, shuffled]), model(x)[:, shuffled])


# --- tokens --------------------------------------------------------------------------------------------------------


def test_tied_untied_and_no_head() -> None:
    ids = torch.randint(VOCAB, (B, N))
    tied, untied, none = (TokenEmbedding(VOCAB, D, head=head) for head in ("tied", "untied", None))
    torch.testing.assert_close(tied(ids), D**0.5 * tied.embedding.weight[ids])
    torch.testing.assert_close(TokenEmbedding(VOCAB, D, scale=1.0)(ids).shape, torch.Size([B, N, D]))
    x = torch.randn(B, N, D)
    torch.testing.assert_close(tied.logits(x), x @ tied.embedding.weight.T)
    torch.testing.assert_close(untied.logits(x), x @ untied.head.weight.T)
    assert none.logits(x) is x
    sizes = [sum(p.numel() for p in tokens.parameters()) for tokens in (tied, untied, none)]
    assert sizes == [VOCAB * D, 2 * VOCAB * D, VOCAB * D]
    assert [repr(t).splitlines()[1].strip().split("=")[-1] for t in (tied, untied, none)] == ["tied", "untied", "None"]


def test_models_of_token_ids() -> None:
    source, target = torch.randint(VOCAB, (B, M)), torch.randint(VOCAB, (B, N))
    assert Encoder(D, HEADS, LAYERS, vocab=VOCAB)(source).shape == (B, M, D)
    assert Decoder(D, HEADS, LAYERS, vocab=VOCAB)(target).shape == (B, N, VOCAB)
    shared = EncoderDecoder(D, HEADS, LAYERS, vocab=VOCAB)
    assert shared.encoder.tokens is shared.decoder.tokens and shared.decoder.tokens.tied
    assert shared(source, target).shape == (B, N, VOCAB)
    two = EncoderDecoder(D, HEADS, LAYERS, vocab=VOCAB, target_vocab=17, tied=False)
    assert two.encoder.tokens is not two.decoder.tokens
    assert two(source, target).shape == (B, N, 17)
    two(source, target).sum().backward()
    assert all(p.grad is not None for p in two.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@torch.no_grad()
def test_the_first_loss_is_that_of_knowing_nothing(d: int, tied: bool) -> None:
    """ln V: a model that begins by predicting the token it has just read is far above it."""
    torch.manual_seed(0)
    ids, vocab = torch.randint(1009, (4, 34)), 1009
    for position in (None, Rotary(16), Learned(33, d), Sinusoidal(d)):
        logits = Decoder(d, d // 16, 2, vocab=vocab, tied=tied, position=position)(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
        assert abs(loss - math.log(vocab)) < 0.2


def test_the_scale_of_embeddings_can_be_chosen() -> None:
    ids = torch.randint(VOCAB, (B, N))
    for make in (Encoder, Decoder):
        model = make(D, HEADS, 1, vocab=VOCAB, token_scale=1.0)
        torch.testing.assert_close(model.embed(ids), model.tokens.embedding.weight[ids], rtol=0, atol=0)
    both = EncoderDecoder(D, HEADS, 1, vocab=VOCAB, target_vocab=17, token_scale=3.0)
    assert both.encoder.tokens.scale == both.decoder.tokens.scale == 3.0


# --- observing -----------------------------------------------------------------------------------------------------


def test_observations_are_named_by_module() -> None:
    model = EncoderDecoder(D, HEADS, LAYERS).to(F64)
    source, target = vectors(M), vectors(N, 1)
    y, seen = model(source, target, padding=[M, 2], observe=regard.Observe(map=2))
    close(y, model(source, target, padding=[M, 2]))
    stacks = [f"encoder.blocks.{i}.attention" for i in range(LAYERS)]
    stacks += [f"decoder.blocks.{i}.{name}" for i in range(LAYERS) for name in ("attention", "cross")]
    assert list(seen) == stacks
    modules = dict(model.named_modules())
    assert all(isinstance(modules[name], MultiHeadAttention) for name in seen)
    assert (seen["encoder.blocks.0.attention"].n, seen["decoder.blocks.1.cross"].m) == (M, M)
    assert seen["encoder.blocks.1.attention"].counted[1, 0].sum() == 2  # padded rows do not count
    assert bool(seen["decoder.blocks.1.cross"].counted.all())


def test_observing_encoder_and_decoder_alone() -> None:
    x = vectors()
    for stack in (Encoder, Decoder):
        model = stack(D, HEADS, LAYERS).to(F64)
        y, seen = model(x, observe=regard.Observe(queries=[N, 3]))
        close(y, model(x))
        assert list(seen) == ["blocks.0.attention", "blocks.1.attention"]
        assert seen["blocks.1.attention"].counted[1, 0].sum() == 3
    with pytest.raises(
        ValueError, match=r"names the rows of one sequence; observe encode\(…\) and decode\(…\) separately"
    ):
        EncoderDecoder(D, HEADS, 1).to(F64)(x, x, observe=regard.Observe(queries=[N, 3]))


# --- as modules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [partial(Encoder, vocab=VOCAB), partial(Decoder, vocab=VOCAB, kv_heads=1, sinks=True)])
def test_state_dict_round_trip_and_deep_copies(make) -> None:
    ids = torch.randint(VOCAB, (B, N))
    model, other = (make(D, HEADS, LAYERS, position=RelativeTable(HEADS, 2)) for _ in range(2))
    other.load_state_dict(model.state_dict())
    twin = copy.deepcopy(model)
    for same in (other, twin):
        torch.testing.assert_close(same(ids), model(ids), rtol=0, atol=0)
    for p in twin.parameters():
        nn.init.zeros_(p)
    assert not torch.allclose(twin(ids), model(ids))


def test_dropout_is_for_training() -> None:
    model, x = Decoder(D, HEADS, LAYERS, dropout=0.4).to(F64), vectors()
    assert not torch.allclose(model(x), model(x))
    close(model.eval()(x), model(x))


def test_a_decoder_learns_to_repeat() -> None:
    """The whole of it trains: after a few steps the loss on one batch is nearly gone."""
    torch.manual_seed(0)
    model = Decoder(24, 3, 2, vocab=7, position=Rotary(8))
    ids = torch.randint(7, (4, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 * math.log(7)


# --- bad input -----------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        Encoder(D, HEADS, 0)
    with pytest.raises(ValueError, match="a stack needs at least one block"):
        Encoder.from_blocks([])
    with pytest.raises(ValueError, match=r"blocks.1 has width 6, but blocks.0 has 12"):
        Decoder.from_blocks([make_block(12, 3, 11), make_block(6, 3, 11)])
    with pytest.raises(ValueError, match=r"position has width 5, but blocks.0 has 12"):
        Encoder(D, HEADS, 1, position=Learned(N, 5))
    with pytest.raises(ValueError, match=r"tokens has width 5, but blocks.0 has 12"):
        Encoder.from_blocks([make_block(12, 3, 11)], tokens=TokenEmbedding(VOCAB, 5))
    with pytest.raises(TypeError, match="unknown option 'head_dim'"):
        Encoder(D, HEADS, 1, head_dim=3)
    with pytest.raises(ValueError, match="target_vocab=13"):
        EncoderDecoder(D, HEADS, 1, target_vocab=13)
    with pytest.raises(ValueError, match='head must be "tied", "untied" or None'):
        TokenEmbedding(VOCAB, D, head="shared")
    encoder = Encoder(D, HEADS, 1)
    with pytest.raises(ValueError, match=r"decoder blocks.0 reads a context of width None, but the encoder gives 12"):
        EncoderDecoder.from_stacks(encoder, Decoder(D, HEADS, 1))
    with pytest.raises(ValueError, match=r"decoder blocks.0 reads a context of width 5, but the encoder gives 12"):
        EncoderDecoder.from_stacks(encoder, Decoder(D, HEADS, 1, d_context=5))
    assert EncoderDecoder.from_stacks(encoder, Decoder(D, HEADS, 1, d_context=12)).encoder is encoder


def test_refusals_of_calls() -> None:
    ids = torch.randint(VOCAB, (B, N))
    with pytest.raises(ValueError, match=r"x is torch.int64 \[2, 7\]; without a vocabulary this stack takes vectors"):
        Encoder(D, HEADS, 1)(ids)
    with pytest.raises(ValueError, match=r"x is torch.float32 \[2, 7, 5\]; without a vocabulary .* \[\*batch, n, 12\]"):
        Encoder(D, HEADS, 1)(torch.zeros(2, 7, 5))
    model = Decoder(D, HEADS, 1, vocab=VOCAB, position=Learned(N, D))
    with pytest.raises(TypeError, match=r"token ids must be integers .* got torch.float32"):
        model(ids.float())
    ids[1, 2] = VOCAB
    with pytest.raises(ValueError, match="to 13; this vocabulary has 0 … 12"):
        model(ids)
    with pytest.raises(ValueError, match="length 7"):
        model(torch.zeros(1, N + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"lengths must be at most .*got 8"):
        Encoder(D, HEADS, 1)(torch.zeros(B, N, D), padding=[8, 1])
    with pytest.raises(TypeError, match="True = may attend"):
        Decoder(D, HEADS, 1)(torch.zeros(B, N, D), mask=torch.zeros(N, N))
    with pytest.raises(ValueError, match="context is missing"):
        Decoder(D, HEADS, 1, d_context=D)(torch.zeros(B, N, D))
    with pytest.raises(ValueError, match="context was given"):
        Decoder(D, HEADS, 1)(torch.zeros(B, N, D), torch.zeros(B, M, D))
