"""Positions applied to q and k, and hard selection: each against its plain formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.positions import EXACT, F64, randn
from torch import Tensor
from torch.utils import _pytree as pytree

from regard.positions import LinearScaling, NTKScaling, Rotary, Scaling, hard_selection


def test_rotary_is_built_where_there_are_no_values() -> None:
    with torch.device("meta"):
        rotary = Rotary(4, frequencies=[1.0, 0.5])  # type: ignore[arg-type]
    x = randn(2, 3, 5, 4)
    assert torch.equal(rotary(x), Rotary(4, frequencies=torch.tensor([1.0, 0.5]))(x))


def turned(x: Tensor, p: float, rotate: int, base: float, layout: str) -> Tensor:
    """One vector ``[d]`` turned by position p, pair by pair."""
    y = x.clone()
    for i in range(rotate // 2):
        a, b = (2 * i, 2 * i + 1) if layout == "pairs" else (i, i + rotate // 2)
        c, s = math.cos(p / base ** (2 * i / rotate)), math.sin(p / base ** (2 * i / rotate))
        y[a], y[b] = x[a] * c - x[b] * s, x[a] * s + x[b] * c
    return y


@pytest.mark.parametrize("layout", ["halves", "pairs"])
@pytest.mark.parametrize("d, rotate", [(2, None), (6, None), (7, 4), (10, 2), (13, 12)])
def test_rotary_is_its_formula(layout: str, d: int, rotate: int | None) -> None:
    x = randn(2, 3, 5, d)
    for start, base in ((0, 10000.0), (17, 500.0), (-3, 10000.0)):
        y = Rotary(d, base=base, layout=layout, rotate=rotate)(x, start=start)
        expected = torch.stack(
            [
                torch.stack([turned(v, start + i, rotate or d, base, layout) for i, v in enumerate(head)])
                for head in x.flatten(0, 1)
            ]
        ).reshape(x.shape)
        torch.testing.assert_close(y, expected, **EXACT)


@settings(max_examples=50, deadline=None)
@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-1000, 1000), st.sampled_from(["halves", "pairs"]))
def test_rotary_products_depend_on_the_distance_alone(i: int, j: int, shift: int, layout: str) -> None:
    rotary, q, k = Rotary(10, layout=layout, rotate=6), randn(1, 1, 10), randn(1, 1, 10)
    product = (rotary(q, start=i) * rotary(k, start=j)).sum()
    torch.testing.assert_close((rotary(q, start=i + shift) * rotary(k, start=j + shift)).sum(), product, **EXACT)
    torch.testing.assert_close(rotary(q, start=i).norm(), q.norm(), **EXACT)


def test_rotary_layouts_are_one_permutation_apart() -> None:
    d, rotate = 11, 6
    x = randn(3, 5, d)
    order = [0, 3, 1, 4, 2, 5, 6, 7, 8, 9, 10]  # halves → pairs
    pairs = Rotary(d, layout="pairs", rotate=rotate)(x[..., order])
    torch.testing.assert_close(pairs, Rotary(d, layout="halves", rotate=rotate)(x)[..., order], **EXACT)


def test_rotary_positions_of_their_own() -> None:
    rotary, x = Rotary(6), randn(2, 3, 5, 6)
    assert torch.equal(rotary(x, position_ids=torch.arange(4, 9)), rotary(x, start=4))
    at = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])  # left padding in the first entry
    y = rotary(x, position_ids=at)
    for b in range(2):
        for i in range(5):
            torch.testing.assert_close(y[b, :, i], rotary(x[b, :, i : i + 1], start=int(at[b, i]))[:, 0], **EXACT)
    assert torch.equal(rotary(x, position_ids=at[1:].int()), rotary(x))  # broadcast over the batch
    assert torch.equal(rotary(x.expand(4, 2, 3, 5, 6), position_ids=at)[3], y)
    assert rotary(x[..., :0, :]).shape == (2, 3, 0, 6)


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_rotary_scaling(layout: str) -> None:
    d, factor, x = 10, 3.0, randn(2, 5, 10)
    linear = Rotary(d, layout=layout, scaling=LinearScaling(factor))
    torch.testing.assert_close(linear(x, start=6)[1, 3], turned(x[1, 3], 9 / factor, d, 10000.0, layout), **EXACT)
    base = 10000.0 * factor ** (d / (d - 2))
    ntk = Rotary(d, layout=layout, scaling=NTKScaling(factor))
    torch.testing.assert_close(ntk(x, start=6), Rotary(d, base=base, layout=layout)(x, start=6), **EXACT)
    both = Rotary(d, layout=layout, scaling=(NTKScaling(factor), LinearScaling(2.0)))
    torch.testing.assert_close(both(x, start=6)[0, 2], turned(x[0, 2], 8 / 2.0, d, base, layout), **EXACT)
    partial = Rotary(d, rotate=6, scaling=NTKScaling(factor))
    stretched = Rotary(d, rotate=6, base=10000.0 * factor ** (6 / 4))
    torch.testing.assert_close(partial(x), stretched(x), **EXACT)


def test_rotary_with_frequencies_and_factor_of_its_own() -> None:
    x = randn(2, 5, 6)
    theta = torch.tensor([1.0, 0.25, 0.0])
    y = Rotary(6, frequencies=theta, attention_factor=1.5)(x)
    angle = torch.arange(5, dtype=F64).unsqueeze(-1) * theta.double()
    a, b = x[..., :3], x[..., 3:]
    expected = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    torch.testing.assert_close(y, 1.5 * expected, **EXACT)
    assert torch.equal(Rotary(6, frequencies=[1.0, 0.25, 0.0])(x), Rotary(6, frequencies=theta)(x))  # type: ignore[arg-type]
    partial = Rotary(8, rotate=6, attention_factor=2.0)(randn(2, 5, 8).new_ones(2, 5, 8))
    assert bool((partial[..., 6:] == 1).all())  # what does not turn is not multiplied

    class Halved(Rotary):
        def inverse_frequencies(self, device: torch.device | str | None = None) -> Tensor:
            return super().inverse_frequencies(device) / 2

    assert torch.equal(Halved(6)(x), Rotary(6, scaling=LinearScaling(2.0))(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotary_keeps_dtype_and_computes_finely(dtype: torch.dtype) -> None:
    x = randn(2, 5, 6).to(dtype)
    y = Rotary(6)(x, start=100_003)  # an angle that bfloat16, and the product in float32, would lose
    assert y.dtype == dtype
    exact = Rotary(6)(x.double(), start=100_003)
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_rotary_gradients_and_travel() -> None:
    x = randn(2, 3, 6).requires_grad_()
    rotary = Rotary(6, rotate=4, layout="pairs", frequencies=torch.tensor([1.0, 0.5]), scaling=(LinearScaling(2.0),))
    assert torch.autograd.gradcheck(lambda x: rotary(x, start=3), (x,))
    leaves, tree = pytree.tree_flatten(rotary)
    assert len(leaves) == 1 and isinstance(leaves[0], Tensor)
    assert torch.equal(pytree.tree_unflatten(leaves, tree)(x), rotary(x))
    compiled = torch.compile(lambda x, at: rotary(x, position_ids=at) + rotary(x), backend="eager", fullgraph=True)
    at = torch.arange(3)
    torch.testing.assert_close(compiled(x, at), rotary(x, position_ids=at) + rotary(x), **EXACT)


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        (lambda: Rotary(7), ValueError, "d must be even.*got 7"),
        (lambda: Rotary(6, rotate=3), ValueError, "rotate must be an even number from 2 to d=6, got 3"),
        (lambda: Rotary(6, rotate=8), ValueError, "rotate must be .* got 8"),
        (lambda: Rotary(6, rotate=0), ValueError, "rotate must be .* got 0"),
        (lambda: Rotary(6, base=-1.0), ValueError, "base must be a finite number > 0, got -1.0"),
        (lambda: Rotary(6, base=math.nan), ValueError, "base must be a number"),
        (lambda: Rotary(6, layout="both"), ValueError, 'layout must be "halves" or "pairs", got \'both\''),
        (lambda: Rotary(6, scaling=2.0), TypeError, "scaling must be .* got 2.0"),
        (lambda: Rotary(2, scaling=NTKScaling(2.0)), ValueError, "NTKScaling needs at least 4"),
        (lambda: LinearScaling(0.0), ValueError, "factor must be a finite number > 0, got 0.0"),
        (lambda: NTKScaling(math.inf), ValueError, "factor must be a finite number > 0, got inf"),
        (lambda: Scaling()(torch.ones(3)), TypeError, "Scaling must implement"),
        (lambda: Rotary(6, frequencies=torch.ones(2)), ValueError, r"frequencies has shape \[2\]; it must be \[3\]"),
        (lambda: Rotary(6, frequencies=torch.full((3,), math.nan)), ValueError, "frequencies must be finite"),
        (lambda: Rotary(6, attention_factor=math.inf), ValueError, "attention_factor must be a finite number, got inf"),
        (lambda: Rotary(6)(torch.zeros(5, 6)), ValueError, r"x has shape \[5, 6\]; .*\[\*, heads, n, 6\]"),
        (lambda: Rotary(6)(torch.zeros(2, 5, 4)), ValueError, r"x has shape \[2, 5, 4\]"),
        (lambda: Rotary(6)(torch.zeros(2, 5, 6).int()), TypeError, "x must be a floating-point tensor"),
        (lambda: Rotary(6)(torch.zeros(2, 5, 6), start=0.5), TypeError, "start must be an integer"),
        (
            lambda: Rotary(6)(torch.zeros(2, 5, 6), position_ids=torch.zeros(5)),
            TypeError,
            "position_ids must be a tensor of integers",
        ),
        (
            lambda: Rotary(6)(torch.zeros(2, 5, 6), position_ids=[1, 2]),
            TypeError,
            r"position_ids must be .* got \[1, 2\]",
        ),
        (
            lambda: Rotary(6)(torch.zeros(2, 5, 6), position_ids=torch.arange(4)),
            ValueError,
            r"position_ids has shape \[4\]; .*\[5\]",
        ),
        (
            lambda: Rotary(6)(torch.zeros(2, 5, 6), position_ids=torch.zeros(2, 5).long()),
            ValueError,
            r"position_ids has shape \[2, 5\]",
        ),
        (
            lambda: Rotary(6)(torch.zeros(3, 2, 5, 6), position_ids=torch.zeros(2, 5).long()),
            ValueError,
            r"\[5\] or \[3, 5\]",
        ),
        (
            lambda: Rotary(6)(torch.zeros(2, 5, 6), position_ids=torch.arange(5), start=1),
            ValueError,
            "start must be 0 .*got 1",
        ),
    ],
)
def test_rotary_refuses(wrong, error, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)


# --- hard selection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 3])
def test_hard_selection_picks_the_nearest_key(p: int) -> None:
    queries, keys, shift = randn(7, p), randn(11, p), randn(3, p)
    q, k = hard_selection(queries, keys, shift)
    assert q.shape == (3, 7, 1 + p) and k.shape == (1, 11, 1 + p)
    target = queries + shift.unsqueeze(1)  # [3, 7, p]
    squared = ((target.unsqueeze(2) - keys) ** 2).sum(-1)
    torch.testing.assert_close(q @ k.mT, (target**2).sum(-1, keepdim=True) - squared, **EXACT)
    assert torch.equal((q @ k.mT).argmax(-1), squared.argmin(-1))


def test_hard_selection_on_a_grid_is_a_tap_of_a_convolution() -> None:
    h, w = 5, 7
    cells = torch.tensor([(y, x) for y in range(h) for x in range(w)])
    shifts = torch.tensor([(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)])
    q, k = hard_selection(cells, cells, shifts)
    assert q.dtype == torch.get_default_dtype()
    chosen = (q @ k.mT).argmax(-1).reshape(9, h, w)
    for s, (dy, dx) in enumerate(shifts.tolist()):
        for y in range(1, h - 1):
            for x in range(1, w - 1):
                assert chosen[s, y, x] == (y + dy) * w + x + dx
    tie = hard_selection(torch.tensor([[1]]), torch.tensor([[0], [2]]), torch.tensor([[0]]))
    assert bool(((scores := tie[0] @ tie[1].mT) == scores.max()).all())  # equally near: exactly equal


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        (lambda x: hard_selection(x, x, torch.zeros(3, 2)), ValueError, "query_xy, key_xy and shift"),
        (lambda x: hard_selection(x[:, 0], x, x), ValueError, r"query_xy has shape \[4\]"),
        (lambda x: hard_selection(x, x.half(), x), TypeError, "key_xy must be .*torch.float16"),
        (lambda x: hard_selection(x, x, [[1.0]]), TypeError, "shift must be a tensor"),
        (lambda x: hard_selection(x, x * math.nan, x), ValueError, "key_xy must be finite"),
    ],
)
def test_hard_selection_refuses(wrong, error, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=says):
        wrong(torch.zeros(4, 1))
