"""The symbols of the formulas, and formulas as text and LaTeX."""

from __future__ import annotations

from typing import TypeAlias

import sympy
from sympy import Expr, Integer, Symbol

from regard._errors import RegardError

Number: TypeAlias = int | Expr  # every size is an integer, or a formula

# Every symbol that a formula may show, by name: sizes of a model, then lengths of a call.
MEANINGS = {
    "N_h": "heads",
    "N_kv": "key and value heads",
    "D": "width of the residual stream (d_model)",
    "D_in": "width of a query's input",
    "D_c": "width of a context",
    "D_hid": "width of a head's queries and keys",
    "D_o": "width of a head's values",
    "D_out": "width of the output",
    "D_ff": "hidden width of the feed-forward network",
    "D_p": "width of a relative position's code",
    "L": "layers",
    "L_dec": "layers of the decoder",
    "V": "words of the vocabulary",
    "K": "width of a convolution's kernel",
    "B": "sequences in a batch",
    "n": "tokens (queries)",
    "m": "tokens of the context (keys)",
    "t": "tokens in the cache",
}
SYMBOLS = {name: Symbol(name, positive=True, integer=True) for name in MEANINGS}

# The order in a product: batch and lengths first, then sizes in the order above.
_PRINT_ORDER = ["B", "n", "m", "t", *MEANINGS]
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def to_int(x: Number) -> int:
    """Return a number as an int. Raises a `RegardError` if a formula still has symbols."""
    if isinstance(x, Expr) and x.free_symbols:
        names = ", ".join(sorted(map(str, x.free_symbols)))
        raise RegardError(f"{to_text(x)} has no value: it still has the symbols {names}")
    return int(x)


def to_latex(x: Number) -> str:
    """A formula in LaTeX.

    >>> to_latex(4 * Symbol("N_h") * Symbol("n") ** 2)
    '4 N_{h} n^{2}'
    """
    return str(sympy.latex(sympy.sympify(x)))


def to_text(x: Number) -> str:
    """A formula on one line: a sum of products, the highest powers of lengths first.

    >>> n = Symbol("n")
    >>> to_text(2048 * n + 8 * n**2)
    '8n² + 2,048n'
    >>> to_text(Symbol("D_in") * (2 * Symbol("D_hid") + Symbol("D_o")) * Symbol("N_h"))
    'N_h·D_in·(2·D_hid + D_o)'
    """
    x = sympy.sympify(x)
    if isinstance(x, Integer):
        return f"{int(x):,}".replace("-", "−")
    if x.is_Add:
        return _sum_text(x)
    if x.is_Mul:
        return _product_text(x)
    if x.is_Pow:
        return _power_text(x)
    if x.is_number:
        # For a fraction or a root, a decimal number is easier to read than the exact form.
        return f"{float(x):,.1f}".replace("-", "−")
    if isinstance(x, sympy.Max | sympy.Min):
        return f"{type(x).__name__.lower()}({', '.join(map(to_text, x.args))})"
    if isinstance(x, sympy.ceiling):
        return f"⌈{to_text(x.args[0])}⌉"
    if isinstance(x, sympy.floor):
        return f"⌊{to_text(x.args[0])}⌋"
    return str(x)


def _sum_text(x: Expr) -> str:
    first, *others = sorted(x.args, key=_term_order, reverse=True)
    text = to_text(first)
    for term in map(to_text, others):
        if term.startswith("−"):
            text += f" − {term[1:]}"
        else:
            text += f" + {term}"
    return text


def _power_text(x: Expr) -> str:
    base, power = x.as_base_exp()
    text = _in_parentheses(base, base.is_Add or base.is_Mul)
    if power == sympy.Rational(1, 2):
        return f"√{text}"
    if power.is_Integer:
        return text + str(power).translate(_SUPERSCRIPTS)
    return f"{text}^({to_text(power)})"


def _product_text(x: Expr) -> str:
    number, factors = x.as_coeff_mul()
    if number < 0:
        return "−" + _product_text(-x)

    # Split the fraction: factors with negative powers go below the line.
    numerator = sorted((f for f in factors if not _is_denominator(f)), key=_factor_order)
    denominator = [1 / f for f in factors if _is_denominator(f)]
    if number.q != 1:
        denominator.insert(0, Integer(number.q))

    parts = [_in_parentheses(f, f.is_Add) for f in numerator]
    if number.p != 1 or not parts:
        # No dot between a number and a single letter (8n²), but before a longer name, a sum or more factors (2·D_hid).
        touches = len(parts) == 1 and str(numerator[0].as_base_exp()[0]) in "nmtD"
        if touches:
            parts = [f"{int(number.p):,}{parts[0]}"]
        else:
            parts = [f"{int(number.p):,}", *parts]
    text = "·".join(parts)

    # Several factors below the line need parentheses around them.
    below = [_in_parentheses(f, f.is_Add or f.is_Mul) for f in denominator]
    if len(below) == 1:
        text += f"/{below[0]}"
    elif below:
        text += f"/({'·'.join(below)})"
    return text


def _in_parentheses(x: Expr, needed: bool) -> str:
    return f"({to_text(x)})" if needed else to_text(x)


def _is_denominator(factor: Expr) -> bool:
    return bool(factor.is_Pow and factor.exp.is_number and factor.exp < 0)


def _term_order(term: Expr) -> tuple[int, int, list[int]]:
    """Sort key of terms: the degree in lengths, then the degree in all symbols, then earlier symbols first."""
    lengths = 0
    degree = 0
    for base, power in term.as_powers_dict().items():
        if power.is_Integer and base.is_Symbol:
            degree += int(power)
            if str(base) in ("n", "m", "t"):
                lengths += int(power)
    factors = sorted(_factor_order(f)[0] for f in term.as_coeff_mul()[1])
    return lengths, degree, [-f for f in factors]


def _factor_order(factor: Expr) -> tuple[int, str]:
    """Sort key of factors: symbols in print order, then other factors, sums last."""
    base = str(factor.as_base_exp()[0])
    if base in _PRINT_ORDER:
        return _PRINT_ORDER.index(base), str(factor)
    return len(_PRINT_ORDER) + bool(factor.is_Add), str(factor)
