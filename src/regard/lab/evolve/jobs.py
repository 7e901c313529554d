"""The training job of the Evolve page: it trains a run in the worker process and reports its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.training._loop import Listener
from regard.training._train import task_class
from regard.training._train import train as train_task

REPORT_SECONDS = 0.1  # shortest time between two progress reports


class ProgressListener(Listener):
    """Reports the step, the loss and the latest held-out score."""

    def __init__(self, progress: Callable[..., None], steps: int, score: str) -> None:
        self.progress = progress
        self.steps = steps
        self.score = score
        self.step = 0
        self.score_text = ""
        self.last_report = 0.0

    def on_step(self, step: int, numbers: dict[str, float]) -> None:
        self.step = step
        now = time.monotonic()
        if now - self.last_report >= REPORT_SECONDS or step == self.steps:
            self.last_report = now
            self.progress(step, self.steps, f"loss {numbers['loss']:.3f}{self.score_text}")

    def on_evaluation(self, step: int, scores: dict[str, float], best: bool) -> None:
        self.score_text = f", {self.score} {scores[self.score]:.3f}"

    def on_stop(self) -> None:
        self.progress(self.step, self.steps, "stopping")


def train(args: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """Train ``args["task"]`` with ``args["changes"]`` into ``args["folder"]``, or continue the run that is there."""
    folder = Path(args["folder"])
    kind = task_class(args["task"])
    steps = kind.default_recipe.with_changes(args["changes"]).steps
    progress(0, steps, "preparing")
    result = train_task(kind, folder, args["changes"], listener=ProgressListener(progress, steps, kind.score))
    return {"ended": result.ended, "steps": result.steps, "seconds": result.seconds, "best": result.best}
