"""The room «Evolve»: training runs, step by step, and new ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from msgspec import Meta

from regard.lab.endpoints import Asked, Bytes, Endpoints
from regard.lab.evolve_runs import Growing, curves
from regard.lab.evolve_tasks import OPTIONS, changed, offered
from regard.lab.lab import Lab, Opened
from regard.lab.work import Id
from regard.training.evolution import Evolution
from regard.training.folder import read_run
from regard.training.offsets import offsets as offsets_of
from regard.training.tasks import TASKS
from regard.watching.kinds import KINDS
from regard.watching.table import COLUMNS

__all__ = ["ENDPOINTS"]

ENDPOINTS = Endpoints()

Step = Annotated[int, Meta(ge=0, le=2**53)]
After = Annotated[int, Meta(ge=-1, le=2**53)]  # the last step that is known already; −1 none


class Run(Asked, frozen=True):
    """``metrics``: how many bytes of them are known already; they come again once there are more."""

    run: Id
    after: After = -1
    metrics: Annotated[int, Meta(ge=-1, le=2**53)] = -1


class Value(Asked, frozen=True):
    run: Id
    name: Annotated[str, Meta(min_length=1, max_length=80)]
    after: After = -1


class Maps(Asked, frozen=True):
    """``of``: weights of query × key, or, of models of pictures, mean weights by offset."""

    run: Id
    step: Step
    of: Literal["map", "profile"] = "map"


class Film(Asked, frozen=True):
    """``head`` counts through all layers."""

    run: Id
    head: Annotated[int, Meta(ge=0, le=100_000)]
    after: After = -1
    of: Literal["map", "profile"] = "map"


class Offsets(Asked, frozen=True):
    run: Id
    after: After = -1


class Train(Asked, frozen=True):
    """What is left out is as in the task's recipe."""

    task: Annotated[str, Meta(pattern=r"^[a-z]+$", max_length=40)]
    steps: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    rate: Annotated[float, Meta(gt=0, le=0.1)] | None = None
    layers: Annotated[int, Meta(ge=1, le=8)] | None = None
    heads: Annotated[int, Meta(ge=1, le=16)] | None = None
    kind: Annotated[str, Meta(pattern=r"^[a-z]+$", max_length=40)] | None = None


class GoOn(Asked, frozen=True):
    run: Id


@ENDPOINTS.get("/api/evolve/runs")
def runs(lab: Lab, asked: Any) -> dict[str, Any]:
    """The runs that are open, each with its state; what was made here last, the newest first."""
    given, made = ([x for x in lab.all("run") if x.made == own] for own in (False, True))
    return {"runs": [_told(lab, one) for one in (*given, *reversed(made))]}


@ENDPOINTS.get("/api/evolve/run", Run)
def run(lab: Lab, asked: Run) -> dict[str, Any]:
    """A run's heads, the steps and labels after ``after``, when types arose, and curves of loss and score."""
    one = lab.get(asked.run, "run")
    growing = _growing(lab, one)
    found = growing.evolution()
    size, lines = growing.metrics()
    told = {**_told(lab, one), "metrics_read": size, "metrics": curves(lines) if size > asked.metrics else None}
    if found is None:
        empty: dict[str, Any] = {name: [] for name in ("heads", "steps", "labels", "arrivals", "names")}
        return {**told, **empty, "count": 0, "on_grid": False, "profile": None}
    new = _after(found, asked.after)
    return {
        **told,
        "count": len(found.steps),
        "model_name": found.model,
        "heads": _heads(found),
        "steps": found.steps[new:],
        "labels": found.labels[new:],
        "arrivals": [{**row, "at": found.heads.index((row["path"], row["head"]))} for row in found.arrivals()],
        "names": _groups(found),
        "on_grid": found.on_grid,
        "profile": list(_picture(found, found.steps[0], *found.heads[0], "profile").shape) if found.on_grid else None,
    }


@ENDPOINTS.get("/api/evolve/value", Value)
def value(lab: Lab, asked: Value) -> dict[str, Any]:
    """One number of every head at every step after ``after``: a row a step."""
    found = _evolution(lab, asked.run)
    new = _after(found, asked.after)
    return {
        "name": asked.name,
        "unit": COLUMNS.get(asked.name, ""),
        "steps": found.steps[new:],
        "values": found.value(asked.name)[new:].tolist(),
    }


@ENDPOINTS.get("/api/evolve/maps", Maps)
def maps(lab: Lab, asked: Maps) -> Bytes:
    """What all heads look at, at one step: a picture a head, one after the other; ``run`` says their sizes."""
    found = _evolution(lab, asked.run)
    pictures = [_picture(found, asked.step, path, head, asked.of).flatten() for path, head in found.heads]
    return _floats(torch.cat(pictures))


@ENDPOINTS.get("/api/evolve/film", Film)
def film(lab: Lab, asked: Film) -> Bytes:
    """What one head looks at, at every step after ``after``: a picture a step."""
    found = _evolution(lab, asked.run)
    if asked.head >= len(found.heads):
        raise ValueError(f"there is no head {asked.head}; there are {len(found.heads)}, counted from 0")
    steps = found.steps[_after(found, asked.after) :]
    if not steps:
        return _floats(torch.zeros(0))
    return _floats(torch.stack([_picture(found, step, *found.heads[asked.head], asked.of) for step in steps]))


@ENDPOINTS.get("/api/evolve/offsets", Offsets)
def offsets(lab: Lab, asked: Offsets) -> dict[str, Any]:
    """Where heads look from a cell of a picture, at every step after ``after``: rows and columns, and how widely."""
    found = _evolution(lab, asked.run)
    told, new = offsets_of(found), _after(found, asked.after)
    return {
        "steps": found.steps[new:],
        "layers": told.layers,
        "peak": told.peak[new:].tolist(),
        "centre": told.centre[new:].tolist(),
        "width": told.width[new:].tolist(),
        "covered": told.covered()[new:],
    }


@ENDPOINTS.get("/api/evolve/tasks")
def tasks(lab: Lab, asked: Any) -> dict[str, Any]:
    """What can be trained, and what can be chosen."""
    return {"tasks": offered()}


@ENDPOINTS.post("/api/evolve/train", Train)
def train(lab: Lab, asked: Train) -> dict[str, Any]:
    """Starts a new run, which is open at once; the job trains it."""
    if asked.task not in TASKS:
        raise ValueError(f"there is no task {asked.task!r}; there are {', '.join(TASKS)}")
    kind = TASKS[asked.task]
    own = {name: getattr(asked, name) for name in OPTIONS}
    changes = changed(kind.recipe, asked.seed, own)
    recipe = kind.recipe.changed(changes)
    kind(recipe)  # refuses what does not go together, before anything is made
    title = f"{asked.task}, {recipe.steps:,} steps, seed {recipe.seed}"
    one = lab.new_run(f"{title}, {asked.kind}" if asked.kind else title, asked.task)
    try:
        return _start(lab, one, changes)
    except RuntimeError:
        lab.close_run(one.id)
        raise


@ENDPOINTS.post("/api/evolve/continue", GoOn)
def go_on(lab: Lab, asked: GoOn) -> dict[str, Any]:
    """Goes on with a run of this lab that was stopped."""
    one = lab.get(asked.run, "run")
    if not one.made:
        raise ValueError("this run was not made in this lab; go on with it where it was started")
    if lab.is_training(one) or _growing(lab, one).result() is not None:
        raise ValueError("this run is not stopped: it goes on, or has come to its end")
    _, recipe = read_run(one.folder)
    return _start(lab, one, recipe)


def _start(lab: Lab, one: Opened, changes: dict[str, Any]) -> dict[str, Any]:
    job = lab.jobs.start("train", {"task": one.about["task"], "folder": str(one.folder), "changes": changes})
    one.about["job"] = job.id
    return {"run": one.id, "job": job.to_dict()}


def _told(lab: Lab, one: Opened) -> dict[str, Any]:
    """``state``: training (by this lab), growing (by another program), failed, ended, or stopped before its end."""
    growing = _growing(lab, one)
    result = growing.result()
    state = "stopped" if result is None else "ended"
    told = {}
    if lab.is_training(one):
        state = "training"
    else:
        lab.open_model_of(one)
        job = next((x for x in lab.jobs.all() if x.id == one.about.get("job")), None)
        if job is not None and job.state == "failed":
            state, told["error"] = "failed", job.error
        elif result is None and not one.made and growing.is_fresh():
            state = "growing"
    task = TASKS.get(str(one.about.get("task")))
    if task is not None:
        told |= {"about": task.about, "score": task.score}
    of_model = [x.id for x in lab.all("recording") if x.about.get("model") == one.about.get("model", "")]
    return {**one.to_dict(), **told, "state": state, "result": result, "recording": of_model[-1] if of_model else None}


def _growing(lab: Lab, one: Opened) -> Growing:
    return lab.cached((one.id, "evolve"), lambda _: 1, lambda: Growing(one.folder))


def _evolution(lab: Lab, name: str) -> Evolution:
    found = _growing(lab, lab.get(name, "run")).evolution()
    if found is None:
        raise ValueError("this run has no records of its heads, or none yet")
    return found


def _after(found: Evolution, step: int) -> int:
    """The first record after a step."""
    return next((at for at, x in enumerate(found.steps) if x > step), len(found.steps))


def _heads(found: Evolution) -> list[dict[str, Any]]:
    """``rows`` and ``columns``: the size of a head's map."""
    told, step = [], found.steps[0]
    for at, (path, head) in enumerate(found.heads):
        rows, columns = found.map(step, path, head).shape
        place = {"label": found.label(at), "layer": found.paths.index(path), "head": head, "path": path}
        told.append({**place, "rows": rows, "columns": columns})
    return told


def _groups(found: Evolution) -> list[dict[str, Any]]:
    """The names of all numbers, as a person looks for them."""
    own = [name for name in found.names() if name.rpartition(" ")[0] in KINDS]
    rest = [name for name in found.names() if name not in own and name not in COLUMNS]
    groups = {"means": list(COLUMNS), "types": own, "probes": rest}
    return [{"title": title, "names": names} for title, names in groups.items() if names]


def _picture(found: Evolution, step: int, path: str, head: int, of: str) -> torch.Tensor:
    if of == "map":
        return found.map(step, path, head)
    if not found.on_grid:
        raise ValueError("these heads were recorded on a line; offsets in the plane are known of models of pictures")
    cells, grid = found.profile(step, path, head), found.records[0].grid
    for axis, side in enumerate(grid or ()):  # offsets within the picture alone
        middle, reach = cells.shape[axis] // 2, min(cells.shape[axis] // 2, side - 1)
        cells = cells.narrow(axis, middle - reach, 2 * reach + 1)
    return cells


def _floats(x: torch.Tensor) -> Bytes:
    """Little-endian float32, and the shape in a header."""
    data = x.contiguous().numpy().astype("<f4", copy=False).tobytes()
    return Bytes(data, headers=(("x-shape", ",".join(map(str, x.shape))),))
