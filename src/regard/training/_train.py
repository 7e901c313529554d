"""``train`` and ``load_trained_model``: run a task in a folder, and load the model of a run."""

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

from regard._config_json import read_json
from regard._errors import RankError, RegardError, RegardTypeError
from regard._files import write_text
from regard._version import __version__
from regard.interp._atlas_store import RESULT_FILE, WEIGHTS, weights_hash
from regard.interp._records import list_records
from regard.parallel._group import describe_lost_rank
from regard.training._checkpoints import Checkpoints
from regard.training._evolution import recorded_share
from regard.training._loop import Listener, Loop
from regard.training._optimizer import load_weights
from regard.training._processes import TIMEOUT_SECONDS, Processes
from regard.training._recipe import Recipe, flatten_recipe
from regard.training._run_folder import RunFolder, read_run
from regard.training._task import Task
from regard.training.tasks import TASKS


@dataclass(frozen=True)
class Result:
    """The result of a run.

    - ``task``: the name of the task.
    - ``ended``: why the run ended: "steps", "patience" or "stopped".
    - ``steps``, ``seconds``: how many steps were done, and how long that took over all starts.
    - ``best``: ``{"step": …, "scores": {…}}`` of the best evaluation; None if there was none.
    - ``recording_share``: the share of the time that recording the heads took; None if nothing was recorded.
    - ``folder``: the folder of the run.
    - ``left_out``: the scheduled steps whose records were left out to keep to the share of the recipe.
    - ``model_step``: the step whose weights ``folder/model`` has: the best one, or the last one without an evaluation.

    >>> import json
    >>> result = json.loads((regard.models.bundled() / "result.json").read_text())  # a run writes this file
    >>> result["ended"], result["steps"], sorted(result["best"]["scores"])
    ('steps', 6000, ['bits per byte', 'loss'])
    """

    task: str
    ended: str
    steps: int
    seconds: float
    best: dict[str, Any] | None
    recording_share: float | None
    folder: Path
    left_out: tuple[int, ...] = ()
    model_step: int | None = None


def task_class(task: str | type[Task]) -> type[Task]:
    """Return the class of a task, given by its name or as the class itself."""
    if isinstance(task, str):
        if task not in TASKS:
            raise RegardError(f"task is {task!r}; it must be one of {', '.join(TASKS)}")
        return TASKS[task]
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise RegardTypeError(f"task must be a name ({', '.join(TASKS)}) or a subclass of Task, got {task!r}")
    return task


def train(
    task: str | type[Task],
    folder: str | os.PathLike[str],
    changes: Mapping[str, Any] | None = None,
    *,
    listener: Listener | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Result:
    """Train a task in ``folder``, or resume the run that is there.

    - ``task``: "text", "dates", "agreement", "digits", "pixels", "repeats", or a class of your own.
    - ``folder``: new, empty, or of a run with the same recipe. At the end, and after a stop, ``folder/model`` has the
      best weights so far.
    - ``changes``: changes of the task's default recipe, for example ``{"steps": 200, "model.layers": 2}``.
    - ``listener``: its methods are called at every step, evaluation, checkpoint and record.
    - ``timeout``: how many seconds a process of torchrun waits for the others in every exchange.

    Ctrl-C finishes the current step, writes a checkpoint and the model, and stops. The same call resumes from there,
    and also after kill −9, a full disk or the loss of a process. Under torchrun every process calls this; the first
    one writes.

    >>> from tempfile import TemporaryDirectory
    >>> small = {"steps": 2, "warmup": 1, "batch": 4, "record": 0, "model.d": 8, "data.checks": 4}
    >>> with TemporaryDirectory() as folder:
    ...     result = train("repeats", f"{folder}/run", small)
    ...     model = regard.models.load(f"{folder}/run/model")
    >>> result.ended, result.steps, result.best["step"], list(result.best["scores"])
    ('steps', 2, 2, ['loss', 'accuracy'])
    """
    kind = task_class(task)
    recipe = kind.default_recipe
    if changes is not None:
        recipe = recipe.with_changes(changes)
    run = RunFolder(folder, recipe)
    instance = kind(recipe, run.path / "data")  # before the folder is made: a wrong recipe leaves no folder
    processes = Processes.current(timeout)
    checkpoints = Checkpoints(run.path / "checkpoints")
    lock = run if processes.is_first else nullcontext()
    with _explain_errors(processes, checkpoints), processes, lock, torch.random.fork_rng(devices=[]):
        processes.agree(_settings(kind, recipe, run.path))
        # One process prepares the data, which may take long; the others wait and then read it.
        if processes.is_first:
            instance.prepare()
        processes.wait_for_first("prepared the data")
        instance.open()
        loop = Loop(instance, run, processes, listener)
        first_step = loop.state.step
        ended = loop.run()
        state = loop.state
        model_step = _best_step(state.best, state.step)
        # A run that had already ended, and wrote everything, is left untouched.
        complete = ended != "stopped" and first_step == state.step and _is_complete(run.path)
        writes = processes.is_first and not complete
        if writes:
            # A stopped run leaves a model with its record too, so that its heads can be inspected.
            _record_model(instance, loop, model_step)
        recording_share = None
        left_out: tuple[int, ...] = ()
        if loop.recorder is not None:
            recording_share = loop.recorder.share
            # From the files of the first process, so that the result, tables and the Evolve page say the same number.
            if processes.is_first:
                recording_share = recorded_share(run.path / "evolution")
            left_out = tuple(loop.recorder.left_out)
        numbers = (instance.name, ended, state.step, state.seconds, state.best, recording_share)
        result = Result(*numbers, run.path, left_out, model_step)

        if writes:
            _write_result(instance, loop, result)
        processes.wait_for_first("written the result")
    return result


def load_trained_model(
    folder: str | os.PathLike[str], step: int | None = None, *, task: type[Task] | None = None
) -> nn.Module:
    """Load the model of a run with the weights of one of its checkpoints.

    - ``folder``: the folder of the run.
    - ``step``: the step of the checkpoint; by default the one with the best score.
    - ``task``: the class of the run's task; needed only for a task of your own.

    >>> from tempfile import TemporaryDirectory
    >>> small = {"steps": 2, "warmup": 1, "batch": 4, "record": 0, "model.d": 8, "data.checks": 4}
    >>> with TemporaryDirectory() as folder:
    ...     result = train("repeats", f"{folder}/run", small)
    ...     model = load_trained_model(f"{folder}/run", step=2)
    >>> type(model).__name__, sum(p.numel() for p in model.parameters())
    ('TextDecoder', 8296)
    """
    path = Path(folder)
    name, recipe = read_run(path)
    kind = task_class(name if task is None else task)
    instance = kind(kind.default_recipe.with_changes(recipe), path / "data")
    instance.open()
    checkpoints = Checkpoints(path / "checkpoints")
    steps = checkpoints.steps()
    if not steps:
        raise FileNotFoundError(f"{path} has no checkpoint yet")
    if step is None:
        newest = checkpoints.read_newest()
        assert newest is not None
        step = _best_step(newest.state["best"], newest.state["step"])
    elif step not in steps:
        raise RegardError(f"step is {step}, but {path} has checkpoints of the steps {', '.join(map(str, steps))}")
    return _model_at(instance, checkpoints, step)


def _settings(task: type[Task], recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return what must be equal in all processes of a run, by name."""
    settings: dict[str, Any] = {
        "task": task.name,
        "folder": folder.absolute(),
        "version of regard": __version__,
        "version of torch": torch.__version__.partition("+")[0],  # builds for a CPU and for a GPU work together
    }
    return settings | flatten_recipe(asdict(recipe))


def _best_step(best: dict[str, Any] | None, last: int) -> int:
    """Return the step of the best evaluation, or the last step if there was no evaluation."""
    return last if best is None else int(best["step"])


def _model_at(task: Task, checkpoints: Checkpoints, step: int) -> nn.Module:
    """Return the task's model with the weights of a checkpoint, in eval mode."""
    # A new model draws random numbers; the random state of the caller must not change.
    with torch.random.fork_rng(devices=[]):
        model = task.model()
    load_weights(model, checkpoints.read(step).weights)
    return model.eval()


def _is_complete(path: Path) -> bool:
    """Whether a run that has ended wrote its model and its result; a result of an earlier stop does not count."""
    if not (path / "model").exists():
        return False
    try:
        return read_json(path / RESULT_FILE).get("ended") != "stopped"
    except (OSError, RegardError):
        return False


def _record_model(task: Task, loop: Loop, step: int) -> None:
    """Record the heads of the weights that are saved as the model; their step may have no record yet."""
    if loop.recorder is not None and step not in list_records(loop.recorder.folder):
        loop.recorder.record_model(_model_at(task, loop.checkpoints, step), step)


def _write_result(task: Task, loop: Loop, result: Result) -> None:
    """Write the best weights as a model folder, then ``result.json``, which says how the run ended."""
    assert result.model_step is not None
    task.save(_model_at(task, loop.checkpoints, result.model_step), loop.path / "model")
    content = asdict(result)
    del content["folder"]
    # Shows that the model's file still has the weights of that step: the record of the step is its head atlas.
    if (loop.path / "model" / WEIGHTS).is_file():
        content["weights"] = weights_hash(loop.path / "model")
    content["watching"] = content.pop("recording_share")  # the name of this entry in all existing files
    write_text(json.dumps(content, indent=1) + "\n", loop.path / RESULT_FILE)


@contextmanager
def _explain_errors(processes: Processes, checkpoints: Checkpoints) -> Iterator[None]:
    """Extend errors about the disk or a lost process by the step from which the run can resume."""
    try:
        yield
    except (FileExistsError, FileNotFoundError, BlockingIOError):
        raise  # an error in the arguments; nothing was done yet
    except OSError as error:
        text = str(error)
        if error.filename and error.strerror:
            text = f"{error.filename} cannot be written: {error.strerror}"
        raise OSError(f"{text}; {checkpoints.describe_newest()}") from None
    except RuntimeError as error:
        # Errors of DDP and FSDP come from torch, those of other exchanges are RankErrors already.
        reason = describe_lost_rank(error)
        if processes.world_size == 1 or reason is None:
            raise
        newest = checkpoints.describe_newest()
        raise RankError(f"{reason}; {newest}; the same command resumes") from None
