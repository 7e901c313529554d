"""Rows of numbers, one per head, as a table for the terminal and as CSV. This module does not import torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from regard._errors import RegardError
from regard._terminal import frameless_table, literal_text

# Column → what it is; a mean over the counted rows: real queries (not padding) that see at least one key.
HEAD_COLUMNS = {
    "entropy": "nats",
    "spread": "entropy over ln(visible keys): 0 is one key, 1 is all keys alike",
    "peak": "largest weight",
    "distance": "tokens between query and key",
    "offset": "tokens from query to key, − is back",
    "sink": "weight on the first keys",
    "local": "weight on the nearest keys",
}

# The columns that compare the position of a query with that of a key. In cross-attention these are of two sequences.
POSITION_COLUMNS = ("distance", "offset", "local")
DIFFERENT_SEQUENCES = "the queries and keys of cross-attention belong to different sequences"
IMAGE_COLUMNS = {
    "distance": "patches between query and key",
    "offset": "patches from query to key in reading order, − is back",
}
STRONGEST = "confidence"  # the sort key of the confidence of a head's most confident type


def column_meanings(*, on_image: bool, is_cross: bool) -> dict[str, str]:
    """What the columns of a layer are where they differ from ``HEAD_COLUMNS``: in images, and in cross-attention.

    >>> column_meanings(on_image=True, is_cross=False)["distance"]
    'patches between query and key'
    """
    meanings: dict[str, str] = {}
    if on_image:
        meanings |= IMAGE_COLUMNS
    if is_cross:
        meanings |= dict.fromkeys(POSITION_COLUMNS, f"unknown: {DIFFERENT_SEQUENCES}")
    return meanings


def head_table(
    rows: Iterable[Mapping[str, Any]], sort: str | None = None, limit: int | None = None, *, has_cross: bool = False
) -> Table:
    """The rows as a table for the terminal: all, or the ``limit`` rows with the largest ``sort``.

    Rows with types (see ``_page_types.add_types``) have a column for them, and can be sorted by ``"confidence"``, that
    of the most confident type. If ``has_cross`` is True, some rows are of cross-attention, and a line says what they
    lack.
    """
    rows = list(rows)
    has_types = bool(rows) and "labels" in rows[0]
    if sort is not None:
        sort_keys = [*HEAD_COLUMNS, STRONGEST] if has_types else list(HEAD_COLUMNS)
        if sort not in sort_keys:
            raise RegardError(f"sort must be one of {', '.join(sort_keys)}, got {sort!r}")
        rows.sort(key=lambda row: sort_value(row, sort), reverse=True)
    pattern, names = shorten_paths([row["path"] for row in rows])
    title = f"{len(rows)} heads"
    if pattern:
        title += f" of {pattern}"
    if sort:
        title += f", by {sort}"
    table = frameless_table(title)
    if has_cross:
        table.caption = f"– : {DIFFERENT_SEQUENCES}; there is no {', '.join(POSITION_COLUMNS)}."
        table.caption_justify = "left"
    # Names come from files: a long one is folded, and markup in it is not interpreted.
    table.add_column("layer", overflow="fold")
    for name in ("head", *HEAD_COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    if has_types:
        table.add_column("types (confidence)", overflow="fold")
    for row in rows[:limit]:
        cells: list[Any] = [format_number(row[name]) for name in HEAD_COLUMNS]
        if has_types:
            cells.append(literal_text(_types_text(row)))
        table.add_row(literal_text(names[row["path"]]), str(row["head"]), *cells)
    return table


def sort_value(row: Mapping[str, Any], sort: str) -> float:
    """What a row is sorted by; a row without it comes last."""
    value = row.get(sort)
    if sort == STRONGEST:
        value = max((row[f"{name} confidence"] for name in row["labels"] or ()), default=None)
    return -math.inf if value is None else value


def _types_text(row: Mapping[str, Any]) -> str:
    if row["labels"] is None:
        return "unknown"
    return ", ".join(f"{name} {row[f'{name} confidence']:.2f}" for name in row["labels"])


def format_number(value: float | None, digits: int = 2) -> str:
    """A number for a table cell, a dash for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def shorten_paths(paths: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The pattern that all paths share (``*.blocks.*.attention``), and what each path has in place of its stars.

    If the paths share no pattern, the pattern is empty and every path keeps its whole name.
    """
    # A single layer is known by its last number.
    if len(set(paths)) == 1:
        numbers = [part for part in paths[0].split(".") if part.isdecimal()]
        return paths[0], {paths[0]: (numbers or ["·"])[-1]}
    parts = {path: path.split(".") for path in paths}
    lengths = set(map(len, parts.values()))
    columns = list(zip(*parts.values(), strict=False))
    is_shared = [len(set(names)) == 1 for names in columns]
    if len(parts) < 2 or len(lengths) != 1 or not any(is_shared):
        return "", dict(zip(paths, paths, strict=True))
    pattern = []
    own_columns = []
    for names, shared in zip(columns, is_shared, strict=True):
        pattern.append(names[0] if shared else "*")
        if not shared:
            own_columns.append(names)
    own_names = [".".join(names) for names in zip(*own_columns, strict=True)]
    return ".".join(pattern), dict(zip(parts, own_names, strict=True))


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """These columns of the rows as comma-separated text with a header; None is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
