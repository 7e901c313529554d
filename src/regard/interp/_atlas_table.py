"""``Atlas``: the scores, labels and types of all heads of a model, as a table, JSON and CSV.

Weights alone can mislead: a sink may have a large weight and a value near 0. ``sinks`` is the share of the weight on
sinks; ``value_weighted`` is their share of weight times size of the value.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

from regard._errors import RegardError, RegardTypeError
from regard._files import json_safe, write_text
from regard._terminal import frameless_table, literal_text
from regard.interp._head_table import STRONGEST, csv_text, format_number
from regard.interp._head_types import HEAD_TYPES, count_labels, describe_counts, head_type_labels, head_type_scores

if TYPE_CHECKING:
    from regard.interp._records import Record

Scores = dict[str, dict[str, dict[str, float]]]  # probe → raw or clean → name → number

# Column → what it is. All but induction are measured on the natural text.
ATLAS_COLUMNS = {
    "sinks": "weight on the first and on special tokens",
    "value_weighted": "the sinks' share of A·‖v W_O‖: weights times the size of what the head reads",
    "previous": "weight on the previous token",
    "positional": "share of rows whose largest weight lies at the most frequent offset, sinks removed",
    "induction": "weight on what followed this token before, in a repeated text",
    "duplicate": "weight on earlier copies of this token",
    "convolution": "how well a function of the offset explains the weights, minus a uniform map, sinks removed",
    "spread": "entropy over ln(visible keys)",
    "distance": "tokens (in an image: patches) between query and key",
}
CONFIDENCE_COLUMNS = tuple(f"{name} confidence" for name in HEAD_TYPES)

# The columns that fit on a line of a terminal, with their short names.
_SHORT_NAMES = {
    "sinks": "sink",
    "value_weighted": "value",
    "previous": "prev",
    "induction": "induct",
    "duplicate": "dupl",
    "spread": "spread",
    "distance": "dist",
}
_DIGITS = {"distance": 1}  # after the point; 2 in all other columns
_LONG_NAMES = {short: name for name, short in _SHORT_NAMES.items()}
ATLAS_SORT_KEYS = tuple(dict.fromkeys((STRONGEST, *ATLAS_COLUMNS, *CONFIDENCE_COLUMNS, *_LONG_NAMES)))


@dataclass(frozen=True, repr=False)
class Atlas:
    """What every head of a model does: one row per head. ``atlas`` makes it.

    A row has ``path``, ``layer``, ``head``, the columns of ``ATLAS_COLUMNS``, the ``labels`` of its head types,
    ``kinds`` (score, control and confidence of each type), all ``scores`` by probe, and ``untrained``, the scores of
    the untrained model. ``source`` says where the numbers come from: the records of a training step, or probes.

    >>> model = regard.models.load(regard.models.bundled())
    >>> found = regard.interp.atlas(model, tokens=32, block=8, control=False)
    >>> row = found.rows[4]
    >>> row["path"], row["head"], row["previous"] > 0.8, "previous" in row["labels"]
    ('decoder.blocks.1.attention', 0, True, True)
    """

    model: str
    rows: list[dict[str, Any]]
    source: str = ""

    @classmethod
    def from_record(cls, record: Record, first: Record | None) -> Atlas:
        """The atlas of the model at a recorded training step; ``first`` is the record of step 0, the control.

        >>> from regard.interp._records import list_records, read_record
        >>> files = list_records(regard.models.bundled() / "evolution")
        >>> Atlas.from_record(read_record(files[6000]), read_record(files[0])).source
        'records of step 6,000; control: step 0'
        """
        layers = [layer.path for layer in record.layers]
        rows = []
        for index, (path, head) in enumerate(record.heads):
            untrained = None
            if first is not None:
                untrained = first.scores(index)
            rows.append(atlas_row(path, layers.index(path), head, record.scores(index), untrained))
        return cls(record.model, rows, record_source(record.step, first is not None))

    @property
    def counts(self) -> dict[str, int]:
        """How many heads have each type; a head with several types counts for each of them.

        >>> atlas = regard.interp.atlas(regard.models.load(regard.models.bundled()))
        >>> atlas.counts["convolution"], atlas.counts["induction"]
        (5, 2)
        """
        return count_labels(row["labels"] for row in self.rows)

    def summary(self) -> str:
        """The counts of all types as a line of text."""
        return describe_counts([row["labels"] for row in self.rows])

    def __repr__(self) -> str:
        return f"Atlas of {len(self.rows)} heads of {self.model}"

    def top(self, column: str, limit: int | None = None) -> list[tuple[str, int]]:
        """The heads with the largest values of a column, as pairs (path, head) that ``ablate`` takes.

        - ``column``: a column, or the confidence of a head type, for example ``"induction confidence"``.
        - ``limit``: how many heads; all by default.

        >>> rows = [{"path": "blocks.0.attention", "head": i, "previous": x} for i, x in enumerate((0.1, 0.9, 0.4))]
        >>> Atlas("a model", rows).top("previous", 2)
        [('blocks.0.attention', 1), ('blocks.0.attention', 2)]
        """
        return [(row["path"], row["head"]) for row in self._sorted(column)[:limit]]

    def table(self, sort: str | None = None, limit: int | None = None) -> Table:
        """The heads as a table for the terminal: all, or the ``limit`` heads with the largest ``sort``."""
        rows = self.rows
        title = f"{len(rows)} heads of {self.model}"
        if sort is not None:
            rows = self._sorted(sort)
            title += f", by {sort}"
        table = frameless_table(title)
        if self.source:
            table.title = Text("\n").join([literal_text(title), literal_text(f"types from {self.source}")])
        table.add_column("head", no_wrap=True)
        for short_name in _SHORT_NAMES.values():
            table.add_column(short_name, justify="right", no_wrap=True)
        table.add_column("types (confidence)", overflow="fold")
        for row in rows[:limit]:
            cells = [f"{row['layer']}.{row['head']}"]
            cells += [format_number(row[name], _DIGITS.get(name, 2)) for name in _SHORT_NAMES]
            labels = [f"{name} {row['kinds'][name]['confidence']:.2f}" for name in row["labels"]]
            table.add_row(*cells, literal_text(", ".join(labels)))
        return table

    def compare(
        self,
        other: Atlas,
        column: str | None = None,
        limit: int | None = None,
        *,
        by: Literal["heads", "types"] = "heads",
    ) -> Table:
        """Compare two atlases, of one or of two architectures, as a table.

        - ``column``: the column or confidence whose largest changes come first; by default the whole heads are
          compared.
        - ``limit``: how many pairs of heads; all by default.
        - ``by``: "heads" compares pairs of heads: the same heads if both models have the same, or else the pairs with
          the most similar scores, each head at most once. "types" compares how many heads of each type there are, and
          how deep in the model they are: 0 is the first layer, 1 the last.

        >>> atlas = regard.interp.atlas(regard.models.load(regard.models.bundled()))
        >>> atlas.compare(atlas, by="types").row_count, atlas.compare(atlas, "induction", limit=3).row_count
        (8, 3)
        """
        from regard.interp import _atlas_comparison  # it imports this module

        if not isinstance(other, Atlas):
            raise RegardTypeError(f"other must be an Atlas, got {type(other).__name__}")
        if by not in ("heads", "types"):
            raise RegardError(f"by must be 'heads' or 'types', got {by!r}")
        if by == "types":
            if column is not None:
                raise RegardError(f"column must be None with by='types', got {column!r}")
            return _atlas_comparison.type_table(self, other)
        return _atlas_comparison.head_pair_table(self, other, column, limit)

    def to_json(self, file: str | os.PathLike[str] | None = None) -> str:
        """Everything as JSON, with the meaning of the columns; also written to ``file`` if one is given."""
        about = {"model": self.model, "source": self.source, "counts": self.counts, "columns": ATLAS_COLUMNS}
        data = json_safe({**about, "heads": self.rows})
        return write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False), file)

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """The columns, labels and confidences as CSV; also written to ``file`` if one is given."""
        columns = ["path", "layer", "head", *ATLAS_COLUMNS, "labels", *CONFIDENCE_COLUMNS]
        rows = []
        for row in self.rows:
            # A type whose probe was not run has no confidence.
            confidences = {name: column_value(row, name) for name in CONFIDENCE_COLUMNS}
            rows.append({**row, **confidences, "labels": " ".join(row["labels"])})
        return write_text(csv_text(columns, rows), file)

    def _sorted(self, column: str) -> list[dict[str, Any]]:
        """The rows, the largest value first and those without a value last."""
        check_column(column)

        def sort_key(row: dict[str, Any]) -> float:
            value = column_value(row, column)
            return -math.inf if value is None else value

        return sorted(self.rows, key=sort_key, reverse=True)


def column_value(row: dict[str, Any], column: str) -> float | None:
    """The value of a column or of a confidence in a row; None if it is not known."""
    # A column may be given by the short name that the table shows.
    column = _LONG_NAMES.get(column, column)
    if column in ATLAS_COLUMNS:
        return row[column]
    if column == STRONGEST:
        confidences = [row["kinds"][label]["confidence"] for label in row["labels"]]
        return max(confidences, default=None)
    head_type = column.removesuffix(" confidence")
    return row["kinds"].get(head_type, {}).get("confidence")


def check_column(column: str) -> None:
    if column not in ATLAS_SORT_KEYS:
        raise RegardError(f"column must be one of {', '.join(ATLAS_SORT_KEYS)}, got {column!r}")


def record_source(step: int, has_control: bool) -> str:
    """Where the types of a record come from, in words; also if they are read as part of an evolution."""
    source = f"records of step {step:,}"
    if has_control:
        return f"{source}; control: step 0"
    return f"{source}; no control, because step 0 was not recorded"


def atlas_row(path: str, layer: int, head: int, scores: Scores, untrained: Scores | None) -> dict[str, Any]:
    """The row of one head, from its scores on the probes and those of the untrained head."""
    raw = scores["natural"]["raw"]
    clean = scores["natural"]["clean"]
    row: dict[str, Any] = {"path": path, "layer": layer, "head": head}
    for name in ("sinks", "value_weighted", "previous", "duplicate", "spread", "distance"):
        row[name] = raw.get(name)
    for name in ("positional", "convolution"):
        row[name] = clean.get(name)
    row["induction"] = None
    if "repeated" in scores:
        row["induction"] = scores["repeated"]["raw"].get("induction")
    type_scores = head_type_scores(scores, untrained)
    row["labels"] = head_type_labels(type_scores)
    row |= {"kinds": type_scores, "scores": scores, "untrained": untrained}
    # A score that no row can have is NaN; the table holds None instead.
    for name in ATLAS_COLUMNS:
        if row[name] is not None and math.isnan(row[name]):
            row[name] = None
    return row
