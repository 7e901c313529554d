"""Positions of their own: what is padded on the left or packed into one row is computed as if it stood alone."""

from __future__ import annotations

import pytest
import torch

from regard.masks import Padding, Segments
from regard.nn import Decoder, Encoder, EncoderDecoder, MultiHeadAttention, make_block
from regard.positions import ALiBi, Learned, RelativeTable, Rotary, Sinusoidal

pytestmark = pytest.mark.usefixtures("full_tiles")
F64 = torch.float64
D, HEADS, N, VOCAB = 12, 3, 11, 13
SCHEMES = {"learned": lambda: Learned(N, D), "sinusoidal": lambda: Sinusoidal(D), "rotary": lambda: Rotary(4)}
EXACT = {"rtol": 0.0, "atol": 1e-12}
REAL = torch.arange(N) >= torch.tensor([[0], [4], [9]])  # 11, 7 and 2 tokens, the padding before them
AT = (REAL.cumsum(-1) - 1).clamp(min=0)
PACKED = torch.tensor([5, 2, 4])  # three documents in one row
IDS, PLACES = torch.repeat_interleave(torch.arange(3), PACKED), torch.cat([torch.arange(int(n)) for n in PACKED])


def made(stack, scheme: str, **options):
    torch.manual_seed(0)
    return stack(D, HEADS, 2, vocab=VOCAB, position=SCHEMES[scheme](), **options).to(F64).eval()


def tokens(batch: int = 3) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, N), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("stack", [Encoder, Decoder])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_left_padded_is_unpadded(scheme: str, stack) -> None:
    model, ids = made(stack, scheme), tokens()
    y = model(ids, padding=REAL, position_ids=AT)
    for b in range(3):
        torch.testing.assert_close(y[b, REAL[b]], model(ids[b : b + 1, REAL[b]])[0], **EXACT)
    if scheme != "rotary":  # which sees distances alone
        assert not torch.allclose(model(ids, padding=REAL)[1, REAL[1]], y[1, REAL[1]])


@pytest.mark.parametrize("stack", [Encoder, Decoder])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_is_unpacked(scheme: str, stack) -> None:
    model, ids = made(stack, scheme), tokens(1)
    packed = model(ids, mask=Segments(IDS), position_ids=PLACES)
    alone = [model(part) for part in ids.split(PACKED.tolist(), dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), **EXACT)


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_left_padded_step_by_step(scheme: str) -> None:
    model, ids = made(Decoder, scheme), tokens()
    cache, parts = model.new_cache(), []
    for first, last in ((0, 6), (6, 7), (7, N)):
        new = slice(first, last)
        parts.append(model(ids[:, new], padding=REAL[:, :last], position_ids=AT[:, new], cache=cache))
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids, padding=REAL, position_ids=AT), **EXACT)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_encoder_decoder_padded_on_both_sides(scheme: str) -> None:
    model, source, target = made(EncoderDecoder, scheme), tokens(), tokens().flip(-1)
    y = model(source, target, padding=REAL, source_position_ids=AT, target_position_ids=AT, target_mask=Padding(REAL))
    for b in range(3):
        alone = model(source[b : b + 1, REAL[b]], target[b : b + 1, REAL[b]])[0]
        torch.testing.assert_close(y[b, REAL[b]], alone, **EXACT)
    context = model.encode(source, padding=REAL, position_ids=AT)
    again = model.decode(target, context, padding=REAL, position_ids=AT, mask=Padding(REAL))
    torch.testing.assert_close(again, y, **EXACT)


def test_blocks_and_layers_hand_positions_on() -> None:
    x, at = torch.randn(2, N, D, dtype=F64), AT[:2]
    rotary = Rotary(4)
    layer, block = MultiHeadAttention(D, HEADS, position=rotary).to(F64), make_block(D, HEADS, 7, position=rotary)
    for model in (layer, block.to(F64)):
        torch.testing.assert_close(model(x, position_ids=torch.arange(N)), model(x), **EXACT)
        assert not torch.allclose(model(x, position_ids=at), model(x))


def test_positions_nobody_looks_at_are_refused() -> None:
    x = torch.zeros(2, N, D)
    for position in (None, ALiBi(heads=HEADS), RelativeTable(HEADS, 2)):
        with pytest.raises(ValueError, match="position_ids"):
            Encoder(D, HEADS, 1, position=position)(x, position_ids=torch.arange(N))


def test_distances_need_no_positions() -> None:
    """Biases on scores go by distances between rows, the same wherever a document begins."""
    model = Decoder(D, HEADS, 2, vocab=VOCAB, position=RelativeTable(HEADS, 2)).to(F64)
    ids = tokens(1)
    alone = [model(part) for part in ids.split(PACKED.tolist(), dim=1)]
    torch.testing.assert_close(model(ids, mask=Segments(IDS)), torch.cat(alone, dim=1), **EXACT)
