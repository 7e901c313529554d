"""The tables of an ``Evolution`` for the terminal: when each head type arrived, and the types of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from torch import Tensor

from regard._terminal import frameless_table, literal_text
from regard.interp._head_types import HEAD_TYPES, count_labels
from regard.training._arrivals import arrival_cell, describe_uncertainty
from regard.training._measures import describe_measure

if TYPE_CHECKING:
    from regard.training._evolution import Evolution


def types_table(evolution: Evolution) -> Table:
    """Return when each head type arrived: one row per type."""
    first = evolution.steps[0]
    last = evolution.steps[-1]
    table = frameless_table(f"{len(evolution.heads)} heads of {evolution.model}, steps {first} … {last}")
    table.add_column("type", no_wrap=True)
    names = [f"heads at step {last}", "first between steps", "by head", "surest head"]
    # The model that is inspected may be of another step than the last record: its types are shown too.
    model_counts = None
    if evolution.describe_model() and evolution.model_step in evolution.steps:
        model_counts = count_labels(evolution.labels[evolution.steps.index(evolution.model_step)])
        names.insert(1, f"in model/, step {evolution.model_step}")
    for name in names:
        table.add_column(name, justify="right")
    # Arrivals are sorted by step, so the first of a type is the earliest.
    first_arrivals: dict[str, dict[str, Any]] = {}
    for row in evolution.arrivals():
        first_arrivals.setdefault(row["kind"], row)
    for head_type in HEAD_TYPES:
        confidences = {}
        for index, labels in enumerate(evolution.labels[-1]):
            if head_type in labels:
                confidences[index] = evolution.head_types()[-1][index][head_type]["confidence"]
        cells = [head_type, str(len(confidences)), "–", "–", "–"]
        if head_type in first_arrivals:
            arrival = first_arrivals[head_type]
            cells[2] = arrival_cell(arrival)
            cells[3] = f"{arrival['layer']}.{arrival['head']}"
        if confidences:
            best = max(confidences, key=lambda index: confidences[index])
            cells[4] = f"{evolution.head_label(best)} {confidences[best]:.2f}"
        if model_counts is not None:
            cells.insert(2, str(model_counts.get(head_type, 0)))
        table.add_row(*cells)
    _add_caption(evolution, table)
    return table


def heads_table(evolution: Evolution) -> Table:
    """Return the types of each head, and how its numbers changed: one row per head."""
    last = evolution.steps[-1]
    table = frameless_table(f"{len(evolution.heads)} heads of {evolution.model}, step {evolution.steps[0]} → {last}")
    table.add_column("head", no_wrap=True)
    decimals = {"entropy": 2, "spread": 2, "distance": 1}
    for name in decimals:
        table.add_column(describe_measure(name).label, justify="right", no_wrap=True)
    table.add_column("types, taken between steps (confidence)", overflow="fold")
    arrivals = {(row["path"], row["head"], row["kind"]): row for row in evolution.arrivals()}
    for index, (path, head) in enumerate(evolution.heads):
        cells = [evolution.head_label(index)]
        for name, digits in decimals.items():
            values = evolution.value(name)[:, index]
            cells.append(f"{_format_number(values[0], digits)} → {_format_number(values[-1], digits)}")
        types = []
        for label in evolution.labels[-1][index]:
            confidence = evolution.head_types()[-1][index][label]["confidence"]
            types.append(f"{label} {arrival_cell(arrivals[path, head, label])} ({confidence:.2f})")
        table.add_row(*cells, literal_text(", ".join(types)))
    _add_caption(evolution, table)
    return table


def _add_caption(evolution: Evolution, table: Table) -> None:
    """Say below a table how many records there are and what they do not show."""
    sentences = [f"{evolution.describe_records()}.", describe_uncertainty(evolution.steps, ())]
    if any(not row["confirmed"] for row in evolution.arrivals()):
        sentences.append("“?”: only the last record shows it, so it may pass.")
    table.caption = literal_text(" ".join(sentence for sentence in sentences if sentence))
    table.caption_justify = "left"


def _format_number(value: Tensor, digits: int) -> str:
    return f"{float(value):.{digits}f}" if value.isfinite() else "–"
