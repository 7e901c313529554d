"""What counting alone can do: 5-gram models of the tokens that a decoder learns from, as baselines.

    p_k(w | h) = (kept(h, w) + left(h) · p_{k−1}(w | h′)) / total(h),     p_{−1} = 1 / V,     h′ = h without its oldest

    Witten–Bell             kept = c(h, w)        left = N₁₊(h •)          total = c(h) + N₁₊(h •)
    modified Kneser–Ney     kept = a − D(a)       left = Σ_w D(a(h, w))    total = Σ_w a(h, w)

c counts in the training text; N₁₊(h •) is how many different tokens followed h. a is c in the longest contexts, and in
shorter ones how many different tokens stood before (h, w). D(a) is D₁, D₂ or D₃₊ by a = 1, 2, ≥ 3, from the numbers
n_r of grams with a = r:  Y = n₁ / (n₁ + 2n₂),  D_r = r − (r + 1) · Y · n_{r+1} / n_r.  Contexts never seen leave
p_{k−1} as it is. Every p_k sums to 1 over the vocabulary, which is closed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.shapes import integer

__all__ = ["NGrams", "bits_per_byte", "rows"]

ORDER = 5
UNKNOWN = (0.5, 1.0, 1.5)  # discounts where the grams are too few to tell


def bits_per_byte(
    train: np.ndarray, held: np.ndarray, vocabulary: int, size: float, end: int | None = None, order: int = ORDER
) -> dict[str, float]:
    """−Σ log₂ p(token | the order − 1 before it) / bytes, of held-out tokens that stand for ``size`` bytes.

    Every token but the first is counted, as of a model that reads the same tokens.
    """
    grams = NGrams(rows(train, vocabulary, end, order), vocabulary, end)
    asked = rows(held, vocabulary, end, order)
    found = {"Witten–Bell": grams.witten_bell(asked), "modified Kneser–Ney": grams.kneser_ney(asked)}
    return {name: float(-np.log2(p).sum() / size) for name, p in found.items()}


def rows(ids: np.ndarray, vocabulary: int, end: int | None = None, order: int = ORDER) -> np.ndarray:
    """``[n − 1, order]``: every token but the first, after the tokens before it, the oldest first.

    Contexts go no further back than the last ``end``, which stands between documents: what lies before is ``end``
    too. Before the first token of all stands ``vocabulary``, which is no token.
    """
    integer("order", order, least=1)
    found = np.empty((max(len(ids) - 1, 0), order), dtype=np.int64)
    for back in range(order):
        column = found[:, order - 1 - back]
        beyond = min(max(back - 1, 0), len(found))
        column[:beyond] = vocabulary
        column[beyond:] = ids[beyond + 1 - back : len(ids) - back]
        if back > 1:
            newer = found[:, order - back]
            outside = newer == vocabulary if end is None else (newer == vocabulary) | (newer == end)
            column[outside] = newer[outside]
    return found


@dataclass(frozen=True)
class _Level:
    """Grams of one length, numbered in the order of their codes: number of the context · (V + 1) + token."""

    contexts: np.ndarray  # codes of contexts: number of the context without its oldest token · (V + 1) + that token
    grams: np.ndarray
    of: np.ndarray  # [grams] the number of its context
    counts: np.ndarray  # [grams] c
    adjusted: np.ndarray  # [grams] a


Smoothed = list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # a level: kept [grams], left [contexts], total [contexts]


class NGrams:
    """Counts of training rows (``rows``), and two smoothed distributions of them."""

    def __init__(self, train: np.ndarray, vocabulary: int, end: int | None = None) -> None:
        if not len(train):
            raise ValueError("there are no tokens to count; give two at least")
        self.vocabulary, self.base = integer("vocabulary", vocabulary, least=2), vocabulary + 1
        self.end = vocabulary if end is None else end
        self.levels = self._counted(train)

    def witten_bell(self, asked: np.ndarray) -> np.ndarray:
        """p of each row's last token after the tokens before it ``[rows]``."""
        smoothed: Smoothed = []
        for level in self.levels:
            followers = np.bincount(level.of)
            counts = np.bincount(level.of, weights=level.counts)
            smoothed.append((level.counts, followers, counts + followers))
        return self._interpolated(asked, smoothed)

    def kneser_ney(self, asked: np.ndarray) -> np.ndarray:
        """p of each row's last token after the tokens before it ``[rows]``."""
        smoothed: Smoothed = []
        for level in self.levels:
            a = level.adjusted
            off = discounts(a)[np.minimum(a, 3)]
            totals = np.bincount(level.of, weights=a)
            smoothed.append((a - off, np.bincount(level.of, weights=off), totals))
        return self._interpolated(asked, smoothed)

    def _counted(self, train: np.ndarray) -> list[_Level]:
        tokens, order = train[:, -1], train.shape[1]
        context = np.zeros(len(train), dtype=np.int64)
        contexts = np.zeros(1, dtype=np.int64)
        found: list[tuple[np.ndarray, ...]] = []
        for length in range(order):
            if length:
                contexts, context = np.unique(context * self.base + train[:, -1 - length], return_inverse=True)
            grams, first, which, counts = np.unique(
                context * self.base + tokens, return_index=True, return_inverse=True, return_counts=True
            )
            found.append((contexts, grams, grams // self.base, counts, first, which))
        levels = []
        for length, (contexts, grams, of, counts, first, which) in enumerate(found):
            adjusted = counts
            if length < order - 1:
                longer = found[length + 1][4]  # one row for each longer gram: those that end alike are counted
                different = np.bincount(which[longer], minlength=len(grams))
                # Nothing but the start stands before a start, so that there counts say more.
                oldest = train[first, -1 - length]
                begins = (oldest == self.vocabulary) | (oldest == self.end) if length else np.zeros(1, dtype=bool)
                adjusted = np.where(begins, counts, different)
            levels.append(_Level(contexts, grams, of, counts, adjusted))
        return levels

    def _interpolated(self, asked: np.ndarray, smoothed: Smoothed) -> np.ndarray:
        p = np.full(len(asked), 1 / self.vocabulary)
        context = np.zeros(len(asked), dtype=np.int64)  # −1 where it was never seen
        for length, (level, (kept, left, total)) in enumerate(zip(self.levels, smoothed, strict=True)):
            if length:
                context = _number(level.contexts, context, asked[:, -1 - length], self.base)
            gram = _number(level.grams, context, asked[:, -1], self.base)
            above = np.where(gram >= 0, kept[gram], 0.0)
            p = np.where(context >= 0, (above + left[context] * p) / total[context], p)
        return p


def discounts(a: np.ndarray) -> np.ndarray:
    """``[0, D₁, D₂, D₃₊]`` from how often each count occurs."""
    n = [int((a == r).sum()) for r in range(5)]
    found = [0.0]
    y = n[1] / (n[1] + 2 * n[2]) if n[1] else 0.0
    for r, unknown in enumerate(UNKNOWN, 1):
        guess = r - (r + 1) * y * n[r + 1] / n[r] if n[1] and n[2] and n[r] else 0.0
        found.append(guess if guess > 0 else unknown)  # nothing taken off would leave nothing for tokens not seen
    return np.array(found)


def _number(codes: np.ndarray, context: np.ndarray, token: np.ndarray, base: int) -> np.ndarray:
    """The numbers of codes, −1 of those that are not there."""
    code = context * base + token
    at = np.minimum(np.searchsorted(codes, code), len(codes) - 1)
    return np.where((context >= 0) & (codes[at] == code), at, -1)
