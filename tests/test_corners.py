"""Corners decided in the docstring: empty rows, ties, zero lengths, NaN behind a mask, bad input."""

from __future__ import annotations

import math

import plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import Causal, Dense, Observe, Padding, Prefix, Segments, Window

D = torch.float64


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=D)


def with_grad(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("scale", [None, 0.0, math.inf])
def test_a_row_that_sees_nothing_is_zero_and_sends_no_gradient(scale: float | None) -> None:
    q, k, v = with_grad(rand(2, 3, 5, 7), rand(2, 3, 5, 7), rand(2, 3, 5, 2))
    out, seen = regard.attention(q, k, v, mask=Causal(offset=-2), scale=scale, observe=Observe(map=2, top=1))
    assert (out[:, :, :2] == 0).all() and (out[:, :, 2:] != 0).all()
    grad = torch.ones_like(out)
    grad[:, :, :2] = math.nan  # whatever arrives at an empty row goes nowhere
    found = torch.autograd.grad(out, (q, k, v), grad)
    assert all(x.isfinite().all() for x in found)
    assert (found[0][:, :, :2] == 0).all()
    assert (seen.lse[:, :, :2] == -math.inf).all() and (seen.peak_at[:, :, :2] == -1).all()
    assert all(
        (getattr(seen, name)[:, :, :2] == 0).all() for name in ("entropy", "peak", "offset", "distance", "visible")
    )
    assert not seen.counted[:, :, :2].any() and seen.rows.tolist() == [6, 6, 6]


def test_a_fully_padded_entry_is_zero() -> None:
    q, k, v = with_grad(rand(2, 1, 3, 2), rand(2, 1, 3, 2), rand(2, 1, 3, 2))
    out = regard.attention(q, k, v, mask=Padding([0, 3]))
    assert (out[0] == 0).all()
    assert torch.equal(out[1:], regard.attention(q[1:], k[1:], v[1:]))
    assert all(x.isfinite().all() and (x[0] == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_an_empty_row_with_a_sink_is_zero_and_its_lse_is_the_sink() -> None:
    q, k, v, sinks = with_grad(rand(1, 2, 3, 2), rand(1, 2, 3, 2), rand(1, 2, 3, 2), torch.tensor([0.5, -1.0], dtype=D))
    out, seen = regard.attention(q, k, v, sinks=sinks, mask=Causal(offset=-1), observe=Observe())
    assert (out[:, :, 0] == 0).all()
    assert torch.equal(seen.lse[0, :, 0], sinks)
    grad = torch.ones_like(out)
    grad[:, :, 0] = math.nan
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, (q, k, v, sinks), grad))


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = rand(1, 2, 3, 2), rand(1, 2, 3, 2), rand(1, 2, 3, 2)
    none = torch.full((2,), -math.inf, dtype=D)
    out, seen = regard.attention(q, k, v, sinks=none, mask=Causal(offset=-1), observe=Observe())
    assert torch.equal(out, regard.attention(q, k, v, mask=Causal(offset=-1)))
    assert seen.entropy.isfinite().all() and (seen.lse[:, :, 0] == -math.inf).all()


@pytest.mark.parametrize("n, m", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize(
    "options", [{}, {"mask": Causal()}, {"scale": math.inf}, {"bias": regard.ALiBi()}, {"scale": 0.0}]
)
def test_zero_lengths(n: int, m: int, options: dict) -> None:
    q, k, v = with_grad(rand(2, 3, n, 2), rand(2, 3, m, 2), rand(2, 3, m, 4))
    out, seen = regard.attention(q, k, v, **options, observe=Observe(map=2, profile=1, key_mass=True, top=2, keep=True))
    assert out.shape == (2, 3, n, 4) and (out == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k, v)))
    assert seen.rows.tolist() == [0, 0, 0] and seen.weights(0).shape == (n, m)


def test_observing_nothing_through_padding() -> None:
    x = rand(2, 1, 0, 3)
    for queries in (None, torch.ones(2, 0, dtype=torch.bool)):
        _, seen = regard.attention(x, x, x, mask=Padding([0, 0]), observe=Observe(map=2, queries=queries))
        assert seen.rows.tolist() == [0] and seen.entropy.shape == (2, 1, 0)


def test_zero_batch_and_zero_value_width() -> None:
    assert regard.attention(rand(0, 2, 3, 4), rand(0, 2, 5, 4), rand(0, 2, 5, 1)).shape == (0, 2, 3, 1)
    assert regard.attention(rand(1, 2, 3, 4), rand(1, 2, 5, 4), rand(1, 2, 5, 0)).shape == (1, 2, 3, 0)


def test_one_key_copies_its_value() -> None:
    q, k, v = rand(2, 3, 5, 7), rand(2, 3, 1, 7), rand(2, 3, 1, 4)
    assert torch.equal(regard.attention(q, k, v), v.expand(2, 3, 5, 4))


def test_scale_zero_is_the_mean_and_does_not_look_at_products() -> None:
    q, k, v = rand(1, 2, 3, 4), rand(1, 2, 8, 4), rand(1, 2, 8, 5)
    k[0, 0, 0, 0] = math.nan
    out = regard.attention(q, k, v, scale=0)
    assert torch.allclose(out, v.mean(-2, keepdim=True).expand(out.shape), atol=1e-15)


def test_hard_attention_shares_ties_equally_and_gives_no_gradient_to_products() -> None:
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [-1.0, 0.0]], dtype=D).reshape(1, 1, 4, 2)
    q, k, v = with_grad(
        torch.tensor([[[[2.0, 1.0], [0.0, 3.0], [0.0, 0.0]]]], dtype=D),
        k,
        torch.arange(8.0, dtype=D).reshape(1, 1, 4, 2),
    )
    out = regard.attention(q, k, v, scale=math.inf)
    expected = torch.stack([(v[0, 0, 0] + v[0, 0, 2]) / 2, v[0, 0, 1], v[0, 0].mean(0)])
    assert torch.equal(out[0, 0], expected)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq == 0).all() and (dk == 0).all()
    assert torch.allclose(dv[0, 0, :, 0], torch.tensor([0.75, 1.25, 0.75, 0.25], dtype=D))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equal_keys_tie_exactly_wherever_they_stand(dtype: torch.dtype) -> None:
    """Random numbers, many duplicates: a matrix product may round equal keys differently, hard attention must not."""
    torch.manual_seed(0)
    few = torch.randn(3, 37)
    which = torch.randint(0, 3, (101,))
    q, k = torch.randn(1, 2, 29, 37).to(dtype), few[which].expand(1, 2, 101, 37).to(dtype)
    weights = regard.attention(q, k, torch.eye(101, dtype=dtype).expand(1, 2, 101, 101), scale=math.inf)
    best = (q.double() @ few.to(dtype).double().T).argmax(-1)
    share = (which == best.unsqueeze(-1)).double() / torch.bincount(which)[best].unsqueeze(-1)
    assert torch.allclose(weights.double(), share.double(), rtol=torch.finfo(dtype).eps, atol=0)


def test_hard_ties_share_by_the_bias_and_lse_is_over_it() -> None:
    q, k = torch.ones(1, 1, 1, 1, dtype=D), torch.tensor([3.0, 3.0, 1.0, 3.0], dtype=D).reshape(1, 1, 4, 1)
    bias = torch.tensor([0.3, -0.5, 9.0, -math.inf], dtype=D, requires_grad=True)
    out, seen = regard.attention(
        q, k, torch.eye(4, dtype=D).reshape(1, 1, 4, 4), bias=bias, scale=math.inf, observe=Observe()
    )
    expected = torch.softmax(bias[:2], 0)
    assert torch.allclose(out.flatten()[:2], expected, atol=1e-15) and (out.flatten()[2:] == 0).all()
    assert torch.allclose(seen.lse.flatten(), torch.logsumexp(bias[:2], 0).detach())
    assert torch.allclose(seen.entropy.flatten(), -(expected * expected.log()).sum().detach())
    (grad,) = torch.autograd.grad(out.flatten()[0], bias)
    assert (
        torch.allclose(grad[:2], expected[0] * torch.stack([1 - expected[0], -expected[1]])) and (grad[2:] == 0).all()
    )


def test_the_hard_limit_ignores_hidden_keys() -> None:
    q, k = torch.ones(1, 1, 1, 1, dtype=D), torch.tensor([9.0, 1.0, 2.0], dtype=D).reshape(1, 1, 3, 1)
    out = regard.attention(q, k, k, mask=Dense(torch.tensor([[False, True, True]])), scale=math.inf)
    assert out.item() == 2.0


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
    want, A, *_ = plain.attention(*exact, scale=1.0)
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


def test_a_batch_of_nothing_with_every_mask() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for dtype in (torch.float32, D):
        z = torch.zeros(0, 2, 5, 4, dtype=dtype, requires_grad=True)
        for mask in (None, Causal(), Padding(none), Prefix(none), Segments(torch.zeros(0, 5).long()), Window(1)):
            out, seen = regard.attention(z, z, z, mask=mask, observe=Observe(map=2, key_mass=True, top=1, profile=1))
            assert out.shape == z.shape and (seen.map == 0).all()
            assert torch.autograd.grad(out.sum(), z)[0].shape == z.shape


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


def test_a_sink_of_minus_infinity_is_none_in_an_empty_row_too() -> None:
    sinks = torch.full((2,), -math.inf, dtype=D, requires_grad=True)
    q = rand(1, 2, 3, 4)
    out = regard.attention(q, q, q, sinks=sinks, mask=Dense(torch.tensor([[True], [False], [True]])))
    (grad,) = torch.autograd.grad(out.sum(), sinks)
    assert (out[:, :, 1] == 0).all() and (grad == 0).all()


def test_a_visible_nan_reaches_the_rows_that_see_it_and_no_others() -> None:
    q, k, v = rand(1, 1, 5, 2), rand(1, 1, 5, 2), rand(1, 1, 5, 2)
    v[0, 0, 3] = math.nan
    rows = regard.attention(q, k, v, mask=Causal()).isnan().any(-1)[0, 0]
    assert rows.tolist() == [False, False, False, True, True]
    k[0, 0, 3] = math.nan
    rows = regard.attention(q, k, v, mask=Causal(), scale=math.inf).isnan().any(-1)[0, 0]
    assert rows.tolist() == [False, False, False, True, True]


def test_dropout_is_the_hash_and_reproducible() -> None:
    q, k = rand(2, 3, 40, 4), rand(2, 3, 50, 4)
    v = torch.eye(50, dtype=D).expand(2, 3, 50, 50)
    torch.manual_seed(1)
    a = regard.attention(q, k, v, dropout=0.25)
    torch.manual_seed(1)
    b = regard.attention(q, k, v, dropout=0.25)
    c = regard.attention(q, k, v, dropout=0.25)
    assert torch.equal(a, b) and not torch.equal(a, c)
    kept = (a != 0).double()
    share, expected = kept.mean().item(), 0.75
    assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / kept.numel())
    full = regard.attention(q, k, v)
    assert torch.allclose(a[a != 0], full[a != 0] / 0.75)
    assert (regard.attention(q, k, v, dropout=1.0) == 0).all()


def test_dropout_bits_are_independent_along_every_index() -> None:
    """No correlation between neighbours in batch, head, query or key, nor between seeds, beyond 4.5 deviations."""
    from regard.scores import dropout_keep

    sizes = (8, 16, 64, 64)
    at = [torch.arange(s).view([-1 if a == x else 1 for x in range(4)]) for a, s in enumerate(sizes)]
    keeps = [dropout_keep(torch.tensor(seed), *at, 0.5).double() * 2 - 1 for seed in (0, 1, 2**40, 2**62 + 1)]
    for x in keeps:
        bound = 4.5 / math.sqrt(x.numel())
        assert abs(x.mean()) < bound
        for axis in range(4):
            for step in (1, 2, 4):
                assert abs((x * x.roll(step, axis)).mean()) < bound
    for a in range(4):
        for b in range(a):
            assert abs((keeps[a] * keeps[b]).mean()) < 4.5 / math.sqrt(keeps[a].numel())


def test_dropout_hash_is_pinned() -> None:
    """The hash is a contract between backends: these bits must never change."""
    from regard.scores import dropout_keep

    at = [torch.arange(s).view([-1 if a == x else 1 for x in range(4)]) for a, s in enumerate((1, 1, 2, 16))]
    bits = dropout_keep(torch.tensor(123456789), *at, 0.4).flatten().int().tolist()
    assert "".join(map(str, bits)) == PINNED_BITS


PINNED_BITS = "00101111110001011111110011110010"


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"q": torch.zeros(2, 4)}, ValueError, "at least 3 dimensions"),
        ({"q": [1, 2]}, TypeError, "must be a tensor"),
        ({"q": torch.zeros(1, 2, 3, 4, dtype=torch.int64)}, TypeError, "int64"),
        ({"q": torch.zeros(1, 2, 3, 4, dtype=torch.float64)}, TypeError, "one dtype"),
        ({"q": torch.zeros(1, 2, 3, 5)}, ValueError, "width 5 and k has width 4"),
        ({"q": torch.zeros(1, 3, 3, 4)}, ValueError, "3 heads and k 2"),
        ({"q": torch.zeros(3, 2, 3, 4), "k": torch.zeros(2, 2, 7, 4)}, ValueError, "do not broadcast"),
        ({"v": torch.zeros(1, 2, 6, 4)}, ValueError, "one value a key"),
        ({"q": torch.zeros(1, 2, 3, 0), "k": torch.zeros(1, 2, 7, 0)}, ValueError, "may be 0"),
        ({"scale": -1.0}, ValueError, "scale must be a number ≥ 0, got -1.0"),
        ({"scale": math.nan}, ValueError, "nan"),
        ({"scale": "1"}, TypeError, "scale must be a number"),
        ({"scale": True}, TypeError, "scale must be a number"),
        ({"softcap": 0.0}, ValueError, "softcap must be a finite number > 0"),
        ({"softcap": math.inf}, ValueError, "softcap"),
        ({"dropout": 1.5}, ValueError, "between 0 and 1"),
        ({"dropout": -0.1}, ValueError, "dropout"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks has shape \[3\]; it must be \[2\]"),
        ({"sinks": [0.0, 0.0]}, TypeError, "sinks must be a float tensor"),
        ({"scale": math.inf, "softcap": 1.0}, ValueError, "softcap"),
        ({"scale": math.inf, "sinks": torch.zeros(2)}, ValueError, "sinks"),
        ({"mask": torch.zeros(3, 7)}, TypeError, "pass it as bias="),
        ({"mask": torch.ones(3, 6, dtype=torch.bool)}, ValueError, "broadcast"),
        ({"mask": torch.ones(5, 1, 1, 1, dtype=torch.bool)}, ValueError, "does not broadcast"),
        ({"mask": "causal"}, TypeError, "True = may attend"),
        ({"mask": Padding([3, 4])}, ValueError, "batch of"),
        ({"mask": Padding(torch.ones(1, 7, dtype=torch.int64))}, ValueError, "of 0 and 1 over keys must be bool"),
        ({"mask": Padding([8])}, ValueError, "up to 8, but there are 7 keys"),
        ({"bias": torch.ones(3, 7, dtype=torch.bool)}, TypeError, "pass it as mask="),
        ({"bias": torch.ones(3, 7, dtype=torch.int64)}, TypeError, "float tensor"),
        ({"bias": torch.ones(4, 7)}, ValueError, "bias has shape"),
        ({"bias": 1.0}, TypeError, "bias must be"),
        ({"bias": regard.RelativeTable(3, 2)}, ValueError, "3 heads"),
        ({"bias": regard.Grid(3, 3, 2)}, ValueError, "9 cells, but there are 7 keys"),
        ({"observe": True}, TypeError, "regard.Observe"),
        ({"backend": "cuda"}, ValueError, "'cuda'; known are 'auto', 'native', 'reference'"),
        ({"observe": Observe(queries=torch.ones(1, 4, dtype=torch.bool))}, ValueError, "queries"),
        ({"observe": Observe(queries=[3, 3])}, ValueError, r"batch of \[2\]"),
    ],
)
def test_bad_input_is_named(change: dict, error: type[Exception], words: str) -> None:
    call = {"q": torch.zeros(1, 2, 3, 4), "k": torch.zeros(1, 2, 7, 4), "v": torch.zeros(1, 2, 7, 4)} | change
    with pytest.raises(error, match=words) as raised:
        regard.attention(**call)
    assert "\n" not in str(raised.value)


def test_a_bias_value_says_what_it_is_not() -> None:
    from regard.scores import Bias

    with pytest.raises(TypeError, match="is not a bias on scores"):
        Bias().terms(torch.zeros(1, 1, 1, 1), 1)
    with pytest.raises(TypeError):
        regard.ALiBi() + 1


def test_other_layouts_give_the_same_numbers() -> None:
    q, k, v = rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 2)
    expected, *_ = plain.attention(q, k, v, mask=Window(2))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.allclose(regard.attention(*turned, mask=Window(2)), expected, atol=1e-14)
    one = [x[:1].expand(2, 3, *x.shape[2:]) for x in (q, k, v)]
    assert torch.allclose(regard.attention(*one)[0], regard.attention(*one)[1])


def test_non_default_device_of_masks_is_moved() -> None:
    q = k = v = torch.zeros(1, 1, 2, 2, device="meta")
    out = regard.attention(q, k, v, mask=Causal())
    assert out.device.type == "meta" and out.shape == (1, 1, 2, 2)


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


def test_equal_keys_tie_in_other_layouts_too() -> None:
    torch.manual_seed(0)
    which = torch.randint(0, 3, (101,))
    keys = torch.randn(3, 37, dtype=D)[which].T.contiguous().T.reshape(1, 1, 101, 37)
    q = torch.randn(1, 1, 37, 29, dtype=D).transpose(-1, -2)
    weights = regard.attention(q, keys, torch.eye(101, dtype=D).reshape(1, 1, 101, 101), scale=math.inf)
    chosen = which[weights[0, 0].argmax(-1)]
    assert torch.equal(weights[0, 0] > 0, which == chosen.unsqueeze(-1))


def test_a_window_may_be_wider_than_any_sequence() -> None:
    assert Window(2**63 - 1).dense(3, 5).all()


def test_padding_that_broadcasts_over_a_nested_batch_can_be_observed() -> None:
    x = rand(2, 3, 1, 5, 4)
    _, seen = regard.attention(x, x, x, mask=Padding([1, 2, 3]), observe=Observe())
    assert seen.rows.tolist() == [12]
