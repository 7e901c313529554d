"""Training for the lab: a run in a process of its own, which says how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.training.folder import read_run
from regard.training.loop import Listener
from regard.training.train import task_of, trained
from regard.training.train import train as train_task

__all__ = ["train"]

EVERY = 0.1  # seconds between two lines of progress


class Telling(Listener):
    """Tells the step, the loss and the newest held-out score."""

    def __init__(self, progress: Callable[..., None], steps: int, score: str) -> None:
        self.progress, self.steps, self.score = progress, steps, score
        self.held, self.told, self.step = "", 0.0, 0

    def learned(self, step: int, numbers: dict[str, float]) -> None:
        now, self.step = time.monotonic(), step
        if now - self.told >= EVERY or step == self.steps:
            self.told = now
            self.progress(step, self.steps, f"loss {numbers['loss']:.3f}{self.held}")

    def scored(self, step: int, scores: dict[str, float], best: bool) -> None:
        self.held = f", {self.score} {scores[self.score]:.3f}"

    def stopping(self) -> None:
        self.progress(self.step, self.steps, "stopping")


def train(args: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """Train ``args["task"]`` with ``args["changes"]`` into ``args["folder"]``, or go on with the run that is there.

    A run that is stopped leaves a model too: that of its last checkpoint.
    """
    folder, kind = Path(args["folder"]), task_of(args["task"])
    steps = kind.recipe.changed(args["changes"]).steps
    progress(0, steps, "preparing")
    result = train_task(kind, folder, args["changes"], listener=Telling(progress, steps, kind.score))
    if result.ended == "stopped":
        _, recipe = read_run(folder)
        task = kind(kind.recipe.changed(recipe), folder / "data")
        task.open()
        task.save(trained(folder), folder / "model")
    return {"ended": result.ended, "steps": result.steps, "seconds": result.seconds, "best": result.best}
