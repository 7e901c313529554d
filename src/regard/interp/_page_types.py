"""Head types beside the numbers of a recording: from an atlas, or from the metadata of the recording."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from regard.interp._head_types import HEAD_TYPES

if TYPE_CHECKING:
    from regard.interp._atlas_table import Atlas

LONGEST_SOURCE = 200  # characters of the sentence that says where types come from
UNKNOWN_SOURCE = "source unknown"

# Path → head → {"labels": names of types, "confidences": {name: number}}.
TypesByHead = dict[str, dict[int, dict[str, Any]]]


def types_metadata(atlas: Atlas) -> dict[str, Any]:
    """The labels and confidences of an atlas as plain data, for ``recording.metadata["kinds"]``.

    >>> atlas = regard.interp.atlas(regard.models.load(regard.models.bundled()))
    >>> kinds = types_metadata(atlas)
    >>> len(kinds["heads"]), sorted(kinds["heads"][0])
    (12, ['confidences', 'head', 'labels', 'path'])
    """
    heads = []
    for row in atlas.rows:
        confidences = {name: values["confidence"] for name, values in row["kinds"].items()}
        heads.append(
            {"path": row["path"], "head": row["head"], "labels": list(row["labels"]), "confidences": confidences}
        )
    return {"source": atlas.source, "heads": heads}


def page_types(atlas: Atlas | None, metadata: Mapping[str, Any]) -> tuple[str, TypesByHead] | None:
    """Where the types come from, and the types of each head; None if they are not known.

    - ``atlas``: of the model; None takes ``metadata["kinds"]``, which may come from anyone: what is not a type is
      left out.
    """
    kinds = metadata.get("kinds") if atlas is None else types_metadata(atlas)
    if not isinstance(kinds, dict) or not isinstance(kinds.get("heads"), list):
        return None
    source = str(kinds.get("source") or UNKNOWN_SOURCE)[:LONGEST_SOURCE]
    types: TypesByHead = {}
    for row in kinds["heads"]:
        if not isinstance(row, dict) or not isinstance(row.get("path"), str) or type(row.get("head")) is not int:
            continue
        confidences = {}
        if isinstance(row.get("confidences"), dict):
            confidences = {name: x for name, x in row["confidences"].items() if name in HEAD_TYPES and _is_share(x)}
        # A label without its confidence could not be judged.
        labels = []
        if isinstance(row.get("labels"), list):
            labels = [name for name in row["labels"] if isinstance(name, str) and name in confidences]
        types.setdefault(row["path"], {})[row["head"]] = {"labels": labels, "confidences": confidences}
    return source, types


def add_types(rows: list[dict[str, Any]], types: tuple[str, TypesByHead] | None) -> list[dict[str, Any]]:
    """Rows of heads with their types, if these are known: ``labels``, and ``"<type> confidence"`` for each type.

    - ``rows``: of ``Recording.heads``.
    - ``types``: of ``page_types``.
    """
    if types is None:
        return rows
    typed = []
    for row in rows:
        head = types[1].get(row["path"], {}).get(row["head"])
        labels = None
        confidences = {}
        if head is not None:
            labels = head["labels"]
            confidences = head["confidences"]
        columns = {f"{name} confidence": confidences.get(name) for name in HEAD_TYPES}
        typed.append({**row, "labels": labels, **columns})
    return typed


def _is_share(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and 0 <= x <= 1
