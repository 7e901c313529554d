"""The room «budget»: formulas as MathML, in letters and with the numbers put in.

A formula in letters depends on which fields a model has, not on their sizes: it is derived and set once, and numbers
are put into what was set. Sums come term by term, so that a narrow page can break them between terms.
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

from regard.budget import flops
from regard.budget.fields import in_letters
from regard.budget.formulas import formulas
from regard.budget.model import Lengths, Model
from regard.budget.parts import Embedding
from regard.budget.plan import Plan
from regard.budget.symbols import LETTERS, whole
from regard.budget.units import count_said
from regard.lab.budget import Ask
from regard.lab.budget_answers import fields_of, model_of, plan_of, sizes, split

__all__ = ["values_of", "written"]

SIZES = ("d", "heads", "kv_heads", "layers", "decoder_layers", "hidden", "vocab", "d_key", "d_value", "d_out")
LAST = 10**12  # beyond this a number is said with three digits
# The order in which the theory writes factors: lengths first, then heads, then widths.
ORDER = ("B", "n", "m", "t", "L", "L_dec", "N_h", "N_kv", "V", "D", "D_in", "D_c", "D_ff", "D_hid", "D_o", "D_out")
GROUPS = {"projections": "q, k, v, out", "attention": "scores and values", "head": "logits"}
_STANDS_FOR = 9_400_000_000  # + a letter's place: a number that stands where the letter's own will stand


@dataclass(frozen=True)
class Formula:
    """``letters`` and ``numbers``: MathML of each term; in ``numbers`` a stand-in for each letter."""

    about: str
    name: str
    value: Expr
    letters: tuple[str, ...]
    numbers: tuple[str, ...]

    def put(self, values: Mapping[str, int]) -> list[str]:
        """With these numbers for letters."""

        def number(found: re.Match[str]) -> str:
            return str(values[ORDER[int(found[0]) - _STANDS_FOR]])

        return [re.sub(r"94000000\d\d", number, term) for term in self.numbers]

    def at(self, values: Mapping[str, int]) -> str:
        """What it comes to."""
        found = self.value.subs({letter: values[str(letter)] for letter in self.value.free_symbols})
        if not found.is_Integer:
            return f"{float(found):,.1f}"
        return f"{int(found):,}" if abs(found) < LAST else count_said(float(found))


def written(asked: Ask) -> dict[str, Any]:
    """All formulas of a model. One from a config has numbers for sizes already, and letters for lengths alone."""
    found = plan_of(asked)
    if asked.config is not None:
        made, sized = _of_config(model_of(asked)), False
    else:
        given = fields_of(asked)
        shape = tuple(sorted((name, True if name in SIZES else x) for name, x in given.items()))
        made, sized = _of_kind(asked.kind, shape, asked.tiled), True
    values = values_of(found)
    used = {str(letter) for one in made for letter in one.value.free_symbols}
    return {
        "sized": sized,
        "formulas": [
            {
                "about": one.about,
                "name": one.name,
                "letters": one.letters,
                "numbers": one.put(values),
                "value": one.at(values),
            }
            for one in made
        ],
        "letters": [
            {"letter": converter.convert(_SPELLED[name]), "means": meaning, "value": values[name]}
            for name, meaning in ((str(letter), said) for letter, said in LETTERS.items())
            if name in used
        ],
    }


def values_of(found: Plan) -> dict[str, int]:
    """Letter → number."""
    own, lengths = sizes(found.model), found.lengths
    source = lengths.n if lengths.m is None else lengths.m
    told = {"N_h": "heads", "N_kv": "kv_heads", "D": "d", "D_in": "d", "D_hid": "d_key", "D_o": "d_value"}
    told |= {"D_out": "d_out", "D_ff": "hidden", "L": "layers", "L_dec": "decoder_layers", "V": "vocab"}
    values = {letter: own[name] for letter, name in told.items() if name in own}
    if "V" not in values and found.model.kind == "encoder":  # which reads words, and writes none
        words = [one.part.rows for one in found.model.stacks[0].before if isinstance(one.part, Embedding)]
        values |= {"V": whole(words[0])} if words else {}
    return values | {"B": int(lengths.batch), "n": int(lengths.n), "m": int(source), "t": int(lengths.n)}


@lru_cache(maxsize=256)
def _of_kind(kind: str, shape: tuple[tuple[str, Any], ...], tiled: bool) -> tuple[Formula, ...]:
    """Formulas in letters of a kind with these fields: for sizes True says that they are given."""
    model = in_letters(kind, {name: 1 if x is True and name in SIZES else x for name, x in shape})
    return (*_parameters(model), *_work(model if tiled else model.plain()))


@lru_cache(maxsize=16)
def _of_config(model: Model) -> tuple[Formula, ...]:
    return _work(model)


def _parameters(model: Model) -> tuple[Formula, ...]:
    if model.kind == "attention":
        ((_, part),) = model.attentions
        heads, out = (sympy.factor(x) for x in split(part))
        parts = {"a head": heads / part.heads} if part.kv_heads == part.heads else {}
        parts |= {"all heads": heads, "output": out}
    else:
        parts = {}
        for stack in model.stacks:
            prefix = f"{stack.name}: " if len(model.stacks) > 1 else ""
            for placed in stack:
                name = prefix + placed.name
                parts[name] = parts.get(name, 0) + sympy.sympify(placed.parameters)
        parts = {name: sympy.factor(x) for name, x in parts.items() if x != 0}
    parts["in all"] = sympy.expand(model.parameters)
    return tuple(_set("parameters", name, x) for name, x in parts.items())


def _work(model: Model) -> tuple[Formula, ...]:
    letters = {str(letter): letter for letter in LETTERS}
    two = any(placed.keys == "m" or placed.rows == "m" for placed in model)
    n: Any = letters["n"] if model.tokens is None else model.tokens
    lengths = Lengths(letters["B"], n, letters["m"] if two else None)
    groups = flops.by_group(model, lengths)
    made = [_set("FLOPs, forward", GROUPS.get(name, name), sympy.factor(x)) for name, x in groups.items()]
    abouts = {
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
    for name, x in formulas(model).items():
        if name in abouts:
            about, said = abouts[name]
            made.append(_set(about, said, sympy.simplify(x) if about.startswith("crossover") else x))
    return tuple(made)


_SPELLED = {
    str(letter): re.sub(
        r"_(\w+)", lambda x: f"_{{{x[1]}}}" if len(x[1]) == 1 else rf"_{{\mathrm{{{x[1]}}}}}", str(letter)
    )
    for letter in LETTERS
}


def _set(about: str, name: str, x: Any) -> Formula:
    """A formula as MathML, twice."""
    x = sympy.sympify(x)
    # sympy sorts by name: names that sort as the theory writes.
    stand_in = {
        letter: Symbol(f"x{ORDER.index(str(letter)):02d}", positive=True, integer=True) for letter in x.free_symbols
    }
    sorted_ = x.xreplace(stand_in)
    spelled = {symbol: _SPELLED[str(letter)] for letter, symbol in stand_in.items()}
    counted = {symbol: str(_STANDS_FOR + ORDER.index(str(letter))) for letter, symbol in stand_in.items()}
    terms = sorted_.as_ordered_terms()
    return Formula(
        about, name, x, _terms(terms, symbol_names=spelled), _terms(terms, symbol_names=counted, mul_symbol="dot")
    )


def _terms(terms: list[Expr], **options: Any) -> tuple[str, ...]:
    found = []
    for at, term in enumerate(terms):
        said = sympy.latex(term, **options)
        if at:  # after something, so that a sign stands between two terms
            said = f"{{}} {said}" if said.startswith("-") else f"{{}} + {said}"
        found.append(converter.convert(said))
    return tuple(found)
