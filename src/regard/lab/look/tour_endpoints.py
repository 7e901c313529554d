"""Endpoints of the tour of the Look page: the model it is about, and which earlier heads a head depends on."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta

from regard import models
from regard._errors import RegardError
from regard.lab.endpoint import Endpoints, NotFound, Request
from regard.lab.look.endpoints import Index
from regard.lab.shared_endpoints import Id
from regard.lab.workspace import Workspace

ENDPOINTS = Endpoints()
MAX_SOURCES = 64  # ablated heads; each is one more run of the model

HeadPair = tuple[Index, Index]  # place and head


class SourcesRequest(Request, frozen=True):
    """Name a head (``place``, ``head``) and ``sources``, heads of earlier layers as pairs (place, head)."""

    recording: Id
    place: Index
    head: Index
    sources: Annotated[list[HeadPair], Meta(min_length=1, max_length=MAX_SOURCES)]


@ENDPOINTS.post("/api/look/bundled")
def open_bundled_model(workspace: Workspace, request: Any) -> dict[str, Any]:
    """Open the model that comes with the package, if it is not open yet, and return it."""
    return workspace.open(models.bundled()).to_dict()


@ENDPOINTS.post("/api/look/sources", SourcesRequest)
def find_sources(workspace: Workspace, request: SourcesRequest) -> dict[str, Any]:
    """Measure a head's induction on a text with each earlier head ablated in turn. Starts a job."""
    model = workspace.model_of(workspace.get(request.recording, "recording"))
    if model is None:
        raise RegardError("the recording's model is not open; open its folder too")
    token_ids = workspace.recording(request.recording).metadata.get("ids")
    if not isinstance(token_ids, list):
        raise RegardError("the recording has no token ids; record the text again in this lab")
    sources = []
    for place, head in request.sources:
        if place >= request.place:
            raise RegardError(f"sources must be in layers before place {request.place}, got place {place}")
        sources.append(_head(workspace, request.recording, place, head))
    args = {
        "model": str(model.folder),
        "ids": token_ids,
        "target": _head(workspace, request.recording, request.place, request.head),
        "sources": sources,
    }
    return workspace.jobs.start("sources", args).to_dict()


def _head(workspace: Workspace, recording_id: str, place: int, head: int) -> tuple[str, int]:
    """Return the module path of a layer and the head's number; raise an error if there is no such head."""
    layers = list(workspace.recording(recording_id).observations().items())
    if place >= len(layers):
        raise NotFound(f"place must be below {len(layers)}, got {place}")
    name, observation = layers[place]
    observation.head_index(head)
    return re.sub(r" \(\d+\)$", "", name), head  # calls that cannot be merged are numbered: "path (2)"
