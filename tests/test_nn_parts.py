"""Norms, feed-forward networks and blocks: against torch and against their formulas."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import regard
from regard.masks import Causal, Padding
from regard.nn import Block, FeedForward, LayerNorm, MultiHeadAttention, RMSNorm, make_block
from regard.nn._cache import BlockCache
from regard.positions import ALiBi

F64 = torch.float64


def randomised(module: nn.Module, seed: int = 7) -> nn.Module:
    torch.manual_seed(seed)
    for p in module.parameters():
        nn.init.normal_(p, std=0.7)
    return module


def gradients(module: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    (module(x) * weight).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


# --- norms ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 17), st.sampled_from([1e-12, 1e-5, 1e-2]), st.booleans(), st.sampled_from([1e-3, 1.0, 1e3]))
def test_layer_norm_is_torchs(d: int, eps: float, bias: bool, size: float) -> None:
    theirs = randomised(nn.LayerNorm(d, eps=eps, bias=bias, dtype=F64))
    ours = LayerNorm.from_torch(theirs)
    x, weight = size * torch.randn(3, 5, d, dtype=F64), torch.randn(3, 5, d, dtype=F64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    if d > 2:  # for fewer elements the gradient of x is a difference of equal numbers
        for a, b in zip(gradients(ours, x, weight), gradients(theirs, x, weight), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(st.integers(1, 17), st.sampled_from([None, 1e-6, 1e-2]), st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm_is_torchs(d: int, eps: float | None, size: float) -> None:
    theirs = randomised(nn.RMSNorm(d, eps=eps, dtype=F64))
    ours = RMSNorm.from_torch(theirs)
    x, weight = size * torch.randn(3, 5, d, dtype=F64), torch.randn(3, 5, d, dtype=F64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    if d > 2:
        for a, b in zip(gradients(ours, x, weight), gradients(theirs, x, weight), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", [LayerNorm(5), LayerNorm(5, bias=False), RMSNorm(5)], ids=repr)
def test_gradients_of_norms(norm: nn.Module) -> None:
    norm = randomised(copy.deepcopy(norm).to(F64))
    assert torch.autograd.gradcheck(norm, torch.randn(3, 5, dtype=F64, requires_grad=True))


@pytest.mark.parametrize("value", [0.0, 1.0, -3e4, 1e4 + 0.1])
def test_constant_rows_give_beta_exactly(value: float) -> None:
    norm = randomised(LayerNorm(11))
    x = torch.full((2, 11), value, requires_grad=True)
    y = norm(x)
    assert bool((y == norm.bias).all())
    y.sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
    assert bool((RMSNorm(11)(torch.zeros(2, 11)) == 0).all())


def test_unit_norm_and_zero_mean_with_eps_0() -> None:
    y = LayerNorm(13, eps=0.0).to(F64)(torch.randn(3, 13, dtype=F64))
    torch.testing.assert_close(y.sum(-1), torch.zeros(3, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.square().sum(-1), torch.full((3,), 13.0, dtype=F64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(norm, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (200 * torch.randn(5, 512)).to(dtype)  # the sum of squares is beyond float16
    layer = norm(512).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    exact = norm(512).to(F64)(x.to(F64))
    torch.testing.assert_close(y.to(F64), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_rows_do_not_see_each_other() -> None:
    norm, x = LayerNorm(7), torch.randn(3, 7)
    other = x.clone()
    other[1] = 100
    assert bool((norm(x)[[0, 2]] == norm(other)[[0, 2]]).all())


def test_norms_refuse() -> None:
    for norm in (LayerNorm(7), RMSNorm(7)):
        with pytest.raises(TypeError, match=r"x is torch.int64"):
            norm(torch.ones(2, 7, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"x has shape \[2, 1\]; this layer normalises vectors of 7: \[\*, 7\]"):
            norm(torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"eps must be a number ≥ 0.0, got -1.0"):
        LayerNorm(7, eps=-1.0)
    with pytest.raises(ValueError, match="d must be at least 1"):
        RMSNorm(0)
    for cls, theirs in ((LayerNorm, nn.LayerNorm), (RMSNorm, nn.RMSNorm)):
        with pytest.raises(ValueError, match="elementwise_affine=False"):
            cls.from_torch(theirs(7, elementwise_affine=False))
        with pytest.raises(ValueError, match=r"normalized_shape=\(3, 7\)"):
            cls.from_torch(theirs((3, 7)))
    assert (
        repr(LayerNorm(7, bias=False)) == "LayerNorm(7, eps=1e-05, bias=False)"
        and repr(RMSNorm(7)) == "RMSNorm(7, eps=1e-06)"
    )


# --- feed-forward --------------------------------------------------------------------------------------------------

FUNCTIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_feed_forward_formula(name: str, gated: bool, bias: bool) -> None:
    layer = randomised(FeedForward(5, 11, activation=name, gated=gated, bias=bias, d_out=3).to(F64))
    x = torch.randn(2, 7, 5, dtype=F64)
    up = F.linear(x, layer.up.weight, layer.up.bias)
    hidden = FUNCTIONS[name](F.linear(x, layer.gate.weight, layer.gate.bias)) * up if gated else FUNCTIONS[name](up)
    expected = F.linear(hidden, layer.down.weight, layer.down.bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    parameters = (3 if gated else 2) * 5 * 11 + 11 * 3 - 5 * 11 + (bias * ((2 if gated else 1) * 11 + 3))
    assert sum(p.numel() for p in layer.parameters()) == parameters


def test_gated_names() -> None:
    for name, function in (("swiglu", "silu"), ("geglu", "gelu")):
        layer = FeedForward(5, 11, activation=name)
        assert layer.gate is not None and layer.activation == function
        assert f"5 → 11 → 5, {function} gated" in repr(layer)


def test_any_function_is_an_activation() -> None:
    layer, x = FeedForward(5, 11, activation=torch.tanh), torch.randn(2, 5)
    torch.testing.assert_close(layer(x), layer.down(torch.tanh(layer.up(x))), rtol=0, atol=0)
    assert layer.activation == "tanh" and FeedForward(5, 11, activation=nn.Mish()).activation == "Mish"


def test_feed_forward_dropout() -> None:
    layer, x = FeedForward(5, 11, dropout=0.9), torch.randn(2, 5)
    assert not torch.allclose(layer(x), layer.eval()(x))


def test_feed_forward_refuses() -> None:
    with pytest.raises(ValueError, match="one of relu, gelu, gelu_tanh, silu, swiglu, geglu; got 'swish'"):
        FeedForward(5, 11, activation="swish")
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        FeedForward(5, 0)
    with pytest.raises(ValueError, match=r"x has shape \[2, 7\]; this feed-forward takes vectors of 5"):
        FeedForward(5, 11)(torch.zeros(2, 7))


# --- blocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [LayerNorm, partial(RMSNorm, eps=1e-3)])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_block_formula(order: str, cross: bool, norm) -> None:
    attention, feedforward = MultiHeadAttention(6, 3), FeedForward(6, 11)
    other = MultiHeadAttention(6, 2, d_context=5) if cross else None
    block = randomised(Block(attention, feedforward, norm=norm, order=order, cross=other).to(F64))
    x, context = torch.randn(2, 7, 6, dtype=F64), torch.randn(2, 3, 5, dtype=F64) if cross else None
    y = x
    for f, n in (
        (lambda z: block.attention(z, mask=Causal()), block.attention_norm),
        (lambda z: block.cross(z, context, mask=Padding([3, 1])), block.cross_norm),
        (block.feedforward, block.feedforward_norm),
    ):
        if n is not None:
            y = y + f(n(y)) if order == "pre" else n(y + f(y))
    masks = {"context_mask": Padding([3, 1])} if cross else {}
    torch.testing.assert_close(block(x, context, mask=Causal(), **masks), y, rtol=0, atol=1e-12)
    assert f"{order}-norm" in repr(block)


def test_block_observes_by_name() -> None:
    block = make_block(6, 3, 11, d_context=6)
    x = torch.randn(2, 7, 6)
    out, seen = block(x, x, observe=regard.Observe(map=3))
    torch.testing.assert_close(out, block(x, x), rtol=0, atol=0)
    assert list(seen) == ["attention", "cross"] and seen["cross"].map.shape == (3, 3, 3)


def test_block_dropout_is_on_every_sublayer() -> None:
    block = Block(MultiHeadAttention(6, 3), FeedForward(6, 11), dropout=1.0)
    x = torch.randn(2, 7, 6)
    assert bool((block(x) == x).all())
    assert not torch.allclose(block.eval()(x), x)


def test_options_of_make_block() -> None:
    position = ALiBi(heads=4)
    block = make_block(
        6, 4, 11, d_context=5, position=position, dropout=0.25, d_key=3, kv_heads=2, qkv_bias=True, bias=False,
        norm=RMSNorm, order="post", activation="silu", gated=True, scale=0.5, softcap=7.0,
        sinks=True, backend="reference",
    )  # fmt: skip
    for layer, where, context in ((block.attention, position, 6), (block.cross, None, 5)):
        assert (layer.d_key, layer.d_value, layer.kv_heads, layer.d_context) == (3, 3, 2, context)
        assert layer.position is where and layer.q_proj.bias is not None and layer.out_proj.bias is None
        assert (layer.scale, layer.softcap, layer.dropout, layer.backend) == (0.5, 7.0, 0.25, "reference")
        assert layer.sinks is not None
    assert isinstance(block.cross_norm, RMSNorm) and block.order == "post" and block.dropout.p == 0.25
    assert block.feedforward.gate is not None and block.feedforward.up.bias is None


def test_blocks_refuse() -> None:
    attention, feedforward = MultiHeadAttention(6, 3), FeedForward(6, 11)
    with pytest.raises(ValueError, match="attention maps 6 to 5; residuals need 6 to 6"):
        Block(MultiHeadAttention(6, 3, d_out=5), feedforward)
    with pytest.raises(ValueError, match="feedforward maps 5 to 5; residuals need 6 to 6"):
        Block(attention, FeedForward(5, 11))
    with pytest.raises(ValueError, match="cross maps 8 to 8; residuals need 6 to 6"):
        Block(attention, feedforward, cross=MultiHeadAttention(8, 2))
    with pytest.raises(ValueError, match=r"order must be .pre. .* got .middle."):
        Block(attention, feedforward, order="middle")
    with pytest.raises(TypeError, match="unknown option 'head_dim'; a block takes d_key, kv_heads"):
        make_block(6, 3, 11, head_dim=3)
    x = torch.zeros(1, 2, 6)
    with pytest.raises(ValueError, match="context was given"):
        Block(attention, feedforward)(x, x)
    with pytest.raises(ValueError, match="context_mask was given, but this block has no cross-attention"):
        Block(attention, feedforward)(x, context_mask=Padding([1]))
    with pytest.raises(ValueError, match="context is missing"):
        Block(attention, feedforward, cross=MultiHeadAttention(6, 2))(x)


@torch.no_grad()
def test_block_with_a_cache_of_its_own() -> None:
    block, cache = make_block(6, 3, 11, d_context=6).to(F64), BlockCache()
    x, context = torch.randn(2, 7, 6, dtype=F64), torch.randn(2, 3, 6, dtype=F64)
    parts = [block(piece, context, mask=Causal(), cache=cache) for piece in x.split([3, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), block(x, context, mask=Causal()), rtol=0, atol=1e-12)
    assert (len(cache.attention), len(cache.cross)) == (7, 3)
