"""docs/symbols.md names what there is: names resolve, parameters are parameters, letters are letters."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import sympy
from torch import nn

import regard
from regard import _shapes as shapes
from regard import budget, claims, convolution
from regard.budget._symbols import SYMBOLS
from regard.nn import LayerNorm, MultiHeadAttention

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "symbols.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`(regard(?:\.\w+)+)(?:\((\w+)=\))?`", PAGE)))
# What layers hold is made when one is made.
MADE = [
    MultiHeadAttention(6, heads=3),
    LayerNorm(4),
    regard.Quadratic(2, 3, heads=2),
    convolution.to_attention(nn.Conv1d(2, 3, 3)),
]


@pytest.mark.parametrize(("name", "parameter"), NAMES, ids=lambda x: x)
def test_names_resolve(name: str, parameter: str) -> None:
    def inside(owner: Any, part: str) -> Any:
        made = (one for one in MADE if type(one) is owner)
        return getattr(owner, part, None) if hasattr(owner, part) else getattr(next(made), part)

    found = functools.reduce(inside, name.split(".")[1:], regard)
    if parameter:
        assert parameter in inspect.signature(found).parameters


def table(title: str) -> list[list[str]]:
    """The rows of a section's table, without its head."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\) *\| *", line)[1:-1] for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_planners_letters_are_its_letters() -> None:
    shown = {letter for row in table("Sizes") for letter in re.split(r"; | in a stack", row[3]) if letter}
    assert len(shown) > 10 and shown <= SYMBOLS.keys()


def test_the_alphabet_is_the_codes() -> None:
    legend = re.findall(r"(?:^ {4}| {4})([A-Z])  \w", shapes.__doc__ or "", re.MULTILINE)
    assert sorted(row[0] for row in table("The alphabet of the code")) == sorted(legend)


def test_the_claims_are_in_the_ledger() -> None:
    ids = re.findall(r'"([a-z-]+)"', PAGE)
    assert ids and all(claims.get_claim(one).id == one for one in ids)


def test_the_count_of_parameters_is_the_planners() -> None:
    counted = budget.formulas(budget.symbolic_model("attention", {"heads": 8}))["parameters"]
    said = PAGE.partition("a layer has ")[2].partition(" parameters")[0].replace("·", "*")
    assert sympy.expand(sympy.sympify(said, locals=SYMBOLS) - counted) == 0
