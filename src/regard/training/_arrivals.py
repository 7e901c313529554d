"""When heads took their types, as far as the records show it.

A head that has a type at one record and not at the record before took it at some step between the two. Where records
are far apart, nothing is known about the steps between them; ``sparse_gaps`` finds these places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

MIN_RECORDS = 2  # an arrival is confirmed if the last two records, or more, have the label
MAX_RATIO = 4  # two records in a row are close if (b + 1) / (a + 1) is at most this …
MAX_PART = 1 / 8  # … or if their distance is at most this part of all recorded steps


def sparse_gaps(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of recorded steps in a row that are too far apart to show what happened between them.

    >>> sparse_gaps([0, 1, 2, 3, 4, 6, 8, 11, 16]), sparse_gaps([0, 1, 2, 512, 600]), sparse_gaps(range(0, 101, 10))
    ([], [(2, 512)], [])
    """
    if not steps:
        return []
    longest = (steps[-1] - steps[0]) * MAX_PART
    gaps = []
    for a, b in pairwise(steps):
        if b + 1 > MAX_RATIO * (a + 1) and b - a > longest:
            gaps.append((a, b))
    return gaps


def find_arrivals(steps: Sequence[int], labels: Sequence[Sequence[Sequence[str]]], head: int) -> list[dict[str, Any]]:
    """Return when a head took each type that it has at the last record: the rows ``{kind, after, step, confirmed}``.

    - ``labels``: the types by record and head.
    """
    rows: list[dict[str, Any]] = []
    for label in labels[-1][head]:
        since = len(steps) - 1
        # Go back from the end for as long as the head has the label.
        while since > 0 and label in labels[since - 1][head]:
            since -= 1
        after = steps[since - 1] if since > 0 else None
        confirmed = len(steps) - since >= MIN_RECORDS
        rows.append({"kind": label, "after": after, "step": steps[since], "confirmed": confirmed})
    return rows


def describe_arrival(row: Mapping[str, Any]) -> str:
    """Return when a head took a type, as a text.

    >>> describe_arrival({"after": 181, "step": 256, "confirmed": True})
    'between step 181 and 256'
    >>> describe_arrival({"after": 0, "step": 600, "confirmed": False})
    'between step 0 and 600; only the last record shows it'
    """
    after = row["after"]
    step = row["step"]
    if after is None:
        text = f"at the first record, step {step:,}"
    elif after + 1 == step:
        text = f"at step {step:,}"
    else:
        text = f"between step {after:,} and {step:,}"
    if not row["confirmed"]:
        text += "; only the last record shows it"
    return text


def arrival_cell(row: Mapping[str, Any]) -> str:
    """Return when a head took a type, for a cell of a table: "181–256"; "?" if only the last record shows it."""
    after = row["after"]
    step = row["step"]
    text = f"{after}–{step}"
    if after is None or after + 1 == step:
        text = str(step)
    return text if row["confirmed"] else f"{text}?"


def describe_uncertainty(steps: Sequence[int], arrivals: Sequence[Mapping[str, Any]]) -> str:
    """Return in a sentence what the records do not show about arrivals; an empty text if they are close enough."""
    gaps = sparse_gaps(steps)
    if not steps:
        return "Unknown: there are no records yet."
    if len(steps) <= MIN_RECORDS:
        noun = "record" if len(steps) == 1 else "records"
        return f"Unknown: only {len(steps)} {noun} between steps {steps[0]:,} and {steps[-1]:,}."
    sentences = []
    if gaps:
        pairs = [f"steps {a:,} and {b:,}" for a, b in gaps[:3]]
        if len(gaps) > 3:
            pairs.append(f"{len(gaps) - 3} more pairs of steps")
        sentences.append(f"Unknown what happened between {', between '.join(pairs)}: no record was made there.")
    if not all(row["confirmed"] for row in arrivals):
        sentences.append("A type that only the last record shows may pass.")
    return " ".join(sentences)


def describe_none(steps: Sequence[int]) -> str:
    """Return what to say if no head took a type after the first record: "none" only if the records can show it."""
    uncertainty = describe_uncertainty(steps, ())
    if uncertainty:
        return uncertainty
    return f"No head took a new type between steps {steps[0]:,} and {steps[-1]:,} ({len(steps)} records)."
