"""Trains every task in a small size in the processes of torchrun; each run stops at step 3 and continues.

python tasks_worker.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from regard.training._task import Batch
from regard.training._train import task_class, train

SMALL = {"steps": 5, "warmup": 1, "evaluate": 2, "save": 2, "record": 1.0, "record_every": 1, "batch": 7, "rate": 1e-3}
WIDTHS = {"model.d": 16, "model.heads": 2, "model.hidden": 16}
TASKS: dict[str, dict[str, Any]] = {
    "agreement": {"data.checks": 5} | WIDTHS,
    "dates": {"data.checks": 5} | WIDTHS,
    "repeats": {"data.checks": 5} | WIDTHS,
    "text": {"data.window": 16, "data.vocabulary": 300, "model.layers": 2} | WIDTHS,
    "digits": WIDTHS,
    "digits attention": {"model.kind": "attention"} | WIDTHS,
    "pixels": {"model.layers": 2, "model.value": 3} | WIDTHS,
}


class Stopped(Exception):
    """Raised to stop a run, in place of a kill signal."""


def changes(name: str, folder: Path, how: str) -> dict[str, Any]:
    """The changes to the recipe of a task; the text to read is in ``folder``."""
    own = {"data.path": str(folder / "text.txt")} if name == "text" else {}
    return SMALL | TASKS[name] | own | {"parallel": how}


def run(name: str, folder: Path, how: str) -> None:
    """Train a task until step 3, then resume it until its end."""

    class Once(task_class(name.split()[0])):  # type: ignore[misc]
        stopped = False

        def batch(self, step: int) -> Batch:
            if step == 3 and not Once.stopped:
                Once.stopped = True
                raise Stopped
            return super().batch(step)  # type: ignore[no-any-return]

    recipe_changes = changes(name, folder, how)
    try:
        train(Once, folder / how / name, recipe_changes)
    except Stopped:
        train(Once, folder / how / name, recipe_changes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for how in ("ddp", "fsdp"):
        for name in TASKS:
            run(name, Path(sys.argv[1]), how)
