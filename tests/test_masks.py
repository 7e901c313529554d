"""Masks: every one and every composition equals its dense form; runs where it can be; both conventions; drawings."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import Causal, Dense, Padding, Prefix, Segments, Window
from regard._shapes import Shape
from regard.masks import Mask, from_torch
from regard.masks._row_mask import row_bounds

B = 3
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 11])


def pairs_allowed(mask: Mask, n: int, m: int) -> torch.Tensor:
    """[B, n, m] by the definition, pair by pair."""
    return torch.tensor(
        [[[allows(mask, b, i, j, n, m) for j in range(m)] for i in range(n)] for b in range(B)]
    ).reshape(B, n, m)


def allows(mask: Mask, b: int, i: int, j: int, n: int, m: int) -> bool:
    at = i + (m - n if getattr(mask, "offset", None) is None else mask.offset)
    match mask:
        case Causal():
            return j <= at
        case Window():
            return at - mask.before <= j <= at + (mask.before if mask.after is None else mask.after)
        case Padding():
            return bool(mask.keys[b, j]) if mask.keys.dtype == torch.bool else j < int(mask.keys[b])
        case Prefix():
            return j < int(mask.lengths[b])
        case Segments():
            return int(mask.ids[b, i]) == int(mask.key_ids[b, j])
        case Dense():
            return bool(mask.visible[b, 0, i, j])
    joined = {"And": operator.and_, "Or": operator.or_}[type(mask).__name__]
    return joined(allows(mask.a, b, i, j, n, m), allows(mask.b, b, i, j, n, m))


@st.composite
def masks(draw, n: int, m: int, depth: int = 2) -> Mask:
    if depth and draw(st.booleans()):
        join = draw(st.sampled_from([operator.and_, operator.or_]))
        return join(draw(masks(n, m, depth - 1)), draw(masks(n, m, depth - 1)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    offset = draw(st.sampled_from([None, 0, -2, 3]))
    lengths = torch.randint(0, m + 1, (B,), generator=g)
    ids, key_ids = (torch.randint(0, 3, (B, size), generator=g) for size in (n, m))
    kind = draw(st.integers(0, 8))
    return [
        Causal(offset),
        Window(draw(st.integers(0, 3)), draw(st.sampled_from([None, 0, 2])), offset),
        Padding(lengths),
        Padding(torch.arange(m) >= lengths.unsqueeze(-1)),
        Padding(torch.rand(B, m, generator=g) < 0.6),
        Prefix(lengths),
        Segments(ids.sort(-1, descending=True).values, key_ids.sort(-1, descending=True).values),
        Segments(ids, key_ids),
        Dense(torch.rand(B, 1, n, m, generator=g) < 0.6),
    ][kind]


def test_offsets_beyond_any_number_do_not_overflow() -> None:
    assert Causal(2**63).dense(2, 3).all() and not Causal(-(2**63)).dense(2, 3).any()
    assert not Window(1, 1, offset=2**64).dense(2, 3).any() and Window(2**70).dense(2, 3).all()


def test_a_tensor_joins_a_mask_from_either_side() -> None:
    see = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal((see & Causal()).dense(4, 4), (Causal() & see).dense(4, 4))
    assert torch.equal((see | Causal()).dense(4, 4), (Causal() | see).dense(4, 4))


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: Padding([2, 3]) & Padding([1, 2, 3]), ValueError, r"batches of \[2\] and \[3\]"),
        (lambda: Prefix([2, 3]) | Padding([1, 2, 3]), ValueError, r"batches of \[2\] and \[3\]"),
        (lambda: Dense(torch.ones(2, 1, 3, 3) > 0) & Dense(torch.ones(3, 1, 3, 3) > 0), ValueError, "batches of"),
        (lambda: Dense(torch.ones(2, 3, 3) > 0) & Dense(torch.ones(3, 3, 3) > 0), ValueError, "do not broadcast"),
        (lambda: Padding("ab"), TypeError, "Padding keys must be a tensor or numbers, got 'ab'"),
        (lambda: Segments([[1], [2, 3]]), TypeError, "Segments ids must be"),
    ],
)
def test_masks_that_do_not_fit_are_named(make, error, words: str) -> None:
    with pytest.raises(error, match=words):
        make().dense(3, 3)


def test_numbers_from_numpy_and_lengths_of_any_whole_dtype() -> None:
    assert torch.equal(Window(np.int64(1)).dense(3, 3), Window(1).dense(3, 3))
    for dtype in (torch.uint8, torch.int32, torch.uint32):
        assert torch.equal(Padding(torch.tensor([1, 2]).to(dtype)).dense(3, 3), Padding([1, 2]).dense(3, 3))
    assert Padding([]).keys.shape == (0,) and Padding([]).keys.dtype == torch.int64


def test_masks_compare() -> None:
    """By their numbers; those that hold tensors, by identity."""
    padding = Padding([1, 2])
    assert Causal() == Causal() != Causal(1) and Causal() & Window(2) == Causal() & Window(2)
    assert padding == padding and padding != Padding([1, 2]) and hash(padding) != hash(Causal())


def test_real_queries_of_compositions() -> None:
    a, b = Padding([2, 3]), Padding([3, 1])
    rows_a, rows_b = a.real_queries(3, 3), b.real_queries(3, 3)
    assert torch.equal((a & b).real_queries(3, 3), rows_a & rows_b)
    assert torch.equal((a | b).real_queries(3, 3), rows_a | rows_b)
    assert torch.equal((Causal() & b).real_queries(3, 3), rows_b)
    assert torch.equal((a & Causal()).real_queries(3, 3), rows_a)
    assert (a | Causal()).real_queries(3, 3) is None and a.real_queries(2, 3) is None


@given(st.data(), SIZES, SIZES)
@settings(max_examples=400)
def test_every_composition_equals_its_definition(data, n: int, m: int) -> None:
    mask = data.draw(masks(n, m))
    expected = pairs_allowed(mask, n, m)
    dense = mask.dense(n, m)
    assert dense.dtype == torch.bool
    assert torch.equal(dense.expand(B, 1, n, m).reshape(B, n, m), expected)
    lowered = mask.lower(n, m)
    lo, hi = row_bounds(lowered, Shape((B,), 1, 1, n, m, 1, 1))
    see = torch.ones(B, n, m, dtype=torch.bool) if lowered.dense is None else lowered.dense.expand(B, 1, n, m)[:, 0]
    j = torch.arange(m)
    see = see if lo is None else see & (j >= lo.unsqueeze(-1))
    see = see if hi is None else see & (j < hi.unsqueeze(-1))
    assert torch.equal(see, expected)


@given(st.data(), SIZES, SIZES)
@settings(max_examples=200)
def test_the_operator_sees_what_the_mask_says(data, n: int, m: int) -> None:
    mask = data.draw(masks(n, m))
    q, k = torch.randn(B, 1, n, 2, dtype=torch.float64), torch.randn(B, 1, m, 2, dtype=torch.float64)
    v = torch.eye(m, dtype=torch.float64).expand(B, 1, m, m)
    weights = regard.attention(q, k, v, mask=mask)
    assert torch.equal(weights[:, 0] > 0, pairs_allowed(mask, n, m))


RUNS = {
    "causal": Causal(),
    "window": Window(2, 1),
    "padding": Padding([2, 5, 7]),
    "left padding": Padding(torch.arange(7) >= torch.tensor([[0], [3], [7]])),
    "prefix-lm": Causal() | Prefix([1, 4, 6]),
    "packed": Causal() & Segments([5, 5, 5, 1, 1, 0, 0]),
    "all": Causal() & Window(3) & Padding([3, 6, 7]) & Segments([0, 0, 1, 1, 1, 2, 2]),
    "touching windows": Window(2, 0) | Window(0, 2),
    "everything": Window(0) | Dense(torch.ones(1, 1, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_a_run_of_keys_stays_one(name: str) -> None:
    """Two integers a row; only the last, which contains a dense mask, may be dense."""
    lowered = RUNS[name].lower(7, 7)
    assert (lowered.dense is None) == (name != "everything")


def test_what_is_no_run_becomes_dense() -> None:
    assert (Window(0) | Prefix(1)).lower(5, 5).dense is not None
    assert Segments([0, 1, 0]).lower(3, 3).dense is not None
    assert Padding(torch.tensor([[True, False, True]])).lower(3, 3).dense is not None


def test_a_bool_tensor_beside_a_mask_is_dense() -> None:
    see = torch.rand(5, 5) < 0.5
    assert torch.equal((Causal() & see).dense(5, 5), Causal().dense(5, 5) & see)
    assert torch.equal((Causal() | see).dense(5, 5), Causal().dense(5, 5) | see)


def test_queries_with_a_cache_take_the_last_ids() -> None:
    ids = torch.tensor([0, 0, 1, 1, 2])
    assert torch.equal(Segments(ids).dense(2, 5), Segments(ids).dense(5, 5)[3:])


def test_drawings() -> None:
    assert repr(Causal()).splitlines()[:3] == ["Causal()", "■ · · · · ·", "■ ■ · · · ·"]
    assert "■ may attend, · hidden" in repr(Causal())
    assert repr(Padding([2, 3])).splitlines()[1] == "■ ■ ·"
    assert repr(Padding([2, 3])).splitlines()[0] == "Padding([2, 3])"
    assert repr(Causal(offset=0) & Window(1)).splitlines()[0] == "Causal(offset=0) & Window(1, 1)"
    assert repr((Causal() | Prefix(2)) & Window(1, offset=3)).startswith(
        "(Causal() | Prefix([2])) & Window(1, 1, offset=3)"
    )
    assert repr(Padding(torch.full((9,), 10_000))) == "Padding(int64 [9])"  # too large to draw
    assert repr(Segments([0, 1], [1, 1, 0])).splitlines()[:2] == ["Segments([0, 1], [1, 1, 0])", "· · ■"]
    assert repr(Dense(torch.zeros(0, 0, dtype=torch.bool))).startswith("Dense(bool [0, 0])")
    assert repr(Padding([3]) & Dense(torch.ones(2, 2, dtype=torch.bool))) == "Padding([3]) & Dense(bool [2, 2])"


def test_from_torch_turns_the_convention_around() -> None:
    ignore = torch.tensor([[False, False, True], [False, True, True]])
    future = torch.ones(3, 3, dtype=torch.bool).triu(1)
    mask = from_torch(key_padding_mask=ignore, attn_mask=future)
    assert torch.equal(mask.dense(3, 3), (~ignore[:, None, None, :]) & ~future)
    added = torch.zeros(3, 3).masked_fill(future, float("-inf"))
    assert torch.equal(from_torch(attn_mask=added).dense(3, 3), ~future)
    assert torch.equal(from_torch(attn_mask=future.expand(4, 3, 3), heads=2).dense(3, 3), (~future).expand(2, 2, 3, 3))
    assert from_torch() is None


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: from_torch(key_padding_mask=torch.ones(2, 3, 4, dtype=torch.bool)), ValueError, "True = ignore"),
        (lambda: from_torch(key_padding_mask=torch.ones(2, 3, dtype=torch.int64)), TypeError, "True = ignore"),
        (lambda: from_torch(attn_mask=torch.ones(3, dtype=torch.bool)), ValueError, "True = hide"),
        (lambda: from_torch(attn_mask=torch.ones(3, 3)), ValueError, "bias="),
        (lambda: from_torch(attn_mask=torch.ones(3, 2, 2, dtype=torch.bool), heads=2), ValueError, "heads="),
        (lambda: Dense(torch.ones(2, 2)), TypeError, "True = may attend"),
        (lambda: Padding(torch.ones(2, 2)), TypeError, "True = a real key"),
        (lambda: Padding(torch.tensor(True)), ValueError, "one bool"),
        (lambda: Padding([-1]), ValueError, "negative"),
        (lambda: Prefix(True), TypeError, "integers"),
        (lambda: Prefix(1.5), TypeError, "integers"),
        (lambda: Causal(1.5), TypeError, "1.5"),
        (lambda: Window(-1), ValueError, "-1"),
        (lambda: Window(1, after=-2), ValueError, "-2"),
        (lambda: Segments(torch.rand(3)), TypeError, "integers"),
        (lambda: Causal() & torch.ones(2, 2), TypeError, "True = may attend"),
        (lambda: Causal() & 3, TypeError, "unsupported"),
        (lambda: Causal() | 3, TypeError, "unsupported"),
        (lambda: Padding([9]).lower(3, 7), ValueError, "lengths must be at most .*got 9"),
        (lambda: Prefix([9]).lower(3, 7), ValueError, "lengths must be at most .*got 9"),
        (lambda: Padding(torch.ones(2, 3, dtype=torch.bool)).lower(3, 7), ValueError, "3 keys"),
        (lambda: Segments([0, 1]).lower(3, 3), ValueError, "key_ids"),
        (lambda: Dense(torch.ones(2, 2, dtype=torch.bool)).lower(3, 3), ValueError, "broadcast"),
        (lambda: Mask().lower(2, 2), TypeError, "Mask"),
    ],
)
def test_bad_input_is_named(make, error, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_masks_are_drawn_at_the_size_that_is_asked_for():
    mask = Causal() & Window(1)
    assert mask.draw(3).splitlines()[1:4] == ["■ · ·", "■ ■ ·", "· ■ ■"]
    assert mask.draw(2, 3).splitlines()[1:3] == ["■ ■ ·", "· ■ ■"]
    assert mask.draw(0, 2).splitlines()[-1].startswith("(rows: 0 queries, columns: 2 keys")
    with pytest.raises(ValueError, match=r"a drawing has at most \d+ rows and columns, got 5 × 1000"):
        mask.draw(5, 1000)
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        mask.draw(-1)
    with pytest.raises(ValueError, match="3"):  # made for other sizes
        Padding(torch.ones(1, 3, dtype=torch.bool)).draw(2, 4)


@pytest.mark.parametrize(
    "wrong", [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a], ids=["and", "or", "not"]
)
def test_masks_are_not_combined_by_words(wrong):
    """``and`` would take the second mask alone, without a word."""
    with pytest.raises(TypeError, match=r"combine masks with & and \|, not with and, or"):
        wrong(Causal(), Padding([3]))
