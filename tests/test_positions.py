"""Positions added to the input: each against its plain formula in float64; and what the package exports."""

from __future__ import annotations

import doctest
import importlib
import math
import pkgutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.positions import EXACT, F64, randn
from torch import Tensor

import regard.positions
from regard.positions import AddedToInput, Learned, NTKScaling, Rotary, Sinusoidal


def test_every_name_is_exported() -> None:
    assert all(hasattr(regard.positions, name) for name in regard.positions.__all__)
    assert len(set(regard.positions.__all__)) == len(regard.positions.__all__)


@pytest.mark.parametrize("module", sorted(m.name for m in pkgutil.iter_modules(regard.positions.__path__)))
def test_examples_in_docstrings_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"regard.positions.{module}"))
    assert result.failed == 0


# --- added to the input ----------------------------------------------------------------------------------------------


def wave(p: int, d: int, base: float) -> list[float]:
    """The code of one position, feature by feature."""
    return [(math.cos if f % 2 else math.sin)(p / base ** (2 * (f // 2) / d)) for f in range(d)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 13), st.integers(0, 7), st.integers(0, 1000), st.sampled_from([10000.0, 7.0]))
def test_sinusoidal_is_its_formula(d: int, n: int, start: int, base: float) -> None:
    expected = torch.tensor([wave(start + p, d, base) for p in range(n)], dtype=F64).reshape(n, d)
    torch.testing.assert_close(Sinusoidal(d, base).encoding(n, start), expected, **EXACT)


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_sinusoidal_on_a_grid(prefix: int) -> None:
    d, h, w = 10, 3, 2  # halves of 5: odd
    cells = [wave(y, 5, 10000.0) + wave(x, 5, 10000.0) for y in range(h) for x in range(w)]
    expected = torch.tensor([[0.0] * d] * prefix + cells, dtype=F64)
    x = randn(2, prefix + h * w, d)
    torch.testing.assert_close(Sinusoidal(d, grid=(h, w))(x), x + expected, **EXACT)


def test_sinusoidal_serves_every_dtype_and_shape() -> None:
    position = Sinusoidal(6)
    assert not list(position.parameters()) and not position.state_dict()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        y = position(torch.zeros(2, 3, 5, 6, dtype=dtype), start=11)
        assert y.dtype == dtype and y.shape == (2, 3, 5, 6)
        assert torch.equal(y[1, 2], position.encoding(5, 11).to(dtype))  # rounded once
    far = position.encoding(1, 10**6)
    torch.testing.assert_close(far, torch.tensor([wave(10**6, 6, 10000.0)], dtype=F64), rtol=0, atol=1e-9)
    assert position(torch.zeros(0, 6)).shape == (0, 6)


def test_learned_on_a_line() -> None:
    position = Learned(11, 5).double()
    x = randn(2, 3, 7, 5)
    for start in (0, 2, 4):
        expected = torch.stack([x[..., i, :] + position.weight[start + i] for i in range(7)], -2)
        torch.testing.assert_close(position(x, start=start), expected, **EXACT)
    assert position(x.bfloat16()).dtype == torch.bfloat16
    assert position(x[..., :0, :], start=11).shape == (2, 3, 0, 5)
    assert torch.autograd.gradcheck(lambda *_: position(x[0, 0], start=4), tuple(position.parameters()))


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_learned_on_a_grid(prefix: int) -> None:
    h, w, d = 3, 5, 7
    position = Learned((h, w), d).double()
    x = randn(2, prefix + h * w, d)
    expected = x.clone()
    for y in range(h):
        for c in range(w):
            expected[:, prefix + y * w + c] += position.row[y] + position.column[c]
    torch.testing.assert_close(position(x), expected, **EXACT)
    assert {name: list(p.shape) for name, p in position.named_parameters()} == {"row": [h, d], "column": [w, d]}
    assert torch.autograd.gradcheck(lambda *_: position(x[0]), tuple(position.parameters()))


@pytest.mark.parametrize("length", [11, (2, 3)])
def test_learned_state_round_trip_and_reset(length: int | tuple[int, int]) -> None:
    a, b = Learned(length, 5), Learned(length, 5)
    x = torch.randn(6, 5)
    assert not torch.equal(a(x), b(x))
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))
    torch.manual_seed(0)
    big = Learned(1009, 31)
    assert 0.019 < float(big.weight.detach().std()) < 0.021


def test_representations_say_how_it_was_made() -> None:
    assert repr(Sinusoidal(6)) == "Sinusoidal(d=6, base=10000)"
    assert repr(Sinusoidal(6, grid=(2, 3))) == "Sinusoidal(d=6, base=10000, grid=(2, 3))"
    assert repr(Learned(11, 5)) == "Learned(11, d=5)" and repr(Learned((2, 3), 5)) == "Learned((2, 3), d=5)"
    assert repr(Rotary(6, layout="pairs")).startswith("Rotary(d=6, base=10000.0, layout='pairs'")
    assert repr(NTKScaling(2.0)) == "NTKScaling(factor=2.0)"


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        (lambda: Sinusoidal(0), ValueError, "d must be at least 1, got 0"),
        (lambda: Sinusoidal(6, base=0.0), ValueError, "base must be a finite number > 0, got 0.0"),
        (lambda: Sinusoidal(6, base="big"), TypeError, "base must be a number, got 'big'"),
        (lambda: Sinusoidal(5, grid=(2, 3)), ValueError, "d must be even .*got 5"),
        (lambda: Sinusoidal(6, grid=4), TypeError, r"grid must be \(height, width\).*got 4"),
        (lambda: Sinusoidal(6, grid=(2, 0)), ValueError, "grid width must be at least 1, got 0"),
        (lambda: Sinusoidal(6)(torch.zeros(3, 6), start=-1), ValueError, "start must be at least 0, got -1"),
        (lambda: Sinusoidal(6)(torch.zeros(3, 5)), ValueError, r"x has shape \[3, 5\].*\[\*, n, 6\]"),
        (lambda: Sinusoidal(6)(torch.zeros(6)), ValueError, r"x has shape \[6\]"),
        (lambda: Sinusoidal(6)(torch.zeros(3, 6).long()), TypeError, "x must be a floating-point tensor"),
        (lambda: Sinusoidal(6)("x"), TypeError, "x must be a floating-point tensor"),
        (lambda: Sinusoidal(6, grid=(2, 3))(torch.zeros(5, 6)), ValueError, "x has 5 rows; .* 2 × 3 .* 6"),
        (lambda: Sinusoidal(6, grid=(2, 3))(torch.zeros(6, 6), start=1), ValueError, "start must be 0 .*got 1"),
        (lambda: Learned(0, 5), ValueError, "length must be at least 1, got 0"),
        (lambda: Learned(7.0, 5), TypeError, "length must be an integer"),
        (lambda: Learned((2, 3, 4), 5), TypeError, r"length must be \(height, width\)"),
        (lambda: Learned(7, 5)(torch.zeros(8, 5)), ValueError, "length 7: from start=0 at most 7"),
        (lambda: Learned(7, 5)(torch.zeros(2, 5), start=9), ValueError, "positions 9 … 10 .*length 7: .*at most 0"),
        (lambda: Learned((2, 3), 5)(torch.zeros(5, 5)), ValueError, "x has 5 rows"),
        (lambda: AddedToInput().encoding(3), TypeError, "AddedToInput must implement"),
        (lambda: AddedToInput().encoding_at(torch.arange(3)), TypeError, "AddedToInput must implement"),
        (
            lambda: Learned(7, 5)(torch.zeros(2, 5), position_ids=torch.tensor([0, 7])),
            ValueError,
            "position_ids must be within 0 … 6, got 0 … 7",
        ),
        (
            lambda: Learned(7, 5)(torch.zeros(2, 5), position_ids=torch.tensor([-1, 0])),
            ValueError,
            "position_ids must be within .*got -1",
        ),
        (
            lambda: Learned(7, 5)(torch.zeros(2, 5), position_ids=torch.zeros(2)),
            TypeError,
            "position_ids must be a tensor of integers",
        ),
        (
            lambda: Learned(7, 5)(torch.zeros(2, 5), position_ids=torch.arange(3)),
            ValueError,
            r"position_ids has shape \[3\]; .* \[2\]",
        ),
        (
            lambda: Sinusoidal(6)(torch.zeros(2, 6), position_ids=torch.arange(2), start=1),
            ValueError,
            "start must be 0 .*got 1",
        ),
        (
            lambda: Learned((1, 2), 5)(torch.zeros(2, 5), position_ids=torch.arange(2)),
            ValueError,
            "position_ids must be None",
        ),
    ],
)
def test_added_schemes_refuse(wrong, error, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)


def left_padded() -> Tensor:
    return torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])


@pytest.mark.parametrize("make", [lambda: Sinusoidal(7), lambda: Learned(11, 7).double()])
def test_added_schemes_at_positions_of_their_own(make) -> None:  # type: ignore[no-untyped-def]
    position, x, at = make(), randn(2, 5, 7), left_padded()
    torch.testing.assert_close(position(x, position_ids=torch.arange(4, 9)), position(x, start=4), **EXACT)
    y = position(x, position_ids=at)
    for b in range(2):
        for i in range(5):
            row = position(x[b, i : i + 1], start=int(at[b, i]))[0]
            torch.testing.assert_close(y[b, i], row, **EXACT)
    torch.testing.assert_close(position(x, position_ids=at[1:].int()), position(x), **EXACT)
    torch.testing.assert_close(position(x.expand(3, 2, 5, 7), position_ids=at)[2], y, **EXACT)
    assert position(x.bfloat16(), position_ids=at).dtype == torch.bfloat16
    compiled = torch.compile(lambda x, at: position(x, position_ids=at), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, at), y, **EXACT)
