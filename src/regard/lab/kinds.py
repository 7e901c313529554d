"""Kinds of a model's heads, kept from one lab to the next: to score them again takes longer than to look at them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from regard.files import renamed
from regard.lab.lab import Lab, Opened

__all__ = ["keep_kinds", "known_kinds", "stamp"]

Kinds = list[dict[str, Any]]


def stamp(folder: Path) -> str:
    """A word for a model's files, by their names, sizes and times: a model that was trained further is another one."""
    parts = [str(folder)]
    for file in [*sorted(folder.glob("*.safetensors")), folder / "config.json"]:
        seen = file.stat()
        parts.append(f"{file.name} {seen.st_size} {seen.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def known_kinds(lab: Lab, model: Opened) -> Kinds | None:
    """What was found of these very files before, or None."""
    try:
        found = json.loads(_file(lab, stamp(model.folder)).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, list) else None


def keep_kinds(lab: Lab, mark: str, found: Kinds) -> None:
    """Keep what was found of the files that had this stamp."""
    file = _file(lab, mark)
    file.parent.mkdir(exist_ok=True)
    with renamed(file) as temporary:
        temporary.write_text(json.dumps(found), encoding="utf-8")


def _file(lab: Lab, mark: str) -> Path:
    return lab.state / "kinds" / f"{mark}.json"
