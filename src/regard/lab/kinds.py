"""Kinds of a model's heads, kept from one lab to the next: to score them again takes longer than to look at them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from regard.files import renamed
from regard.lab.lab import Lab, Opened

__all__ = ["keep_kinds", "known_kinds"]

Kinds = list[dict[str, Any]]


def known_kinds(lab: Lab, model: Opened) -> Kinds | None:
    """What was found of these very files before, or None."""
    if model.kinds is None:
        try:
            found = json.loads(_file(lab, model).read_text(encoding="utf-8"))
            model.kinds = found if isinstance(found, list) else None
        except (OSError, ValueError):
            return None
    return model.kinds


def keep_kinds(lab: Lab, model: Opened, found: Kinds) -> None:
    model.kinds = found
    file = _file(lab, model)
    file.parent.mkdir(exist_ok=True)
    with renamed(file) as temporary:
        temporary.write_text(json.dumps(found), encoding="utf-8")


def _file(lab: Lab, model: Opened) -> Path:
    """Named by the model's files, their sizes and times: another model in the same folder is another one."""
    parts = [str(model.folder)]
    for file in [*sorted(model.folder.glob("*.safetensors")), model.folder / "config.json"]:
        seen = file.stat()
        parts.append(f"{file.name} {seen.st_size} {seen.st_mtime_ns}")
    return lab.state / "kinds" / f"{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:24]}.json"
