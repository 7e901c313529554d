"""An item that is open in the lab, and what the files of models and recordings tell about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard._config_json import Config, read_json
from regard.interp import Recording
from regard.interp._atlas_store import model_fingerprint


@dataclass
class OpenItem:
    """A model, recording or run that is open in the lab."""

    id: str  # its name in requests
    kind: str  # "model", "recording" or "run"
    folder: Path
    title: str  # its name for people
    created_here: bool = False  # whether this lab created it; if so, closing it moves its files to the trash
    details: dict[str, Any] = field(default_factory=dict)  # further fields for the page, by kind
    recording: Recording | None = None  # loaded at its first use, if the item is a recording
    is_starting: bool = False  # whether the job that trains this run is about to be started

    def to_dict(self) -> dict[str, Any]:
        """Return the item as plain data for a page."""
        # Paths of this machine are not sent.
        details = {name: self.details[name] for name in self.details if name not in ("model_folder", "model_files")}
        return {"id": self.id, "kind": self.kind, "title": self.title, "made": self.created_here, **details}


def recording_details(recording: Recording) -> dict[str, Any]:
    """Return the fields of a recording for the page."""
    longest = 0
    sizes = recording.sizes()
    for path, calls in recording.calls.items():
        # The steps of a generation count as one text. Texts of unequal sizes do not.
        n, _ = sizes[path]
        longest = max(longest, n or max(call.n or 0 for call in calls))
    return {
        "model_name": str(recording.metadata.get("model") or ""),
        "model_files": recording.metadata.get("model_files"),
        "tokens": longest,
    }


def fingerprint(folder: Path) -> str | None:
    """Return the fingerprint of a model's files; None if they cannot be read."""
    try:
        return model_fingerprint(folder)
    except OSError:  # the files of an open model can be removed
        return None


def training_task(folder: Path) -> str:
    """Return the task that a model's folder says it was trained for, or an empty string."""
    try:
        return str(read_json(folder / "result.json")["task"])
    except (ValueError, LookupError, TypeError, OSError):
        return ""


def input_kind(config: Config) -> str:
    """Return what a model reads: "text", "pair" (a source and a target) or "image"."""
    if config.model_type == "t5":
        return "pair"
    if config.model_type == "vit" or config.model_type.startswith("regard-"):
        return "image"
    return "text"
