"""Print two models side by side, layers that mix tokens, and the list of presets."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich.console import Group

from regard._terminal import literal_text
from regard.budget._attention_vs_alternatives import Alternative
from regard.budget._compare_models import ComparedFigure, Comparison, Unit
from regard.budget._presets import Preset
from regard.budget._report import as_text, conditions_text, step_name, titled_table
from regard.budget._symbols import to_int
from regard.budget._units import format_bytes, format_count, format_seconds

LONGEST_LINE = 16  # characters of a line in a column's title


def comparison_text(comparison: Comparison) -> str:
    """A comparison as text, 80 columns wide."""
    return as_text(comparison_table(comparison))


def comparison_table(comparison: Comparison) -> Group:
    """One row per figure: both values, the difference and the ratio second/first."""
    first = comparison.first
    second = comparison.second
    rows = []
    if first.lengths.n != second.lengths.n:  # an image model has its own length
        n = ComparedFigure("tokens n", "tokens", to_int(first.lengths.n), to_int(second.lengths.n))
        rows.append(_figure_cells(n))
    for figure in comparison.figures:
        rows.append(_figure_cells(figure, comparison.without_limit(figure.name)))

    title = f"{first.model.title} against {second.model.title}, {step_name(first)} of {conditions_text(first)}"
    if first.machine is not None:
        title += f" on {first.machine.name}"
    names = [first.model.title, second.model.title]
    if names[0] == names[1]:  # equal titles would not say which is which
        names = ["first", "second"]
    # Long titles would not fit into 80 columns.
    names = ["\n".join(textwrap.wrap(literal_text(name).plain, LONGEST_LINE)) for name in names]
    columns = ["", *names, "difference", "ratio"]
    return titled_table(title, columns, rows)


def _figure_cells(figure: ComparedFigure, without_limit: tuple[bool, bool] = (False, False)) -> list[str]:
    difference = "–"
    if figure.difference is not None:
        difference = _signed(figure.difference, figure.unit, figure.name)
    ratio = "–"
    if figure.ratio is not None:
        ratio = f"{figure.ratio:.2f}"
    cells = []
    for value, is_unlimited in zip((figure.first, figure.second), without_limit, strict=True):
        cells.append("no limit" if is_unlimited else _value_text(value, figure.unit, figure.name))
    return [figure.name, *cells, difference, ratio]


def _signed(difference: float, unit: Unit, name: str) -> str:
    if difference == 0:
        return "same"
    sign = "+" if difference > 0 else "−"
    return sign + _value_text(abs(difference), unit, name)


def _value_text(value: float | None, unit: Unit, name: str) -> str:
    if value is None:
        # Attention never has half of the cost, or the model has no such step.
        return "never" if name == "crossover n*" else "–"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    if name.startswith("longest n") and not value:
        return "none"  # not even one token fits
    if unit == "tokens" or name == "parameters":
        return f"{value:,.0f}"
    return format_count(value)


def preset_table(presets: Iterable[Preset]) -> Group:
    """The presets with their number of parameters."""
    rows = []
    for preset in presets:
        model = preset.build()
        tokens = to_int(preset.tokens or model.fixed_tokens or 0)
        rows.append([preset.name, model.kind, f"{tokens:,}", f"{to_int(model.parameters):,}"])
    title = "Models by name; n is used if no tokens are given"
    return titled_table(title, ["name", "kind", "n", "parameters"], rows, text_columns=2)


def alternatives_table(alternatives: Iterable[Alternative], n: int, d: int, d_p: int, kernel: int) -> Group:
    """A table of layers that mix the tokens of a sequence, with their costs."""
    rows = []
    for each in alternatives:
        numbers = each.at(n, d, d_p, kernel)
        cells = [format_count(numbers["flops"]), format_count(numbers["parameters"]), format_count(numbers["memory"])]
        rows.append([each.name, each.order, *cells, f"{numbers['steps']:,}", f"{numbers['reach']:,}"])
    title = f"One head of D = {d:,} on n = {n:,} tokens; positions of D_p = {d_p}, kernels of K = {kernel}"
    return titled_table(title, ["layer", "O(…)", "FLOPs", "params", "saved", "steps", "reach"], rows)
