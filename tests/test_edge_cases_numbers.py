"""Numbers that are no numbers, or too large: NaN and inf hidden and seen, overflow, large and lowest scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense_attention
from support.float64 import D, rand, with_grad

import regard
from regard import Causal, Dense, Observe, Padding


@given(st.integers(0, 10**6), st.sampled_from([None, 0.0, math.inf, 0.7]), st.booleans())
@settings(max_examples=60)
def test_a_hidden_key_contributes_nothing_even_if_it_is_nan(seed: int, scale: float | None, softcap: bool) -> None:
    """Poison keys, values and queries; what sees none of it, forward and backward, is as if it were not there."""
    g = torch.Generator().manual_seed(seed)
    n, m, bad_key, bad_query = 7, 11, int(torch.randint(11, (), generator=g)), int(torch.randint(7, (), generator=g))
    q, k, v = (torch.randn(1, 4, x, 3, generator=g, dtype=D) for x in (n, m, m))
    k, v = k[:, :2], v[:, :2]
    see = torch.rand(n, m, generator=g) < 0.7
    see[:, 0] = True
    poison = [math.nan, math.inf, -math.inf][seed % 3]
    dirty = [x.clone() for x in (q, k, v)]
    dirty[1][:, :, bad_key] = dirty[2][:, :, bad_key] = poison
    dirty[0][:, :, bad_query] = math.nan
    options = {"mask": Dense(see), "scale": scale, "softcap": 2.0 if softcap and scale != math.inf else None}
    clean_leaves, leaves = with_grad(q, k, v), with_grad(*dirty)
    clean, out = regard.attention(*clean_leaves, **options), regard.attention(*leaves, **options)
    untouched = ~see[:, bad_key]
    untouched[bad_query] = False
    assert torch.equal(clean[:, :, untouched], out[:, :, untouched])
    # backward from untouched rows only: the others' gradient is 0, but their weights are NaN
    weight = untouched.to(D).view(1, 1, n, 1)
    safe_out = torch.where(weight.bool(), out, 0)
    grads = torch.autograd.grad(safe_out.sum(), leaves)
    expected = torch.autograd.grad((clean * weight).sum(), clean_leaves)
    assert torch.equal(grads[0][:, :, untouched], expected[0][:, :, untouched])
    reached = see[~untouched].any(0)
    reached[bad_key] = True
    for a, b in zip(grads[1:], expected[1:], strict=True):
        assert torch.allclose(a[:, :, ~reached], b[:, :, ~reached], atol=1e-14)


def test_padding_content_changes_nothing_bit_for_bit() -> None:
    q, k, v = rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 4)
    clean = regard.attention(q, k, v, mask=Padding([4, 6]))
    for junk in (7.0, math.nan, math.inf):
        k2, v2 = k.clone(), v.clone()
        for b, length in enumerate([4, 6]):
            k2[b, :, length:] = v2[b, :, length:] = junk
        assert torch.equal(clean, regard.attention(q, k2, v2, mask=Padding([4, 6])))


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_rows_at_the_lowest_finite_logit_are_ordinary(backend: str) -> None:
    x = torch.full((1, 1, 3, 4), 0.5)
    v = torch.arange(12.0).view(1, 1, 3, 4).requires_grad_()
    low = torch.full((3, 3), torch.finfo(torch.float32).min)
    out, seen = regard.attention(x, x, v, bias=low, observe=Observe(map=3, keep=True, top=1), backend=backend)
    assert torch.allclose(out, v.mean(2, keepdim=True).expand(out.shape))
    assert (
        (seen.peak_at == 0).all()
        and (seen.visible == 3).all()
        and torch.allclose(seen.entropy, low.new_tensor(3).log())
    )
    assert torch.allclose(seen.map.sum(-1), torch.ones(3)) and torch.allclose(seen.weights(0).sum(-1), torch.ones(3))
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert torch.allclose(dv, torch.ones_like(dv))


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("reach", [1e4, 1e7])
def test_large_scores_lose_no_digit_of_a_weight(backend: str, reach: float) -> None:
    """Whole-number scores are exact in float32; then so are weights, gradients and observables."""
    g = torch.Generator().manual_seed(0)
    q = torch.ones(1, 1, 20, 1)
    k = (reach + torch.randint(-3, 4, (1, 1, 30, 1), generator=g)).float()
    v, grad = torch.randn(1, 1, 30, 5, generator=g), torch.randn(1, 1, 20, 5, generator=g)
    leaves = with_grad(q, k, v)
    out, seen = regard.attention(*leaves, scale=1.0, observe=Observe(keep=True, map=4), backend=backend)
    exact = with_grad(q.double(), k.double(), v.double())
    want, A, *_ = dense_attention.attention(*exact, scale=1.0)
    assert torch.allclose(out.double(), want, rtol=0, atol=1e-6)
    assert torch.allclose(seen.weights(0).double(), A[0, 0], rtol=1e-6) and torch.allclose(
        seen.map.sum(-1), torch.ones(4), atol=1e-6
    )
    assert torch.allclose(seen.entropy.double(), -(A * A.log()).sum(-1), atol=2e-6)
    found = torch.autograd.grad(out, leaves, grad)
    wanted = torch.autograd.grad(want, exact, grad.double())
    for a, b, terms in zip(found, wanted, (reach, 1, 1), strict=True):  # dq adds terms as large as the keys
        assert torch.allclose(a.double(), b, rtol=1e-5, atol=2e-6 * terms)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_what_overflows_float32_on_the_way_is_right_all_the_same(backend: str) -> None:
    q = torch.full((1, 1, 2, 4), 1e25, requires_grad=True)
    k = torch.tensor([1e25, 2e25, -1e25]).view(1, 1, 3, 1).expand(1, 1, 3, 4)
    out = regard.attention(q, k, torch.eye(3).view(1, 1, 3, 3), backend=backend)
    assert torch.equal(out, torch.tensor([0.0, 1.0, 0.0]).expand(1, 1, 2, 3))


LOWEST = torch.finfo(torch.float32).min
HUGE = {
    "to −inf": ([1e20], [[-1e20], [-2e20], [-1e20]], {}, [0.5, 0, 0.5]),
    "to −inf and back": ([1e20, 1e20], [[-1e20, 1e20], [0, 0], [0, 0]], {}, [1 / 3] * 3),
    "hard": ([1e20], [[1e20], [2e20], [1e20]], {"scale": math.inf}, [0, 1, 0]),
    "hard, to −inf": ([1e20], [[-1e20], [-2e20], [-1e20]], {"scale": math.inf}, [0.5, 0, 0.5]),
    "scale": ([1.0], [[-1.0], [-2.0], [-3.0]], {"scale": 1e39}, [1, 0, 0]),
    "softcap": ([1.0], [[2.0], [2.0], [2.0]], {"softcap": 1e39}, [1 / 3] * 3),
    "bias": ([1.0], [[1.0], [1.0], [1.0]], {"bias": torch.full((1, 3), -1e39, dtype=D)}, [1 / 3] * 3),
    "bias and score": ([1e17], [[-2e17]] * 3, {"bias": torch.full((1, 3), LOWEST)}, [1 / 3] * 3),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HUGE)
def test_no_overflow_passes_for_a_hidden_key(name: str, dtype: torch.dtype, masked: bool, backend: str) -> None:
    q, k, options, weights = HUGE[name]
    q, k = torch.tensor(q).view(1, 1, 1, -1).to(dtype), torch.tensor(k).unsqueeze(0).unsqueeze(0).to(dtype)
    v = torch.eye(3, dtype=dtype).view(1, 1, 3, 3).requires_grad_()
    options = options | ({"mask": Dense(torch.ones(1, 3, dtype=torch.bool))} if masked else {})
    out, seen = regard.attention(q, k, v, observe=Observe(), backend=backend, **options)
    want = torch.tensor(weights, dtype=torch.float32)
    assert torch.allclose(out.float().flatten(), want, atol=4e-3) and seen.visible.item() == 3
    assert want[seen.peak_at.item()] == want.max()
    (dv,) = torch.autograd.grad(out.sum(), v)
    assert torch.allclose(dv.float()[0, 0, :, 0], want, atol=4e-3)


def test_views_that_torch_negates_lazily_are_read_right() -> None:
    flipped = torch.randn(6, 6, dtype=torch.complex64).conj().imag
    x = torch.randn(1, 1, 6, 1)
    assert flipped.is_neg()
    lazy = regard.attention(x, x, x, bias=flipped)
    assert torch.equal(lazy, regard.attention(x, x, x, bias=flipped.resolve_neg()))
    y = x.clone().requires_grad_()
    found = [
        torch.autograd.grad(regard.attention(y, x, x, bias=b).sum(), y)[0] for b in (flipped, flipped.resolve_neg())
    ]
    assert torch.equal(*found)
    q = torch.view_as_complex(torch.randn(1, 1, 6, 1, 2)).conj().imag
    assert torch.equal(regard.attention(q, q, x), regard.attention(*[q.resolve_neg()] * 2, x))


@pytest.mark.parametrize("entry", [0, 1])
def test_a_hidden_nan_in_any_batch_entry_stays_hidden(entry: int) -> None:
    """Forward and backward, be the NaN in k or v, or in a query or gradient of a row that sees nothing."""
    see = torch.ones(4, 5, dtype=torch.bool)
    see[:, 2] = False
    for place in (1, 2):
        tensors = [rand(2, 2, 4, 3), rand(2, 2, 5, 3), rand(2, 2, 5, 3)]
        clean = with_grad(*tensors)
        tensors = [x.clone() for x in tensors]
        tensors[place][entry, :, 2] = math.nan
        dirty = with_grad(*tensors)
        a, b = (regard.attention(*x, mask=Dense(see)) for x in (clean, dirty))
        assert torch.equal(a, b)
        for x, y in zip(*(torch.autograd.grad(o.sum(), leaves) for o, leaves in ((a, clean), (b, dirty))), strict=True):
            assert torch.allclose(x, y, atol=1e-14)
    see[3] = False
    clean = [rand(2, 2, 4, 3), rand(2, 2, 5, 3), rand(2, 2, 5, 3)]
    dirty = [x.clone() for x in clean]
    dirty[0][entry, :, 3] = math.nan
    weight, poisoned = torch.ones(2, 2, 4, 3, dtype=D), torch.ones(2, 2, 4, 3, dtype=D)
    poisoned[entry, :, 3] = math.nan
    found = []
    for tensors, g in ((clean, weight), (dirty, poisoned)):
        leaves = with_grad(*tensors)
        out = regard.attention(*leaves, mask=Dense(see))
        found.append([out.detach(), *torch.autograd.grad(out, leaves, g)])
    for x, y in zip(*found, strict=True):
        assert torch.allclose(x, y, atol=1e-14)


def test_at_scale_zero_keys_are_not_looked_at() -> None:
    k = rand(2, 2, 5, 3)
    k[1, :, 1] = math.nan
    leaves = with_grad(rand(2, 2, 4, 3), k, rand(2, 2, 5, 3))
    out = regard.attention(*leaves, scale=0)
    assert torch.allclose(out, leaves[2].mean(2, keepdim=True).expand(out.shape))
    dq, dk, _ = torch.autograd.grad(out.sum(), leaves)
    assert (dq == 0).all() and (dk == 0).all()


def test_a_visible_nan_reaches_the_rows_that_see_it_and_no_others() -> None:
    q, k, v = rand(1, 1, 5, 2), rand(1, 1, 5, 2), rand(1, 1, 5, 2)
    v[0, 0, 3] = math.nan
    rows = regard.attention(q, k, v, mask=Causal()).isnan().any(-1)[0, 0]
    assert rows.tolist() == [False, False, False, True, True]
    k[0, 0, 3] = math.nan
    rows = regard.attention(q, k, v, mask=Causal(), scale=math.inf).isnan().any(-1)[0, 0]
    assert rows.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_hidden_overflow_sends_no_gradient(backend: str, softcap: float | None) -> None:
    """Finite but huge numbers behind a mask, as uninitialised memory has them: their products overflow unseen."""
    q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
    k[:, :, 2] = torch.tensor([3e38, -3e38, 3e38, -3e38])
    v[:, :, 2] = 3e38
    leaves = with_grad(q * 10, k, v)
    out = regard.attention(*leaves, mask=Padding([2]), softcap=softcap, backend=backend)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))
