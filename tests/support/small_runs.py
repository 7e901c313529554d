"""Folders of small training runs, which take milliseconds per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.training._run_folder import RunFolder
from regard.training.tasks import TASKS

# Changes of the recipe of "repeats" that make a step take a few milliseconds.
SMALL_RUN: dict[str, Any] = {
    "steps": 3000,
    "warmup": 5,
    "batch": 4,
    "evaluate": 50,
    "save": 10,
    "record": 0,
    "model.d": 8,
    "model.layers": 1,
    "model.heads": 1,
    "data.checks": 4,
}


def write_run(folder: Path, changes: dict[str, Any] | None = None) -> None:
    """Write the folder of a run that has not started."""
    recipe = TASKS["repeats"].default_recipe.with_changes(SMALL_RUN | (changes or {}))
    with RunFolder(folder, recipe):
        pass
