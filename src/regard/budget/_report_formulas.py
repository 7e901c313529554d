"""Print formulas of costs: as a table, as JSON, and as LaTeX."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group

from regard._terminal import frameless_table, literal_text
from regard.budget._symbols import Number, to_latex, to_text


def formula_table(formulas: Mapping[str, Number], title: str) -> Group:
    """One formula per line."""
    table = frameless_table()
    table.add_column("what", no_wrap=True)
    table.add_column("formula", overflow="fold")
    for name, formula in formulas.items():
        table.add_row(name, to_text(formula))
    return Group(literal_text(title), table)


def formula_json(formulas: Mapping[str, Number]) -> dict[str, dict[str, str]]:
    """Formulas as text and LaTeX."""
    return {name.strip(): {"text": to_text(x), "latex": to_latex(x)} for name, x in formulas.items()}


def latex_lines(formulas: Mapping[str, Number]) -> list[str]:
    """Formulas as one LaTeX environment, in lines."""
    lines = (rf"\text{{{name.strip()}}} &= {to_latex(x)} \\" for name, x in formulas.items())
    return [r"\begin{align*}", *lines, r"\end{align*}"]


# --- cost against n --------------------------------------------------------------------------------------------------
