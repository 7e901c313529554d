"""A figure of a sweep: which heads change the metric, and at which positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard import plots
from regard._checks import describe_value
from regard._errors import RegardError, RegardTypeError
from regard.interp._head_table import shorten_paths
from regard.interp._patch_table import PatchSweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_HEADS = 64  # rows of a map of heads × positions


@plots.styled
def patching(
    sweep: PatchSweep,
    part: str | None = None,
    *,
    tokens: Sequence[str] | None = None,
    style: plots.FigureStyle | None = None,
) -> Figure:
    """What patching each site changes: layers × heads, or heads × positions if the sweep has single positions.

    The colours show the effect, (after − before) / (source − before), or the change if the source has no number. With
    positions at most 64 heads are drawn, those with the largest changes; the title then says so.

    - ``sweep``: of ``patch_sweep`` or ``attribution_patch``.
    - ``part``: which part, if the sweep has several.
    - ``tokens``: labels of the positions.
    - ``style``: width, font, palette and title; see ``regard.plots.FigureStyle``.

    >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> sweep = regard.interp.patch_sweep(model, torch.tensor([[3, 1, 4]]), torch.zeros_like)
    >>> figure = patching(sweep)  # regard.plots.save(figure, "patching.svg") writes it
    >>> figure.axes[0].images[0].get_array().shape, figure.texts[0].get_text()
    ((2, 3), 'loss · output')
    """
    if not isinstance(sweep, PatchSweep):
        raise RegardTypeError(f"sweep must be a PatchSweep, got {describe_value(sweep)}")
    rows = _rows_of_part(sweep, part)
    value = "change" if sweep.source is None or sweep.source == sweep.before else "effect"
    value_label = "effect (1 = source)" if value == "effect" else "change"
    title = f"{sweep.metric} · {rows[0]['part']}"
    if sweep.is_estimate:
        title += " · estimated"
    if rows[0]["position"] is None:
        if tokens is not None:
            raise RegardError("tokens are labels of single positions, but this sweep has all positions together")
        return _draw_layers(rows, value, value_label, title)
    return _draw_positions(rows, value, value_label, title, tokens)


def _rows_of_part(sweep: PatchSweep, part: str | None) -> list[dict[str, Any]]:
    parts = list(dict.fromkeys(row["part"] for row in sweep.rows))
    if not parts:
        raise RegardError("the sweep has no sites; there is nothing to show")
    if part is None and len(parts) == 1:
        part = parts[0]
    if part not in parts:
        raise RegardError(f"part must be one of {', '.join(parts)}, got {part!r}")
    rows = [row for row in sweep.rows if row["part"] == part]
    if len({row["position"] is None for row in rows}) > 1:
        raise RegardError("the sweep has single positions and all of them together; give a sweep of one kind")
    return rows


def _draw_layers(rows: list[dict[str, Any]], value: str, value_label: str, title: str) -> Figure:
    _, names = shorten_paths(list(dict.fromkeys(row["path"] for row in rows)))
    heads = sorted({row["head"] for row in rows})
    # A head that was not patched leaves its cell empty.
    cells = np.full((len(names), len(heads)), math.nan)
    line = {path: index for index, path in enumerate(names)}
    for row in rows:
        cells[line[row["path"]], heads.index(row["head"])] = _number(row, value)
    is_numbered = all(name.isdecimal() for name in names.values())
    return plots.signed_heatmap(
        cells,
        list(names.values()),
        heads,
        row_name="layer" if is_numbered else "",
        column_name="head",
        value_label=value_label,
        title=title,
    )


def _draw_positions(
    rows: list[dict[str, Any]], value: str, value_label: str, title: str, tokens: Sequence[str] | None
) -> Figure:
    positions = sorted({row["position"] for row in rows})
    by_head: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        by_head.setdefault((row["path"], row["head"]), []).append(row)
    chosen = list(by_head)
    if len(chosen) > MOST_HEADS:

        def largest(head: tuple[str, int]) -> float:
            return max(abs(_number(row, value, 0.0)) for row in by_head[head])

        strongest = set(sorted(chosen, key=largest, reverse=True)[:MOST_HEADS])
        title += f" · {MOST_HEADS} of {len(chosen)} heads"
        chosen = [head for head in chosen if head in strongest]

    column = {position: index for index, position in enumerate(positions)}
    cells = np.full((len(chosen), len(positions)), math.nan)
    for line, head in enumerate(chosen):
        for row in by_head[head]:
            cells[line, column[row["position"]]] = _number(row, value)
    labels = positions
    if tokens is not None:
        if len(tokens) <= positions[-1]:
            raise RegardError(f"tokens must have a label for position {positions[-1]}, got {len(tokens)}")
        labels = [tokens[position] for position in positions]
    _, names = shorten_paths(list(dict.fromkeys(row["path"] for row in rows)))
    return plots.signed_heatmap(
        cells,
        [f"{names[path]}.{head}" for path, head in chosen],
        labels,
        row_name="head",
        column_name="position",
        value_label=value_label,
        title=title,
    )


def _number(row: dict[str, Any], value: str, missing: float = math.nan) -> float:
    number = row[value]
    if number is None or not math.isfinite(number):
        return missing
    return float(number)
