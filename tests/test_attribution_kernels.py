"""The contributions that the backward passes of the kernels sum: against dense autograd, for every option."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support import dense_attention
from support.cases import Case, build, pairs
from support.operator_runs import draw_dropout_seed, with_gradients
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard._attribution import AttributedOutput, AttributionRequest
from regard.kernels import native

MAP = 3
needs_native = pytest.mark.skipif(not native.built(), reason="the native module was not built")
CHOICES = list(pairs())
# Prime sizes: more queries than keys, and fewer.
SIZES = [(7, 11, 3, 5), (11, 7, 5, 3)]


def settled(choice: dict[str, str], index: int) -> Case:
    """A case in which no rounding decides which of two products is larger."""
    n, m, d, e = SIZES[index % 2]
    case = build(choice, n, m, d, e, index)
    if case.options["scale"] == math.inf:
        case = replace(case, q=dense_attention.on_grid(case.q), k=dense_attention.on_grid(case.k))
    return case


def run_with_request(
    case: Case, dtype: torch.dtype, backend: str, size: int = MAP
) -> tuple[AttributionRequest, Tensor]:
    """The request after a backward pass, and the gradient of the output."""
    leaves = [x.detach().float().to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]
    options, _ = with_gradients(case)
    request = AttributionRequest(size)
    out = regard.attention(*leaves, **options, observe=request, backend=backend)  # type: ignore[arg-type]
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(dtype)
    out.backward(grad)
    return request, grad


def pool(contributions: Tensor, size: int) -> Tensor:
    """``[B, H, g, g]``: sums over bins of rows and keys."""
    n, m = contributions.shape[2:]
    in_row_bin = (torch.arange(n) * size // max(1, n)).unsqueeze(-1) == torch.arange(size)
    in_key_bin = (torch.arange(m) * size // max(1, m)).unsqueeze(-1) == torch.arange(size)
    return in_row_bin.to(contributions.dtype).T @ contributions @ in_key_bin.to(contributions.dtype)


def dense_contributions(case: Case, grad: Tensor, seed: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``[B, H, n, m]``, by autograd: each weight times the gradient of the loss by it."""
    q, k, v = (x.detach().float().to(dtype) for x in (case.q, case.k, case.v))
    options = {
        name: x.detach().to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in case.options.items()
    }
    out, A, _, _ = dense_attention.attention(q, k, v, **options, seed=seed)
    B, H, n, m = A.shape
    grad = grad.to(dtype).expand(out.shape).reshape(B, H, n, -1)
    values = v.expand(*out.shape[:-3], *v.shape[-3:]).reshape(B, *v.shape[-3:]).repeat_interleave(H // v.shape[-3], 1)
    used = A
    if case.options["dropout"]:
        ones = torch.ones_like(values[..., :1])
        # The output for values of 1 at one key alone shows which weights dropout left.
        columns = []
        for j in range(m):
            one = torch.zeros_like(ones)
            one[:, :, j] = 1
            one = one[:, :: H // case.v.shape[-3]].reshape(*out.shape[:-3], case.v.shape[-3], m, 1)
            columns.append(dense_attention.attention(q, k, one, **options, seed=seed)[0].reshape(B, H, n, 1))
        used = torch.cat(columns, -1) if columns else A
    return used * (grad @ values.transpose(-1, -2))


@pytest.mark.parametrize("part", range(4))
def test_the_reference_sums_what_dense_autograd_gives(part: int) -> None:
    for index, choice in list(enumerate(CHOICES))[part::12]:
        case = settled(choice, index)
        seed = draw_dropout_seed() if case.options["dropout"] else None
        request, grad = run_with_request(case, torch.float64, "reference")
        expected = dense_contributions(case, grad, seed, torch.float64)
        scale = 1 + expected.abs().sum()
        assert request.keys is not None and request.rows is not None and request.map_sums is not None
        assert request.keys.dtype == torch.float64
        assert (request.keys - expected.sum(2)).abs().amax() <= 1e-10 * scale if expected.numel() else True
        assert (request.rows - expected.sum(3)).abs().amax() <= 1e-10 * scale if expected.numel() else True
        assert (request.map_sums - pool(expected, MAP)).abs().amax() <= 1e-10 * scale


@needs_native
@pytest.mark.parametrize("part", range(4))
def test_the_native_kernel_has_the_error_of_float32(part: int) -> None:
    for index, choice in list(enumerate(CHOICES))[part::12]:
        case = settled(choice, index)
        seed = draw_dropout_seed() if case.options["dropout"] else None
        request, grad = run_with_request(case, torch.float32, "native")
        expected = dense_contributions(case, grad, seed, torch.float64)
        single = dense_contributions(case, grad, seed, torch.float32)
        # Sums of many numbers: the bound is on the absolute contributions, and on the error of the formula in float32.
        allowed = 2 * (single - expected).abs().sum() + 1e-5 * (1 + expected.abs().sum())
        assert request.keys is not None and request.rows is not None and request.map_sums is not None
        for ours, theirs in (
            (request.keys, expected.sum(2)),
            (request.rows, expected.sum(3)),
            (request.map_sums, pool(expected, MAP)),
        ):
            assert ours.shape == theirs.shape
            assert bool(((ours - theirs).abs() <= allowed).all())


def long_call(dtype: torch.dtype = torch.float32, heads: int = 2, groups: int = 1, n: int = 701, m: int = 2503) -> Case:
    """A call with several chunks of keys and of queries, and few key heads, so that its keys are split into tasks."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, n, 16, generator=generator, dtype=dtype)
    k = torch.randn(1, groups, m, 16, generator=generator, dtype=dtype)
    v = torch.randn(1, groups, m, 8, generator=generator, dtype=dtype)
    options = {"mask": regard.Causal(), "bias": None, "dropout": 0.0}
    return Case(q, k, v, options)


@needs_native
@pytest.mark.parametrize("size", [0, 1, 64])
def test_long_calls_agree_with_the_formula(size: int) -> None:
    case = long_call()
    ours, grad = run_with_request(case, torch.float32, "native", size)
    expected = dense_contributions(case, grad, None, torch.float64)
    assert ours.keys is not None
    torch.testing.assert_close(ours.keys.double(), expected.sum(2), rtol=1e-4, atol=1e-4)
    assert (ours.map_sums is None) == (size == 0)
    if ours.map_sums is not None:
        torch.testing.assert_close(ours.map_sums.double(), pool(expected, size), rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize("heads", [(2, 1), (5, 5)])
def test_the_number_of_threads_changes_no_bit(heads: tuple[int, int]) -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(run_with_request(long_call(heads=heads[0], groups=heads[1]), torch.float32, "native", 17)[0])
    finally:
        torch.set_num_threads(threads)
    for name in ("keys", "rows", "map_sums"):
        assert torch.equal(getattr(results[0], name), getattr(results[1], name))


@needs_native
def test_collecting_changes_no_bit_of_the_gradients() -> None:
    case = long_call()
    gradients = []
    for request in (None, AttributionRequest(5)):
        leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
        out = regard.attention(*leaves, **case.options, observe=request)  # type: ignore[arg-type]
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for plain, collected in zip(*gradients, strict=True):
        assert torch.equal(plain, collected)


@needs_native
@pytest.mark.parametrize("name", native.instruction_sets())
def test_every_instruction_set_sums_the_same(name: str) -> None:
    case = long_call(n=67, m=301)
    with native.use_instruction_set(name):
        ours, grad = run_with_request(case, torch.float32, "native", 7)
    expected = dense_contributions(case, grad, None, torch.float64)
    assert ours.keys is not None and ours.map_sums is not None
    torch.testing.assert_close(ours.keys.double(), expected.sum(2), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(ours.map_sums.double(), pool(expected, 7), rtol=1e-4, atol=2e-5)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = long_call(n=67, m=131)
    rounded = replace(case, q=case.q.to(dtype).float(), k=case.k.to(dtype).float(), v=case.v.to(dtype).float())
    ours, grad = run_with_request(rounded, dtype, "native", 7)
    expected = dense_contributions(rounded, grad, None, torch.float64)
    assert ours.keys is not None and ours.keys.dtype == torch.float32
    assert (ours.keys - expected.sum(2)).abs().max() <= torch.finfo(dtype).eps * expected.abs().sum(2).max()


def test_hidden_keys_that_are_not_finite_contribute_nothing() -> None:
    for backend in ("auto", "reference"):
        q = torch.ones(1, 1, 3, 2)
        k = torch.ones(1, 1, 5, 2)
        v = torch.ones(1, 1, 5, 2)
        k[:, :, 3] = math.nan
        v[:, :, 3] = math.inf
        k.requires_grad_()
        request = AttributionRequest(2)
        mask = torch.tensor([True, True, True, False, True])
        out = regard.attention(q, k, v, mask=mask, observe=request, backend=backend)  # type: ignore[call-overload]
        out.sum().backward()
        assert request.keys is not None
        torch.testing.assert_close(request.keys[0, 0], torch.tensor([1.5, 1.5, 1.5, 0.0, 1.5]))


def test_calls_without_a_gradient_of_their_own_are_reached() -> None:
    q = torch.randn(1, 1, 3, 2)
    request = AttributionRequest()
    out = regard.attention(q, q, q, observe=request)  # type: ignore[call-overload]
    assert request.leaf is not None
    torch.autograd.grad(out.sum(), [request.leaf])
    assert request.rows is not None
    torch.testing.assert_close(request.rows, out.detach().sum(-1))


def test_a_call_under_a_dispatch_mode_is_attributed() -> None:
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 1, 3, 2, requires_grad=True)
    request = AttributionRequest()
    with Counting():
        out = regard.attention(q, q, q, observe=request)  # type: ignore[call-overload]
    out.sum().backward()
    assert request.keys is not None


@pytest.mark.parametrize("size", [0, 3])
def test_weights_of_a_model_give_the_same_sums(size: int) -> None:
    case = long_call(torch.float64, heads=6, groups=2, n=7, m=11)
    request, grad = run_with_request(case, torch.float64, "reference", size)
    _, A, _, _ = dense_attention.attention(
        *(x.float().double() for x in (case.q, case.k, case.v)), mask=regard.Causal()
    )
    out = torch.zeros(1, 6, 7, 8, dtype=torch.float64, requires_grad=True)
    other = AttributionRequest(size)
    AttributedOutput.apply(other, out, A, case.v.float().double()).backward(grad)
    torch.testing.assert_close(out.grad, grad)
    assert request.keys is not None and other.keys is not None
    torch.testing.assert_close(other.keys, request.keys)
    torch.testing.assert_close(other.rows, request.rows)
    torch.testing.assert_close(other.map_sums, request.map_sums)
