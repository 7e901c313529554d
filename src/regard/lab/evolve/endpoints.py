"""Endpoints of the Evolve page: training runs step by step, and new runs."""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta

from regard._errors import RegardError
from regard.interp._atlas_store import WEIGHTS, saved_model_step
from regard.lab.endpoint import BinaryResponse, Endpoints, NotFound, Request, float32_response
from regard.lab.evolve.run_reader import RunReader, training_curves
from regard.lab.evolve.task_options import OPTIONS, list_tasks, recipe_changes
from regard.lab.open_item import OpenItem
from regard.lab.shared_endpoints import Id
from regard.lab.workspace import Workspace
from regard.training._arrivals import describe_arrival, describe_none
from regard.training._evolution import Evolution
from regard.training._measures import describe_measure
from regard.training._pixel_offsets import head_offsets
from regard.training._record_schedule import describe_excess
from regard.training._run_folder import RunFolder, read_run
from regard.training.tasks import TASKS

ENDPOINTS = Endpoints()

Step = Annotated[int, Meta(ge=0, le=2**53)]
After = Annotated[int, Meta(ge=-1, le=2**53)]  # the last step that the page already has; −1 if it has none
MapKind = Literal["map", "profile"]  # weights by query × key, or mean weights by pixel offset (image models only)


class OffsetsRequest(Request, frozen=True):
    run: Id
    after: After = -1


class RunRequest(OffsetsRequest, frozen=True, kw_only=True):
    """Name a run. ``metrics``: bytes of the metrics file that the page has; curves are sent only if it has grown."""

    metrics: Annotated[int, Meta(ge=-1, le=2**53)] = -1


class ValueRequest(OffsetsRequest, frozen=True, kw_only=True):
    """Name one number of a run's heads, for example "entropy"."""

    name: Annotated[str, Meta(min_length=1, max_length=80)]


class MapsRequest(Request, frozen=True):
    run: Id
    step: Step
    of: MapKind = "map"


class FilmRequest(OffsetsRequest, frozen=True, kw_only=True):
    """Name a head of a run; ``head`` is its index among the heads of all layers."""

    head: Annotated[int, Meta(ge=0, le=100_000)]
    of: MapKind = "map"


class TrainRequest(Request, frozen=True):
    """Describe a new run. Fields that are left out keep the values of the task's recipe."""

    task: Annotated[str, Meta(pattern=r"^[a-z]+$", max_length=40)]
    steps: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    rate: Annotated[float, Meta(gt=0, le=0.1)] | None = None
    layers: Annotated[int, Meta(ge=1, le=8)] | None = None
    heads: Annotated[int, Meta(ge=1, le=16)] | None = None
    kind: Annotated[str, Meta(pattern=r"^[a-z]+$", max_length=40)] | None = None


class ContinueRequest(Request, frozen=True):
    run: Id


@ENDPOINTS.get("/api/evolve/runs")
def runs(workspace: Workspace, request: Any) -> dict[str, Any]:
    """List the open runs with their states. Runs of this lab come last, the newest first."""
    items = workspace.items("run")
    opened = [item for item in items if not item.created_here]
    created = [item for item in items if item.created_here]
    return {"runs": [_run_state(workspace, item) for item in (*opened, *reversed(created))]}


@ENDPOINTS.get("/api/evolve/run", RunRequest)
def run(workspace: Workspace, request: RunRequest) -> dict[str, Any]:
    """Return a run's heads, its steps and labels after ``after``, when head types arose, and its curves."""
    item = workspace.get(request.run, "run")
    reader = _reader(workspace, item)
    evolution = reader.evolution()
    metrics_bytes, metrics = reader.metrics()
    response = _run_state(workspace, item)
    response["metrics_read"] = metrics_bytes
    response["metrics"] = training_curves(metrics) if metrics_bytes > request.metrics else None
    if evolution is None:
        response |= {name: [] for name in ("heads", "steps", "labels", "arrivals", "measures", "gaps")}
        return {**response, "count": 0, "on_grid": False, "profile": None, "records": "", "unknown": ""}

    arrivals = []
    for arrival in evolution.arrivals():
        index = evolution.heads.index((arrival["path"], arrival["head"]))
        arrivals.append({**arrival, "at": index, "text": describe_arrival(arrival)})
    profile_shape = None
    if evolution.on_grid:
        profile_shape = list(_head_map(evolution, evolution.steps[0], 0, "profile").shape)
    # Say what the records cannot show; "none" only if they could have shown a new type.
    unknown = evolution.describe_uncertainty()
    if not any(arrival["after"] is not None for arrival in arrivals):
        unknown = describe_none(evolution.steps)
    start = bisect_right(evolution.steps, request.after)
    return {
        **response,
        "count": len(evolution.steps),
        "model_name": evolution.model,
        "heads": _heads(evolution),
        "steps": evolution.steps[start:],
        "labels": evolution.labels[start:],
        "kind_source": evolution.source,
        "kind_counts": evolution.counts,
        "arrivals": arrivals,
        "gaps": evolution.gaps,
        "records": _describe_records(item, evolution, response["state"] in ("waiting", "training")),
        "unknown": unknown,
        "measures": _grouped_measures(evolution),
        "on_grid": evolution.on_grid,
        "profile": profile_shape,
    }


@ENDPOINTS.get("/api/evolve/value", ValueRequest)
def value(workspace: Workspace, request: ValueRequest) -> dict[str, Any]:
    """Return one number of every head at every step after ``after``: one row per step."""
    evolution = _evolution(workspace, request.run)
    start = bisect_right(evolution.steps, request.after)
    return {
        "name": request.name,
        "meaning": describe_measure(request.name, evolution.on_grid).meaning,
        "steps": evolution.steps[start:],
        "values": evolution.value(request.name)[start:].tolist(),
    }


@ENDPOINTS.get("/api/evolve/maps", MapsRequest)
def maps(workspace: Workspace, request: MapsRequest) -> BinaryResponse:
    """Return the maps of all heads at one step, one after the other. ``/api/evolve/run`` tells their sizes."""
    evolution = _evolution(workspace, request.run)
    head_maps = []
    for index in range(len(evolution.heads)):
        head_maps.append(_head_map(evolution, request.step, index, request.of).flatten())
    return float32_response(torch.cat(head_maps))


@ENDPOINTS.get("/api/evolve/film", FilmRequest)
def film(workspace: Workspace, request: FilmRequest) -> BinaryResponse:
    """Return the map of one head at every step after ``after``: one map per step."""
    evolution = _evolution(workspace, request.run)
    if request.head >= len(evolution.heads):
        raise RegardError(f"head must be below {len(evolution.heads)}, got {request.head}")
    steps = evolution.steps[bisect_right(evolution.steps, request.after) :]
    if not steps:
        return float32_response(torch.zeros(0))
    return float32_response(torch.stack([_head_map(evolution, step, request.head, request.of) for step in steps]))


@ENDPOINTS.get("/api/evolve/offsets", OffsetsRequest)
def offsets(workspace: Workspace, request: OffsetsRequest) -> dict[str, Any]:
    """Return the pixel offsets that heads attend to, at every step after ``after``: peak, centre and width."""
    evolution = _evolution(workspace, request.run)
    all_offsets = head_offsets(evolution)
    start = bisect_right(evolution.steps, request.after)
    return {
        "steps": evolution.steps[start:],
        "layers": all_offsets.layers,
        "peak": all_offsets.peak[start:].tolist(),
        "centre": all_offsets.centre[start:].tolist(),
        "width": all_offsets.width[start:].tolist(),
        "covered": all_offsets.count_covered()[start:],
    }


@ENDPOINTS.get("/api/evolve/tasks")
def tasks(workspace: Workspace, request: Any) -> dict[str, Any]:
    """List the tasks that can be trained, with their options."""
    return {"tasks": list_tasks()}


@ENDPOINTS.post("/api/evolve/train", TrainRequest)
def train(workspace: Workspace, request: TrainRequest) -> dict[str, Any]:
    """Start a new run. It is open at once; a job trains it."""
    if request.task not in TASKS:
        raise RegardError(f"task must be one of {', '.join(TASKS)}; got {request.task!r}")
    task_class = TASKS[request.task]
    options = {name: getattr(request, name) for name in OPTIONS}
    changes = recipe_changes(task_class.default_recipe, request.seed, options)
    recipe = task_class.default_recipe.with_changes(changes)
    task_class(recipe)  # raises an error if the options do not fit together, before a folder is made
    title = f"{request.task}, {recipe.steps:,} steps, seed {recipe.seed}"
    if request.kind:
        title += f", {request.kind}"
    item = workspace.new_run(title, request.task)
    try:
        # The recipe is written now, not only when the training starts: a waiting run can be stopped, closed, reopened.
        with RunFolder(item.folder, recipe):
            pass
        return _start_training(workspace, item, changes)
    except BaseException:  # the queue or the disk is full: nothing was trained
        workspace.close_run(item.id, forever=True)
        raise


@ENDPOINTS.post("/api/evolve/continue", ContinueRequest)
def continue_run(workspace: Workspace, request: ContinueRequest) -> dict[str, Any]:
    """Continue a run that was stopped, in this lab or on the command line, or start one that was never started."""
    item = workspace.get(request.run, "run")
    # Of two requests at the same time, the second one finds a run that is starting.
    with workspace.lock:
        if not _can_continue(workspace, item, _state(workspace, item)):
            reason = "it is still training, has ended, or has no recipe"
            raise RegardError(f"run {request.run!r} cannot be continued: {reason}")
        item.is_starting = True
    try:
        _, recipe = read_run(item.folder)
        return _start_training(workspace, item, recipe)
    finally:
        item.is_starting = False


@ENDPOINTS.post("/api/evolve/close", ContinueRequest)
def close(workspace: Workspace, request: ContinueRequest) -> dict[str, Any]:
    """Close a run that is not training. If the lab created it, ``undo`` is the id that opens it again."""
    with workspace.lock:
        item = workspace.get(request.run, "run")
        if workspace.is_training(item):
            raise RegardError(f"run {request.run!r} is still training; stop it first")
        return {"undo": workspace.close_run(request.run)}


def _start_training(workspace: Workspace, item: OpenItem, changes: dict[str, Any]) -> dict[str, Any]:
    args = {"task": item.details["task"], "folder": str(item.folder), "changes": changes}
    job = workspace.jobs.start("train", args)
    workspace.run_started(item, job.id)
    return {"run": item.id, "job": job.to_dict()}


def _state(workspace: Workspace, item: OpenItem) -> str:
    """Return the state of a run.

    - "waiting" for other trainings of this lab, "training" by this lab, "growing" because another program trains it;
    - "unstarted": it was stopped before its first step; "stopped" before its end; "failed"; "ended";
    - "recorded": the records of a training of the user's own, whose end is not known.
    """
    if workspace.is_training(item):
        is_running = not item.is_starting and workspace.jobs.get(str(item.details.get("job"))).state == "running"
        return "training" if is_running else "waiting"
    if _training_error(workspace, item) is not None:
        return "failed"
    reader = _reader(workspace, item)
    result = reader.result()
    if result is not None and result.get("ended") != "stopped":
        return "ended"
    if not item.created_here and reader.is_fresh():
        return "growing"
    if reader.progress() is None:
        return "recorded"
    return "stopped" if reader.has_started() else "unstarted"


def _can_continue(workspace: Workspace, item: OpenItem, state: str) -> bool:
    """Return whether this lab can train a run further: it knows the task, and a recipe is there."""
    is_idle = state in ("stopped", "unstarted")
    return is_idle and item.details.get("task") in TASKS and _reader(workspace, item).progress() is not None


def _run_state(workspace: Workspace, item: OpenItem) -> dict[str, Any]:
    """Return a run as plain data, with its state, and the step whose weights its model has."""
    reader = _reader(workspace, item)
    result = reader.result()
    state = _state(workspace, item)
    fields: dict[str, Any] = {"can_continue": _can_continue(workspace, item, state)}
    if state not in ("waiting", "training"):
        workspace.open_model_of(item)
    if state == "failed":
        fields["error"] = _training_error(workspace, item)
    progress = reader.progress()
    if progress is not None:
        fields |= {"done": progress[0], "of": progress[1]}
    if result is not None and "model" in item.details:
        fields["model_step"] = saved_model_step(result)
    task = TASKS.get(str(item.details.get("task")))
    if task is not None:
        fields |= {"about": task.description, "score": task.score}

    recording = _recording_of_model(workspace, item)
    return {**item.to_dict(), **fields, "state": state, "result": result, "recording": recording}


def _recording_of_model(workspace: Workspace, item: OpenItem) -> str | None:
    """Return the newest recording of a run's model, so that the page can link to it; None if there is none."""
    newest = None
    for candidate in workspace.items("recording"):
        model = workspace.model_of(candidate)
        if model is not None and model.id == item.details.get("model"):
            # A run that continues replaces its weights: recordings of the earlier ones show another model.
            try:
                made = (candidate.folder / "recording.json").stat().st_mtime
                if made >= (model.folder / WEIGHTS).stat().st_mtime:
                    newest = candidate.id
            except OSError:
                continue
    return newest


def _training_error(workspace: Workspace, item: OpenItem) -> str | None:
    """Return why the job that trained a run failed; None if it did not fail or is not remembered."""
    try:
        job = workspace.jobs.get(str(item.details.get("job")))
    except NotFound:
        return None
    return job.error if job.state == "failed" else None


def _reader(workspace: Workspace, item: OpenItem) -> RunReader:
    # A reader remembers what it has already read, so each run has its own reader.
    return workspace.cache.get((item.id, "evolve"), lambda _: 1, lambda: RunReader(item.folder))


def _evolution(workspace: Workspace, run_id: str) -> Evolution:
    evolution = _reader(workspace, workspace.get(run_id, "run")).evolution()
    if evolution is None:
        raise RegardError(f"run {run_id!r} has no records of its heads yet")
    return evolution


def _heads(evolution: Evolution) -> list[dict[str, Any]]:
    """Return the place of every head, and the rows and columns of its map."""
    heads = []
    for index, (path, head) in enumerate(evolution.heads):
        rows, columns = evolution.map(evolution.steps[0], path, head).shape
        place = {"label": evolution.head_label(index), "layer": evolution.paths.index(path), "head": head, "path": path}
        heads.append({**place, "rows": rows, "columns": columns})
    return heads


def _describe_records(item: OpenItem, evolution: Evolution, is_training: bool) -> str:
    """Return in a line how many records there are and how much time they took, against the limit of the recipe."""
    text = evolution.describe_records()
    try:
        _, recipe = read_run(item.folder)
        limit = float(recipe["record"])
    except (OSError, ValueError, LookupError, TypeError):  # the records of a model folder come without a recipe
        return text
    # Early in a training, the first records are most of the time.
    if is_training:
        return text
    return text + describe_excess(evolution.share, limit)


def _grouped_measures(evolution: Evolution) -> list[dict[str, Any]]:
    """Return the measures in groups for a menu, without those that no head has at any record."""
    groups: dict[str, list[dict[str, str]]] = {}
    for measure in evolution.measures():
        if bool(evolution.value(measure.name).isfinite().any()):
            entry = {"name": measure.name, "label": measure.label, "meaning": measure.meaning}
            groups.setdefault(measure.group, []).append(entry)
    return [{"title": title, "measures": measures} for title, measures in groups.items()]


def _head_map(evolution: Evolution, step: int, head_index: int, of: MapKind) -> torch.Tensor:
    path, head = evolution.heads[head_index]
    if of == "map":
        return evolution.map(step, path, head)
    if not evolution.on_grid:
        raise RegardError("of='profile' needs an image model; these heads were recorded on a line of tokens")

    # Offsets that are larger than the image have no weight, so they are cut off.
    profile = evolution.profile(step, path, head)
    for axis, side in enumerate(evolution.records[0].grid or ()):
        middle = profile.shape[axis] // 2
        reach = min(middle, side - 1)
        profile = profile.narrow(axis, middle - reach, 2 * reach + 1)
    return profile
