"""The output of ``regard train``: one line per evaluation, a progress bar, and the results."""

from __future__ import annotations

import time
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from regard._errors import RegardError
from regard._terminal import literal_text, printable
from regard.training._evolution import evolution
from regard.training._loop import Listener
from regard.training._processes import TIMEOUT_SECONDS, Processes
from regard.training._recipe import flatten_recipe, parse_assignments, read_recipe
from regard.training._record_schedule import describe_excess, format_steps
from regard.training._run_folder import read_run
from regard.training._task import Task
from regard.training._train import Result, task_class, train

STOPPED = 130  # the exit code after Ctrl-C
REFRESH_SECONDS = 0.1  # time between updates of the progress bar


def run_training(
    task: str,
    out: Path | None,
    config: Path | None,
    changes: list[str],
    show_recipe: bool,
    timeout: float = TIMEOUT_SECONDS,
) -> None:
    """Train a task, or print its recipe."""
    chosen = task_class(task)
    entries: dict[str, Any] = {}
    if config is not None:
        entries = read_recipe(config)
    config_task = entries.pop("task", chosen.name)
    if config_task != chosen.name:
        raise RegardError(f"{config} must be a recipe of the task {chosen.name}, got one of {config_task}")
    # Assignments on the command line override the file.
    recipe_changes = flatten_recipe(entries) | parse_assignments(changes)
    recipe = chosen.default_recipe.with_changes(recipe_changes)
    if "warmup" not in recipe_changes and recipe.warmup != chosen.default_recipe.warmup:
        reason = f"a quarter of the steps; the task's {chosen.default_recipe.warmup} steps of warmup would not fit"
        _print_note(f"warmup is {recipe.warmup}, {reason}")
    if show_recipe:
        typer.echo(printable(recipe.to_toml(), lines=True), nl=False)
        return
    folder = Path("runs") / chosen.name if out is None else out
    with ProgressOutput() as output, warnings.catch_warnings():
        # The result says which records were left out.
        warnings.filterwarnings("ignore", "no record of")
        result = train(chosen, folder, recipe_changes, listener=output, timeout=timeout)
    # With torchrun, all processes run this function; one of them prints.
    if result.ended == "stopped":
        if Processes.current().is_first:
            with suppress(OSError):  # the end of the terminal may have stopped it
                _print_result(result, chosen)
        raise typer.Exit(STOPPED)
    if Processes.current().is_first:
        _print_result(result, chosen)


def _print_note(text: str) -> None:
    """Print a line to stderr, so that the output of --recipe stays a recipe."""
    if Processes.current().is_first:
        Console(stderr=True, soft_wrap=True).print(literal_text(text))


class ProgressOutput(Listener):
    """Prints one line per evaluation, and below them a bar with loss, speed and remaining time."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            expand=True,
            disable=not (self.console.is_terminal and Processes.current().is_first),
        )
        self.bar_id: Any = None
        self.averages: dict[str, float] = {}  # averages of the loss and of predictions per second
        self.steps = 0
        self.unit = ""
        self.last_update = 0.0  # time of the bar's last update

    def __enter__(self) -> ProgressOutput:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.bar.stop()

    def on_start(self, task: Task, model: nn.Module, step: int) -> None:
        parameters = sum(p.numel() for p in model.parameters())
        self.steps = task.recipe.steps
        self.unit = task.unit
        self.bar_id = self.bar.add_task(task.name, total=self.steps, completed=step, status="")
        line = f"{task.name}: {task.description}; {parameters:,} parameters, {self.steps} steps"
        if step:
            line += f", continues from step {step}"
        self._print(line)

    def on_step(self, step: int, numbers: dict[str, float]) -> None:
        # Exponential averages: the numbers of single steps jump too much to be read.
        for name in ("loss", "predictions"):
            before = self.averages.get(name, numbers[name])
            self.averages[name] = 0.9 * before + 0.1 * numbers[name]
        now = time.monotonic()
        if now - self.last_update > REFRESH_SECONDS or step == self.steps:
            self.last_update = now
            status = f"loss {self.averages['loss']:.3f} · {self._speed()}"
            self.bar.update(self.bar_id, completed=step, status=status)

    def on_evaluation(self, step: int, scores: dict[str, float], best: bool) -> None:
        numbers = "  ".join(f"{name} {_format_score(value)}" for name, value in scores.items())
        loss = self.averages.get("loss", float("nan"))
        line = f"step {step:>{len(str(self.steps))}}  loss {loss:.3f}  held out: {numbers}  {self._speed()}"
        if best:
            line += "  best"
        self._print(line)

    def on_stop(self) -> None:
        self._print("stopping after this step; a second Ctrl-C stops at once, without a checkpoint")

    def _speed(self) -> str:
        return f"{self.averages['predictions']:,.0f} {self.unit}/s"

    def _print(self, text: str) -> None:
        # The terminal may be closed while the training runs, which must nevertheless save its state.
        with suppress(OSError):
            self.bar.console.print(literal_text(text), soft_wrap=True)


def _print_result(result: Result, task: type[Task]) -> None:
    if result.ended == "stopped":
        _print_line(f"stopped at step {result.steps} and saved; the same command continues from there")
        return _print_model(result)
    best = result.best or {"step": result.steps, "scores": {}}
    score = _format_score(best["scores"].get(task.score))
    line = f"{task.name}: {task.score} {score} at step {best['step']} of {result.steps}"
    if result.ended == "patience":
        line += f" (stopped early: {task.score} did not improve)"
    _print_line(line)
    if result.recording_share is None:
        _print_line(f"{result.seconds:.0f} s")
        return _print_model(result)

    # The heads were recorded: show how they changed.
    # This line may be long and contains no path, so it wraps at the width of the terminal.
    Console().print(literal_text(f"{result.seconds:.0f} s; {_describe_recording(result, result.recording_share)}"))
    _print_model(result)
    history = evolution(result.folder)
    Console().print(history.table())
    # Figures are optional: without matplotlib, training still succeeds.
    if find_spec("matplotlib") is not None:
        from regard.training.figures import save_figures

        for file in save_figures(history, result.folder / "figures"):
            _print_line(f"figure: {file}")


def _describe_recording(result: Result, share: float) -> str:
    """Return how much time recording took, and which records were made in spite of the limit or left out."""
    _, recipe = read_run(result.folder)
    limit = float(recipe.get("record", 1.0))
    text = f"recording the heads took {100 * share:.1f}% of the time" + describe_excess(share, limit)
    if result.left_out:
        text += f"; no record of {format_steps(result.left_out)}: these would have exceeded {100 * limit:.3g}%"
    return text


def _print_model(result: Result) -> None:
    """Say where the model is and, if that is not the last step, which step its weights are of."""
    line = f"model: {result.folder / 'model'}"
    if result.model_step != result.steps:
        line += f", of step {result.model_step}"
    _print_line(line)


def _print_line(text: str) -> None:
    Console(soft_wrap=True).print(literal_text(text))


def _format_score(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.3g}"  # a perplexity at the start of training can be huge
