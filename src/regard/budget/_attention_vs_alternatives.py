"""Compare attention with other layers that mix the tokens of a sequence: recurrence, convolution, other positions.

All formulas are for one head of width D on n tokens (D_in = D_hid = D_o = D). A multiply–add counts as two FLOPs.
Memory is the number of values saved for the backward pass. The theory's O(…) drops terms; these formulas keep them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from sympy import Expr, Integer

from regard.budget._symbols import SYMBOLS

N = SYMBOLS["n"]
D = SYMBOLS["D"]
D_P = SYMBOLS["D_p"]
K = SYMBOLS["K"]


@dataclass(frozen=True)
class Alternative:
    """One kind of layer that mixes the tokens of a sequence, with its costs as formulas.

    - `order`: its cost in the theory's O(…) notation.
    - `flops`, `parameters`, `memory`: FLOPs of a forward pass, learned numbers, values saved for the backward pass.
    - `steps`: how many operations must run one after another.
    - `reach`: how many tokens one output can depend on.
    """

    name: str
    order: str
    flops: Expr
    parameters: Expr
    memory: Expr
    steps: Expr
    reach: Expr

    def at(self, n: int, d: int, d_p: int, kernel: int) -> dict[str, int]:
        """The costs as numbers for `n` tokens, width `d`, positions of width `d_p`, a convolution of `kernel` taps."""
        sizes = {N: n, D: d, D_P: d_p, K: kernel}
        formulas = ("flops", "parameters", "memory", "steps", "reach")
        return {name: int(getattr(self, name).subs(sizes)) for name in formulas}


def alternatives() -> tuple[Alternative, ...]:
    """List all alternatives. Every form of attention also projects its values once: ``2·n·D²``.

    - Absolute positions are part of the input. If each score ``(x_q W_q)·(x_k W_k)`` is computed alone, each of the n²
      scores costs two projections and a dot product. Projecting q and k only once gives the same scores.
    - Relative positions without content have the score ``v·r_δ``: a dot product of D_p numbers.
    - Relative positions with content (Shaw) have the score ``q·k + q·r_δ``.

    >>> once = alternatives()[1]
    >>> once.name, regard.budget.to_text(once.flops), once.at(n=4096, d=512, d_p=3, kernel=3)["flops"]
    ('absolute, projected once', '4·n²·D + 6·n·D²', 40802189312)
    """
    # FLOPs of: values and their weighted sums; q and k projected once; q and k projected again for every score.
    values = 2 * N * D**2 + 2 * N**2 * D
    once = 4 * N * D**2 + 2 * N**2 * D
    entries = N**2 * (4 * D**2 + 2 * D)
    relative = 2 * N**2 * D_P

    # Memory: the n × n weights, the input, q, k and v. Shaw's table has one code per offset.
    stored = N**2 + 4 * N * D
    tiled = 4 * N * D + 2 * N
    table = (2 * N - 1) * D
    one = Integer(1)
    return (
        Alternative("absolute, entry by entry", "n²D² + n²D", entries + values, 3 * D**2, stored, one, N),
        Alternative("absolute, projected once", "nD² + n²D", once + values, 3 * D**2, stored, one, N),
        Alternative("  the same, tiled", "nD² + n²D", once + values, 3 * D**2, tiled, one, N),
        Alternative("relative, no content", "n²D_p + n²D", relative + values, D**2 + D_P, stored - 2 * N * D, one, N),
        Alternative(
            "relative and content", "nD² + n²D", once + 2 * N**2 * D + values, 3 * D**2 + table, stored, one, N
        ),
        Alternative("recurrence (RNN)", "nD²", 4 * N * D**2, 2 * D**2, 2 * N * D, N, N),
        Alternative("recurrence (LSTM)", "nD²", 16 * N * D**2, 8 * D**2, 7 * N * D, N, N),
        Alternative("convolution", "nKD²", 2 * N * K * D**2, K * D**2, N * D, one, K),
    )
