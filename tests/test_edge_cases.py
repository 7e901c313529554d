"""Corners decided in the docstring: empty rows, ties, zero lengths, dropout, layouts, bad input."""

from __future__ import annotations

import math

import pytest
import torch
from support import dense_attention
from support.float64 import D, rand, with_grad

import regard
from regard import Causal, Dense, Observe, Padding, Prefix, Segments, Window


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
    assert (seen.lse[:, :, :2] == -math.inf).all() and (seen.logit_max[:, :, :2] == -math.inf).all()
    assert (seen.peak_at[:, :, :2] == -1).all()
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


def test_a_batch_of_nothing_with_every_mask() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for dtype in (torch.float32, D):
        z = torch.zeros(0, 2, 5, 4, dtype=dtype, requires_grad=True)
        for mask in (None, Causal(), Padding(none), Prefix(none), Segments(torch.zeros(0, 5).long()), Window(1)):
            out, seen = regard.attention(z, z, z, mask=mask, observe=Observe(map=2, key_mass=True, top=1, profile=1))
            assert out.shape == z.shape and (seen.map == 0).all()
            assert torch.autograd.grad(out.sum(), z)[0].shape == z.shape


def test_a_sink_of_minus_infinity_is_none_in_an_empty_row_too() -> None:
    sinks = torch.full((2,), -math.inf, dtype=D, requires_grad=True)
    q = rand(1, 2, 3, 4)
    out = regard.attention(q, q, q, sinks=sinks, mask=Dense(torch.tensor([[True], [False], [True]])))
    (grad,) = torch.autograd.grad(out.sum(), sinks)
    assert (out[:, :, 1] == 0).all() and (grad == 0).all()


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
    from regard._lowered_scores import dropout_keep

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
    from regard._lowered_scores import dropout_keep

    at = [torch.arange(s).view([-1 if a == x else 1 for x in range(4)]) for a, s in enumerate((1, 1, 2, 16))]
    bits = dropout_keep(torch.tensor(123456789), *at, 0.4).flatten().int().tolist()
    assert "".join(map(str, bits)) == PINNED_BITS


PINNED_BITS = "00101111110001011111110011110010"


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"q": torch.zeros(2, 4)}, ValueError, "q has shape"),
        ({"q": [1, 2]}, TypeError, "must be a tensor"),
        ({"q": torch.zeros(1, 2, 3, 4, dtype=torch.int64)}, TypeError, "int64"),
        ({"q": torch.zeros(1, 2, 3, 4, dtype=torch.float64)}, TypeError, "one dtype"),
        ({"q": torch.zeros(1, 2, 3, 5)}, ValueError, "q and k must have equal widths"),
        ({"q": torch.zeros(1, 3, 3, 4)}, ValueError, "heads of k must divide"),
        ({"q": torch.zeros(3, 2, 3, 4), "k": torch.zeros(2, 2, 7, 4)}, ValueError, "do not broadcast"),
        ({"v": torch.zeros(1, 2, 6, 4)}, ValueError, "v must have one value"),
        ({"q": torch.zeros(1, 2, 3, 0), "k": torch.zeros(1, 2, 7, 0)}, ValueError, "must not be 0"),
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
        ({"mask": torch.ones(3, 7, dtype=torch.int64)}, TypeError, r"where 1 = may attend, give mask\.bool\(\)"),
        ({"mask": torch.ones(3, 6, dtype=torch.bool)}, ValueError, "broadcast"),
        ({"mask": torch.ones(5, 1, 1, 1, dtype=torch.bool)}, ValueError, "does not broadcast"),
        ({"mask": "causal"}, TypeError, "True = may attend"),
        ({"mask": Padding([3, 4])}, ValueError, "batch of"),
        ({"mask": Padding(torch.ones(1, 7, dtype=torch.int64))}, ValueError, "of 0 and 1 over keys must be bool"),
        ({"mask": Padding([8])}, ValueError, "Padding lengths must be at most .*got 8"),
        ({"bias": torch.ones(3, 7, dtype=torch.bool)}, TypeError, "mask="),
        ({"bias": torch.ones(3, 7, dtype=torch.int64)}, TypeError, "float tensor"),
        ({"bias": torch.ones(4, 7)}, ValueError, "bias has shape"),
        ({"bias": 1.0}, TypeError, "bias must be"),
        ({"bias": regard.RelativeTable(3, 2)}, ValueError, "3 heads"),
        ({"bias": regard.Grid(3, 3, 2)}, ValueError, "grid of 3 × 3"),
        ({"observe": True}, TypeError, "regard.Observe"),
        ({"backend": "cuda"}, ValueError, "backend must be .* got 'cuda'"),
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
    from regard._lowered_scores import Bias

    with pytest.raises(TypeError, match="is not a bias on scores"):
        Bias().terms(torch.zeros(1, 1, 1, 1), 1)
    with pytest.raises(TypeError):
        regard.ALiBi() + 1


def test_other_layouts_give_the_same_numbers() -> None:
    q, k, v = rand(2, 3, 5, 4), rand(2, 3, 7, 4), rand(2, 3, 7, 2)
    expected, *_ = dense_attention.attention(q, k, v, mask=Window(2))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.allclose(regard.attention(*turned, mask=Window(2)), expected, atol=1e-14)
    one = [x[:1].expand(2, 3, *x.shape[2:]) for x in (q, k, v)]
    assert torch.allclose(regard.attention(*one)[0], regard.attention(*one)[1])


def test_non_default_device_of_masks_is_moved() -> None:
    q = k = v = torch.zeros(1, 1, 2, 2, device="meta")
    out = regard.attention(q, k, v, mask=Causal())
    assert out.device.type == "meta" and out.shape == (1, 1, 2, 2)


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
