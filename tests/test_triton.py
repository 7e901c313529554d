"""The Triton kernels: every option against float64, in the interpreter, or on a GPU with ``pytest -m gpu``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense_attention
from support.cases import CHOICES, Case, build, pairs
from support.operator_runs import attention_on, check_backend
from support.triton_device import DEVICES
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard import Causal, Dense, Padding, Window
from regard._lowered_scores import NO_POSITION, Bias, RelativeTerm
from regard.kernels import native
from regard.kernels import triton as kernels

pytest.importorskip("triton")

from regard.kernels.triton import _launch, _tile_sizes

# The interpreter computes NaN and overflow with numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = st.sampled_from([0, 1, 3, 7, 17, 19, 37])
WIDTHS = st.sampled_from([1, 2, 3, 5, 17])
CASES = st.builds(
    build,
    # More heads and entries only repeat the same kernel, slowly; test_every_choice_of_every_option has them.
    st.fixed_dictionaries(
        {name: st.sampled_from(values) for name, values in CHOICES.items()}
        | {"heads": st.sampled_from(("one", "shared")), "batch": st.sampled_from(("one", "two"))}
    ),
    SIZES,
    SIZES,
    WIDTHS,
    WIDTHS,
    st.integers(0, 2**31),
)
# The smallest tile of a matrix product: a few dozen keys cross its borders.
TINY = _tile_sizes.TileSize(16, 16)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "tile_size", lambda *arguments: TINY)


def every_choice() -> Iterator[dict[str, str]]:
    """For every choice of every option, one choice of all options that contains it."""
    rng = random.Random(0)
    for name, values in CHOICES.items():
        for value in values:
            yield {other: rng.choice(choices) for other, choices in CHOICES.items()} | {name: value}


def check(choice: dict[str, str], seed: int, device: str) -> None:
    try:
        check_backend(build(choice, 19, 23, 3, 5, seed), "triton", device)
    except Exception as error:
        raise AssertionError(f"with {choice}") from error


def test_every_choice_of_every_option(device: str) -> None:
    for seed, choice in enumerate(every_choice()):
        check(choice, seed, device)


@pytest.mark.full
def test_every_pair_of_options(device: str) -> None:
    for seed, choice in enumerate(pairs()):
        check(choice, seed, device)


@given(case=CASES)
@settings(max_examples=30)
def test_equals_the_plain_formula(tiny_tiles: None, device: str, case: Case) -> None:
    check_backend(case, "triton", device)


@pytest.mark.full
@given(case=CASES)
@settings(max_examples=1000)
def test_equals_the_plain_formula_often(tiny_tiles: None, device: str, case: Case) -> None:
    check_backend(case, "triton", device)


def run_sdpa(q, k, v, grad, dtype, **options):
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if dtype != torch.float64 else SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*leaves, **options)
    return out.detach(), torch.autograd.grad(out, leaves, grad.to(dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("largest_logit", [1, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_against_torchs_own(device: str, dtype: torch.dtype, largest_logit: int, causal: bool) -> None:
    """The forward pass is within 2 × and gradients are within 3 × torch's error, in every dtype."""
    g = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 257, 64, generator=g) for _ in range(4))
    if largest_logit > 1:
        q = q * (largest_logit / (q @ k.transpose(-1, -2) / 8).abs().max())
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    exact, exact_grads = run_sdpa(q, k, v, grad, torch.float64, is_causal=causal)
    torch_out, torch_grads = run_sdpa(q, k, v, grad, dtype, is_causal=causal)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ours = attention_on(device, "triton", *leaves, mask=Causal() if causal else None)
    eps = torch.finfo(dtype).eps
    assert (ours - exact).abs().max() <= 2 * (torch_out - exact).abs().max() + eps / 4
    for a, b, c in zip(torch.autograd.grad(ours, leaves, grad), torch_grads, exact_grads, strict=True):
        assert (a - c).abs().max() <= 3 * (b - c).abs().max() + eps * c.abs().max() / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("d, e", [(96, 96), (200, 31), (31, 256), (256, 256)])
def test_every_width(device: str, d: int, e: int, dtype: torch.dtype) -> None:
    """The error is within 4 × that of the plain formula in the same dtype, with grouped heads and n ≠ m.

    Δ = out·g is one more float32 sum over e numbers, which the plain formula does not have.
    """
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 67, d, generator=g).to(dtype)
    k = torch.randn(1, 1, 41, d, generator=g).to(dtype)
    v = torch.randn(1, 1, 41, e, generator=g).to(dtype)
    grad = torch.randn(1, 2, 67, e, generator=g).to(dtype)

    def results(call: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = call(*leaves, mask=Causal())
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    exact = results(plain_out, torch.float64)
    baseline = results(plain_out, dtype)
    ours = results(partial(attention_on, device, "triton"), dtype)
    for a, b, c in zip(ours, baseline, exact, strict=True):
        assert (a - c).abs().max() <= 4 * (b - c).abs().max() + torch.finfo(dtype).eps * c.abs().max() / 4


def plain_out(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    return dense_attention.attention(*tensors, **options)[0]


# --- hidden and visible numbers that are not finite -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hidden_nan_stays_hidden_and_a_visible_one_does_not(device: str, bad: float, dtype: torch.dtype) -> None:
    """Key 7 is hidden from some rows, and visible to others."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=g).to(dtype) for _ in range(3))
    see = torch.rand(40, 40, generator=g) < 0.6
    see[:, 0] = True
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    k[:, :, 7] = bad
    v[:, :, 7] = bad
    with_nan = [x.clone().requires_grad_() for x in (q, k, v)]
    a = attention_on(device, "triton", *clean, mask=Dense(see))
    b = attention_on(device, "triton", *with_nan, mask=Dense(see))
    blind = ~see[:, 7]
    assert torch.allclose(a[:, :, blind], b[:, :, blind], atol=1e-6)
    assert not b[:, :, ~blind].isfinite().any()

    rows = blind.view(1, 1, -1, 1)
    ours = torch.autograd.grad(torch.where(rows, b, 0).sum(), with_nan)
    theirs = torch.autograd.grad((a * rows).sum(), clean)
    assert torch.allclose(ours[0][:, :, blind], theirs[0][:, :, blind], atol=1e-5)


def test_padding_may_hold_anything(device: str) -> None:
    """Keys that no row sees, and queries that see nothing: their NaN reaches neither results nor gradients."""
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 2, 37, 8, generator=g) for _ in range(3)]
    grad = torch.randn(2, 2, 37, 8, generator=g)
    lengths = [37, 11]
    real = torch.arange(37) < torch.tensor(lengths).view(2, 1, 1, 1)
    real = real.view(2, 1, 37, 1)
    mask = Padding(lengths) & Dense(real)
    results = []
    for filling in (0.0, math.nan):
        leaves = [torch.where(real, x, filling).requires_grad_() for x in tensors]
        out = attention_on(device, "triton", *leaves, mask=mask)
        results.append([out, *torch.autograd.grad(out, leaves, torch.where(real, grad, filling))])
    for zeros, nans in zip(*results, strict=True):
        assert torch.equal(zeros, nans)


def test_an_infinite_value_has_its_sign(device: str) -> None:
    q, k = torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2)
    v = torch.zeros(1, 1, 4, 3)
    v[0, 0, 0] = torch.tensor([math.inf, -math.inf, math.inf])
    v[0, 0, 2, 2] = -math.inf
    out = attention_on(device, "triton", q, k, v, mask=Causal())[0, 0]
    assert torch.equal(out[:2], torch.tensor([[math.inf, -math.inf, math.inf]] * 2))
    assert torch.equal(out[2:, :2], torch.tensor([[math.inf, -math.inf]] * 2))
    assert out[2:, 2].isnan().all()


@pytest.mark.parametrize("scale", [0.0, 1.0, math.inf])
def test_a_hidden_nan_does_not_reach_the_gradient_of_a_bias(device: str, scale: float) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=g) for _ in range(3))
    v[:, :, 4] = math.nan
    see = torch.ones(9, 9, dtype=torch.bool)
    see[:, 4] = False
    results = []
    for backend in ("triton", "reference"):
        bias = torch.randn(9, 9, generator=g.manual_seed(1)).requires_grad_()
        out = attention_on(device, backend, q, k, v, bias=bias, mask=Dense(see), scale=scale)
        results.append(torch.autograd.grad((out * out).sum(), bias)[0])
    assert results[0].isfinite().all()
    assert torch.allclose(*results, atol=1e-4)


@pytest.mark.parametrize("scale", [None, 0.0, math.inf])
def test_a_row_that_sees_nothing_is_zero_and_sends_no_gradient(device: str, scale: float | None) -> None:
    leaves = [torch.randn(2, 3, 5, 7, requires_grad=True) for _ in range(3)]
    out = attention_on(device, "triton", *leaves, mask=Causal(offset=-2), scale=scale)
    assert (out[:, :, :2] == 0).all()
    assert (out[:, :, 2:] != 0).all()
    grad = torch.ones_like(out)
    grad[:, :, :2] = math.nan
    gradients = torch.autograd.grad(out, leaves, grad)
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[0][:, :, :2] == 0).all()


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_keys_tie_exactly_wherever_they_stand(device: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    few = torch.randn(3, 37, generator=g)
    which = torch.randint(0, 3, (101,), generator=g)
    q = torch.randn(1, 2, 29, 37, generator=g).to(dtype)
    k = few[which].expand(1, 2, 101, 37).to(dtype)
    v = torch.eye(101, dtype=dtype).expand(1, 2, 101, 101)
    weights = attention_on(device, "triton", q, k, v, scale=math.inf)
    best = (q.double() @ few.to(dtype).double().T).argmax(-1)
    share = (which == best.unsqueeze(-1)).double() / torch.bincount(which)[best].unsqueeze(-1)
    assert torch.allclose(weights.double(), share, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("n, m", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"mask": Causal()}, {"scale": math.inf}, {"bias": regard.ALiBi()}])
def test_zero_lengths(device: str, n: int, m: int, options: dict) -> None:
    leaves = [torch.randn(2, 4, size, width).requires_grad_() for size, width in ((n, 2), (m, 2), (m, 3))]
    out = attention_on(device, "triton", *leaves, **options)
    assert out.shape == (2, 4, n, 3)
    assert (out == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), leaves))


def test_zero_batch_and_zero_value_width(device: str) -> None:
    def shape(batch: int, e: int) -> tuple[int, ...]:
        q = torch.randn(batch, 2, 3, 4)
        k = torch.randn(batch, 2, 5, 4)
        return tuple(attention_on(device, "triton", q, k, k[..., :e]).shape)

    assert shape(0, 1) == (0, 2, 3, 1)
    assert shape(1, 0) == (1, 2, 3, 0)


def test_layouts_are_read_in_place_or_copied(device: str) -> None:
    """Length-first, expanded and strided tensors, and rows that are not contiguous."""
    base = torch.randn(2, 21, 3, 16)
    length_first = base.transpose(1, 2)[..., :8]
    expanded = torch.randn(1, 1, 21, 8).expand(2, 3, 21, 8)
    columns = torch.randn(2, 3, 8, 21).transpose(-1, -2)
    mask = Padding([21, 4]) & Window(9)
    ours = attention_on(device, "triton", length_first, expanded, columns, mask=mask)
    theirs = attention_on(device, "reference", length_first, expanded, columns, mask=mask)
    assert torch.allclose(ours, theirs, atol=1e-6)


class FixedTerms(Bias):
    """A bias with the terms it is built from."""

    def __init__(self, *terms: RelativeTerm) -> None:
        self.fixed_terms = terms

    def terms(self, q: torch.Tensor, m: int) -> tuple[RelativeTerm, ...]:
        return self.fixed_terms


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_table_expanded_over_rows_has_its_own_gradient(device: str, shuffled: bool) -> None:
    at = torch.arange(5, device=device)
    keys = at.flip(0) if shuffled else at
    results = []
    for backend in ("triton", "reference"):
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 3, 5, 4, generator=g) for _ in range(3))
        table = torch.randn(1, 3, 1, 9, generator=g).to(device).requires_grad_()
        bias = FixedTerms(RelativeTerm(table.expand(2, 3, 5, 9), at, keys, -4))
        out = attention_on(device, backend, q, k, v, bias=bias)
        results.append([out, *torch.autograd.grad((out * out).sum(), table)])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_a_query_without_a_position_takes_no_bias(device: str, n: int) -> None:
    table = torch.arange(9.0, device=device).view(1, 1, 1, 9)
    positions = torch.tensor([NO_POSITION, 1][:n], device=device)
    q, k, v = torch.randn(1, 1, n, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    bias = FixedTerms(RelativeTerm(table, positions, torch.arange(5, device=device), -4))
    ours = attention_on(device, "triton", q, k, v, bias=bias)
    assert torch.allclose(ours, attention_on(device, "reference", q, k, v, bias=bias), atol=1e-6)


def test_biases_that_overflow_together_do_not_hide(device: str) -> None:
    at = torch.arange(3, device=device)
    low = RelativeTerm(torch.full((1, 1, 1, 5), -2e38, device=device), at, at, -2)
    x, v = torch.ones(1, 1, 3, 2), torch.eye(3).view(1, 1, 3, 3)
    out = attention_on(device, "triton", x, x, v, bias=FixedTerms(low, low))
    assert torch.allclose(out, torch.full((3, 3), 1 / 3))


@pytest.mark.parametrize("term", [False, True])
def test_a_float64_bias_that_overflows_float32_does_not_hide(device: str, term: bool) -> None:
    """The smallest float64 is a common stand-in for −inf. Row 1 sees only such keys, and −inf itself hides."""
    low = torch.finfo(torch.float64).min
    bias = torch.tensor([[0.5, low, 0], [low, low, low], [low, -math.inf, low]], dtype=torch.float64)
    expected = torch.tensor([[0.5, -math.inf, 0], [0, 0, 0], [0, -math.inf, 0]]).softmax(-1)
    x, v = torch.zeros(1, 1, 3, 2), torch.eye(3).view(1, 1, 3, 3)
    added: Any = bias.to(device)
    if term:
        at = torch.arange(3, device=device)
        added = FixedTerms(RelativeTerm(bias.view(1, 1, 3, 3).to(device), torch.zeros_like(at), at, 0))
    assert torch.allclose(attention_on(device, "triton", x, x, v, bias=added)[0, 0], expected)


@pytest.mark.parametrize("name", ["lo", "hi"])
def test_a_wrong_bound_leads_to_no_key_that_does_not_exist(device: str, name: str) -> None:
    """Bounds are int64. A kernel that clamps them as int32 reads memory of others."""
    q, k, v = (torch.randn(1, 1, 8, 8, device=device) for _ in range(3))
    bound = torch.tensor([[0, 9, -1, 2**31, -(2**31) - 1, 2**32 + 3, 2**40, -(2**40)]], device=device)
    results = []
    for values in (bound, bound.clamp(0, 8)):
        scores = regard._lowered_scores.Scores(0.3, **{name: values})
        result = kernels.forward(q, k, v, scores)
        gradients = kernels.backward(v, q, k, v, result, scores)
        results.append([result.out, gradients.q, gradients.k, gradients.v])
    for wrong, clamped in zip(*results, strict=True):
        assert torch.equal(wrong, clamped)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_gradients_of_tables_have_the_precision_of_float32_at_any_size(device: str, size: float) -> None:
    """Integers with a unit per head: no table gradient overflows, none loses its digits."""
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        g = torch.Generator().manual_seed(0)
        q, k, v, grad = (torch.randn(1, 2, 33, 8, generator=g) for _ in range(4))
        bias = regard.RelativeTable(2, 3)
        bias.weight.data = torch.randn(bias.weight.shape, generator=g)
        out = attention_on(device, backend, q.to(dtype), k.to(dtype), v.to(dtype), bias=bias.to(dtype))
        results.append(torch.autograd.grad(out, bias.weight, (grad * size).to(dtype))[0].double() / size)
    assert torch.allclose(*results, rtol=1e-5, atol=1e-5)


# --- reproducible results ---------------------------------------------------------------------------------------------


def test_the_same_input_gives_the_same_bits(device: str) -> None:
    q = torch.randn(1, 4, 75, 24)
    k, v = torch.randn(2, 1, 2, 61, 24)
    bias = torch.randn(1, 1, 75, 61)
    table = regard.RelativeTable(4, 5)
    results = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
        out = attention_on(device, "triton", *leaves[:3], bias=leaves[3], mask=Causal() & Window(30))
        other = attention_on(device, "triton", *leaves[:3], bias=table)
        loss = out.sum() + (other * other).sum()
        results.append([out, other, *torch.autograd.grad(loss, [*leaves, table.weight])])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.skipif(not native.built(), reason="the native module was not built")
@pytest.mark.parametrize("p", [0.3, 0.999, 1.0])
def test_dropout_drops_the_weights_that_native_drops(device: str, p: float) -> None:
    """With the identity as values, the output is the weights."""
    q, k = torch.randn(2, 3, 29, 8), torch.randn(2, 3, 31, 8)
    v = torch.eye(31).expand(2, 3, 31, 31)
    outs = []
    for where, backend in ((device, "triton"), ("cpu", "native")):
        torch.manual_seed(7)
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
        scores = regard._lowered_scores.Scores(0.3, dropout=p, seed=seed.to(where))
        module = {"triton": kernels, "native": native}[backend]
        outs.append(module.output(q.to(where), k.to(where), v.to(where), scores).cpu())
    assert torch.equal(outs[0] == 0, outs[1] == 0)
    assert torch.allclose(*outs, rtol=1e-5)
    assert (outs[0] == 0).any()


# --- operators --------------------------------------------------------------------------------------------------------


def test_opcheck(device: str) -> None:
    from regard.kernels import ops

    q, k, v = (torch.randn(1, 2, 5, 8, device=device, requires_grad=True) for _ in range(3))
    scores = regard._lowered_scores.Scores(0.5, hi=torch.arange(1, 6, device=device).view(1, 5))
    torch.library.opcheck(ops.attention_op, (q, k, v, *scores.pack(), "triton"))
    encoded = ops.encode_observe(regard.Observe(map=2, top=2, key_mass=True, profile=1), 5, 5)
    torch.library.opcheck(ops.observed_op, (q, k, v, *scores.pack(), "triton", None, None, encoded))


def test_compiled_code_has_the_same_results(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 19, 8, device=device) for _ in range(3))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, k, v, mask=Causal(), backend="triton") * 2

    assert torch.equal(torch.compile(run, backend="aot_eager")(q, k, v), run(q, k, v))


def test_queries_and_heads_of_many_programs(device: str) -> None:
    """More tiles, heads and batch entries than one, with sizes that are no multiples of a tile."""
    q = torch.randn(3, 6, 131, 16)
    k, v = torch.randn(2, 3, 2, 139, 16)
    mask = Causal() & Padding([139, 70, 1])
    ours = attention_on(device, "triton", q, k, v, mask=mask)
    assert torch.allclose(ours, attention_on(device, "reference", q, k, v, mask=mask), atol=1e-5)
