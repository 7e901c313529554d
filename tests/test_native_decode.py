"""Layers of decoding in C++ (linear layers, norms, RoPE) against float64 and torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from regard import Rotary
from regard.kernels import linear_norm_rope as layers
from regard.kernels import native, native_decode_layers
from regard.nn import LayerNorm, RMSNorm
from regard.nn._linear import Linear, apply_linears

pytestmark = pytest.mark.skipif(not native.built(), reason="the native module was not built")
SETS = native.instruction_sets() or ("none",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=SETS, autouse=True)
def isa(request, monkeypatch):
    monkeypatch.setattr(native, "instruction_set", lambda: request.param)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def within(ours: Tensor, torchs: Tensor, exact: Tensor, times: float = 2.0) -> None:
    """Our error is at most ``times`` torch's own, and one rounding of the largest result."""
    assert ours.dtype == torchs.dtype and ours.shape == torchs.shape
    floor = torch.finfo(ours.dtype).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= times * (torchs - exact).abs().max() + floor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 7, 15, 16, 17, 63, 64, 65, 131, 577])
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@torch.no_grad()
def test_linear(dtype: torch.dtype, inner: int, rows: int) -> None:
    for outer in (1, 5, 37):
        x, w, b = (
            random(rows, inner, dtype=dtype),
            random(outer, inner, dtype=dtype, seed=1),
            random(outer, dtype=dtype),
        )
        for bias in (None, b):
            exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
            size = F.linear(x.double().abs(), w.double().abs(), None if bias is None else bias.double().abs())
            ours = layers.linear(x, w, bias)
            assert ours.dtype == dtype and torch.equal(ours, native_decode_layers.linear(x, (w, bias)))
            assert ((ours - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 2**-23 * size).all()


@pytest.mark.parametrize("inner", [64, 577, 4096])
@torch.no_grad()
def test_linear_errs_no_more_than_torch(inner: int) -> None:
    x, w = random(4, inner), random(997, inner, seed=1)
    exact = F.linear(x.double(), w.double())
    ours, torchs = ((y - exact).square().mean().sqrt() for y in (layers.linear(x, w), F.linear(x, w)))
    assert ours <= 2 * torchs


@torch.no_grad()
def test_linear_of_any_layout() -> None:
    x, w = random(2, 3, 34), random(11, 40)[:, 3:20]
    for view in (
        x[..., ::2],
        x[..., :17],
        x.transpose(0, 1)[..., 5:22],
        x[0, 0, :17],
        x[:1, :, 2:19].expand(2, 3, 17),
    ):
        torch.testing.assert_close(layers.linear(view, w), F.linear(view, w))
    for empty in (random(0, 17), random(2, 0, 17)):
        assert layers.linear(empty, w).shape == (*empty.shape[:-1], 11)


@torch.no_grad()
def test_several_maps_at_once_are_each_alone() -> None:
    x, maps = random(3, 1, 17), [Linear(17, n, bias=n != 7) for n in (5, 7, 11)]
    for one, many in zip([each(x) for each in maps], apply_linears(x, *maps), strict=True):
        assert torch.equal(one, many)
    called = []
    maps[1].register_forward_hook(lambda *_: called.append(1))
    apply_linears(x, *maps)
    assert called
    plain = nn.Linear(17, 3)
    assert torch.equal(apply_linears(x, maps[0], plain)[1], plain(x))


def test_the_number_of_threads_changes_no_bit() -> None:
    x, w = random(3, 577), random(997, 577, seed=1)
    before = torch.get_num_threads()
    try:
        ours = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            ours.append(native_decode_layers.linear(x, (w, None)))
        alone = torch.cat([native_decode_layers.linear(row[None], (w, None)) for row in x])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(ours[0], other) for other in (*ours[1:], alone))


def test_calls_with_gradients_or_observers_go_to_torch() -> None:
    x, map_ = random(1, 17).requires_grad_(), Linear(17, 5)
    map_(x).sum().backward()
    assert x.grad is not None and map_.weight.grad is not None
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            map_(x)
        assert counter.get_total_flops() == 2 * 17 * 5
        called: list[str] = []

        class Recorder(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                called.append(getattr(func, "__name__", ""))
                return func(*args, **(kwargs or {}))

        with Recorder():
            map_(x)
        assert "linear" in called
        with torch.autocast("cpu", torch.bfloat16):
            assert map_(x).dtype == torch.bfloat16
        compiled = torch.compile(map_, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), map_(x))
        torch.testing.assert_close(torch.func.vmap(map_)(random(3, 17)), map_(random(3, 17)))
    with pytest.raises(RuntimeError, match="shapes"):
        map_(torch.zeros(1, 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 15, 16, 17, 64, 65, 577])
@torch.no_grad()
def test_norms(dtype: torch.dtype, width: int) -> None:
    for rows in (1, 2, 131):
        x = (random(rows, width) * 3 + 5).to(dtype)
        weight, bias = random(width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2)
        exact = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
        within(layers.rms_norm(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5), exact, 4)
        for b in (None, bias):
            exact = F.layer_norm(x.double(), (width,), weight.double(), None if b is None else b.double(), 1e-5)
            within(layers.layer_norm(x, weight, b, 1e-5), F.layer_norm(x, (width,), weight, b, 1e-5), exact, 4)


@torch.no_grad()
def test_edge_cases_of_norms() -> None:
    far = torch.full((2, 577), 12345.678)
    assert torch.equal(LayerNorm(577)(far), torch.zeros(2, 577))
    assert torch.equal(RMSNorm(5)(torch.zeros(1, 5)), torch.zeros(1, 5))
    assert LayerNorm(5, eps=0.0)(torch.zeros(1, 5)).isnan().all()
    assert RMSNorm(5, eps=0.0)(torch.zeros(1, 5)).isnan().all()
    assert RMSNorm(3)(torch.tensor([[1.0, float("nan"), 2.0]])).isnan().all()
    x = random(3, 5, 34)[..., ::2]
    torch.testing.assert_close(LayerNorm(17)(x), F.layer_norm(x, (17,)))
    assert LayerNorm(17)(x[:0]).shape == (0, 5, 17)


@torch.no_grad()
def test_shapes_that_only_torch_accepts() -> None:
    norm = RMSNorm(64)
    norm.weight = nn.Parameter(torch.tensor([2.0]))
    x = random(3, 64)
    torch.testing.assert_close(norm(x), 2 * F.rms_norm(x, (64,), eps=1e-6))
    rotary, at = Rotary(4), torch.tensor([[3], [5]])
    layers.apply_rope(rotary, random(2, 1, 1, 4), at)
    with pytest.raises(ValueError, match="position_ids has shape"):
        layers.apply_rope(rotary, random(4, 1, 1, 4), at)


def test_traces_and_forward_derivatives_go_to_torch() -> None:
    for module in (Linear(17, 5), RMSNorm(17), LayerNorm(17)):
        module.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a check of sizes is not traced
            traced = torch.jit.trace(module, random(1, 17))
        other = random(1, 17, seed=5)
        torch.testing.assert_close(traced(other), module(other))
        with forward_ad.dual_level():
            dual = module(forward_ad.make_dual(other, torch.ones_like(other)))
            assert forward_ad.unpack_dual(dual).tangent is not None
    rotary, x, at = Rotary(4), random(1, 2, 3, 4), torch.arange(6).reshape(2, 3)
    rotary(x, position_ids=at[0])
    torch.testing.assert_close(
        torch.func.vmap(lambda places: rotary(x, position_ids=places))(at)[1], rotary(x, position_ids=at[1])
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["halves", "pairs"])
@pytest.mark.parametrize("rotate", [None, 6])
@torch.no_grad()
def test_rope(dtype: torch.dtype, layout: str, rotate: int | None) -> None:
    rotary = Rotary(10, layout=layout, rotate=rotate)
    x = random(3, 2, 5, 10, dtype=dtype)
    at = torch.tensor([[0, 1, 2, 3, 4], [7, 6, 5, 4, 3], [0, 0, 0, 1, 900]])
    for view in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.repeat(1, 1, 1, 2)[..., 3:13]):
        for where in ({"start": 0}, {"start": 17}, {"position_ids": at}, {"position_ids": at[2]}):
            exact = rotary(view.double(), **where)
            within(layers.apply_rope(rotary, view, **where), rotary(view, **where), exact)
