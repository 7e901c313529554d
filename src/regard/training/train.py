"""``train``: a task, a folder, and everything between a recipe and a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.files import renamed
from regard.training.checkpoints import Checkpoints
from regard.training.folder import RunFolder, read_run
from regard.training.loop import Listener, Loop
from regard.training.optimizer import put
from regard.training.processes import Processes
from regard.training.task import Task
from regard.training.tasks import TASKS

__all__ = ["Result", "task_of", "train", "trained"]

# What gloo says of a process that is gone; torch has no class of error for it.
LOST = ("connection closed by peer", "connection reset", "timed out", "timeout", "connection refused", "broken pipe")


@dataclass(frozen=True)
class Result:
    """What a run came to: how it ended (``steps``, ``patience`` or ``stopped``), and the best it did.

    ``best`` is ``{"step", "scores"}`` of the best evaluation, ``watching`` the share of the time that the recorder
    took.

    >>> import json
    >>> said = json.loads((regard.models.bundled() / "result.json").read_text())  # what a run leaves of it
    >>> said["ended"], said["steps"], sorted(said["best"]["scores"])
    ('steps', 6000, ['bits per byte', 'loss'])
    """

    task: str
    ended: str
    steps: int
    seconds: float
    best: dict[str, Any] | None  # {"step": …, "scores": {…}}
    watching: float | None  # the share of the time that watching the heads took
    folder: Path


def task_of(task: str | type[Task]) -> type[Task]:
    """A task by its name, or the class itself."""
    if isinstance(task, str):
        if task not in TASKS:
            raise ValueError(f"there is no task {task!r}; there are {', '.join(TASKS)}")
        return TASKS[task]
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise TypeError(f"task must be a name ({', '.join(TASKS)}) or a class of Task, got {task!r}")
    return task


def train(
    task: str | type[Task],
    folder: str | os.PathLike[str],
    changes: Mapping[str, Any] | None = None,
    *,
    listener: Listener | None = None,
) -> Result:
    """Train a task into ``folder``, or go on with the run that is there.

    - ``task``: ``"text"``, ``"dates"``, ``"agreement"``, ``"digits"``, ``"pixels"``, ``"repeats"``, or your own class.
    - ``changes``: what differs from the task's recipe, ``{"steps": 200, "model.layers": 2}``.
    - Ctrl-C writes a checkpoint and ends; the same call goes on from there, as it does after kill −9, a full disk, or
      the loss of a process. At the end the best weights are in ``folder/model``.
    - under torchrun every process calls this; the first one writes.

    >>> from tempfile import TemporaryDirectory
    >>> small = {"steps": 2, "warmup": 1, "batch": 4, "record": 0, "model.d": 8, "data.checks": 4}
    >>> with TemporaryDirectory() as folder:
    ...     result = train("repeats", f"{folder}/run", small)
    ...     model = regard.models.load(f"{folder}/run/model")
    >>> result.ended, result.steps, result.best["step"], list(result.best["scores"])
    ('steps', 2, 2, ['loss', 'accuracy'])
    """
    kind = task_of(task)
    recipe = kind.recipe if changes is None else kind.recipe.changed(changes)
    run = RunFolder(folder, recipe)
    opened = kind(recipe, run.path / "data")  # what it refuses leaves no folder
    processes = Processes.found()
    held = run if processes.first else nullcontext()
    with _telling(processes, Checkpoints(run.path / "checkpoints")), processes, held, torch.random.fork_rng(devices=[]):
        if processes.first:
            opened.prepare()
        processes.wait_for_first("prepared")
        opened.open()
        loop = Loop(opened, run, processes, Listener() if listener is None else listener)
        before, ended = loop.state.step, loop.run()
        result = _result(loop, ended)
        whole = all((run.path / name).exists() for name in ("model", "result.json"))
        if processes.first and ended != "stopped" and not (whole and before == result.steps):
            _finish(opened, loop, result)
        processes.wait_for_first("written")
    return result


def trained(folder: str | os.PathLike[str], step: int | None = None, *, task: type[Task] | None = None) -> nn.Module:
    """The model of a run, with the weights of one of its checkpoints: ``step``, or the best that there is.

    ``task`` is needed where the run's task is a class of your own.

    >>> from tempfile import TemporaryDirectory
    >>> small = {"steps": 2, "warmup": 1, "batch": 4, "record": 0, "model.d": 8, "data.checks": 4}
    >>> with TemporaryDirectory() as folder:
    ...     result = train("repeats", f"{folder}/run", small)
    ...     model = trained(f"{folder}/run", step=2)
    >>> type(model).__name__, sum(p.numel() for p in model.parameters())
    ('TextDecoder', 8296)
    """
    path = Path(folder)
    name, recipe = read_run(path)
    kind = task_of(name if task is None else task)
    opened = kind(kind.recipe.changed(recipe), path / "data")
    opened.open()
    checkpoints = Checkpoints(path / "checkpoints")
    steps = checkpoints.steps()
    if not steps:
        raise FileNotFoundError(f"{path} has no checkpoint yet")
    if step is None:
        best = checkpoints.read(steps[-1]).state["best"]
        step = steps[-1] if best is None else int(best["step"])
    elif step not in steps:
        raise ValueError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return _filled(opened, checkpoints, step).eval()


def _filled(task: Task, checkpoints: Checkpoints, step: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        model = task.model()
    put(model, checkpoints.read(step).weights)
    return model


def _result(loop: Loop, ended: str) -> Result:
    watching = None if loop.recorder is None else loop.recorder.share
    state = loop.state
    return Result(loop.task.name, ended, state.step, state.seconds, state.best, watching, loop.path)


def _finish(task: Task, loop: Loop, result: Result) -> None:
    """Write the best weights as a model folder, then what came out."""
    step = loop.state.step if result.best is None else int(result.best["step"])
    task.save(_filled(task, loop.checkpoints, step).eval(), loop.path / "model")
    told = {name: x for name, x in asdict(result).items() if name != "folder"}
    with renamed(loop.path / "result.json") as temporary:
        temporary.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _telling(processes: Processes, checkpoints: Checkpoints) -> Iterator[None]:
    """Errors with what is left to go on from: where they are about the disk, or about another process that is gone."""
    try:
        yield
    except (FileExistsError, FileNotFoundError, BlockingIOError):
        raise  # about what was asked for, before anything was done
    except OSError as error:
        said = f"{error.filename} cannot be written: {error.strerror}" if error.filename and error.strerror else error
        raise OSError(f"{said}; {checkpoints.left()}") from None
    except RuntimeError as error:
        said = " ".join(str(error).split()).lower()
        if processes.world == 1 or not any(word in said for word in LOST):
            raise
        left = checkpoints.left()
        raise RuntimeError(f"another process of this run was lost; {left}, and the same command goes on") from None
