"""5-gram models of token ids, as baselines for the text task: Witten–Bell and modified Kneser–Ney smoothing.

    p_k(w | h) = (numerator(h, w) + left(h) · p_{k−1}(w | h′)) / total(h),   p_{−1} = 1 / V

    Witten–Bell             numerator = c(h, w)        left = N₁₊(h •)          total = c(h) + N₁₊(h •)
    modified Kneser–Ney     numerator = a − D(a)       left = Σ_w D(a(h, w))    total = Σ_w a(h, w)

h is the context of k tokens, and h′ is h without its oldest token. c is the count in the training text, and N₁₊(h •) is
the number of different tokens that followed h. a is c in the longest contexts; in shorter ones it is the number of
different tokens that stood before (h, w). D(a) is D₁, D₂ or D₃₊ for a = 1, 2, ≥ 3. With n_r, the number of grams with
a = r: Y = n₁ / (n₁ + 2n₂), D_r = r − (r + 1) · Y · n_{r+1} / n_r. For a context that is not in the training text,
p_k = p_{k−1}. Every p_k sums to 1 over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard._checks import check_integer
from regard._errors import RegardError

ORDER = 5
DEFAULT_DISCOUNTS = (0.5, 1.0, 1.5)  # if there are too few grams to estimate them


def bits_per_byte(
    train: np.ndarray, held_out: np.ndarray, vocabulary: int, size: float, end: int | None = None, order: int = ORDER
) -> dict[str, float]:
    """Return −Σ log₂ p(token | the order − 1 tokens before it) / ``size`` by smoothing method.

    - ``train``, ``held_out``: token ids. Every held-out token except the first is predicted, as by a language model.
    - ``size``: the number of bytes of the held-out tokens.
    - ``end``: the token between documents, if there is one.
    """
    grams = NGrams(gram_rows(train, vocabulary, end, order), vocabulary, end)
    rows = gram_rows(held_out, vocabulary, end, order)
    probabilities = {"Witten–Bell": grams.witten_bell(rows), "modified Kneser–Ney": grams.kneser_ney(rows)}
    return {name: float(-np.log2(p).sum() / size) for name, p in probabilities.items()}


def gram_rows(ids: np.ndarray, vocabulary: int, end: int | None = None, order: int = ORDER) -> np.ndarray:
    """Return ``[n − 1, order]``: one row per token except the first, with its context before it, the oldest first.

    A context does not reach beyond the last ``end``, which separates documents: earlier positions are filled with
    ``end`` too. Positions before the very first token are filled with ``vocabulary``, which is not a token.
    """
    check_integer("order", order, least=1)
    rows = np.empty((max(len(ids) - 1, 0), order), dtype=np.int64)
    for back in range(order):
        column = rows[:, order - 1 - back]
        before_start = min(max(back - 1, 0), len(rows))
        column[:before_start] = vocabulary
        column[before_start:] = ids[before_start + 1 - back : len(ids) - back]
        # The position next to the predicted token is always a real token.
        if back > 1:
            newer = rows[:, order - back]
            outside = newer == vocabulary
            if end is not None:
                outside |= newer == end
            column[outside] = newer[outside]
    return rows


@dataclass(frozen=True)
class _Level:
    """All grams of one length, numbered in the order of their codes: code = context number · (V + 1) + token."""

    contexts: np.ndarray  # codes of contexts: number of the context without its oldest token · (V + 1) + that token
    grams: np.ndarray
    context_of: np.ndarray  # [grams] the number of the gram's context
    counts: np.ndarray  # [grams] c
    adjusted: np.ndarray  # [grams] a


# Per level: numerator [grams], left [contexts], total [contexts].
Smoothed = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


class NGrams:
    """Counts of training rows (from ``gram_rows``), and two smoothed distributions of them."""

    def __init__(self, train: np.ndarray, vocabulary: int, end: int | None = None) -> None:
        if not len(train):
            raise RegardError("train is empty; it must have at least two tokens")
        self.vocabulary = check_integer("vocabulary", vocabulary, least=2)
        self.base = vocabulary + 1
        self.end = vocabulary if end is None else end
        self.levels = self._count(train)

    def witten_bell(self, rows: np.ndarray) -> np.ndarray:
        """Return p of each row's last token after the tokens before it, ``[rows]``."""
        smoothed: Smoothed = []
        for level in self.levels:
            followers = np.bincount(level.context_of)
            counts = np.bincount(level.context_of, weights=level.counts)
            smoothed.append((level.counts, followers, counts + followers))
        return self._interpolate(rows, smoothed)

    def kneser_ney(self, rows: np.ndarray) -> np.ndarray:
        """Return p of each row's last token after the tokens before it, ``[rows]``."""
        smoothed: Smoothed = []
        for level in self.levels:
            a = level.adjusted
            discount = estimate_discounts(a)[np.minimum(a, 3)]
            totals = np.bincount(level.context_of, weights=a)
            smoothed.append((a - discount, np.bincount(level.context_of, weights=discount), totals))
        return self._interpolate(rows, smoothed)

    def _count(self, train: np.ndarray) -> list[_Level]:
        tokens = train[:, -1]
        order = train.shape[1]

        # For every length: the grams, and for each row the number of its gram and of its context.
        context = np.zeros(len(train), dtype=np.int64)
        contexts = np.zeros(1, dtype=np.int64)
        counted: list[tuple[np.ndarray, ...]] = []
        for length in range(order):
            if length:
                contexts, context = np.unique(context * self.base + train[:, -1 - length], return_inverse=True)
            codes = context * self.base + tokens
            grams, first_row, gram_of_row, counts = np.unique(
                codes, return_index=True, return_inverse=True, return_counts=True
            )
            counted.append((contexts, grams, counts, first_row, gram_of_row))

        levels = []
        for length, (contexts, grams, counts, first_row, gram_of_row) in enumerate(counted):
            adjusted = counts
            if length < order - 1:
                # Each longer gram occurs in one of these rows; count those that end with the same shorter gram.
                longer_rows = counted[length + 1][3]
                different = np.bincount(gram_of_row[longer_rows], minlength=len(grams))
                # Only filler stands before the start of a document, so there the count says more.
                at_start = np.zeros(1, dtype=bool)
                if length:
                    oldest = train[first_row, -1 - length]
                    at_start = (oldest == self.vocabulary) | (oldest == self.end)
                adjusted = np.where(at_start, counts, different)
            levels.append(_Level(contexts, grams, grams // self.base, counts, adjusted))
        return levels

    def _interpolate(self, rows: np.ndarray, smoothed: Smoothed) -> np.ndarray:
        # From the shortest context to the longest.
        p = np.full(len(rows), 1 / self.vocabulary)
        context = np.zeros(len(rows), dtype=np.int64)  # −1 if it does not occur in the training text
        for length, (level, (numerator, left, total)) in enumerate(zip(self.levels, smoothed, strict=True)):
            if length:
                context = _find_codes(level.contexts, context, rows[:, -1 - length], self.base)
            gram = _find_codes(level.grams, context, rows[:, -1], self.base)
            known = np.where(gram >= 0, numerator[gram], 0.0)
            p = np.where(context >= 0, (known + left[context] * p) / total[context], p)
        return p


def estimate_discounts(a: np.ndarray) -> np.ndarray:
    """Return ``[0, D₁, D₂, D₃₊]`` from the number of grams with each count."""
    n = [int((a == r).sum()) for r in range(5)]
    y = n[1] / (n[1] + 2 * n[2]) if n[1] else 0.0
    discounts = [0.0]
    for r, default in enumerate(DEFAULT_DISCOUNTS, 1):
        estimate = 0.0
        if n[1] and n[2] and n[r]:
            estimate = r - (r + 1) * y * n[r + 1] / n[r]
        # A discount of 0 would leave no probability for tokens that never followed the context.
        discounts.append(estimate if estimate > 0 else default)
    return np.array(discounts)


def _find_codes(codes: np.ndarray, context: np.ndarray, token: np.ndarray, base: int) -> np.ndarray:
    """Return the numbers of the codes ``context · base + token`` in a sorted array, −1 if they are not in it."""
    wanted_codes = context * base + token
    index = np.minimum(np.searchsorted(codes, wanted_codes), len(codes) - 1)
    return np.where((context >= 0) & (codes[index] == wanted_codes), index, -1)
