"""Every count of a model as a formula, in the letters that it has."""

from __future__ import annotations

import sympy

from regard.budget import flops
from regard.budget.attending import Attention
from regard.budget.memory import kept
from regard.budget.model import Lengths, Model, Placed, as_model
from regard.budget.parts import total
from regard.budget.symbols import LETTERS, Number

__all__ = ["formulas"]


def formulas(model: Model | Attention | tuple[Placed, ...]) -> dict[str, Number]:
    """Name → formula, in the letters that the model has, of a batch of B sequences of n tokens.

    >>> model = regard.budget.in_letters("block", {"heads": 8})
    >>> for name, formula in formulas(model).items():
    ...     print(name, "=", regard.budget.text(formula))
    parameters = 2·D·D_ff + 4D² + 6D + D_ff
    FLOPs, forward = 4·B·n²·D + 4·B·n·D·D_ff + 8·B·n·D²
    ...
    n* (attention = the rest) = 2D + D_ff
    """
    model = as_model(model)
    letters = {str(letter): letter for letter in LETTERS}
    b, n, m, t = (letters[name] for name in ("B", "n", "m", "t"))
    two = any(placed.keys == "m" or placed.rows == "m" for placed in model)
    if model.tokens is not None:
        n = model.tokens
    lengths = Lengths(b, n, m if two else None)
    found: dict[str, Number] = {"parameters": model.parameters}
    found["FLOPs, forward"] = flops.forward(model, lengths)
    if not _is_same(flops.needed(model, lengths), found["FLOPs, forward"]):
        found["  masks exploited"] = flops.needed(model, lengths)
    found["FLOPs, backward"] = flops.backward(model, lengths)
    if model.writes:
        found["FLOPs, a token after t"] = flops.decode(model, b, t, m if two else None)
        own = [(placed, part) for placed, part in model.attentions if placed.rows == "n"]
        found["cache after t, values"] = total(p.times * part.cached(b, t if p.keys == "n" else m) for p, part in own)
    found["activations, values"] = _in_values(kept(model, lengths))
    found["  recomputing blocks"] = _in_values(kept(model, lengths, recompute=True))
    found["n × n, values"] = sum(
        placed.times * part.matrices(placed.call(lengths)) for placed, part in model.attentions
    )
    if model.attentions and model.tokens is None:
        for name, exploited in (("n* (attention = the rest)", False), ("n*, masks exploited", True)):
            cross = flops.crossover(model, exploited=exploited)
            if cross is not None and cross != found.get("n* (attention = the rest)"):
                found[name] = cross
    return {name: _short(x) for name, x in found.items()}


def _in_values(x: Number) -> Number:
    """Bytes of float32 as values: what is kept in another precision counts for more or fewer."""
    return sympy.sympify(x) / 4


def _short(x: Number) -> Number:
    return sympy.expand(x) if isinstance(x, sympy.Expr) else x


def _is_same(a: Number, b: Number) -> bool:
    return bool(sympy.expand(a - b) == 0)
