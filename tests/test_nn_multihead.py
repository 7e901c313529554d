"""MultiHeadAttention: the theory's parameter counts, its formula and its options."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense_attention

import regard
from regard.masks import Causal, Padding
from regard.nn import MultiHeadAttention
from regard.positions import ALiBi, RelativeKeys, RelativeTable, Rotary

F64 = torch.float64
SIZES = st.integers(1, 13)


def layer_and_x(*args: int, n: int = 7, seed: int = 0, **options) -> tuple[MultiHeadAttention, torch.Tensor]:
    torch.manual_seed(seed)
    layer = MultiHeadAttention(*args, **options).to(F64)
    for p in layer.parameters():  # biases and sinks start at 0, which would hide them
        torch.nn.init.normal_(p, std=0.5)
    return layer, torch.randn(2, n, layer.d_in, dtype=F64)


def parameters(layer: torch.nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())


def by_hand(layer: MultiHeadAttention, x: torch.Tensor, context: torch.Tensor | None = None, **options) -> torch.Tensor:
    """Σ_h A^h C W_v^h W_out^h + b_out, one head at a time, each with its own slices of the matrices."""
    c = x if context is None else context
    out = torch.zeros(*x.shape[:-1], layer.d_out, dtype=x.dtype)
    for h in range(layer.heads):
        g = h * layer.kv_heads // layer.heads
        one = []
        for source, linear, i, width in (
            (x, layer.q_proj, h, layer.d_key),
            (c, layer.k_proj, g, layer.d_key),
            (c, layer.v_proj, g, layer.d_value),
        ):
            rows = slice(i * width, (i + 1) * width)
            y = source @ linear.weight[rows].T
            one.append((y if linear.bias is None else y + linear.bias[rows]).unsqueeze(-3))
        mixed = dense_attention.attention(*one, **options)[0].squeeze(-3)
        out = out + mixed @ layer.out_proj.weight[:, h * layer.d_value : (h + 1) * layer.d_value].T
    return out if layer.out_proj.bias is None else out + layer.out_proj.bias


# --- parameters ----------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(SIZES, SIZES, SIZES, SIZES, SIZES)
def test_parameters_are_those_of_the_theory(heads: int, d_in: int, d_hid: int, d_o: int, d_out: int) -> None:
    layer = MultiHeadAttention(d_in, heads, d_key=d_hid, d_value=d_o, d_out=d_out)
    assert parameters(layer) == heads * d_in * (2 * d_hid + d_o) + heads * d_o * d_out + d_out


def test_eight_heads_at_512() -> None:
    assert parameters(MultiHeadAttention(512, 8, out_bias=False)) == 1_048_576


def test_parameters_of_the_options() -> None:
    plain_layer = MultiHeadAttention(6, 6)
    assert parameters(MultiHeadAttention(6, 6, qkv_bias=True)) == parameters(plain_layer) + 18
    assert parameters(MultiHeadAttention(6, 6, sinks=True)) == parameters(plain_layer) + 6
    assert parameters(MultiHeadAttention(6, 6, kv_heads=2)) == 6 * 6 + 2 * 6 * 2 + 6 * 6 + 6


def test_defaults() -> None:
    layer = MultiHeadAttention(15, 5)
    assert (layer.d_key, layer.d_value, layer.d_out, layer.d_context, layer.kv_heads) == (3, 3, 15, 15, 5)
    assert layer.q_proj.bias is None and layer.out_proj.bias is not None
    assert bool((layer.out_proj.bias == 0).all())


# --- the formula ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 5), (6, 2), (6, 1)])
def test_five_free_dimensions(heads: int, kv_heads: int, biases: bool) -> None:
    layer, x = layer_and_x(7, heads, d_key=3, d_value=5, d_out=11, kv_heads=kv_heads, qkv_bias=biases, out_bias=biases)
    out = layer(x)
    assert out.shape == (2, 7, 11)
    torch.testing.assert_close(out, by_hand(layer, x), rtol=0, atol=1e-12)


def test_cross_attention_has_its_own_width() -> None:
    layer, x = layer_and_x(6, 3, d_context=11, qkv_bias=True)
    context = torch.randn(2, 5, 11, dtype=F64)
    torch.testing.assert_close(layer(x, context), by_hand(layer, x, context), rtol=0, atol=1e-12)
    mask = Padding([5, 2])
    torch.testing.assert_close(layer(x, context, mask=mask), by_hand(layer, x, context, mask=mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 2.0}, {"scale": 0.0}, {"scale": math.inf}])
def test_numbers_reach_the_operator(options: dict[str, float]) -> None:
    layer, x = layer_and_x(6, 3, **options)
    torch.testing.assert_close(layer(x), by_hand(layer, x, **options), rtol=0, atol=1e-12)


def test_scale_of_a_call_replaces_the_layers() -> None:
    layer, x = layer_and_x(6, 3, scale=0.3)
    torch.testing.assert_close(layer(x, scale=2.0), by_hand(layer, x, scale=2.0), rtol=0, atol=1e-12)


def test_learned_sinks() -> None:
    layer, x = layer_and_x(6, 3, sinks=True)
    torch.manual_seed(0)
    assert layer.sinks is not None
    q, k, v = (p(x).unflatten(-1, (3, 2)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    mixed = dense_attention.attention(q, k, v, sinks=layer.sinks)[0]
    expected = layer.out_proj(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    layer(x).sum().backward()
    assert layer.sinks.grad is not None and bool((layer.sinks.grad != 0).all())


@pytest.mark.parametrize(
    "mask", [Causal(), Padding([7, 3]), torch.rand(2, 1, 7, 7) > 0.4], ids=["causal", "padding", "bool"]
)
def test_masks_reach_the_operator(mask) -> None:
    layer, x = layer_and_x(6, 1)
    torch.testing.assert_close(layer(x, mask=mask), by_hand(layer, x, mask=mask), rtol=0, atol=1e-12)


def test_any_number_of_batch_dimensions() -> None:
    layer, _ = layer_and_x(6, 3)
    x = torch.randn(2, 3, 5, 6, dtype=F64)
    torch.testing.assert_close(layer(x)[1, 2], layer(x[1, 2]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [0, 1])
def test_short_inputs(n: int) -> None:
    layer, x = layer_and_x(6, 3, n=n)
    assert layer(x).shape == (2, n, 6)


def test_a_fully_padded_sample_is_finite() -> None:
    layer, x = layer_and_x(6, 3)
    x[1] = math.nan
    x.requires_grad_()
    out = layer(x, mask=Padding([7, 0]))
    assert bool((out[1] == layer.out_proj.bias).all()) and bool(out.isfinite().all())
    out.sum().backward()
    assert x.grad is not None and bool(x.grad[0].isfinite().all())


def test_gradients() -> None:
    layer, x = layer_and_x(4, 2, n=3, d_key=3, d_value=1, d_out=5, qkv_bias=True, sinks=True)
    names = [name for name, _ in layer.named_parameters()]

    def f(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(f, (x.requires_grad_(), *layer.parameters()))


def test_dropout_in_training_only() -> None:
    layer, x = layer_and_x(6, 3, dropout=0.5)
    same, _ = layer_and_x(6, 3)
    torch.manual_seed(3)
    dropped = layer.train()(x)
    torch.manual_seed(3)
    assert bool((dropped == layer(x)).all())
    assert not torch.allclose(dropped, same(x))
    torch.testing.assert_close(layer.eval()(x), same(x), rtol=0, atol=0)


# --- positions -----------------------------------------------------------------------------------------------------


def test_rotary_turns_queries_and_keys() -> None:
    rotary = Rotary(4)
    layer, x = layer_and_x(12, 3, position=rotary)
    q, k, v = (p(x).unflatten(-1, (3, 4)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    expected = layer.out_proj(dense_attention.attention(rotary(q), rotary(k), v)[0].transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: ALiBi(heads=3), lambda: RelativeTable(3, 2), lambda: RelativeKeys(4, 3)])
def test_biases_on_scores(make) -> None:
    torch.manual_seed(1)
    position = make()
    layer, x = layer_and_x(12, 3, position=position)
    q, k, v = (p(x).unflatten(-1, (3, 4)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    expected = layer.out_proj(dense_attention.attention(q, k, v, bias=position)[0].transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(layer(x), layer_and_x(12, 3)[0](x))


def test_a_learned_bias_is_part_of_the_layer() -> None:
    layer = MultiHeadAttention(12, 3, position=RelativeTable(3, 2))
    assert any(name.startswith("position.") for name in layer.state_dict())
    layer(torch.randn(2, 5, 12)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_learned_slopes_are_part_of_the_layer() -> None:
    for position in (ALiBi(torch.nn.Parameter(torch.ones(3))), ALiBi(torch.nn.Parameter(torch.ones(3))) + ALiBi()):
        layer = MultiHeadAttention(12, 3, position=position)
        (name,) = (name for name in layer.state_dict() if name.startswith("position."))
        slopes = layer.get_parameter(name)
        x = torch.randn(2, 5, 12)
        layer(x).sum().backward()
        assert slopes.grad is not None and bool((slopes.grad != 0).all())
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            slopes.mul_(3.0)
        assert not torch.allclose(twin(x), layer(x))
        twin.load_state_dict(layer.state_dict(), assign=True)
        torch.testing.assert_close(twin(x), layer(x), rtol=0, atol=0)
    plain_value = MultiHeadAttention(12, 3, position=ALiBi(torch.ones(3)))
    assert not any(name.startswith("position.") for name in plain_value.state_dict())


# --- observing -----------------------------------------------------------------------------------------------------


def test_observing_changes_nothing_and_gives_the_exact_weights() -> None:
    layer, x = layer_and_x(6, 3)
    out, seen = layer(x, mask=Causal(), observe=regard.Observe(keep=True))
    torch.testing.assert_close(out, layer(x, mask=Causal()), rtol=0, atol=0)
    assert seen.entropy.shape == (2, 3, 7)
    q, k, v = (p(x).unflatten(-1, (3, 2)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    weights = dense_attention.attention(q, k, v, mask=Causal())[1]
    torch.testing.assert_close(seen.weights(2, batch=1), weights[1, 2], rtol=0, atol=1e-12)


def test_a_contexts_padding_says_nothing_about_the_queries() -> None:
    layer, x = layer_and_x(6, 3, n=5)
    context = torch.randn(2, 5, 6, dtype=F64)
    _, seen = layer(x, context, mask=Padding([5, 2]), observe=regard.Observe())
    assert bool(seen.counted.all())
    _, seen = layer(x, mask=Padding([5, 2]), observe=regard.Observe())
    assert seen.counted[1, 0].tolist() == [True, True, False, False, False]


# --- as a module ---------------------------------------------------------------------------------------------------


def test_state_dict_round_trip_and_deep_copies() -> None:
    options = {"kv_heads": 1, "qkv_bias": True, "sinks": True, "position": RelativeTable(3, 2)}
    layer, x = layer_and_x(6, 3, **options)
    other, _ = layer_and_x(6, 3, seed=1, **{**options, "position": RelativeTable(3, 2)})
    other.load_state_dict(layer.state_dict())
    twin = copy.deepcopy(layer)
    for same in (other, twin):
        torch.testing.assert_close(same(x), layer(x), rtol=0, atol=0)
    with torch.no_grad():
        twin.q_proj.weight.zero_()
    assert not torch.allclose(twin(x), layer(x))


def test_dtypes() -> None:
    layer, x = layer_and_x(6, 3)
    expected = layer(x).detach()
    for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 0.5)):
        out = layer.to(dtype)(x.to(dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out.to(F64), expected, rtol=0, atol=atol)


def test_repr_says_what_is_not_usual() -> None:
    text = repr(MultiHeadAttention(12, 3, kv_heads=1, softcap=30.0, position=Rotary(4)))
    assert "d_key=4" in text and "kv_heads=1" in text and "softcap=30.0" in text and "Rotary(d=4" in text
    assert "dropout" not in text and "d_context" not in text and "sinks" not in text and "backend" not in text
    text = repr(MultiHeadAttention(12, 3, sinks=True, backend="reference"))
    assert "sinks=True" in text and "backend='reference'" in text
