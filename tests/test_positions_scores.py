"""Positions added to scores: each equals its n × n formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.positions import EXACT, F64, D, H, queries, spread
from torch import Tensor
from torch.utils import _pytree as pytree

from regard._lowered_scores import Bias, SumOfBiases
from regard.positions import ALiBi, Grid, Quadratic, RelativeKeys, RelativeTable, T5Buckets, published_slopes

LINES = [(5, 7), (7, 5), (11, 11), (1, 13), (13, 1), (1, 1), (0, 5), (5, 0), (0, 0)]
OFFSETS = [None, 0, -3, 4]


def plain(q: Tensor, m: int, offset: int | None, entry: Callable[[int, int, int, int, int], object]) -> Tensor:
    """``bias[b, h, i, j] = entry(b, h, i, j, δ)``, δ = j − (i + offset), one number after the other."""
    batch, heads, n, _ = q.shape
    shift = m - n if offset is None else offset
    rows = [
        torch.as_tensor(entry(b, h, i, j, j - (i + shift)), dtype=F64)
        for b in range(batch)
        for h in range(heads)
        for i in range(n)
        for j in range(m)
    ]
    return torch.stack(rows).reshape(batch, heads, n, m) if rows else torch.zeros(batch, heads, n, m, dtype=F64)


def assert_same(bias: Bias, q: Tensor, m: int, expected: Tensor) -> None:
    dense = bias.dense(q, m)
    assert dense.dtype == F64
    torch.testing.assert_close(dense.detach().expand(expected.shape), expected.detach(), **EXACT)


# --- on a line -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("n, m", LINES)
def test_schemes_on_a_line_are_their_formulas(n: int, m: int, offset: int | None) -> None:
    q, c = queries(n), 2
    slopes = torch.randn(H, dtype=F64)
    assert_same(ALiBi(slopes, offset=offset), q, m, plain(q, m, offset, lambda b, h, i, j, δ: -slopes[h] * abs(δ)))
    usual = [2.0**-4, 2.0**-8, 2.0**-2]
    assert_same(ALiBi(offset=offset), q, m, plain(q, m, offset, lambda b, h, i, j, δ: -usual[h] * abs(δ)))

    spread(table := RelativeTable(H, c, offset=offset))
    expected = plain(q, m, offset, lambda b, h, i, j, δ: table.weight[h, max(-c, min(c, δ)) + c])
    assert_same(table, q, m, expected)

    spread(shared := RelativeKeys(D, c, offset=offset))
    expected = plain(
        q, m, offset, lambda b, h, i, j, δ: q[b, h, i] @ shared.weight[0, max(-c, min(c, δ)) + c] / math.sqrt(D)
    )
    assert_same(shared, q, m, expected)

    spread(own := RelativeKeys(D, c, heads=H, scale=0.7, offset=offset))
    expected = plain(q, m, offset, lambda b, h, i, j, δ: 0.7 * (q[b, h, i] @ own.weight[h, max(-c, min(c, δ)) + c]))
    assert_same(own, q, m, expected)

    for bidirectional in (True, False):
        spread(t5 := T5Buckets(H, buckets=8, max_distance=7, bidirectional=bidirectional, offset=offset))
        expected = plain(q, m, offset, lambda b, h, i, j, δ: t5.weight[exact_bucket(δ, 8, 7, t5.bidirectional), h])
        assert_same(t5, q, m, expected)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 6),
    m=st.integers(0, 6),
    c=st.integers(0, 8),
    offset=st.none() | st.integers(-20, 20),
    seed=st.integers(0, 2**31),
)
def test_sums_of_random_schemes(n: int, m: int, c: int, offset: int | None, seed: int) -> None:
    torch.manual_seed(seed)
    q, slopes = queries(n), torch.randn(H, dtype=F64)
    spread(table := RelativeTable(H, c, offset=offset))
    spread(keys := RelativeKeys(D, c, offset=offset))

    def entry(b: int, h: int, i: int, j: int, δ: int) -> Tensor:
        at = max(-c, min(c, δ)) + c
        return -slopes[h] * abs(δ) + table.weight[h, at] + q[b, h, i] @ keys.weight[0, at] / math.sqrt(D)

    both = ALiBi(slopes, offset=offset) + table + keys
    assert isinstance(both, SumOfBiases) and len(both.terms(q, m)) == 3
    assert_same(both, q, m, plain(q, m, offset, entry))


def test_published_slopes() -> None:
    assert published_slopes(1) == [2.0**-8]
    assert published_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert published_slopes(16) == [2.0 ** (-h / 2) for h in range(1, 17)]
    assert published_slopes(12) == published_slopes(8) + published_slopes(16)[0:8:2]
    assert published_slopes(5) == published_slopes(4) + published_slopes(8)[:1]
    assert published_slopes(7) == published_slopes(4) + published_slopes(8)[0:6:2]


def test_alibi_is_a_value() -> None:
    assert repr(ALiBi()) == "ALiBi()"
    assert repr(ALiBi([0.5, 1 / 3], offset=-2)) == "ALiBi(slopes=[0.5, 0.3333], offset=-2)"
    assert repr(ALiBi(heads=3)) == "ALiBi(heads=3)"
    slopes = torch.tensor([1, 2, 3])  # whole numbers are numbers
    a = ALiBi(slopes)
    leaves, tree = pytree.tree_flatten(a)
    assert len(leaves) == 1 and torch.equal(
        pytree.tree_unflatten(leaves, tree).dense(queries(2), 3), a.dense(queries(2), 3)
    )


# --- T5's buckets ----------------------------------------------------------------------------------------------------


def exact_bucket(δ: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The bucket in whole numbers: ln(t/e)/ln(M/e)·(b − e) ≥ s exactly where (t/e)^(b − e) ≥ (M/e)^s."""
    side, first = (buckets // 2, buckets // 2 if δ > 0 else 0) if bidirectional else (buckets, 0)
    t = abs(δ) if bidirectional else max(-δ, 0)
    e = side // 2
    if t < e:
        return first + t
    power = Fraction(t, e) ** (side - e)
    return first + e + max(s for s in range(side - e) if power >= Fraction(max_distance, e) ** s)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, far", [(32, 128), (32, 256), (64, 128), (16, 64), (8, 1000), (4, 5), (14, 13)])
def test_buckets_and_where_their_table_ends(buckets: int, far: int, bidirectional: bool) -> None:
    δ = torch.arange(-2 * far, 2 * far + 1)
    expected = [exact_bucket(x, buckets, far, bidirectional) for x in δ.tolist()]
    assert T5Buckets.bucket(δ, buckets, far, bidirectional).tolist() == expected
    t5 = T5Buckets(H, buckets, far, bidirectional)
    last = t5.first_offset + len(t5.columns) - 1
    clamped = δ.clamp(t5.first_offset, last) - t5.first_offset
    assert [t5.columns[x] for x in clamped.tolist()] == expected  # the table says it all
    assert t5.columns[0] != t5.columns[1] and t5.columns[-1] != t5.columns[-2]  # and no column in vain
    assert -far <= t5.first_offset < 0 and last == (-t5.first_offset if bidirectional else 0)


def test_t5_reaches_its_last_bucket_where_t5_does() -> None:
    bucket = T5Buckets.bucket(torch.tensor([-90, -91, -128, -(10**6), 90, 91, 10**6]))
    assert bucket.tolist() == [14, 15, 15, 15, 30, 31, 31]
    decoder = T5Buckets.bucket(torch.tensor([10**6, 1, 0, -112, -113, -(10**6)]), bidirectional=False)
    assert decoder.tolist() == [0, 0, 0, 30, 31, 31]
    assert T5Buckets.bucket(torch.tensor([[3], [-3]], dtype=torch.int32)).tolist() == [[19], [3]]
    assert T5Buckets(2, bidirectional=False).first_offset == -113 and T5Buckets(2).first_offset == -91
    # Powers of two sit on the borders of buckets: the logarithm in float32 must not fall short of them.
    assert T5Buckets.bucket(-torch.tensor([15, 16, 31, 32, 63, 64])).tolist() == [9, 10, 11, 12, 13, 14]


def test_a_far_max_distance_costs_only_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    longest, bucket = [], T5Buckets.bucket

    def counted(distance: Tensor, *args: object) -> Tensor:
        longest.append(distance.numel())
        return bucket(distance, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(T5Buckets, "bucket", staticmethod(counted))
    far = 10**6
    t5 = T5Buckets(2, max_distance=far)
    assert max(longest) == len(t5.columns) == 2 * -t5.first_offset + 1 < 0.5 * far
    assert t5.columns[0] == 15 and t5.columns[1] == 14 and t5.columns[-1] == 31 and t5.columns[-2] == 30


# --- on a grid -------------------------------------------------------------------------------------------------------

GRIDS = [(2, 3, 0, None), (3, 2, 1, None), (1, 5, 2, None), (5, 1, 0, 0), (2, 3, 1, -2), (2, 2, 3, 5), (1, 1, 0, None)]


def on_grid(h: int, w: int, q: Tensor, m: int, offset: int | None, entry: Callable[..., object]) -> Tensor:
    """``entry(b, h, i, δ₁, δ₂)`` where query and key both stand on the grid, else 0."""
    start = m - h * w

    def one(b: int, head: int, i: int, j: int, δ: int) -> object:
        query, key = j - δ - start, j - start
        if not (0 <= query < h * w and 0 <= key < h * w):
            return 0.0
        return entry(b, head, i, key // w - query // w, key % w - query % w)

    return plain(q, m, offset, one)


@pytest.mark.parametrize("n_less", [-2, 0, 3, None])
@pytest.mark.parametrize("h, w, prefix, offset", GRIDS)
def test_schemes_on_a_grid_are_their_formulas(
    h: int, w: int, prefix: int, offset: int | None, n_less: int | None
) -> None:
    m = h * w + prefix
    q = queries(0 if n_less is None else max(m - n_less, 0))

    spread(grid := Grid(h, w, H, offset=offset))
    expected = on_grid(h, w, q, m, offset, lambda b, k, i, y, x: grid.y[k, y + h - 1] + grid.x[k, x + w - 1])
    assert_same(grid, q, m, expected)

    for scale in (None, 0.3):
        spread(met := Grid(h, w, H, d=D, scale=scale, offset=offset))
        assert met.key_y is not None and met.key_x is not None

        def entry(b: int, k: int, i: int, y: int, x: int, s: float | None = scale, g: Grid = met) -> Tensor:
            assert g.key_y is not None and g.key_x is not None
            r = g.key_y[k, y + h - 1] + g.key_x[k, x + w - 1]
            return g.y[k, y + h - 1] + g.x[k, x + w - 1] + (D**-0.5 if s is None else s) * (q[b, k, i] @ r)

        assert_same(met, q, m, on_grid(h, w, q, m, offset, entry))

    spread(bowl := Quadratic(h, w, H, offset=offset))
    a, c = bowl.alpha, bowl.centers
    expected = on_grid(h, w, q, m, offset, lambda b, k, i, y, x: -a[k] * ((y - c[k, 0]) ** 2 + (x - c[k, 1]) ** 2))
    assert_same(bowl, q, m, expected)


def test_quadratic_is_a_product_of_width_three() -> None:
    bowl = Quadratic(3, 5, H, alpha=[0.5, 1.0, -2.0]).double()
    δ = torch.tensor([(y, x) for y in range(-2, 3) for x in range(-4, 5)], dtype=F64)
    v, r = bowl.vectors(), bowl.features(δ)
    assert v.shape == (H, 3) and r.shape == (45, 3)
    whole = -bowl.alpha.unsqueeze(-1) * ((δ - bowl.centers.unsqueeze(1)) ** 2).sum(-1)
    constant = -bowl.alpha * (bowl.centers**2).sum(-1)
    torch.testing.assert_close(v @ r.T + constant.unsqueeze(-1), whole, **EXACT)


def test_quadratic_first_values() -> None:
    centers = torch.randn(H, 2, dtype=F64)
    bowl = Quadratic(3, 5, H, centers=centers, alpha=46)
    assert torch.equal(bowl.centers, centers) and bowl.centers.data_ptr() != centers.data_ptr()
    assert bowl.alpha.tolist() == [46.0] * H and bowl.alpha.dtype == torch.get_default_dtype()
    torch.manual_seed(0)
    drawn = Quadratic(3, 5, 5003).centers.detach()
    assert abs(float(drawn.var()) - 2.0) < 0.1 and abs(float(drawn.mean())) < 0.1
