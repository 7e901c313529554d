"""Endpoints of the Look page: from the grid of all heads down to one weight and how it is computed."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from regard._errors import RegardError
from regard._observables import Observation
from regard._saved_call import SavedCall
from regard.interp._atlas_store import model_fingerprint, stored_atlas
from regard.interp._token_labels import is_cross_attention
from regard.lab.endpoint import BinaryResponse, Endpoints, NotFound, Request, float32_response
from regard.lab.jobs import FINISHED
from regard.lab.look.changed_scores import (
    Variant,
    apply_variant,
    observe_variant,
    reason_no_weights,
    reason_not_measured,
    rotary_of,
)
from regard.lab.look.map_pyramid import TILE, Pyramid
from regard.lab.look.responses import head_response, is_hidden, recording_response, weight_response
from regard.lab.look.text_scores import score_text, token_numbers
from regard.lab.saved_items import remove_unfinished
from regard.lab.shared_endpoints import Id
from regard.lab.workspace import Workspace
from regard.positions import Rotary

ENDPOINTS = Endpoints()
MAX_CHARACTERS = 2_000_000  # the longest text
MAX_IMAGE_BYTES = 8 * 2**20  # of the image file; its base64 text is a third longer
IMAGE_URL = r"^$|^data:image/(png|jpeg|webp);base64,"
MAX_TITLE = 60  # characters of a title that is made from a text
MEDIA_TYPES = {"html": "text/html", "csv": "text/csv", "json": "application/json"}
Index = Annotated[int, Meta(ge=0, le=2**24)]
Text = Annotated[str, Meta(max_length=MAX_CHARACTERS)]


class LookRequest(Request, frozen=True):
    """Run a model on ``text`` (and ``target``, for models that read pairs) or on ``image``, a data URL.

    ``tokens``: the largest number of tokens; ``layers``: a pattern of module paths; ``title``: name of the recording.
    """

    model: Id
    text: Text = ""
    target: Text = ""
    image: Annotated[str, Meta(max_length=MAX_IMAGE_BYTES * 4 // 3 + 64, pattern=IMAGE_URL)] = ""
    tokens: Annotated[int, Meta(ge=1, le=2**17)] | None = None
    layers: Annotated[str, Meta(max_length=120)] = ""
    title: Annotated[str, Meta(max_length=120)] = ""


class ModelRequest(Request, frozen=True):
    model: Id


class RecordingRequest(Request, frozen=True):
    recording: Id


class ExportRequest(RecordingRequest, frozen=True, kw_only=True):
    """``place`` and ``head`` name the head that the offline page shows first."""

    format: Literal["html", "csv", "json"] = "html"
    place: Index | None = None
    head: Index | None = None


class VariantRequest(RecordingRequest, frozen=True, kw_only=True):
    """Name a head and what to change in it: see ``changed_scores.Variant``.

    ``place`` is the index of the head's layer in the recording, ``batch`` the entry of the batch.
    """

    place: Index
    head: Index
    batch: Index = 0
    beta: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    hard: bool = False
    mask: bool = True
    position: bool = True


class TileRequest(VariantRequest, frozen=True, kw_only=True):
    """Name a tile of a head's map: its zoom level, and its place along keys (x) and queries (y)."""

    level: Annotated[int, Meta(ge=0, le=24)]
    x: Index
    y: Index


class RowRequest(VariantRequest, frozen=True, kw_only=True):
    """Name a query (``direction`` "from") or a key (``direction`` "to")."""

    row: Index
    direction: Literal["from", "to"] = "from"


class WeightRequest(VariantRequest, frozen=True, kw_only=True):
    """Name one weight by its query and its key."""

    row: Index
    key: Index


class AblateRequest(RecordingRequest, frozen=True, kw_only=True):
    """Name heads as pairs (place, head), and what replaces their outputs.

    ``position``: the next tokens are compared there and at the positions around it; None means the last token.
    """

    heads: Annotated[list[tuple[Index, Index]], Meta(min_length=1, max_length=256)]
    by: Literal["zero", "mean"] = "zero"
    position: Index | None = None


@ENDPOINTS.post("/api/look", LookRequest)
def look(workspace: Workspace, request: LookRequest) -> dict[str, Any]:
    """Run a model on a text or an image and record every head. Starts a job whose result names the recording."""
    model = workspace.get(request.model, "model")
    reads_images = model.details["reads"] == "image"
    if reads_images and not request.image:
        raise RegardError(f"image is missing: {model.title} reads images")
    if not reads_images and not request.text.strip():
        raise RegardError("text must not be empty")
    title = request.title
    if not title:
        title = "an image" if reads_images else _short_title(request.text)
    item_id, folder = workspace.new_recording()
    args = msgspec.structs.asdict(request) | {"model": str(model.folder), "recording": item_id, "folder": str(folder)}
    job = workspace.jobs.start(
        "look",
        args,
        on_success=lambda result: workspace.add_recording(item_id, title, model),
        on_failure=lambda: remove_unfinished(folder),
    )
    return job.to_dict()


def _short_title(text: str) -> str:
    """Return the first words of a text as the title of its recording; a title that is cut ends with "…"."""
    title = " ".join(text.split())
    if len(title) <= MAX_TITLE:
        return title
    return title[: MAX_TITLE - 1].rstrip() + "…"


@ENDPOINTS.post("/api/look/kinds", ModelRequest)
def score_heads(workspace: Workspace, request: ModelRequest) -> dict[str, Any]:
    """Score every head of a model on probes and find its type. Starts a job, or returns the one that runs."""
    model = workspace.get(request.model, "model")
    args = {"model": str(model.folder), "stamp": model_fingerprint(model.folder)}
    for job in workspace.jobs.all():
        if job.kind == "kinds" and job.args == args and job.state not in FINISHED and not job.cancelled:
            return job.to_dict()
    return workspace.jobs.start("kinds", args).to_dict()


@ENDPOINTS.get("/api/look/recording", RecordingRequest)
def recording(workspace: Workspace, request: RecordingRequest) -> dict[str, Any]:
    """Return a recording: its text, its layers, and every head's numbers and small map."""
    item = workspace.get(request.recording, "recording")
    return recording_response(workspace, item, workspace.recording(request.recording))


@ENDPOINTS.get("/api/look/head", VariantRequest)
def head(workspace: Workspace, request: VariantRequest) -> dict[str, Any]:
    """Return one head: its profile, its entropy along the text, its numbers, and what it does on this text.

    All of them follow the variant. If it cannot be measured, they are those of the trained head, and ``as_trained``
    says why.
    """
    path, observation = _layer(workspace, request.recording, request.place)
    head_index = observation.head_index(request.head)
    variant = _variant(request)
    as_trained = ""
    measured = observation
    if variant != Variant():
        as_trained = reason_not_measured(observation)
        if not as_trained:
            measured = _measured_variant(workspace, request, path, observation)
            head_index = 0

    on_text: dict[str, Any] = {"reason": reason_no_weights(observation)}
    if not on_text["reason"]:
        on_text = _text_scores(workspace, request, path, observation)
    is_cross = is_cross_attention(workspace.recording(request.recording).metadata, path)
    return head_response(measured, head_index, request.batch, as_trained=as_trained, on_text=on_text, is_cross=is_cross)


@ENDPOINTS.get("/api/look/levels", VariantRequest)
def levels(workspace: Workspace, request: VariantRequest) -> dict[str, Any]:
    """Return the size of a head's map and the darkest value of each zoom level. Computes the coarse levels."""
    pyramid = _pyramid(workspace, request)
    key = (request.recording, "dark", request.place, request.head, request.batch, _variant(request))
    darkest = workspace.cache.get(key, lambda values: 8 * len(values), pyramid.darkest)
    return {"n": pyramid.n, "m": pyramid.m, "tile": TILE, "top": pyramid.top, "darkest": darkest}


@ENDPOINTS.get("/api/look/tile", TileRequest)
def tile(workspace: Workspace, request: TileRequest) -> BinaryResponse:
    """Return one tile of a head's map: float32 [queries, keys], at most 256 × 256 cells."""
    return float32_response(_pyramid(workspace, request).tile(request.level, request.x, request.y))


@ENDPOINTS.get("/api/look/row", RowRequest)
def row(workspace: Workspace, request: RowRequest) -> BinaryResponse:
    """Return the exact weights of one query on all keys, or of all queries on one key: float32."""
    pyramid = _pyramid(workspace, request)
    if request.direction == "to":
        _check_index("row", request.row, pyramid.m)
        return float32_response(pyramid.column(request.row))
    _check_index("row", request.row, pyramid.n)
    return float32_response(pyramid.call.weights(pyramid.batch, pyramid.head, request.row, None)[0])


@ENDPOINTS.get("/api/look/why", WeightRequest)
def weight(workspace: Workspace, request: WeightRequest) -> dict[str, Any]:
    """Return how one weight is computed: product, scale, softcap, biases, mask, softmax.

    ``hidden`` tells whether the head as it is set hides the key, and ``hidden_as_trained`` whether its own mask does.
    """
    pyramid = _pyramid(workspace, request)
    _check_index("row", request.row, pyramid.n)
    _check_index("key", request.key, pyramid.m)
    response = weight_response(pyramid.call, pyramid.batch, pyramid.head, request.row, request.key)
    _, observation = _layer(workspace, request.recording, request.place)
    trained_call, entry = _saved_call(observation, request.batch)
    head_index = observation.head_index(request.head)
    hidden_as_trained = is_hidden(trained_call, entry, head_index, request.row, request.key)
    return response | {"hidden_as_trained": hidden_as_trained}


@ENDPOINTS.post("/api/look/ablate", AblateRequest)
def ablate(workspace: Workspace, request: AblateRequest) -> dict[str, Any]:
    """Ablate heads and compare the next tokens and the loss of each token. Starts a job."""
    model = workspace.model_of(workspace.get(request.recording, "recording"))
    if model is None:
        raise RegardError("the recording's model is not open; open its folder too")
    metadata = workspace.recording(request.recording).metadata
    token_ids = metadata.get("ids")
    if not isinstance(token_ids, list) or not isinstance(metadata.get("tokens"), list):
        raise RegardError("the recording has no token ids; record the text again in this lab")
    heads = []
    for place, head_number in request.heads:
        path, observation = _layer(workspace, request.recording, place)
        observation.head_index(head_number)  # raises an error if the layer has no such head
        heads.append([path, head_number])
    position = len(token_ids) - 1
    if request.position is not None:
        _check_index("position", request.position, len(token_ids))
        position = request.position
    args = {"model": str(model.folder), "ids": token_ids, "heads": heads, "by": request.by, "position": position}
    return workspace.jobs.start("ablate", args).to_dict()


@ENDPOINTS.get("/api/look/export", ExportRequest)
def export(workspace: Workspace, request: ExportRequest) -> BinaryResponse:
    """Download a recording as one offline HTML page, or its heads' numbers as CSV or JSON."""
    recording = workspace.recording(request.recording)
    item = workspace.get(request.recording, "recording")
    # The files have the types that the Look page shows, if the heads were scored.
    model = workspace.model_of(item)
    atlas = None if model is None else stored_atlas(model.folder)
    if request.format == "html":
        first_head = None
        if request.place is not None and request.head is not None:
            paths = list(recording.observations())
            _check_index("place", request.place, len(paths))
            first_head = (paths[request.place], request.head)
        title = item.title if model is None else f"{model.title}: {item.title}"
        text = recording.to_html(atlas=atlas, title=title, head=first_head)
    elif request.format == "csv":
        text = recording.to_csv(atlas=atlas)
    else:
        text = recording.to_json(atlas=atlas)
    data = text.encode("utf-8", "backslashreplace")  # as write_text does it
    media_type = f"{MEDIA_TYPES[request.format]}; charset=utf-8"
    download = ("content-disposition", f'attachment; filename="{request.recording}.{request.format}"')
    return BinaryResponse(data, media_type, (download,))


@ENDPOINTS.post("/api/look/close", RecordingRequest)
def close(workspace: Workspace, request: RecordingRequest) -> dict[str, Any]:
    """Close a recording. If the lab created it, ``undo`` is the id that opens it again."""
    return {"undo": workspace.close_recording(request.recording)}


def _layer(workspace: Workspace, recording_id: str, place: int) -> tuple[str, Observation]:
    """Return the module path and the observation of a layer, by its index in the recording."""
    layers = list(workspace.recording(recording_id).observations().items())
    _check_index("place", place, len(layers))
    name, observation = layers[place]
    return re.sub(r" \(\d+\)$", "", name), observation  # calls that cannot be merged are numbered: "path (2)"


def _variant(request: VariantRequest) -> Variant:
    return Variant(request.beta, request.hard, request.mask, request.position)


def _pyramid(workspace: Workspace, request: VariantRequest) -> Pyramid:
    """Return the map of a head, from the cache if it is there."""
    variant = _variant(request)

    def compute() -> Pyramid:
        path, observation = _layer(workspace, request.recording, request.place)
        head_index = observation.head_index(request.head)
        # Select one head of one batch entry, so that a variant copies and caches no more than that.
        whole_call, entry = _saved_call(observation, request.batch)
        problem = whole_call.select_head(entry, head_index)
        saved_call = SavedCall(problem.q, problem.k, problem.scores)
        if observation.counted is None:
            raise RegardError("this layer merges calls of different sizes, so it has no single map")
        rotary = _rotary(workspace, request, path, saved_call)
        counted = observation.counted[request.batch, head_index]
        return Pyramid(apply_variant(saved_call, variant, rotary), 0, 0, counted)

    key = (request.recording, "map", request.place, request.head, request.batch, variant)
    return workspace.cache.get(key, lambda pyramid: pyramid.bytes, compute)


def _rotary(workspace: Workspace, request: VariantRequest, path: str, saved_call: SavedCall) -> Rotary | None:
    """Return the rotation that a request without positions has to undo, or None if there is none."""
    if request.position:
        return None
    model = workspace.model_of(workspace.get(request.recording, "recording"))
    rotary = rotary_of(None if model is None else model.folder, path)
    if rotary is None and not saved_call.scores.terms:
        raise RegardError("position cannot be false for this head: its positions are part of its input")
    return rotary


def _measured_variant(
    workspace: Workspace, request: VariantRequest, path: str, observation: Observation
) -> Observation:
    """Return the observation of a variant of a head, from the cache if it is there."""
    variant = _variant(request)
    head_index = observation.head_index(request.head)

    def compute() -> Observation:
        saved_call, _ = _saved_call(observation, 0)
        return observe_variant(observation, head_index, variant, _rotary(workspace, request, path, saved_call))

    key = (request.recording, "measured", request.place, request.head, variant)
    # About ten row values of at most 8 bytes each.
    return workspace.cache.get(key, lambda measured: 80 * int(measured.rows.sum()) + 1000, compute)


def _text_scores(workspace: Workspace, request: VariantRequest, path: str, observation: Observation) -> dict[str, Any]:
    """Return what a head, or a variant of it, does on this text; from the cache if it is there."""
    metadata = workspace.recording(request.recording).metadata
    key = (request.recording, "on text", request.place, request.head, request.batch, _variant(request))

    def compute() -> dict[str, Any]:
        tokens = token_numbers(metadata, path, observation.n, observation.m)
        return score_text(_pyramid(workspace, request), tokens)

    return workspace.cache.get(key, lambda _: 1000, compute)


def _saved_call(observation: Observation, batch: int) -> tuple[SavedCall, int]:
    """Return the saved call that holds an entry of the batch, and the index of the entry in that call."""
    if not observation.saved_calls:
        raise RegardError("this recording has no q and k, so no exact weights; record it with regard look --keep")
    if batch >= sum(saved_call.batch_size for saved_call in observation.saved_calls):
        raise NotFound("no such batch entry")
    saved_call, entry = observation.find_saved_call(batch)
    assert isinstance(saved_call, SavedCall)
    return saved_call, entry


def _check_index(name: str, index: int, size: int) -> None:
    if index >= size:
        raise RegardError(f"{name} must be below {size}, got {index}")
