"""The operator against torch's SDPA and against the plain n × n formula, over every option and pair of options."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense_attention
from support.cases import CHOICES, Case, build, pairs
from support.operator_runs import assert_close, draw_dropout_seed, gradients, with_gradients
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 11, 13, 17])
WIDTHS = st.sampled_from([1, 2, 3, 5, 7])
CASES = st.builds(
    build,
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}),
    SIZES,
    SIZES,
    WIDTHS,
    WIDTHS,
    st.integers(0, 2**31),
)


def run(case: Case, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients of ours, for q, k, v and what is learned."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]
    options, learned = with_gradients(case)
    out = regard.attention(*leaves, **options)
    return out, gradients(out, leaves + learned)


def truth(case: Case, seed: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    options, learned = with_gradients(case)
    out, *_ = dense_attention.attention(*leaves, **options, seed=seed)
    return out, gradients(out, leaves + learned)


def check(case: Case) -> None:
    seed = draw_dropout_seed() if case.options["dropout"] else None
    out, grads = run(case)
    expected, expected_grads = truth(case, seed)
    assert_close(out, expected)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert_close(ours, theirs, 1e-11)


@given(CASES)
@settings(max_examples=300)
def test_equals_the_plain_formula(case: Case) -> None:
    check(case)


@pytest.mark.full
@given(CASES)
@settings(max_examples=5000, derandomize=False)
def test_equals_the_plain_formula_often(case: Case) -> None:
    check(case)


def test_every_pair_of_options() -> None:
    for seed, choice in enumerate(pairs()):
        try:
            check(build(choice, 7, 11, 3, 5, seed))
        except Exception as error:
            raise AssertionError(f"with {choice}") from error


@given(
    CASES.filter(lambda c: c.options["softcap"] is None and "sinks" not in c.options and c.options["scale"] != math.inf)
)
@settings(max_examples=150)
def test_equals_torch_where_torch_has_the_option(case: Case) -> None:
    """Bool and float masks, grouped heads, scales, in float64, on rows that see something (torch's others are NaN)."""
    options = dict(case.options, dropout=0.0)
    ours = regard.attention(case.q, case.k, case.v, **options)
    theirs, see = torch_sdpa(case, options, torch.float64)
    rows = see.any(-1, keepdim=True).expand(ours.shape)
    assert_close(torch.where(rows, ours, 0), torch.where(rows, theirs, 0))
    assert (torch.where(rows, 0, ours) == 0).all()


def torch_sdpa(case: Case, options: dict, dtype: torch.dtype):
    batch = torch.broadcast_shapes(case.q.shape[:-3], case.k.shape[:-3], case.v.shape[:-3])
    H, n, d = case.q.shape[-3:]
    m = case.k.shape[-2]
    q4 = case.q.expand(*batch, *case.q.shape[-3:]).reshape(math.prod(batch), H, n, d)
    bias = dense_attention.dense_bias(options["bias"], q4, batch, m)
    see = dense_attention.visible(options["mask"], None if bias is None else bias.detach(), batch, H, n, m).reshape(
        *batch, H, n, m
    )
    added = torch.zeros(see.shape, dtype=torch.float64) if bias is None else bias.detach().reshape(see.shape)
    added = added.masked_fill(~see, -math.inf)
    q, k, v = (x.expand(*batch, *x.shape[-3:]).to(dtype) for x in (case.q, case.k, case.v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=added.to(dtype), scale=options["scale"], enable_gqa=True
        ), see


SOFT = CASES.filter(lambda c: c.choice["dropout"] == "none" and c.choice["scale"] != "hard")


def check_float32(case: Case) -> None:
    """Output and gradients: the error is at most twice the plain float32 formula's, plus one rounding of the result."""
    in_float32(case)
    exact = results(case, torch.float64, plain_out)
    single = results(case, torch.float32, plain_out)
    ours = results(case, torch.float32, lambda *a, **o: regard.attention(*a, **o, backend="reference"))
    assert ours[0].dtype == torch.float32
    for a, b, c in zip(ours, single, exact, strict=True):
        if a.numel():
            floor = torch.finfo(torch.float32).eps * (1 + max(x.abs().max() for x in exact if x.numel()))
            assert (a - c).abs().max() <= 2 * (b - c).abs().max() + floor


def in_float32(case: Case) -> None:
    """Rounds every input of a case to a float32 number, so that all dtypes start from the same numbers."""
    with torch.no_grad():
        case.q, case.k, case.v = (x.float().double() for x in (case.q, case.k, case.v))
        for x in case.learned:
            x.copy_(x.float())


def plain_out(*args, **options) -> torch.Tensor:
    return dense_attention.attention(*args, **options)[0]


def results(case: Case, dtype: torch.dtype, call) -> list[torch.Tensor]:
    """Output and gradients with everything in ``dtype``."""
    bias = case.options["bias"]
    if isinstance(bias, torch.nn.Module):
        bias.to(dtype)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]
    options, learned = with_gradients(case)
    out = call(*leaves, **options)
    return [out, *gradients(out, leaves + learned)]


@given(SOFT)
@settings(max_examples=250)
def test_float32_error_is_within_twice_the_plain_formulas_own(case: Case) -> None:
    check_float32(case)


@pytest.mark.full
@given(SOFT)
@settings(max_examples=5000, derandomize=False)
def test_float32_error_is_within_twice_the_plain_formulas_own_often(case: Case) -> None:
    check_float32(case)


def test_a_case_in_which_one_rounded_lse_lost_two_digits() -> None:
    choice = dict.fromkeys(CHOICES, "none") | {"mask": "dense", "bias": "keys", "scale": "large", "sinks": "sinks"}
    choice |= {"heads": "one", "batch": "two", "layout": "sliced", "values": "large"}
    check_float32(build(choice, 5, 13, 7, 7, 3671))


def test_a_case_in_which_a_rounded_table_lost_a_digit_of_its_parameters_gradient() -> None:
    choice = dict.fromkeys(CHOICES, "none") | {"bias": "quadratic", "scale": "small", "softcap": "cap"}
    choice |= {"heads": "one", "batch": "nested", "layout": "sliced", "values": "normal"}
    check_float32(build(choice, 11, 0, 7, 1, 2541825))


def test_a_case_in_which_tables_made_of_queries_lost_a_digit() -> None:
    choice = dict.fromkeys(CHOICES, "none") | {"bias": "grid-q", "scale": "small", "heads": "many"}
    choice |= {"batch": "one", "layout": "expanded", "values": "large"}
    check_float32(build(choice, 1, 17, 3, 2, 789051))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n, m", [(64, 64), (17, 63), (128, 257)])
def test_error_is_within_twice_torchs_own(middle_tiles, dtype: torch.dtype, n: int, m: int) -> None:
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        q, k, v, grad = (torch.randn(2, 3, x, 64, generator=g).to(dtype) for x in (n, m, m, n))
        exact, exact_grads = _sdpa(q, k, v, grad, torch.float64)
        torchs, torchs_grads = _sdpa(q, k, v, grad, dtype)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        ours = regard.attention(*leaves, backend="reference")
        assert ours.dtype == dtype
        floor = torch.finfo(dtype).eps
        assert (ours - exact).abs().max() <= 2 * (torchs - exact).abs().max() + floor / 4
        for a, b, c in zip(torch.autograd.grad(ours, leaves, grad), torchs_grads, exact_grads, strict=True):
            assert (a - c).abs().max() <= 2 * (b - c).abs().max() + floor


def _sdpa(q, k, v, grad, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, grad.to(dtype))


@pytest.mark.parametrize("bias", CHOICES["bias"])
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "grouped", "dropout", "zero"])
def test_gradcheck(bias: str, extra: str) -> None:
    """Gradients to q, k, v, biases, sinks and every learned table, against finite differences."""
    choice = dict.fromkeys(CHOICES, "none") | {
        "mask": "causal",
        "bias": bias,
        "scale": "zero" if extra == "zero" else "default",
        "softcap": "cap" if extra == "softcap" else "none",
        "sinks": "sinks" if extra == "sinks" else "none",
        "dropout": "some" if extra == "dropout" else "none",
        "heads": "grouped" if extra == "grouped" else "many",
        "batch": "one",
        "layout": "contiguous",
        "values": "normal",
    }
    case = build(choice, 3, 5, 2, 3, 1)
    options, learned = with_gradients(case)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]

    def call(*_: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return regard.attention(*leaves, **options)

    finite = [x for x in learned if x.isfinite().all()]  # a step away from −inf is no step
    assert torch.autograd.gradcheck(call, tuple(leaves + finite), fast_mode=True)


def test_alibi_slopes_can_be_learned() -> None:
    slopes = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(3))
    assert torch.autograd.gradcheck(lambda s: regard.attention(q, k, v, bias=regard.ALiBi(slopes=s)), (slopes,))
