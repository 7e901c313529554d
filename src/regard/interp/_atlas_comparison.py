"""Compare two atlases, also of models with other numbers of layers and heads: by type, and by matched heads.

Heads of two models of one shape are compared one by one: head 1.3 with head 1.3. If the shapes differ, heads are
matched by what they do. The scores of the types of a head are a vector, and the pairs of nearest vectors are taken
first, each head at most once:

    distance(a, b) = √ mean_t (score_t(a) − score_t(b))²,   t over the types that either of the two models can have

The depth of a layer is (layer + ½) / layers: 0 is the input and 1 the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard._terminal import frameless_table, literal_text
from regard.interp._atlas_table import Atlas, check_column, column_value
from regard.interp._head_table import csv_text, format_number
from regard.interp._head_types import HEAD_TYPES

Row = dict[str, Any]


@dataclass(frozen=True)
class HeadPair:
    """A head of the first atlas, the head of the second that it is compared with, and their distance."""

    first: Row
    second: Row
    distance: float


def same_heads(first: Atlas, second: Atlas) -> bool:
    """Whether both models have the same heads at the same paths."""
    if len(first.rows) != len(second.rows):
        return False
    for row, other in zip(first.rows, second.rows, strict=True):
        if (row["path"], row["head"]) != (other["path"], other["head"]):
            return False
    return True


def pair_heads(first: Atlas, second: Atlas) -> list[HeadPair]:
    """Pair the heads of two atlases: the same heads if the shapes are equal, else the most similar ones."""
    distances = _distances(first, second)
    if same_heads(first, second):
        pairs = []
        for index, (row, other) in enumerate(zip(first.rows, second.rows, strict=True)):
            pairs.append(HeadPair(row, other, float(distances[index, index])))
        return pairs

    # The nearest pairs come first. A stable sort keeps the order of equal distances the same everywhere.
    order = distances.flatten().argsort(stable=True).tolist()
    columns = distances.shape[1]
    matched_first: set[int] = set()
    matched_second: set[int] = set()
    pairs = []
    for position in order:
        i = position // columns
        j = position % columns
        if i in matched_first or j in matched_second:
            continue
        matched_first.add(i)
        matched_second.add(j)
        pairs.append(HeadPair(first.rows[i], second.rows[j], float(distances[i, j])))
        if len(pairs) == min(distances.shape):
            break
    return pairs


def type_table(first: Atlas, second: Atlas) -> Table:
    """How many heads of each type both models have, their share of all heads, and their mean depth."""
    table = frameless_table(f"A: {_title(first)}, B: {_title(second)}")
    table.add_column("type", no_wrap=True)
    for name in ("heads A", "heads B", "share A", "share B", "depth A", "depth B"):
        table.add_column(name, justify="right", no_wrap=True)
    for head_type in HEAD_TYPES:
        counts = []
        shares = []
        depths = []
        for atlas in (first, second):
            count = atlas.counts[head_type]
            counts.append(str(count))
            shares.append(f"{100 * count / len(atlas.rows):.0f} %")
            depths.append(format_number(mean_depth(atlas, head_type)))
        table.add_row(head_type, *counts, *shares, *depths)
    return table


def head_pair_table(first: Atlas, second: Atlas, column: str | None = None, limit: int | None = None) -> Table:
    """The pairs of heads: with a ``column`` those that differ most in it, else the most similar pairs first."""
    if column is not None:
        check_column(column)
    by_name = same_heads(first, second)
    title = "the same heads" if by_name else "heads matched by their scores"
    table = frameless_table(f"{column or 'distance'}, {title}: A → B")
    for name in ("head A", "head B"):
        table.add_column(name, no_wrap=True)
    names = ["distance"]
    if column is not None:
        names = ["A", "B", "change"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("types A", overflow="fold")
    table.add_column("types B", overflow="fold")
    for pair in _sorted_pairs(first, second, column, by_name)[:limit]:
        numbers = [format_number(pair.distance)]
        if column is not None:
            numbers = _column_cells(pair, column)
        table.add_row(
            _head_name(pair.first), _head_name(pair.second), *numbers, _labels(pair.first), _labels(pair.second)
        )
    return table


def head_pair_csv(first: Atlas, second: Atlas) -> str:
    """All pairs as CSV: path, layer, head and labels of both heads, and their distance."""
    own_columns = ("path", "layer", "head", "labels")
    rows = []
    for pair in pair_heads(first, second):
        row: Row = {"distance": pair.distance}
        for name in own_columns:
            row[name] = pair.first[name]
            row[f"other {name}"] = pair.second[name]
        for name in ("labels", "other labels"):
            row[name] = " ".join(row[name])
        rows.append(row)
    return csv_text([*own_columns, *(f"other {name}" for name in own_columns), "distance"], rows)


def mean_depth(atlas: Atlas, head_type: str) -> float | None:
    """The mean depth, 0 … 1, of the heads of a type; None if there is no such head."""
    layers = 1 + max(row["layer"] for row in atlas.rows)
    depths = [(row["layer"] + 0.5) / layers for row in atlas.rows if head_type in row["labels"]]
    return sum(depths) / len(depths) if depths else None


def _distances(first: Atlas, second: Atlas) -> Tensor:
    """The distance of every head of the first from every head of the second atlas."""
    measured = set()
    for row in (*first.rows, *second.rows):
        measured.update(row["kinds"])
    types = [head_type for head_type in HEAD_TYPES if head_type in measured]
    # Not torch.cdist: it loses digits of small distances to cancellation.
    differences = _score_vectors(first, types).unsqueeze(1) - _score_vectors(second, types)
    return differences.square().mean(-1).sqrt()


def _score_vectors(atlas: Atlas, types: list[str]) -> Tensor:
    rows = []
    for row in atlas.rows:
        rows.append([row["kinds"].get(head_type, {}).get("score", 0.0) for head_type in types])
    return torch.tensor(rows, dtype=torch.float64)


def _sorted_pairs(first: Atlas, second: Atlas, column: str | None, by_name: bool) -> list[HeadPair]:
    pairs = pair_heads(first, second)
    if column is not None:
        return sorted(pairs, key=lambda pair: -abs(_change(pair, column) or 0.0))
    # Of the same heads those are of interest that changed most.
    return sorted(pairs, key=lambda pair: -pair.distance if by_name else pair.distance)


def _change(pair: HeadPair, column: str) -> float | None:
    """The change of a column; None if one of the two heads has no value."""
    before = column_value(pair.first, column)
    after = column_value(pair.second, column)
    if before is None or after is None:
        return None
    return after - before


def _column_cells(pair: HeadPair, column: str) -> list[str]:
    """A column of both heads, and its change."""
    change = _change(pair, column)
    cells = [format_number(column_value(row, column)) for row in (pair.first, pair.second)]
    cells.append("–" if change is None else f"{change:+.2f}")
    return cells


def _head_name(row: Row) -> str:
    return f"{row['layer']}.{row['head']}"


def _labels(row: Row) -> Text:
    # Labels of a stored atlas come from a file.
    return literal_text(", ".join(row["labels"]) or "–")


def _title(atlas: Atlas) -> str:
    return f"{atlas.model} ({len(atlas.rows)} heads)"
