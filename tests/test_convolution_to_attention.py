"""A convolution as attention: the same outputs and gradients, the error of finite α, what a stride saves, refusals."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.budget._op_flops import register_flop_formulas
from regard.convolution import AttentionConvolution, leak, to_attention
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic

MODES = ("zeros", "reflect", "replicate", "circular")


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Conv1d | nn.Conv2d, Tensor]:
    """Any convolution of one or two axes with an input that it takes."""
    axes = draw(st.integers(1, 2))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(axes))

    kernel, dilation = each(1, 5 if axes == 1 else 3), each(1, 3 if axes == 1 else 2)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding: str | tuple[int, ...] = draw(st.sampled_from(["same", "valid", "some"]))
    mode = draw(st.sampled_from(MODES))
    padding = each(0, 2) if padding == "some" else padding
    stride = (1,) * axes if padding == "same" else each(1, 3)
    most = [s if isinstance(padding, str) else p for s, p in zip(spans, (padding * axes)[:axes], strict=True)]
    size = [max(s, int(m) + 1) + draw(st.integers(0, 2)) for s, m in zip(spans, most, strict=True)]
    groups = draw(st.integers(1, 3))
    channels, out = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    seed, batch = draw(st.integers(0, 2**31)), draw(st.integers(0, 2))
    torch.manual_seed(seed)
    conv = (nn.Conv1d if axes == 1 else nn.Conv2d)(
        *(channels, out, kernel),
        **{"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
        **{"bias": draw(st.booleans()), "padding_mode": mode, "dtype": torch.float64},
    )
    shape = (channels, *size) if batch == 0 else (batch, channels, *size)
    return conv, torch.randn(shape, dtype=torch.float64)


def outputs_and_gradients(layer: nn.Module, x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = layer(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).cos()
    kernel.grad = None
    (y * weights).sum().backward()
    assert x.grad is not None and kernel.grad is not None
    return y.detach(), x.grad, kernel.grad


@settings(max_examples=160, deadline=None)
@given(convolutions(), st.booleans())
def test_outputs_and_gradients_are_those_of_the_convolution(
    pair: tuple[nn.Conv1d | nn.Conv2d, Tensor], direct: bool
) -> None:
    check_outputs_and_gradients(pair, direct)


@pytest.mark.full
@settings(max_examples=1000, deadline=None, derandomize=False)
@given(convolutions(), st.booleans())
def test_outputs_and_gradients_are_those_of_the_convolution_often(
    pair: tuple[nn.Conv1d | nn.Conv2d, Tensor], direct: bool
) -> None:
    check_outputs_and_gradients(pair, direct)


def check_outputs_and_gradients(pair: tuple[nn.Conv1d | nn.Conv2d, Tensor], direct: bool) -> None:
    conv, x = pair
    layer = to_attention(conv, direct=direct)
    assert layer.attention.heads == math.prod(conv.kernel_size)
    expected = outputs_and_gradients(conv, x, conv.weight)
    for mine, its in zip(outputs_and_gradients(layer, x, layer.kernel), expected, strict=True):
        assert mine.shape == its.shape
        assert torch.allclose(mine, its, rtol=0, atol=1e-12)
    if conv.bias is not None:
        assert torch.equal(layer.attention.out_proj.bias, conv.bias)
    single, few = to_attention(copy.deepcopy(conv).float(), direct=direct), x.float()
    y = single(few)
    assert y.dtype == torch.float32
    assert torch.allclose(y.double(), expected[0], rtol=0, atol=1e-5)


def test_what_is_learned_is_the_kernel_and_the_bias() -> None:
    conv = nn.Conv2d(4, 6, 3, groups=2)
    layer = to_attention(conv)
    learned = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in learned.values()) == sum(p.numel() for p in conv.parameters())
    assert layer.kernel.shape == conv.weight.shape
    layer.kernel.data.add_(1)
    assert not torch.equal(layer.kernel, conv.weight)  # a copy
    for ours, its in ((layer, layer.kernel), (conv, conv.weight)):
        torch.optim.SGD(ours.parameters(), lr=0.1).zero_grad()
        its.data.copy_(torch.ones_like(its))
    x, y = torch.randn(2, 4, 5, 5), torch.randn(2, 6, 3, 3)
    for _ in range(3):  # the same steps lead to the same weights
        for ours in (layer, conv):
            optimizer = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.1)
            optimizer.zero_grad()
            (ours(x) - y).square().mean().backward()
            optimizer.step()
    assert torch.allclose(layer.kernel, conv.weight, atol=1e-5)
    twin = to_attention(nn.Conv2d(4, 6, 3, groups=2))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("what", ["offset", "head", "sign"])
def test_what_is_wrong_shows(what: str) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 4, 3, padding=1).double(), torch.randn(2, 3, 6, 6).double()
    layer = to_attention(conv)
    assert torch.allclose(layer(x), conv(x), atol=1e-12)
    with torch.no_grad():
        if what == "offset":
            layer.attention.q_proj.weight.view(9, 3, 3)[2, 1, 0] += 2
        elif what == "head":
            layer.kernel[..., 0, 2] = 0
        else:
            layer.attention.q_proj.weight.view(9, 3, 3)[:, 1:, 0] *= -1
    assert not torch.allclose(layer(x), conv(x), atol=1e-3)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_the_error_of_finite_alpha_is_under_its_bound(axes: int, mode: str) -> None:
    torch.manual_seed(axes)
    conv = (nn.Conv1d, nn.Conv2d)[axes - 1](4, 6, 3, padding=2, groups=2, padding_mode=mode).double()
    x = torch.randn(2, 4, *(9,) * axes, dtype=torch.float64)
    errors = []
    for alpha in (0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 30.0):
        layer = to_attention(conv, alpha=alpha)
        error = (layer(x) - conv(x)).abs().flatten(2).amax(-1)
        bound = layer.error_bound(x)
        assert bound.shape == error.shape
        assert (error <= bound + 1e-13).all()
        errors.append(float(error.detach().max()))
        assert errors[-1] > 1e-3 * float(bound.max())  # the bound says something
    ratios = [math.log(a / b) for a, b in pairwise(errors[4:8])]
    assert all(abs(r - d) < 0.1 for r, d in zip(ratios, (4, 8, 8), strict=True))  # e^{−α}
    assert to_attention(conv).error_bound(x).abs().max() == 0


def test_leak_is_the_weight_beside_the_offset() -> None:
    far = torch.arange(-60, 61, dtype=torch.float64)
    for alpha in (0.01, 0.5, 3.0):
        line = torch.exp(-alpha * far**2)
        assert math.isclose(leak(alpha, 1), 1 - 1 / float(line.sum()), rel_tol=1e-9)
        plane = torch.outer(line, line)
        assert math.isclose(leak(alpha, 2), 1 - 1 / float(plane.sum()), rel_tol=1e-9)
    assert math.isclose(leak(40.0, 2), 4 * math.exp(-40), rel_tol=1e-12)
    assert leak(math.inf, 2) == 0
    assert leak(1e6, 1) == 0
    # The sum itself, term by term, for an alpha that needs many of them.
    theta = math.fsum(math.exp(-1e-4 * k * k) for k in range(-3000, 3001))
    assert math.isclose(leak(1e-4, 1), 1 - 1 / theta, rel_tol=1e-12)
    # It would need more terms than there is time for.
    assert leak(1e-300, 2) == 1 and leak(5e-324, 1) == 1


def test_finite_alpha_is_the_quadratic_encoding() -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(2, 3, 3, padding="same").double(), torch.randn(1, 2, 5, 6).double()
    layer = to_attention(conv, alpha=2.5)
    padded = layer.geometry.pad(x)
    encoded = MultiHeadAttention(
        2,
        heads=9,
        **{"d_key": 1, "d_value": 2, "d_out": 3, "kv_heads": 1, "scale": 1.0},
        position=Quadratic(7, 8, heads=9, centers=torch.tensor(layer.shifts).double(), alpha=2.5),
    ).double()
    with torch.no_grad():
        for projection in (encoded.q_proj, encoded.k_proj):
            projection.weight.zero_()
        encoded.v_proj.weight.copy_(torch.eye(2))
        encoded.out_proj.weight.copy_(layer.attention.out_proj.weight)
        encoded.out_proj.bias.copy_(conv.bias)
        whole = encoded(padded.flatten(2).mT).mT.unflatten(-1, (7, 8))
    assert torch.allclose(whole[..., 1:-1, 1:-1], layer(x), atol=1e-12)


def test_the_direct_form_asks_less_by_the_ratio_of_queries() -> None:
    conv, x = nn.Conv2d(3, 4, 3, stride=(2, 3), padding=1), torch.randn(2, 3, 12, 18)
    direct, dense = (to_attention(conv, direct=x) for x in (True, False))
    assert torch.allclose(direct(x), dense(x), atol=1e-6)
    counts = [_products(layer, x) for layer in (direct, dense)]
    assert counts[0] * 2 * 3 == counts[1]


def _products(layer: AttentionConvolution, x: Tensor) -> int:
    """FLOPs of the score and value products, counted while the layer runs: 2·B·H·n·m·(D_k + D_v)."""
    register_flop_formulas()
    with FlopCounterMode(display=False) as counter:
        layer(x)
    counted = int(counter.get_flop_counts()["Global"][torch.ops.regard.attention])
    _, queries, keys = layer._tokens(x)
    a = layer.attention
    assert counted == 2 * len(keys) * a.heads * queries.shape[1] * keys.shape[1] * (a.d_key + a.d_value)
    return counted


def test_refusals() -> None:
    for other in (nn.ConvTranspose2d(2, 2, 3), nn.Conv3d(2, 2, 3), nn.LazyConv2d(2, 3), nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=f"conv must be .* got {type(other).__name__}"):
            to_attention(other)  # type: ignore[arg-type]
    conv = nn.Conv2d(2, 2, 3)
    with pytest.raises(TypeError, match=r"dtype must be .* got torch.bfloat16"):
        to_attention(nn.Conv2d(2, 2, 3).bfloat16())
    for alpha in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            to_attention(conv, alpha=alpha)
    layer = to_attention(conv)
    for shape in ((2, 3, 5, 5), (5, 5), (1, 1, 2, 5, 5)):
        with pytest.raises(ValueError, match="x must be"):
            layer(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"input .* at least 3 wide"):
        layer(torch.zeros(1, 2, 2, 5))
    with pytest.raises(ValueError, match="use float64"):
        to_attention(nn.Conv1d(1, 1, 1))(torch.zeros(1, 1, 5000))
