"""Attention beside other ways to mix a sequence: positions, orders of evaluation, recurrence, convolution.

One head of width D on n tokens, as the theory counts it (D_in = D_hid = D_o = D), in letters; FLOPs are two a
multiply–add, memory is what is kept for the backward pass, in values. The theory's O(…) leaves out terms; here none is.
"""

from __future__ import annotations

from dataclasses import dataclass

from sympy import Expr, Integer

from regard.budget.symbols import LETTERS

__all__ = ["Way", "ways"]

_LETTERS = {str(letter): letter for letter in LETTERS}
N, D, D_P, K = (_LETTERS[name] for name in ("n", "D", "D_p", "K"))


@dataclass(frozen=True)
class Way:
    """One way: FLOPs, parameters and memory in letters, steps that wait for one another, how many tokens one sees.

    ``order``: how the theory writes its cost.
    """

    name: str
    order: str
    flops: Expr
    parameters: Expr
    memory: Expr
    steps: Expr
    reach: Expr

    def at(self, n: int, d: int, d_p: int, kernel: int) -> dict[str, int]:
        """The numbers."""
        sizes = {N: n, D: d, D_P: d_p, K: kernel}
        return {
            name: int(getattr(self, name).subs(sizes)) for name in ("flops", "parameters", "memory", "steps", "reach")
        }


def ways() -> tuple[Way, ...]:
    """All of them. Values are projected once in every form of attention: ``2·n·D²``, which the theory's sums leave out.

    - Absolute positions are part of the input. Entry by entry, ``(x_q W_q)·(x_k W_k)`` costs two maps and a product of
      vectors for each of the n² scores; projecting q and k once gives the same numbers.
    - Relative positions alone, ``v·r_δ``: a product of D_p numbers for each score, and no content at all.
    - Relative positions beside content (Shaw): ``q·k + q·r_δ``.

    >>> once = ways()[1]
    >>> once.name, regard.budget.text(once.flops), once.at(n=4096, d=512, d_p=3, kernel=3)["flops"]
    ('absolute, projected once', '4·n²·D + 6·n·D²', 40802189312)
    """
    values = 2 * N * D**2 + 2 * N**2 * D
    once, entries = 4 * N * D**2 + 2 * N**2 * D, N**2 * (4 * D**2 + 2 * D)
    stored, one = N**2 + 4 * N * D, Integer(1)
    table = (2 * N - 1) * D
    return (
        Way("absolute, entry by entry", "n²D² + n²D", entries + values, 3 * D**2, stored, one, N),
        Way("absolute, projected once", "nD² + n²D", once + values, 3 * D**2, stored, one, N),
        Way("  the same, tiled", "nD² + n²D", once + values, 3 * D**2, 4 * N * D + 2 * N, one, N),
        Way("relative, no content", "n²D_p + n²D", 2 * N**2 * D_P + values, D**2 + D_P, stored - 2 * N * D, one, N),
        Way("relative and content", "nD² + n²D", once + 2 * N**2 * D + values, 3 * D**2 + table, stored, one, N),
        Way("recurrence (RNN)", "nD²", 4 * N * D**2, 2 * D**2, 2 * N * D, N, N),
        Way("recurrence (LSTM)", "nD²", 16 * N * D**2, 8 * D**2, 7 * N * D, N, N),
        Way("convolution", "nKD²", 2 * N * K * D**2, K * D**2, N * D, one, K),
    )
