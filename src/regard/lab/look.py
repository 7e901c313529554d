"""The room «Look»: what heads do, from the grid of all of them down to one weight and why it is what it is."""

from __future__ import annotations

import math
import re
import shutil
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta
from torch import Tensor

from regard.kept import KeptCall
from regard.lab.endpoints import Asked, Bytes, Endpoints, Gone
from regard.lab.jobs import ENDED
from regard.lab.kinds import keep_kinds, stamp
from regard.lab.lab import Lab
from regard.lab.look_answers import head_answer, recording_answer, why_answer
from regard.lab.pyramid import TILE, Pyramid
from regard.lab.variant import Variant, changed, rotary_of
from regard.lab.work import Id
from regard.observables import Observation

__all__ = ["ENDPOINTS"]

ENDPOINTS = Endpoints()
LONGEST = 2_000_000  # characters of a text
IMAGE = 8 * 2**20  # bytes of a picture; a third more as text
Count = Annotated[int, Meta(ge=0, le=2**24)]
Text = Annotated[str, Meta(max_length=LONGEST)]


class Look(Asked, frozen=True):
    model: Id
    text: Text = ""
    target: Text = ""
    image: Annotated[str, Meta(max_length=IMAGE * 4 // 3 + 64, pattern=r"^$|^data:image/(png|jpeg|webp);base64,")] = ""
    tokens: Annotated[int, Meta(ge=1, le=2**17)] | None = None
    layers: Annotated[str, Meta(max_length=120)] = ""
    title: Annotated[str, Meta(max_length=120)] = ""


class OfModel(Asked, frozen=True):
    model: Id


class OfRecording(Asked, frozen=True):
    recording: Id


class Export(OfRecording, frozen=True, kw_only=True):
    format: Literal["html", "csv", "json"] = "html"


class OfHead(OfRecording, frozen=True, kw_only=True):
    place: Count
    head: Count
    batch: Count = 0


class Changed(OfHead, frozen=True, kw_only=True):
    """A head, perhaps changed: see ``variant``."""

    beta: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    hard: bool = False
    mask: bool = True
    position: bool = True


class Tile(Changed, frozen=True, kw_only=True):
    level: Annotated[int, Meta(ge=0, le=24)]
    x: Count
    y: Count


class Row(Changed, frozen=True, kw_only=True):
    row: Count
    direction: Literal["from", "to"] = "from"


class Cell(Changed, frozen=True, kw_only=True):
    row: Count
    key: Count


class Ablate(OfRecording, frozen=True, kw_only=True):
    heads: Annotated[list[tuple[Count, Count]], Meta(min_length=1, max_length=256)]
    by: Literal["zero", "mean"] = "zero"


@ENDPOINTS.post("/api/look", Look)
def look(lab: Lab, asked: Look) -> dict[str, Any]:
    """Runs a model on a text or a picture, every head watched: a job, whose result names the recording."""
    model = lab.get(asked.model, "model")
    reads = model.about["reads"]
    if reads == "image" and not asked.image:
        raise ValueError(f"{model.title} reads pictures; give one")
    if reads != "image" and not asked.text.strip():
        raise ValueError("the text is empty: there is nothing to read")
    name, folder = lab.new_recording()
    title = asked.title or (" ".join(asked.text.split())[:60] if reads != "image" else "a picture")
    args = {
        **{"model": str(model.folder), "recording": name, "folder": str(folder), "text": asked.text},
        **{"target": asked.target, "image": asked.image, "tokens": asked.tokens, "layers": asked.layers},
    }
    return lab.jobs.start(
        "look", args, lambda result: lab.made(name, title, model), lambda: shutil.rmtree(folder, ignore_errors=True)
    ).to_dict()


@ENDPOINTS.post("/api/look/kinds", OfModel)
def kinds(lab: Lab, asked: OfModel) -> dict[str, Any]:
    """Scores every head of a model on probes, and names it: a job, the one under way where there is one."""
    model = lab.get(asked.model, "model")
    args = {"model": str(model.folder), "stamp": stamp(model.folder)}
    for job in lab.jobs.all():
        if job.kind == "kinds" and job.args == args and job.state not in ENDED and not job.cancelled:
            return job.to_dict()
    return lab.jobs.start("kinds", args, lambda result: keep_kinds(lab, args["stamp"], result["kinds"])).to_dict()


@ENDPOINTS.get("/api/look/recording", OfRecording)
def recording(lab: Lab, asked: OfRecording) -> dict[str, Any]:
    """A recording: its text, its places, and every head's numbers and small map."""
    return recording_answer(lab, lab.get(asked.recording, "recording"), lab.seen(asked.recording))


@ENDPOINTS.get("/api/look/head", OfHead)
def head(lab: Lab, asked: OfHead) -> dict[str, Any]:
    """One head: its profile, its entropy along the text, its numbers."""
    return head_answer(*_head(lab, asked), asked.batch)


@ENDPOINTS.get("/api/look/levels", Changed)
def levels(lab: Lab, asked: Changed) -> dict[str, Any]:
    """The sizes of a head's map, and how dark each zoom level is; makes the coarse levels, which are then kept."""
    found = _pyramid(lab, asked)
    dark = lab.cached((asked.recording, "dark", *_key(asked)), lambda x: 8 * len(x), found.darkest)
    return {"n": found.n, "m": found.m, "tile": TILE, "top": found.top, "darkest": dark}


@ENDPOINTS.get("/api/look/tile", Tile)
def tile(lab: Lab, asked: Tile) -> Bytes:
    """One tile of a head's map: float32, rows of queries, at most 256 × 256 cells."""
    return _numbers(_pyramid(lab, asked).tile(asked.level, asked.x, asked.y))


@ENDPOINTS.get("/api/look/row", Row)
def row(lab: Lab, asked: Row) -> Bytes:
    """The exact weights of one query on all keys, or of all queries on one key: float32."""
    found = _pyramid(lab, asked)
    of, what = (found.n, "query") if asked.direction == "from" else (found.m, "key")
    _inside(asked.row, of, what)
    if asked.direction == "to":
        return _numbers(found.column(asked.row))
    return _numbers(found.call.weights(found.batch, found.head, asked.row, None)[0])


@ENDPOINTS.get("/api/look/why", Cell)
def why(lab: Lab, asked: Cell) -> dict[str, Any]:
    """How one weight came about: product, scale, softcap, biases, mask, softmax."""
    found = _pyramid(lab, asked)
    _inside(asked.row, found.n, "query")
    _inside(asked.key, found.m, "key")
    return why_answer(found.call, found.batch, found.head, asked.row, asked.key)


@ENDPOINTS.post("/api/look/ablate", Ablate)
def ablate(lab: Lab, asked: Ablate) -> dict[str, Any]:
    """Takes heads out, and says what becomes of the next token and of the loss: a job."""
    one, seen = lab.get(asked.recording, "recording"), lab.seen(asked.recording)
    model = lab.model_of(one)
    if model is None:
        raise ValueError("the recording's model is not open here; open its folder too")
    words = seen.about.get("tokens")
    ids = seen.about.get("ids")
    if not isinstance(ids, list) or not isinstance(words, list):
        raise ValueError("the recording does not say which tokens were read; run the text anew in this lab")
    heads = []
    for place, head in asked.heads:
        path, observation = _place(lab, asked.recording, place)
        observation.at(head)
        heads.append([path, head])
    return lab.jobs.start("ablate", {"model": str(model.folder), "ids": ids, "heads": heads, "by": asked.by}).to_dict()


@ENDPOINTS.get("/api/look/export", Export)
def export(lab: Lab, asked: Export) -> Bytes:
    """A recording as one offline page, or its heads' numbers as CSV or JSON: a file."""
    seen = lab.seen(asked.recording)
    make = {"html": seen.to_html, "csv": seen.to_csv, "json": seen.to_json}[asked.format]
    media = {"html": "text/html", "csv": "text/csv", "json": "application/json"}[asked.format]
    return Bytes(make().encode("utf-8"), f"{media}; charset=utf-8", f"{asked.recording}.{asked.format}")


@ENDPOINTS.post("/api/look/close", OfRecording)
def close(lab: Lab, asked: OfRecording) -> dict[str, Any]:
    """Closes a recording; one that the lab made is removed."""
    lab.close_recording(asked.recording)
    return {}


def _head(lab: Lab, asked: OfHead) -> tuple[Observation, int]:
    """What was seen at a place, and where the head stands in it."""
    _, observation = _place(lab, asked.recording, asked.place)
    return observation, observation.at(asked.head)


def _place(lab: Lab, recording: str, number: int) -> tuple[str, Observation]:
    """A place by its number: the module's path, and what was seen there."""
    found = list(lab.seen(recording).each().items())
    _inside(number, len(found), "place")
    name, observation = found[number]
    return re.sub(r" \(\d+\)$", "", name), observation  # calls that cannot be one are numbered


def _key(asked: Changed) -> tuple[Any, ...]:
    return asked.place, asked.head, asked.batch, asked.beta, asked.hard, asked.mask, asked.position


def _pyramid(lab: Lab, asked: Changed) -> Pyramid:
    def make() -> Pyramid:
        observation, at = _head(lab, asked)
        call, entry = _kept(observation, asked.batch)
        call = _of_head(call, entry, at)
        if observation.counted is None:
            raise ValueError("calls of unequal sizes were merged here; there is no one map of them")
        variant = Variant(asked.beta, asked.hard, asked.mask, asked.position)
        rotary = None
        if not asked.position:
            model = lab.model_of(lab.get(asked.recording, "recording"))
            rotary = rotary_of(None if model is None else model.folder, _place(lab, asked.recording, asked.place)[0])
            if rotary is None and not call.scores.terms:
                raise ValueError("this head's positions cannot be left out: they are part of its input")
        return Pyramid(changed(call, variant, rotary), 0, 0, observation.counted[asked.batch, at])

    return lab.cached((asked.recording, "map", *_key(asked)), lambda x: x.bytes, make)


def _kept(observation: Observation, batch: int) -> tuple[KeptCall, int]:
    """The call that holds a batch entry, and its number in it."""
    for call in observation.kept:
        if batch < call.batches:
            assert isinstance(call, KeptCall)
            return call, batch
        batch -= call.batches
    if not observation.kept:
        raise ValueError(
            "q and k of this recording were not kept, so that there are no exact weights; regard look --keep keeps"
        )
    raise Gone("there is no such batch entry")


def _of_head(call: KeptCall, entry: int, head: int) -> KeptCall:
    """One head of one batch entry alone: what is changed and kept of it is no more than that."""
    group = head * call.k.shape[1] // call.q.shape[1]
    q, k = call.q[entry : entry + 1, head : head + 1], call.k[entry : entry + 1, group : group + 1]
    return KeptCall(q, k, call.scores.select(entry, head))


def _inside(index: int, size: int, what: str) -> None:
    if index >= size:
        raise ValueError(f"there is no {what} {index}; there are {size}" if size else f"there is no {what}")


def _numbers(values: Tensor) -> Bytes:
    data = values.detach().float().contiguous()
    assert math.prod(data.shape) == data.numel() and data.dtype == torch.float32
    shape = ",".join(map(str, data.shape))
    return Bytes(data.numpy().astype("<f4").tobytes(), headers=(("x-shape", shape),))
