"""Formulas of the Budget page as MathML, in symbols and with numbers inserted.

A formula in symbols depends on which fields a model has, not on their values. So each formula is derived and typeset
once, with one placeholder per symbol; for each request, numbers replace the placeholders. Sums are typeset term by
term, so that a narrow page can break lines between terms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
from latex2mathml import converter
from sympy import Expr, Symbol

from regard.budget import _flops as flops
from regard.budget._formulas import formulas
from regard.budget._model import Lengths, Model
from regard.budget._models_from_fields import symbolic_model
from regard.budget._parts import Embedding
from regard.budget._plan import Plan
from regard.budget._symbols import MEANINGS, SYMBOLS, to_int
from regard.budget._units import format_count
from regard.lab.budget.endpoints import PlanRequest
from regard.lab.budget.responses import attention_parameters, build_plan, fields_of, model_of, model_sizes

# Fields that are sizes: formulas have symbols for them. All other fields change the formula itself.
SIZES = ("d", "heads", "kv_heads", "layers", "decoder_layers", "hidden", "vocab", "d_key", "d_value", "d_out")
MAX_DIGITS_VALUE = 10**12  # larger numbers are rounded to three digits
# The order of factors in the theory: lengths first, then heads, then widths.
ORDER = ("B", "n", "m", "t", "L", "L_dec", "N_h", "N_kv", "V", "D", "D_in", "D_c", "D_ff", "D_hid", "D_o", "D_out")
# Symbol → the size that it stands for.
SIZE_OF_SYMBOL = {
    "N_h": "heads", "N_kv": "kv_heads", "D": "d", "D_in": "d", "D_hid": "d_key", "D_o": "d_value", "D_out": "d_out",
    "D_ff": "hidden", "L": "layers", "L_dec": "decoder_layers", "V": "vocab",
}  # fmt: skip
FLOP_GROUPS = {"projections": "q, k, v, out", "attention": "scores and values"}
# Name of a formula in ``regard.budget`` → its heading and its name on the page.
HEADINGS = {
    "FLOPs, forward": ("FLOPs, forward", "in all"),
    "  masks exploited": ("FLOPs, forward", "masked pairs skipped"),
    "FLOPs, backward": ("FLOPs, backward", "in all"),
    "FLOPs, a token after t": ("FLOPs, one more token", "after t"),
    "cache after t, values": ("values in memory", "cache after t"),
    "activations, values": ("values in memory", "kept for the backward pass"),
    "  recomputing blocks": ("values in memory", "kept, blocks computed again"),
    "n × n, values": ("values in memory", "n × n"),
    "n* (attention = the rest)": ("crossover in FLOPs", "n*"),
    "n*, masks exploited": ("crossover in FLOPs", "n*, masked pairs skipped"),
}
# A placeholder is this number plus the index of its symbol in ORDER. No formula contains such a number.
PLACEHOLDER = 9_400_000_000


@dataclass(frozen=True)
class Formula:
    """A typeset formula."""

    heading: str  # the group that it is shown in
    name: str  # its name in the group
    value: Expr  # the expression in symbols
    symbol_terms: tuple[str, ...]  # the MathML of each term, in symbols
    number_terms: tuple[str, ...]  # the MathML of each term, with placeholders for numbers

    def with_numbers(self, values: Mapping[str, int]) -> list[str]:
        """Return the terms with numbers in place of the symbols."""

        def number(match: re.Match[str]) -> str:
            return str(values[ORDER[int(match[0]) - PLACEHOLDER]])

        return [re.sub(r"94000000\d\d", number, term) for term in self.number_terms]

    def evaluate(self, values: Mapping[str, int]) -> str:
        """Return the value of the formula as text."""
        result = self.value.subs({symbol: values[str(symbol)] for symbol in self.value.free_symbols})
        if not result.is_Integer:
            return f"{float(result):,.1f}"
        if abs(result) < MAX_DIGITS_VALUE:
            return f"{int(result):,}"
        return format_count(float(result))


def formulas_response(request: PlanRequest) -> dict[str, Any]:
    """Return all formulas of a model as plain data."""
    plan = build_plan(request)
    if request.config is not None:
        # The sizes of a config are numbers already; only lengths are symbols.
        all_formulas = _cost_formulas(model_of(request))
    else:
        fields = fields_of(request)
        fields |= {name: True for name in SIZES if name in fields}
        shape = tuple(sorted(fields.items()))
        all_formulas = _formulas_of_kind(request.kind, shape, request.tiled)

    values = _symbol_values(plan)
    used: set[str] = set()
    entries = []
    for formula in all_formulas:
        used.update(str(symbol) for symbol in formula.value.free_symbols)
        entries.append(
            {
                "about": formula.heading,
                "name": formula.name,
                "letters": formula.symbol_terms,
                "numbers": formula.with_numbers(values),
                "value": formula.evaluate(values),
            }
        )
    legend = []
    for name, meaning in MEANINGS.items():
        if name in used:
            legend.append({"letter": converter.convert(_latex_name(name)), "means": meaning, "value": values[name]})
    return {"sized": request.config is None, "formulas": entries, "letters": legend}


def _symbol_values(plan: Plan) -> dict[str, int]:
    """Return symbol → number for a plan."""
    sizes = model_sizes(plan.model)
    values = {symbol: sizes[name] for symbol, name in SIZE_OF_SYMBOL.items() if name in sizes}

    # An encoder has no logits, so the size of its vocabulary is taken from the input embedding.
    if "V" not in values and plan.model.kind == "encoder":
        for placed in plan.model.stacks[0].before:
            if isinstance(placed.part, Embedding):
                values["V"] = to_int(placed.part.rows)
                break
    lengths = plan.lengths
    source = lengths.n if lengths.m is None else lengths.m
    return values | {"B": int(lengths.batch), "n": int(lengths.n), "m": int(source), "t": int(lengths.n)}


@lru_cache(maxsize=256)
def _formulas_of_kind(kind: str, shape: tuple[tuple[str, Any], ...], tiled: bool) -> tuple[Formula, ...]:
    """Return the formulas of a kind of model. ``shape``: its fields, with True in place of every size."""
    fields = dict(shape)
    model = symbolic_model(kind, fields | {name: 1 for name in SIZES if name in fields})
    parameters = _parameter_formulas(model)
    if not tiled:
        model = model.with_plain_attention()
    return (*parameters, *_cost_formulas(model))


def _parameter_formulas(model: Model) -> tuple[Formula, ...]:
    """Return the numbers of parameters by part, and their sum."""
    parts: dict[str, Any] = {}
    if model.kind == "attention":
        ((_, part),) = model.attention_parts
        parts = {name: sympy.factor(count) for name, count in attention_parameters(part).items()}
    else:
        for stack in model.stacks:
            prefix = f"{stack.name}: " if len(model.stacks) > 1 else ""
            for placed in stack:
                name = prefix + placed.name
                parts[name] = parts.get(name, 0) + sympy.sympify(placed.parameters)
        parts = {name: sympy.factor(count) for name, count in parts.items() if count != 0}
    parts["in all"] = sympy.expand(model.parameters)
    return tuple(_typeset("parameters", name, count) for name, count in parts.items())


@lru_cache(maxsize=32)
def _cost_formulas(model: Model) -> tuple[Formula, ...]:
    """Return FLOPs, values in memory, and crossovers."""
    n: Any = SYMBOLS["n"] if model.fixed_tokens is None else model.fixed_tokens
    lengths = Lengths(SYMBOLS["B"], n, SYMBOLS["m"] if model.has_source else None)

    typeset = []
    for group, count in flops.by_group(model, lengths).items():
        typeset.append(_typeset("FLOPs, forward", FLOP_GROUPS.get(group, group), sympy.factor(count)))
    for key, expression in formulas(model).items():
        if key in HEADINGS:
            heading, name = HEADINGS[key]
            if heading.startswith("crossover"):
                expression = sympy.simplify(expression)
            typeset.append(_typeset(heading, name, expression))
    return tuple(typeset)


def _latex_name(symbol: str) -> str:
    """Return the LaTeX of a symbol: a subscript of several letters is upright.

    >>> _latex_name("N_h"), _latex_name("D_in")
    ('N_{h}', 'D_{\\\\mathrm{in}}')
    """
    base, _, subscript = symbol.partition("_")
    if not subscript:
        return base
    if len(subscript) == 1:
        return f"{base}_{{{subscript}}}"
    return rf"{base}_{{\mathrm{{{subscript}}}}}"


def _typeset(heading: str, name: str, expression: Any) -> Formula:
    """Typeset an expression twice: in symbols, and with placeholders for numbers."""
    expression = sympy.sympify(expression)
    # sympy sorts factors by name. Temporary names that sort as in ORDER give the theory's order.
    renamed = {}
    latex_names = {}
    placeholders = {}
    for symbol in expression.free_symbols:
        index = ORDER.index(str(symbol))
        temporary = Symbol(f"x{index:02d}", positive=True, integer=True)
        renamed[symbol] = temporary
        latex_names[temporary] = _latex_name(str(symbol))
        placeholders[temporary] = str(PLACEHOLDER + index)
    terms = expression.xreplace(renamed).as_ordered_terms()
    symbol_terms = _mathml_terms(terms, symbol_names=latex_names)
    number_terms = _mathml_terms(terms, symbol_names=placeholders, mul_symbol="dot")
    return Formula(heading, name, expression, symbol_terms, number_terms)


def _mathml_terms(terms: list[Expr], **options: Any) -> tuple[str, ...]:
    """Return each term of a sum as MathML, with its sign."""
    typeset = []
    for index, term in enumerate(terms):
        latex = sympy.latex(term, **options)
        if index:
            # The empty group makes the sign a binary operator, with the space that it has between two terms.
            latex = f"{{}} {latex}" if latex.startswith("-") else f"{{}} + {latex}"
        typeset.append(converter.convert(latex))
    return tuple(typeset)
