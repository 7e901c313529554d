"""An atlas of heads: one row a head, as a table, as text, and next to another one."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from regard.terminal import plain_table
from regard.watching.kinds import KINDS
from regard.watching.seen import written

__all__ = ["COLUMNS", "CONFIDENCES", "SORTS", "Atlas"]

# Column → what it is. Of the natural text and of A as it is, unless said otherwise.
COLUMNS = {
    "sinks": "weight on the first and on special tokens",
    "moved": "the same of A·‖v W_O‖: what sinks give of all that the head moves",
    "previous": "weight on the token before",
    "positional": "rows whose largest weight lies at the most frequent offset, sinks removed",
    "induction": "weight on what followed this token before, in a repeated text",
    "duplicate": "weight on earlier copies of this token",
    "convolution": "how well a function of the offset alone explains the weights, above a uniform map, sinks removed",
    "spread": "entropy over ln(visible keys)",
    "distance": "tokens (on a picture: patches) between query and key",
}
CONFIDENCES = tuple(f"{kind} confidence" for kind in KINDS)


@dataclass(frozen=True, repr=False)
class Atlas:
    """What every head of a model does, as ``regard.watching.heads.atlas`` found it: one row a head.

    A row has ``path``, ``layer``, ``head``, the columns, ``kinds`` with score, control and confidence, ``labels``, and
    all ``scores`` by probe; ``untrained`` the same of the untrained twin.

    >>> model = regard.models.load(regard.models.bundled())
    >>> found = regard.watching.heads.atlas(model, tokens=32, block=8, control=False)
    >>> row = found.rows[4]
    >>> row["path"], row["head"], row["previous"] > 0.8, "previous" in row["labels"]
    ('decoder.blocks.1.attention', 0, True, True)
    """

    model: str
    rows: list[dict[str, Any]]

    def __repr__(self) -> str:
        return f"Atlas of {len(self.rows)} heads of {self.model}"

    def top(self, column: str, most: int | None = None) -> list[tuple[str, int]]:
        """Heads by a column, or by ``"induction confidence"`` (any kind), largest first.

        As pairs (path, head), which ``ablate`` takes.

        >>> rows = [{"path": "blocks.0.attention", "head": i, "previous": x} for i, x in enumerate((0.1, 0.9, 0.4))]
        >>> Atlas("a model", rows).top("previous", 2)
        [('blocks.0.attention', 1), ('blocks.0.attention', 2)]
        """
        return [(row["path"], row["head"]) for row in self._sorted(column)[:most]]

    def table(self, sort: str | None = None, most: int | None = None) -> Table:
        """The heads as a table for the terminal, perhaps the ``most`` with the largest ``sort``."""
        rows = self.rows if sort is None else self._sorted(sort)
        table = plain_table(f"{len(self.rows)} heads of {self.model}" + (f", by {sort}" if sort else ""))
        table.add_column("head", no_wrap=True)
        for name in _SHORT.values():
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("kinds (confidence)", overflow="fold")
        for row in rows[:most]:
            named = ", ".join(f"{k} {row['kinds'][k]['confidence']:.2f}" for k in row["labels"])
            numbers = ("–" if row[x] is None else f"{row[x]:.{1 if x == 'distance' else 2}f}" for x in _SHORT)
            table.add_row(f"{row['layer']}.{row['head']}", *numbers, named)
        return table

    def compare(self, other: Atlas, column: str, most: int | None = None) -> Table:
        """Two models, or one at two times, head by head: the heads whose ``column`` differs most."""
        if not isinstance(other, Atlas):
            raise TypeError(f"an atlas is compared with an atlas, got {type(other).__name__}")
        pairs = [(a, b) for a, b in zip(self.rows, other.rows, strict=False) if _place(a) == _place(b)]
        if len(pairs) != len(self.rows) or len(pairs) != len(other.rows):
            raise ValueError(
                f"{self.model} has {len(self.rows)} heads and {other.model} {len(other.rows)}, "
                f"{len(pairs)} of them at the same places; atlases of one shape are compared"
            )
        _check_column(column)
        pairs.sort(key=lambda p: -abs((_value(p[1], column) or 0.0) - (_value(p[0], column) or 0.0)))
        table = plain_table(f"{column}: {self.model} → {other.model}")
        for name in ("head", "before", "after", "change", "kinds before", "kinds after"):
            table.add_column(name, justify="left" if name.startswith(("head", "kinds")) else "right")
        for a, b in pairs[:most]:
            x, y = _value(a, column) or 0.0, _value(b, column) or 0.0
            named = [", ".join(row["labels"]) for row in (a, b)]
            table.add_row(f"{a['layer']}.{a['head']}", f"{x:.2f}", f"{y:.2f}", f"{y - x:+.2f}", *named)
        return table

    def to_json(self, file: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON, with what the columns mean; written to ``file`` where one is given."""
        data = {"model": self.model, "columns": COLUMNS, "heads": self.rows}
        return written(json.dumps(_finite(data), indent=1, ensure_ascii=False, allow_nan=False), file)

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """The columns and the kinds' confidences as comma-separated text."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["path", "layer", "head", *COLUMNS, "labels", *CONFIDENCES])
        for row in self.rows:
            sure = [row["kinds"].get(k, {}).get("confidence", "") for k in KINDS]
            values = ["" if row[name] is None else row[name] for name in COLUMNS]
            writer.writerow([row["path"], row["layer"], row["head"], *values, " ".join(row["labels"]), *sure])
        return written(text.getvalue(), file)

    def _sorted(self, column: str) -> list[dict[str, Any]]:
        _check_column(column)
        values = [(_value(row, column), row) for row in self.rows]
        return [row for _, row in sorted(values, key=lambda x: -math.inf if x[0] is None else x[0], reverse=True)]


# What of it a line of a terminal holds; the kinds say the rest.
_SHORT = {
    **{"sinks": "sink", "moved": "moved", "previous": "prev", "induction": "induct", "duplicate": "dupl"},
    **{"spread": "spread", "distance": "dist"},
}
_LONG = {short: name for name, short in _SHORT.items()}
SORTS = (*COLUMNS, *CONFIDENCES, *(short for short in _LONG if short not in COLUMNS))


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["path"], row["head"]


def _value(row: dict[str, Any], column: str) -> float | None:
    column = _LONG.get(column, column)
    kind = column.removesuffix(" confidence")
    return row[column] if column in COLUMNS else row["kinds"].get(kind, {}).get("confidence")


def _check_column(column: str) -> None:
    if column not in SORTS:
        raise ValueError(f"there is no column {column!r}; there are {', '.join(SORTS)}")


def _finite(x: Any) -> Any:
    """NaN is no JSON: a score that no row could show is null."""
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
