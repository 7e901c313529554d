"""The native kernel: every option against float64, on every instruction set this machine has."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense_attention
from support.cases import CHOICES, Case, build, pairs
from support.key_groups import GROUPS
from support.operator_runs import check_native
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard import Causal, Dense, Observe, Padding, Window
from regard._lowered_scores import NO_POSITION, Bias, RelativeTerm
from regard.kernels import native

pytestmark = pytest.mark.skipif(not native.built(), reason="the native module was not built")
SETS = native.instruction_sets() or ("none",)
SIZES = st.sampled_from([0, 1, 3, 7, 15, 16, 17, 33, 63, 64, 65, 130])
WIDTHS = st.sampled_from([1, 2, 3, 5, 8, 15, 16, 17, 33, 64])
CASES = st.builds(
    build,
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}),
    SIZES,
    SIZES,
    WIDTHS,
    WIDTHS,
    st.integers(0, 2**31),
)


@pytest.fixture(params=SETS)
def isa(request, monkeypatch):
    """Each instruction set in turn."""
    monkeypatch.setattr(native, "instruction_set", lambda: request.param)
    return request.param


@given(CASES, st.sampled_from(SETS))
@settings(max_examples=300)
def test_equals_the_plain_formula(case: Case, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "instruction_set", lambda: name)
        check_native(case)


@pytest.mark.full
@given(CASES, st.sampled_from(SETS))
@settings(max_examples=5000)
def test_equals_the_plain_formula_often(case: Case, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "instruction_set", lambda: name)
        check_native(case)


def test_every_pair_of_options() -> None:
    for seed, choice in enumerate(pairs()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "instruction_set", lambda s=seed: SETS[s % len(SETS)])
            try:
                check_native(build(choice, 19, 23, 3, 5, seed))
            except Exception as error:
                raise AssertionError(f"with {choice}") from error


def run_sdpa(q, k, v, grad, dtype, **options):
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if dtype != torch.float64 else SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*leaves, **options)
    return out.detach(), torch.autograd.grad(out, leaves, grad.to(dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("largest_logit", [1, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_against_torchs_own(isa: str, dtype: torch.dtype, largest_logit: int, causal: bool) -> None:
    """The forward pass is within 2 × and gradients are within 3 × torch's error, in every dtype."""
    g = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 257, 64, generator=g) for _ in range(4))
    if largest_logit > 1:
        q = q * (largest_logit / (q @ k.transpose(-1, -2) / 8).abs().max())
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    exact, exact_grads = run_sdpa(q, k, v, grad, torch.float64, is_causal=causal)
    torch_out, torch_grads = run_sdpa(q, k, v, grad, dtype, is_causal=causal)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ours = regard.attention(*leaves, mask=Causal() if causal else None, backend="native")
    eps = torch.finfo(dtype).eps
    assert (ours - exact).abs().max() <= 2 * (torch_out - exact).abs().max() + eps / 4
    for a, b, c in zip(torch.autograd.grad(ours, leaves, grad), torch_grads, exact_grads, strict=True):
        assert (a - c).abs().max() <= 3 * (b - c).abs().max() + eps * c.abs().max() / 4


@given(CASES.filter(lambda c: c.choice["values"] != "large"), st.sampled_from(SETS), st.data())
@settings(max_examples=150)
def test_observables_equal_the_references(case: Case, name: str, data) -> None:
    observe = Observe(
        map=data.draw(st.sampled_from([0, 1, 3, 64])),
        sink=data.draw(st.sampled_from([0, 1, 4])),
        local=data.draw(st.sampled_from([0, 1, 5])),
        offset=data.draw(st.sampled_from([None, 0, 2, -3])),
        profile=data.draw(st.sampled_from([None, 3])),
        key_mass=data.draw(st.booleans()),
        top=data.draw(st.sampled_from([0, 2])),
        groups=data.draw(st.sampled_from([None, *GROUPS])),
    )
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "instruction_set", lambda: name)
        out, ours = regard.attention(q, k, v, observe=observe, backend="native", **(case.options | {"dropout": 0.0}))
        without = regard.attention(q, k, v, backend="native", **(case.options | {"dropout": 0.0}))
        assert torch.equal(out, without)
    exact = (q.double(), k.double(), v.double())
    _, theirs = regard.attention(*exact, observe=observe, backend="reference", **(case.options | {"dropout": 0.0}))
    rows = ("lse", "logit_max", "entropy", "peak", "offset", "distance", "sink", "local", "groups")
    for field in (*rows, "map", "key_mass", "profile", "top"):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert (a is None) == (b is None), field
        if a is not None:
            assert torch.allclose(a.double(), b, rtol=2e-4, atol=2e-4, equal_nan=False), field
    for field in ("visible", "counted", "rows", "map_rows", "profile_rows"):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert (a is None and b is None) or torch.equal(a, b), field
    assert torch.equal(ours.peak_at < 0, theirs.peak_at < 0)
    # the highest key is one whose weight equals the exact highest to rounding
    if ours.peak_at.numel():
        A = dense_attention.attention(*exact, **(case.options | {"dropout": 0.0}))[1]
        if A.shape[-1]:
            there = A.gather(-1, ours.peak_at.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            assert torch.allclose(there, theirs.peak * (ours.peak_at >= 0), atol=2e-4)
            if observe.top:
                there = A.gather(-1, ours.top_at.clamp(min=0)) * (ours.top_at >= 0)
                assert torch.allclose(there, theirs.top, atol=2e-4)


@given(CASES.filter(lambda c: c.choice["values"] != "large"), st.sampled_from(SETS), st.data())
@settings(max_examples=150)
def test_tiles_are_the_references(case: Case, name: str, data) -> None:
    """Any run of rows and keys, pooled to any size, from row_max and row_sum."""
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    _, observation = regard.attention(q, k, v, observe=Observe(keep=True), **(case.options | {"dropout": 0.0}))
    if not q.numel() or not observation.counted.shape[0]:
        return
    head, batch = (
        data.draw(st.integers(0, q.shape[-3] - 1)),
        data.draw(st.integers(0, observation.counted.shape[0] - 1)),
    )
    places = []
    for size in (observation.n, observation.m):
        begin = data.draw(st.integers(0, max(0, size - 1)))
        places.append(slice(begin, data.draw(st.integers(begin, size))))
    side = data.draw(st.sampled_from([1, 2, 5, 64]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "instruction_set", lambda: name)
        ours = observation.tile(head, *places, side, batch=batch)
        patch.setattr(native, "refusal", lambda q: "not here")
        theirs = observation.tile(head, *places, side, batch=batch)
    assert ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=2e-4, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_threads_do_not_change_a_bit(isa: str, dtype: torch.dtype) -> None:
    """All calls are large enough for three threads (csrc/threads.h)."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 6, 190, 24).to(dtype), *(torch.randn(2, 2, 205, 24).to(dtype) for _ in range(2))]
    bias, table = torch.randn(1, 1, 190, 205), regard.RelativeTable(6, 5)
    results = []
    before = torch.get_num_threads()
    decode_inputs = [torch.randn(1, 2, 5, 24).to(dtype), *(torch.randn(1, 1, 7500, 24).to(dtype) for _ in range(2))]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        decode_leaves = [x.clone().requires_grad_() for x in decode_inputs]
        decoded, decode_observation = regard.attention(*decode_leaves, observe=Observe(map=8), backend="native")
        fresh = [x.clone().requires_grad_() for x in (*leaves, bias)]
        out, observation = regard.attention(
            *fresh[:3], bias=fresh[3], mask=Causal() & Window(99), observe=Observe(map=16), backend="native"
        )
        other = regard.attention(*fresh[:3], bias=table, backend="native")
        grads = torch.autograd.grad(out.float().sum() + (other * other).float().sum(), [*fresh, table.weight])
        grads += torch.autograd.grad(decoded.float().sum(), decode_leaves)
        results.append(
            [
                out,
                other,
                observation.map,
                observation.entropy,
                decoded,
                decode_observation.map,
                decode_observation.entropy,
                *grads,
            ]
        )
    torch.set_num_threads(before)
    for one, two, three in zip(*results, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


LONG = {
    "plain": {},
    "grouped": {"heads": "grouped"},
    "alibi sinks": {"bias": "alibi", "sinks": "sinks", "heads": "shared"},
    "window": {"mask": "window"},
    "padding": {"mask": "padding", "batch": "two", "bias": "row"},
    "dropout": {"dropout": "some", "softcap": "cap"},
    "hard": {"scale": "hard", "values": "ties"},
    "shaw": {"bias": "keys", "heads": "grouped"},
}


@pytest.mark.parametrize("n", [1, 3, 17])
@pytest.mark.parametrize("name", LONG)
def test_few_queries_and_many_keys(full_tiles, isa: str, name: str, n: int) -> None:
    """Keys are split into parts that are merged: output, gradients and observables."""
    choice = {option: choices[0] for option, choices in CHOICES.items()} | {"heads": "one"} | LONG[name]
    case = build(choice, n, 4200, 20, 36, 3)
    check_native(case)
    options = case.options | {"dropout": 0.0}
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    observe = Observe(map=7, sink=3, local=2, groups=GROUPS[1])
    out, ours = regard.attention(q, k, v, observe=observe, backend="native", **options)
    assert torch.equal(out, regard.attention(q, k, v, backend="native", **options))
    _, theirs = regard.attention(q, k, v, observe=observe, backend="reference", **options)
    for field in ("lse", "logit_max", "entropy", "peak", "offset", "distance", "sink", "local", "groups", "map"):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4), field
    assert torch.equal(ours.visible, theirs.visible) and torch.equal(ours.peak_at, theirs.peak_at)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [1, 6])
def test_decoding_reads_half_precision_without_conversion(full_tiles, isa: str, dtype: torch.dtype, heads: int) -> None:
    """One head reads keys in their own dtype; heads that share keys read a converted block. Widths have a remainder."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, heads, 1, 83, generator=g).to(dtype), torch.randn(2, 1, 700, 83, generator=g).to(dtype)
    v = torch.randn(2, 1, 700, 77, generator=g).to(dtype)
    ours = regard.attention(q, k, v, mask=Padding([700, 333]), backend="native")
    theirs = regard.attention(q, k, v, mask=Padding([700, 333]), backend="reference")
    assert torch.allclose(ours.float(), theirs.float(), atol=torch.finfo(dtype).eps / 2)


def test_hidden_nan_stays_hidden_and_visible_nan_does_not(isa: str) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=g) for _ in range(3))
    see = torch.rand(40, 40, generator=g) < 0.6
    see[:, 0] = True
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    k[:, :, 7], v[:, :, 7] = math.nan, math.inf
    with_nan = [x.clone().requires_grad_() for x in (q, k, v)]
    a = regard.attention(*clean, mask=Dense(see), backend="native")
    b = regard.attention(*with_nan, mask=Dense(see), backend="native")
    blind = ~see[:, 7]
    assert torch.allclose(a[:, :, blind], b[:, :, blind], atol=1e-6) and not b[:, :, ~blind].isfinite().any()
    nan_grads = torch.autograd.grad(torch.where(blind.view(1, 1, -1, 1), b, 0).sum(), with_nan)
    theirs = torch.autograd.grad((a * blind.view(1, 1, -1, 1)).sum(), clean)
    assert torch.allclose(nan_grads[0][:, :, blind], theirs[0][:, :, blind], atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1.0, math.inf])
def test_a_hidden_nan_does_not_reach_the_gradient_of_a_bias(isa: str, scale: float) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=g) for _ in range(3))
    v[:, :, 4] = math.nan
    see = torch.ones(9, 9, dtype=torch.bool)
    see[:, 4] = False
    results = []
    for backend in ("native", "reference"):
        bias = torch.randn(9, 9, generator=g.manual_seed(1)).requires_grad_()
        out = regard.attention(q, k, v, bias=bias, mask=Dense(see), scale=scale, backend=backend)
        results.append(torch.autograd.grad((out * out).sum(), bias)[0])
    assert results[0].isfinite().all() and torch.allclose(*results, atol=1e-4)


class FixedTerms(Bias):
    """A bias with the terms it is built from."""

    def __init__(self, *terms: RelativeTerm) -> None:
        self.fixed_terms = terms

    def terms(self, q: torch.Tensor, m: int) -> tuple[RelativeTerm, ...]:
        return self.fixed_terms


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_table_expanded_over_rows_has_its_own_gradient(isa: str, shuffled: bool) -> None:
    at = torch.arange(5)
    keys = at.flip(0) if shuffled else at
    results = []
    for backend in ("native", "reference"):
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 3, 5, 4, generator=g) for _ in range(3))
        table = torch.randn(1, 3, 1, 9, generator=g).requires_grad_()
        bias = FixedTerms(RelativeTerm(table.expand(2, 3, 5, 9), at, keys, -4))
        out = regard.attention(q, k, v, bias=bias, backend=backend)
        results.append([out, *torch.autograd.grad((out * out).sum(), table)])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_a_query_without_a_position_takes_no_bias(isa: str, n: int) -> None:
    table = torch.arange(9.0).view(1, 1, 1, 9)
    positions = torch.tensor([NO_POSITION, 1][:n])
    q, k, v = torch.randn(1, 1, n, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    bias = FixedTerms(RelativeTerm(table, positions, torch.arange(5), -4))
    ours = regard.attention(q, k, v, bias=bias, backend="native")
    assert torch.allclose(ours, regard.attention(q, k, v, bias=bias, backend="reference"), atol=1e-6)


@pytest.mark.parametrize("shuffled", [False, True])
def test_biases_that_overflow_together_do_not_hide(isa: str, shuffled: bool) -> None:
    at = torch.arange(3)
    low = RelativeTerm(torch.full((1, 1, 1, 5), -2e38), at, at.flip(0) if shuffled else at, -2)
    x, v = torch.ones(1, 1, 3, 2), torch.eye(3).view(1, 1, 3, 3)
    assert torch.allclose(
        regard.attention(x, x, v, bias=FixedTerms(low, low), backend="native"), torch.full((3, 3), 1 / 3)
    )


def test_layouts_without_contiguous_rows_are_copied_once(isa: str) -> None:
    q, k, v = (torch.randn(2, 3, 8, 21).transpose(-1, -2) for _ in range(3))
    ours = regard.attention(q, k, v, mask=Padding([21, 4]), backend="native")
    assert torch.allclose(ours, regard.attention(q, k, v, mask=Padding([21, 4]), backend="reference"), atol=1e-6)


def test_native_refuses_what_it_cannot_compute_and_auto_uses_the_reference() -> None:
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"q is torch\.float64"):
        regard.attention(q, q, q, backend="native")
    assert torch.equal(regard.attention(q, q, q), regard.attention(q, q, q, backend="reference"))
    x = q.float()
    assert torch.equal(regard.attention(x, x, x), regard.attention(x, x, x, backend="native"))
