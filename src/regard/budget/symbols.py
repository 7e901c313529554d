"""The theory's letters as sympy symbols, and formulas as text and LaTeX."""

from __future__ import annotations

from typing import TypeAlias

import sympy
from sympy import Expr, Integer, Symbol

__all__ = ["LETTERS", "Number", "latex", "text", "whole"]

Number: TypeAlias = int | Expr


def _letter(name: str) -> Symbol:
    return Symbol(name, positive=True, integer=True)


# Every letter that a formula may show, with what it means. Sizes of a model, then lengths of a call.
LETTERS = {
    _letter("N_h"): "heads",
    _letter("N_kv"): "key and value heads",
    _letter("D"): "width of the residual stream (d_model)",
    _letter("D_in"): "width of a query's input",
    _letter("D_c"): "width of a context",
    _letter("D_hid"): "width of a head's queries and keys",
    _letter("D_o"): "width of a head's values",
    _letter("D_out"): "width of the output",
    _letter("D_ff"): "hidden width of the feed-forward network",
    _letter("D_p"): "width of a relative position's code",
    _letter("L"): "layers",
    _letter("L_dec"): "layers of the decoder",
    _letter("V"): "words of the vocabulary",
    _letter("K"): "width of a convolution's kernel",
    _letter("B"): "sequences in a batch",
    _letter("n"): "tokens (queries)",
    _letter("m"): "tokens of the context (keys)",
    _letter("t"): "tokens in the cache",
}

_RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def whole(x: Number) -> int:
    """A number that has no letter left in it, as an int."""
    if isinstance(x, Expr):
        if x.free_symbols:
            raise ValueError(f"{text(x)} still holds letters: {', '.join(sorted(map(str, x.free_symbols)))}")
        x = int(x)
    return x


def latex(x: Number) -> str:
    """A formula in LaTeX, with D_hid as D_{\\mathrm{hid}}.

    >>> latex(4 * Symbol("N_h") * Symbol("n") ** 2)
    '4 N_{h} n^{2}'
    """
    return str(sympy.latex(sympy.sympify(x)))


def text(x: Number) -> str:
    """A formula on one line: sums of products, the highest powers first.

    >>> n = Symbol("n")
    >>> text(2048 * n + 8 * n**2)
    '8n² + 2,048n'
    >>> text(Symbol("D_in") * (2 * Symbol("D_hid") + Symbol("D_o")) * Symbol("N_h"))
    'N_h·D_in·(2·D_hid + D_o)'
    """
    x = sympy.sympify(x)
    if isinstance(x, Integer):
        return f"{int(x):,}".replace("-", "−")
    if x.is_Add:
        terms = sorted(x.args, key=_height, reverse=True)
        said = [text(term) for term in terms]
        return said[0] + "".join(f" − {one[1:]}" if one.startswith("−") else f" + {one}" for one in said[1:])
    if x.is_Mul:
        return _product(x)
    if x.is_Pow:
        base, power = x.as_base_exp()
        inner = f"({text(base)})" if base.is_Add or base.is_Mul else text(base)
        if power == sympy.Rational(1, 2):
            return f"√{inner}"
        return inner + str(power).translate(_RAISED) if power.is_Integer else f"{inner}^({text(power)})"
    if x.is_number:  # a fraction or a root, where the digits say more
        return f"{float(x):,.1f}".replace("-", "−")
    if isinstance(x, sympy.Max | sympy.Min):
        return f"{type(x).__name__.lower()}({', '.join(text(one) for one in x.args)})"
    if isinstance(x, sympy.ceiling):
        return f"⌈{text(x.args[0])}⌉"
    if isinstance(x, sympy.floor):
        return f"⌊{text(x.args[0])}⌋"
    return str(x)


def _product(x: Expr) -> str:
    number, factors = x.as_coeff_mul()
    sign = "−" if number < 0 else ""
    number = abs(number)
    above = [f for f in factors if not _below(f)]
    below = [1 / f for f in factors if _below(f)]
    above.sort(key=_order)
    parts = [f"({text(f)})" if f.is_Add else text(f) for f in above]
    if number.p != 1 or not parts:
        # A number stands right before a lone letter (8n²), and apart from a name, a sum or several (2·D_hid).
        close = len(parts) == 1 and str(above[0].as_base_exp()[0]) in "nmtD"
        parts = [f"{int(number.p):,}{parts[0]}", *parts[1:]] if close else [f"{int(number.p):,}", *parts]
    if number.q != 1:
        below.insert(0, Integer(number.q))
    said = sign + "·".join(parts)
    if below:
        under = [f"({text(f)})" if f.is_Add or f.is_Mul else text(f) for f in below]
        said += "/" + (under[0] if len(under) == 1 else f"({'·'.join(under)})")
    return said


def _below(factor: Expr) -> bool:
    return bool(factor.is_Pow and factor.exp.is_number and factor.exp < 0)


def _height(term: Expr) -> tuple[int, int, list[int]]:
    """Terms with higher powers of lengths stand first, then those with more letters, then those with earlier ones."""
    powers = term.as_powers_dict()
    lengths = sum(int(p) for s, p in powers.items() if str(s) in ("n", "m", "t") and p.is_Integer)
    degree = sum(int(p) for s, p in powers.items() if s.is_Symbol and p.is_Integer)
    factors = sorted(_order(f)[0] for f in term.as_coeff_mul()[1])
    return lengths, degree, [-f for f in factors]


def _order(factor: Expr) -> tuple[int, str]:
    """Batch and lengths, sizes in the order of LETTERS, sums last."""
    names = ["B", "n", "m", "t", *(str(letter) for letter in LETTERS)]
    base = factor.as_base_exp()[0]
    return (names.index(str(base)) if str(base) in names else len(names) + bool(factor.is_Add), str(factor))
