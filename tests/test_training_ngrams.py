"""The n-gram baselines: against counting one gram at a time, and against what a distribution must be."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from regard.training._ngram_baselines import NGrams, bits_per_byte, estimate_discounts, gram_rows

ORDER = 5


def text(seed: int, length: int, vocabulary: int, end: int | None) -> np.ndarray:
    """Tokens in which some follow others often, with an ``end`` here and there and at both ends."""
    draw = np.random.default_rng(seed)
    ids = [end if end is not None else 1]
    for _ in range(length):
        follow = (3 * ids[-1] + 1) % vocabulary if draw.random() < 0.6 else int(draw.zipf(1.5)) % vocabulary
        ids.append(follow)
    return np.array([*ids, ids[0]])


def contexts(ids: np.ndarray, vocabulary: int, end: int | None, order: int) -> list[tuple[int, ...]]:
    """``rows`` as a loop over tokens that stops at an end."""
    found = []
    for t in range(1, len(ids)):
        row = [int(ids[t])]
        for back in range(1, order):
            if len(row) > 1 and row[0] in (vocabulary, end):
                row.insert(0, row[0])
            else:
                row.insert(0, int(ids[t - back]) if t >= back else vocabulary)
        found.append(tuple(row))
    return found


def naive_witten_bell(train: list[tuple[int, ...]], vocabulary: int) -> Callable[[tuple[int, ...]], Fraction]:
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row in train:
        for k in range(len(row)):
            followers[row[len(row) - 1 - k : -1]][row[-1]] += 1

    def p(row: tuple[int, ...]) -> Fraction:
        shorter = p(row[1:]) if len(row) > 1 else Fraction(1, vocabulary)
        seen = followers.get(row[:-1])
        if seen is None:
            return shorter
        return (seen[row[-1]] + len(seen) * shorter) / (seen.total() + len(seen))

    return p


def naive_kneser_ney(
    train: list[tuple[int, ...]], vocabulary: int, end: int | None
) -> Callable[[tuple[int, ...]], float]:
    order = len(train[0])
    a: list[dict[tuple[int, ...], Counter[int]]] = []
    for length in range(1, order + 1):
        counts = Counter(row[-length:] for row in train)
        before: dict[tuple[int, ...], set[int]] = defaultdict(set)
        if length < order:
            for row in train:
                before[row[-length:]].add(row[-length - 1])
        table: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for gram, count in counts.items():
            starts = length > 1 and gram[0] in (vocabulary, end)
            table[gram[:-1]][gram[-1]] = count if length == order or starts else len(before[gram])
        a.append(table)

    def discount(level: int) -> list[float]:
        n = Counter(x for seen in a[level].values() for x in seen.values())
        found = [0.0]
        for r, unknown in ((1, 0.5), (2, 1.0), (3, 1.5)):
            if not n[1] or not n[2] or not n[r]:
                found.append(unknown)
                continue
            y = n[1] / (n[1] + 2 * n[2])
            guess = r - (r + 1) * y * n[r + 1] / n[r]
            found.append(guess if guess > 0 else unknown)
        return found

    taken = [discount(level) for level in range(order)]

    def p(row: tuple[int, ...]) -> float:
        level = len(row) - 1
        shorter = p(row[1:]) if level else 1 / vocabulary
        seen = a[level].get(row[:-1])
        if seen is None:
            return shorter
        left = sum(taken[level][min(x, 3)] for x in seen.values())
        mine = seen[row[-1]]
        return (mine - taken[level][min(mine, 3)] + left * shorter) / seen.total()

    return p


CASES = [(0, 400, 12, 0), (1, 60, 30, 0), (2, 300, 9, None), (3, 900, 5, 4), (4, 3, 6, None)]


@pytest.mark.parametrize(("seed", "length", "vocabulary", "end"), CASES)
def test_rows_are_tokens_after_what_stood_before_them(seed: int, length: int, vocabulary: int, end: int | None) -> None:
    ids = text(seed, length, vocabulary, end)
    for order in (1, 2, 5):
        assert list(map(tuple, gram_rows(ids, vocabulary, end, order).tolist())) == contexts(
            ids, vocabulary, end, order
        )


@pytest.mark.parametrize(("seed", "length", "vocabulary", "end"), CASES)
def test_probabilities_are_those_of_counting_one_by_one(
    seed: int, length: int, vocabulary: int, end: int | None
) -> None:
    train, held = text(seed, length, vocabulary, end), text(seed + 100, 80, vocabulary, end)
    grams = NGrams(gram_rows(train, vocabulary, end), vocabulary, end)
    asked = gram_rows(held, vocabulary, end)
    counted = contexts(train, vocabulary, end, ORDER)
    one, other = naive_witten_bell(counted, vocabulary), naive_kneser_ney(counted, vocabulary, end)
    queries = contexts(held, vocabulary, end, ORDER)
    np.testing.assert_allclose(grams.witten_bell(asked), [float(one(row)) for row in queries], rtol=1e-12)
    np.testing.assert_allclose(grams.kneser_ney(asked), [other(row) for row in queries], rtol=1e-12)


@pytest.mark.parametrize(("seed", "length", "vocabulary", "end"), CASES)
@pytest.mark.parametrize("kind", ["witten_bell", "kneser_ney"])
def test_each_context_has_a_distribution(seed: int, length: int, vocabulary: int, end: int | None, kind: str) -> None:
    train = gram_rows(text(seed, length, vocabulary, end), vocabulary, end)
    grams = NGrams(train, vocabulary, end)
    draw = np.random.default_rng(0)
    unseen = draw.integers(0, vocabulary, (20, ORDER - 1))
    half = np.concatenate([unseen[:, :2], train[draw.integers(0, len(train), 20), 2:-1]], 1)
    for context in (*train[:20, :-1], *unseen, *half):
        asked = np.column_stack([np.tile(context, (vocabulary, 1)), np.arange(vocabulary)])
        p = getattr(grams, kind)(asked)
        assert p.min() > 0
        assert math.isclose(p.sum(), 1.0, rel_tol=1e-12)


def test_bits_per_byte_of_what_is_known() -> None:
    # Nothing but 0 is ever said: with more of it, less and less is left for the other tokens.
    for length, most in ((100, 0.05), (10_000, 0.001)):
        zeros = np.zeros(length, dtype=np.int64)
        found = bits_per_byte(zeros, np.zeros(50, dtype=np.int64), 4, 49.0)
        assert set(found) == {"Witten–Bell", "modified Kneser–Ney"}
        assert 0 < found["Witten–Bell"] < most
    # What was never counted is as likely as anything: 2 bits of a vocabulary of 4, spread over 2 bytes a token.
    uniform = NGrams(gram_rows(np.array([0, 1, 2, 3, 0]), 4, None, 1), 4)
    assert np.allclose(uniform.witten_bell(np.array([[0], [3]])), 0.25)
    balanced = bits_per_byte(np.array([0, 1, 2, 3, 0]), np.array([0, 1]), 4, 2.0, order=1)
    assert math.isclose(balanced["Witten–Bell"], 1.0)


def test_kneser_ney_counts_where_a_token_was_met_not_how_often() -> None:
    # 7 always follows 6, often; 5 follows many, once each: after a new context 5 is the likelier one.
    ids = [6, 7] * 20
    for other in range(1, 5):
        ids += [other, 5]
    grams = NGrams(gram_rows(np.array(ids), 10), 10)
    asked = np.array([[9, 9, 9, 9, 5], [9, 9, 9, 9, 7]])
    five, seven = grams.kneser_ney(asked)
    assert five > seven
    five, seven = grams.witten_bell(asked)
    assert five < seven


def test_discounts() -> None:
    a = np.repeat([1, 2, 3, 4, 9], [50, 20, 10, 5, 3])
    y = 50 / 90
    expected = [0, 1 - 2 * y * 20 / 50, 2 - 3 * y * 10 / 20, 3 - 4 * y * 5 / 10]
    assert np.allclose(estimate_discounts(a), expected)
    assert estimate_discounts(np.array([4, 4])).tolist() == [0, 0.5, 1.0, 1.5]  # too few to tell


def test_nothing_to_count_is_refused() -> None:
    with pytest.raises(ValueError, match="train is empty"):
        NGrams(gram_rows(np.array([1]), 4), 4)
    with pytest.raises(ValueError, match="vocabulary"):
        NGrams(gram_rows(np.array([0, 0]), 1), 1)
    with pytest.raises(ValueError, match="order"):
        gram_rows(np.array([1, 2]), 4, None, 0)
