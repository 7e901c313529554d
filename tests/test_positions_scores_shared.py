"""Positions added to scores, what holds for all: they learn, travel, stay small and refuse what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support.positions import EXACT, F64, B, D, H, queries, spread
from torch import Tensor, nn

from regard._lowered_scores import Bias
from regard.positions import ALiBi, Grid, Quadratic, RelativeKeys, RelativeTable, T5Buckets

LEARNED: list[Callable[[], nn.Module]] = [
    lambda: T5Buckets(H, buckets=8, max_distance=7),
    lambda: T5Buckets(H, buckets=8, max_distance=7, bidirectional=False, offset=2),
    lambda: RelativeTable(H, 2),
    lambda: RelativeKeys(D, 2),
    lambda: RelativeKeys(D, 2, heads=H, offset=-1),
    lambda: Grid(2, 3, H),
    lambda: Grid(2, 3, H, d=D),
    lambda: Quadratic(2, 3, H),
]


@pytest.mark.parametrize("make", LEARNED)
def test_learned_schemes_learn_travel_and_compile(make: Callable[[], nn.Module]) -> None:
    bias, other = make(), make()
    assert isinstance(bias, Bias)
    spread(bias)
    n, m = 5, 7
    q = queries(n).requires_grad_()
    inputs = (
        (*bias.parameters(), q) if isinstance(bias, RelativeKeys) or getattr(bias, "d", None) else (*bias.parameters(),)
    )
    assert torch.autograd.gradcheck(lambda *_: bias.dense(q, m), inputs)
    other.double().load_state_dict(bias.state_dict())
    assert torch.equal(other.dense(q, m), bias.dense(q, m))  # type: ignore[operator]
    compiled = torch.compile(lambda q: bias.dense(q, m), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), bias.dense(q, m), **EXACT)
    two = bias + bias
    torch.testing.assert_close(two.dense(q, m), 2 * bias.dense(q, m), **EXACT)
    assert repr(bias).startswith(type(bias).__name__ + "(") and "\n" not in repr(bias)


class Biased(nn.Module):
    def forward(self, q: Tensor, bias: Bias) -> Tensor:
        return bias.dense(q, 7)


@pytest.mark.parametrize("strict", [True, False])
def test_slopes_may_be_an_input_of_an_exported_program(strict: bool) -> None:
    q, other = queries(5), ALiBi(torch.randn(H, dtype=F64))
    program = torch.export.export(Biased(), (q, ALiBi(torch.ones(H, dtype=F64))), strict=strict)
    torch.testing.assert_close(program.module()(q, other), other.dense(q, 7), **EXACT)


def test_gradients_reach_slopes() -> None:
    slopes = torch.randn(H, dtype=F64, requires_grad=True)
    q = queries(5)
    assert torch.autograd.gradcheck(lambda s: ALiBi(s, offset=1).dense(q, 7), (slopes,))
    compiled = torch.compile(lambda s, q: (ALiBi(s) + ALiBi()).dense(q, 7), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(slopes, q), (ALiBi(slopes) + ALiBi()).dense(q, 7), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tables_are_small_and_fine(dtype: torch.dtype) -> None:
    n, m, h, w = 1009, 1021, 29, 31
    q = torch.randn(B, H, n, D).to(dtype)
    shapes: list[tuple[Bias, list[tuple[int, ...]]]] = [
        (ALiBi(), [(1, H, 1, n + m + 1)]),
        (T5Buckets(H), [(1, H, 1, 2 * 91 + 1)]),
        (T5Buckets(H, bidirectional=False), [(1, H, 1, 113 + 1)]),
        (RelativeTable(H, 17), [(1, H, 1, 35)]),
        (RelativeKeys(D, 17), [(B, H, n, 35)]),
        (RelativeKeys(D, 17, heads=H), [(B, H, n, 35)]),
        (Grid(h, w, H), [(1, H, 1, 2 * h - 1), (1, H, 1, 2 * w - 1)]),
        (Grid(h, w, H, d=D), [(B, H, n, 2 * h - 1), (B, H, n, 2 * w - 1)]),
        (Quadratic(h, w, H), [(1, H, 1, 2 * h - 1), (1, H, 1, 2 * w - 1)]),
    ]
    for bias, expected in shapes:
        terms = bias.terms(q, m)
        assert [tuple(term.table.shape) for term in terms] == expected
        fine = torch.float64 if isinstance(bias, T5Buckets | Quadratic) else torch.float32
        assert all(term.table.dtype == fine for term in terms)  # bfloat16 knows no distance of 1,001
        assert bias.dense(q[:, :, :2], m).dtype == torch.float32
        assert all(term.query_positions.shape == (n,) and term.key_positions.shape == (m,) for term in terms)
    far = ALiBi([1.0] * H).terms(q, m)[0]
    assert far.table[0, 0, 0, 1001 - far.first_offset] == -1001


def test_schemes_are_built_where_there_are_no_values() -> None:
    with torch.device("meta"):
        alibi, bowl = ALiBi(slopes=[0.5, 0.25, 0.125]), Quadratic(2, 3, H)
        empty = ALiBi(slopes=torch.ones(H))
        grid = Grid(2, 3, H, d=D)
    assert bowl.alpha.is_meta and bowl.centers.is_meta and grid.y.is_meta
    assert repr(empty) == "ALiBi(slopes=[…])"
    q = queries(5)
    torch.testing.assert_close(alibi.dense(q, 7), ALiBi(slopes=[0.5, 0.25, 0.125]).dense(q, 7), **EXACT)
    made = Quadratic(2, 3, H)
    bowl.load_state_dict(made.state_dict(), assign=True)
    assert torch.equal(bowl.dense(queries(6), 6), made.dense(queries(6), 6))


def test_autocast_keeps_tables_in_float32() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (term,) = RelativeKeys(D, 2).terms(torch.randn(B, H, 3, D), 3)
    assert term.table.dtype == torch.float32


def test_representations_say_how_it_was_made() -> None:
    assert repr(T5Buckets(2)) == "T5Buckets(heads=2, buckets=32, max_distance=128, bidirectional=True)"
    assert repr(RelativeTable(2, 3, offset=1)) == "RelativeTable(heads=2, max_distance=3, offset=1)"
    assert repr(RelativeKeys(4, 3)) == "RelativeKeys(d=4, max_distance=3, heads=None, scale=0.5)"
    assert repr(Grid(2, 3, 4, d=4, offset=0)) == "Grid(2, 3, heads=4, d=4, scale=0.5, offset=0)"
    assert repr(Quadratic(2, 3, 4)) == "Quadratic(2, 3, heads=4)"
    assert repr(T5Buckets(2, offset=0)).endswith("offset=0)") and repr(RelativeKeys(4, 3, offset=0)).endswith(
        "offset=0)"
    )
    assert repr(Quadratic(2, 3, 4, offset=0)).endswith("offset=0)")


q3 = torch.zeros(1, 3, 4, 5)


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        (lambda: ALiBi([0.5, math.nan]), ValueError, "slopes must be finite numbers, got .*nan"),
        (lambda: ALiBi(torch.tensor([math.inf])), ValueError, "slopes must be finite"),
        (lambda: ALiBi(0.5), TypeError, "slopes must be a tensor or a sequence of numbers, got 0.5"),
        (lambda: ALiBi("steep"), TypeError, "slopes must be .* got 'steep'"),
        (lambda: ALiBi(["steep"]), TypeError, "slopes must be .* got .*steep"),
        (lambda: ALiBi(torch.tensor([True])), TypeError, "slopes must be real numbers, got torch.bool"),
        (lambda: ALiBi([]), ValueError, r"slopes has shape \[0\]; it must be \[H\]"),
        (lambda: ALiBi([[1.0]]), ValueError, r"slopes has shape \[1, 1\]"),
        (lambda: ALiBi([1.0, 2.0], heads=3), ValueError, "slopes .*heads=3; got 2"),
        (lambda: ALiBi(heads=0), ValueError, "heads must be at least 1, got 0"),
        (lambda: ALiBi(offset=0.5), TypeError, "offset must be an integer"),
        (lambda: ALiBi([1.0, 2.0]).terms(q3, 4), ValueError, "ALiBi is made for 2 heads, but q has 3"),
        (lambda: ALiBi(heads=2).terms(q3, 4), ValueError, "ALiBi is made for 2 heads, but q has 3"),
        (lambda: T5Buckets(0), ValueError, "heads must be at least 1, got 0"),
        (lambda: T5Buckets(2, buckets=2), ValueError, "buckets must be at least 4, got 2"),
        (lambda: T5Buckets(2, buckets=7), ValueError, "buckets must be even.*got 7"),
        (lambda: T5Buckets(2, max_distance=8), ValueError, "max_distance must be above 8, .*got 8"),
        (lambda: T5Buckets(2, bidirectional=1), TypeError, "bidirectional must be True or False, got 1"),
        (lambda: T5Buckets(2).terms(q3, 4), ValueError, "T5Buckets is made for 2 heads, but q has 3"),
        (lambda: T5Buckets.bucket(torch.ones(2)), TypeError, "distance must be a tensor of integers"),
        (lambda: RelativeTable(2, -1), ValueError, "max_distance must be at least 0, got -1"),
        (lambda: RelativeTable(2, 1).terms(q3, 4), ValueError, "RelativeTable is made for 2 heads, but q has 3"),
        (lambda: RelativeKeys(5, 1, heads=2).terms(q3, 4), ValueError, "RelativeKeys is made for 2 heads"),
        (lambda: RelativeKeys(4, 1).terms(q3, 4), ValueError, "RelativeKeys is made for d=4, but q has width 5"),
        (lambda: RelativeKeys(4, 1, scale=-1.0), ValueError, "scale must be a number ≥ 0.0, got -1.0"),
        (lambda: RelativeKeys(4, 1, scale=math.inf), ValueError, "scale must be a finite number"),
        (lambda: Grid(0, 3, 2), ValueError, "height must be at least 1, got 0"),
        (lambda: Grid(2, 3, 2, scale=1.0), ValueError, "scale needs d"),
        (lambda: Grid(2, 3, 3).terms(q3, 4), ValueError, "grid of 2 × 3"),
        (lambda: Grid(2, 2, 2).terms(q3, 4), ValueError, "Grid is made for 2 heads, but q has 3"),
        (lambda: Grid(2, 2, 3, d=4).terms(q3, 4), ValueError, "Grid is made for d=4, but q has width 5"),
        (lambda: Quadratic(2, 3, 2, centers=[[0, 1]]), ValueError, r"centers has shape \[1, 2\]; it must be \[2, 2\]"),
        (lambda: Quadratic(2, 3, 2, centers=1.0), TypeError, "centers must be a tensor or a sequence"),
        (lambda: Quadratic(2, 3, 2, alpha=math.nan), ValueError, "alpha must be a number"),
        (lambda: Quadratic(2, 3, 2, alpha=True), TypeError, "alpha must be a number, got True"),
        (lambda: Quadratic(2, 3, 2, alpha=[1.0]), ValueError, r"alpha has shape \[1\]; it must be \[2\]"),
        (lambda: Quadratic(2, 2, 2).terms(q3, 4), ValueError, "Quadratic is made for 2 heads, but q has 3"),
        (lambda: Quadratic.features(torch.zeros(3)), ValueError, r"delta has shape \[3\]; it must be \[\*, 2\]"),
        (lambda: ALiBi() + 3.0, TypeError, "unsupported operand"),
    ],
)
def test_schemes_refuse(wrong, error, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)
