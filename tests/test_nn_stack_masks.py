"""Encoder, decoder, encoder–decoder: masks where the theory puts them, seen by which inputs an output depends on."""

from __future__ import annotations

import math

import pytest
import torch

import regard
from regard.masks import Causal, Padding, Window
from regard.nn import Decoder, Encoder, EncoderDecoder

pytestmark = pytest.mark.usefixtures("full_tiles")
F64 = torch.float64
B, N, M, D, HEADS, LAYERS = 2, 7, 5, 12, 3, 2


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def vectors(n: int = N, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(B, n, D, dtype=F64)


def depends(y: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Which rows of each input row i of sample b of y depends on, by gradient: bool [B, n, rows] each."""
    found = [torch.zeros(B, y.shape[1], x.shape[1], dtype=torch.bool) for x in inputs]
    weight = torch.randn(y.shape[-1], dtype=y.dtype)
    for i in range(y.shape[1]):
        grads = torch.autograd.grad((y[:, i] @ weight).sum(), inputs, retain_graph=True, allow_unused=True)
        for seen, grad in zip(found, grads, strict=True):
            seen[:, i] = False if grad is None else (grad != 0).any(-1)
    return found


@pytest.mark.parametrize("order", ["pre", "post"])
def test_an_encoder_sees_all_real_positions_and_no_padding(order: str) -> None:
    encoder = Encoder(D, HEADS, LAYERS, order=order).to(F64)
    x = vectors().requires_grad_()
    (seen,) = depends(encoder(x, padding=[N, 4]), x)
    assert bool(seen[0].all())
    assert bool(seen[1, :4, :4].all()) and not bool(seen[1, :4, 4:].any())


def test_padding_in_every_form() -> None:
    encoder, x = Encoder(D, HEADS, LAYERS).to(F64), vectors()
    real = torch.arange(N) < torch.tensor([[N], [4]])
    expected = encoder(x, padding=[N, 4])
    for padding in (torch.tensor([N, 4]), real, Padding([N, 4])):
        close(encoder(x, padding=padding), expected)
    close(encoder(x, mask=Padding([N, 4])), expected)
    close(encoder(x, mask=real[:, None, None]), expected)
    close(expected[1, :4], encoder(x[1:, :4])[0])
    window = encoder(x, padding=[N, 4], mask=Window(1))
    close(window, encoder(x, mask=Window(1) & Padding([N, 4])))
    assert not torch.allclose(window, expected)


@pytest.mark.parametrize("content", [0.0, 1e6, math.nan, math.inf])
def test_what_stands_in_the_padding_does_not_matter(content: float) -> None:
    model = EncoderDecoder(D, HEADS, LAYERS).to(F64)
    source, target = vectors(M), vectors(N, 1)
    expected, read = model(source, target, padding=[M, 2]), model.encode(source, padding=[M, 2])
    source[1, 2:] = content
    close(model(source, target, padding=[M, 2]), expected)
    close(model.encode(source, padding=[M, 2])[1, :2], read[1, :2])


def test_a_decoder_does_not_see_later_inputs() -> None:
    decoder = Decoder(D, HEADS, LAYERS).to(F64)
    x = vectors().requires_grad_()
    (seen,) = depends(decoder(x), x)
    assert bool((seen == torch.ones(N, N, dtype=torch.bool).tril()).all())
    (seen,) = depends(decoder(x, mask=Window(0)), x)
    assert bool((seen == torch.eye(N, dtype=torch.bool)).all())
    (seen,) = depends(decoder(x, mask=torch.ones(N, N, dtype=torch.bool)), x)  # no mask can lift causality
    assert bool((seen == torch.ones(N, N, dtype=torch.bool).tril()).all())


def test_right_padding_needs_no_mask_in_a_decoder() -> None:
    decoder, x = Decoder(D, HEADS, LAYERS).to(F64), vectors()
    expected = decoder(x)[1, :4]
    x[1, 4:] = math.nan
    close(decoder(x)[1, :4], expected)


def test_an_encoder_decoder_has_each_mask_in_its_place() -> None:
    model = EncoderDecoder(D, HEADS, LAYERS, decoder_layers=3).to(F64)
    assert (len(model.encoder.blocks), len(model.decoder.blocks)) == (2, 3)
    source, target = vectors(M).requires_grad_(), vectors(N, 1).requires_grad_()
    on_source, on_target = depends(model(source, target, padding=[M, 2]), source, target)
    assert bool((on_target == torch.ones(N, N, dtype=torch.bool).tril()).all())
    assert bool(on_source[0].all())
    assert bool(on_source[1, :, :2].all()) and not bool(on_source[1, :, 2:].any())


def test_source_and_target_masks_stay_in_their_self_attentions() -> None:
    model = EncoderDecoder(D, HEADS, 1).to(F64)
    source, target = vectors(M).requires_grad_(), vectors(N, 1).requires_grad_()
    y = model(source, target, source_mask=Window(0), target_mask=Window(0))
    on_source, on_target = depends(y, source, target)
    assert bool(on_source.all()) and bool((on_target == torch.eye(N, dtype=torch.bool)).all())


@pytest.mark.parametrize("order", ["pre", "post"])
def test_a_fully_padded_sample_is_finite(order: str) -> None:
    model = EncoderDecoder(D, HEADS, LAYERS, order=order).to(F64)
    source, target = vectors(M).requires_grad_(), vectors(N, 1).requires_grad_()
    y = model(source, target, padding=[M, 0])
    y.square().sum().backward()
    for x in (y, source.grad, target.grad, *(p.grad for p in model.parameters())):
        assert bool(x.isfinite().all())


def test_prefix_language_model() -> None:
    encoder, x = Encoder(D, HEADS, LAYERS).to(F64), vectors().requires_grad_()
    (seen,) = depends(encoder(x, mask=Causal() | regard.Prefix([3, 0])), x)
    expected = torch.ones(B, N, N, dtype=torch.bool).tril()
    expected[0, :, :3] = True
    assert bool((seen == expected).all())
