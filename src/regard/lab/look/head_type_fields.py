"""The head types of a model as fields of a response, from the atlas that is stored for the model's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.interp._atlas_store import stored_atlas
from regard.interp._atlas_table import ATLAS_COLUMNS, Atlas
from regard.interp._head_types import HEAD_TYPES, LEAST_CONFIDENCE, count_labels
from regard.interp._page_types import page_types


def stored_head_types(folder: Path | None, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of a response about head types; ``kinds`` is None if the heads were not scored yet.

    They are those of the model in ``folder``; without it, those that the recording itself has in its ``metadata``.

    - ``kinds``: per head its path and number, all its labels, and on the probes the confidence and the score of each
      type, and all scores (``columns``).
    - ``kind_source``: where these numbers come from. They are of probes, not of the text on the page.
    - ``kind_counts``: how many heads have each type; a head with several types counts for each of them.
    - ``kind_columns``: the meaning of the scores.
    - ``kind_least``: the smallest score with which a head gets each type, and the smallest ``confidence``.
    """
    least: dict[str, Any] = {"score": {name: head_type.least for name, head_type in HEAD_TYPES.items()}}
    least["confidence"] = LEAST_CONFIDENCE
    fields = {"kind_columns": ATLAS_COLUMNS, "kind_least": least}
    atlas = None if folder is None else stored_atlas(folder)
    if atlas is not None:
        return head_types_response(atlas) | fields
    recorded = page_types(None, metadata or {})
    if recorded is None:
        return {"kinds": None, "kind_source": None, "kind_counts": None} | fields
    source, types = recorded
    head_types = []
    for path, heads in types.items():
        for head, found in heads.items():
            names = {"path": path, "head": head, "labels": found["labels"], "confidence": found["confidences"]}
            head_types.append(names | {"score": {}, "columns": {}})
    counts = count_labels(entry["labels"] for entry in head_types)
    return {"kinds": head_types, "kind_source": source, "kind_counts": counts} | fields


def head_types_response(atlas: Atlas) -> dict[str, Any]:
    """Return an atlas as plain data for the page."""
    head_types = []
    for row in atlas.rows:
        head_type = {name: row[name] for name in ("path", "head", "labels")}
        head_type["confidence"] = {name: scores["confidence"] for name, scores in row["kinds"].items()}
        head_type["score"] = {name: scores["score"] for name, scores in row["kinds"].items()}
        head_type["columns"] = {name: row[name] for name in ATLAS_COLUMNS}
        head_types.append(head_type)
    return {"kinds": head_types, "kind_source": atlas.source, "kind_counts": atlas.counts}
