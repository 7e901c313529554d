"""What ``regard train`` shows: a line an evaluation, a bar with the time left, and what came out."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from regard.terminal import plain
from regard.training.evolution import evolution
from regard.training.loop import Listener
from regard.training.processes import Processes
from regard.training.recipe import assigned, flat, read_recipe
from regard.training.task import Task
from regard.training.train import Result, task_of
from regard.training.train import train as run_task

__all__ = ["run"]

STOPPED = 130  # the exit code of what Ctrl-C ended


def run(task: str, out: Path | None, config: Path | None, changes: list[str], show: bool) -> None:
    """Train, or print the recipe (``show``)."""
    kind = task_of(task)
    wanted: dict[str, Any] = {} if config is None else read_recipe(config)
    if wanted.pop("task", kind.name) != kind.name:
        raise ValueError(f"{config} is a recipe of another task than {kind.name}")
    wanted = flat(wanted) | assigned(changes)
    if show:
        typer.echo(kind.recipe.changed(wanted).to_toml(), nl=False)
        return
    folder = Path("runs") / kind.name if out is None else out
    with Screen() as screen:
        result = run_task(kind, folder, wanted, listener=screen)
    if Processes.found().first:
        _tell(result, kind)
    if result.ended == "stopped":
        raise typer.Exit(STOPPED)


class Screen(Listener):
    """A line an evaluation, and below them a bar with loss, speed and the time that is left."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            expand=True,
            disable=not (self.console.is_terminal and Processes.found().first),
        )
        self.row: Any = None
        self.smooth: dict[str, float] = {}
        self.steps, self.unit, self.shown = 0, "", 0.0

    def __enter__(self) -> Screen:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def began(self, task: Task, model: nn.Module, step: int) -> None:
        many = sum(p.numel() for p in model.parameters())
        self.steps, self.unit = task.given.steps, task.unit
        self.row = self.bar.add_task(task.name, total=self.steps, completed=step, told="")
        goes_on = f", goes on from step {step}" if step else ""
        self._say(f"{task.name}: {task.about}; {many:,} parameters, {self.steps} steps{goes_on}")

    def learned(self, step: int, numbers: dict[str, float]) -> None:
        for name in ("loss", "predictions"):
            before = self.smooth.get(name, numbers[name])
            self.smooth[name] = 0.9 * before + 0.1 * numbers[name]
        now = time.monotonic()
        if now - self.shown > 0.1 or step == self.steps:
            self.shown = now
            told = f"loss {self.smooth['loss']:.3f} · {self._speed()}"
            self.bar.update(self.row, completed=step, told=told)

    def scored(self, step: int, scores: dict[str, float], best: bool) -> None:
        numbers = "  ".join(f"{name} {_short(value)}" for name, value in scores.items())
        loss = self.smooth.get("loss", float("nan"))
        told = f"step {step:>{len(str(self.steps))}}  loss {loss:.3f}  held out: {numbers}  {self._speed()}"
        self._say(told + ("  best" if best else ""))

    def stopping(self) -> None:
        self._say("stopping after this step; Ctrl-C once more ends at once, without a checkpoint")

    def _speed(self) -> str:
        return f"{self.smooth['predictions']:,.0f} {self.unit}/s"

    def _say(self, text: str) -> None:
        self.bar.console.print(plain(text), soft_wrap=True)


def _tell(result: Result, kind: type[Task]) -> None:
    say = Console(soft_wrap=True).print
    if result.ended == "stopped":
        say(plain(f"stopped at step {result.steps} and saved; the same command goes on from there"))
        return
    best = result.best or {"step": result.steps, "scores": {}}
    score = best["scores"].get(kind.score)
    early = f" (no better one in {kind.score} for long enough)" if result.ended == "patience" else ""
    say(plain(f"{kind.name}: {kind.score} {_short(score)} at step {best['step']} of {result.steps}{early}"))
    share = "" if result.watching is None else f"; watching the heads took {100 * result.watching:.1f}% of it"
    say(plain(f"{result.seconds:.0f} s{share}"))
    say(plain(f"model: {result.folder / 'model'}"))
    if result.watching is None:
        return
    seen = evolution(result.folder)
    Console().print(seen.table())
    if find_spec("matplotlib") is not None:
        from regard.training.evolution_figures import save_figures

        for file in save_figures(seen, result.folder / "figures"):
            say(plain(f"figure: {file}"))


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"
