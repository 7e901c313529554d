"""The endpoint of the Look page that splits a score over pairs of parts of the model."""

from __future__ import annotations

import re
from typing import Any

from regard._errors import RegardError
from regard.interp._token_labels import is_cross_attention
from regard.lab.endpoint import Endpoints
from regard.lab.look.endpoints import Index, RecordingRequest
from regard.lab.workspace import Workspace

ENDPOINTS = Endpoints()


class ScorePairsRequest(RecordingRequest, frozen=True, kw_only=True):
    """Name one score of the head as trained: ``place`` is the index of its layer in the recording."""

    place: Index
    head: Index
    row: Index
    key: Index


@ENDPOINTS.post("/api/look/pairs", ScorePairsRequest)
def split_score(workspace: Workspace, request: ScorePairsRequest) -> dict[str, Any]:
    """Split the score of a query and a key over pairs of parts of the model. Starts a job."""
    model = workspace.model_of(workspace.get(request.recording, "recording"))
    if model is None:
        raise RegardError("the recording's model is not open; open its folder too")
    recording = workspace.recording(request.recording)
    token_ids = recording.metadata.get("ids")
    layers = list(recording.observations().items())
    if request.place >= len(layers):
        raise RegardError(f"place must be below {len(layers)}, got {request.place}")
    name, observation = layers[request.place]
    path = re.sub(r" \(\d+\)$", "", name)  # calls that cannot be merged are numbered: "path (2)"
    observation.head_index(request.head)
    if not isinstance(token_ids, list) or observation.n != len(token_ids) or observation.m != len(token_ids):
        raise RegardError("the recording has no token ids of this layer; record the text again in this lab")
    if is_cross_attention(recording.metadata, path):
        raise RegardError(f"{path} reads another sequence, and scores are split in models that read one text")
    for field in ("row", "key"):
        index = getattr(request, field)
        if index >= len(token_ids):
            raise RegardError(f"{field} must be below {len(token_ids)}, got {index}")
    args = {
        "model": str(model.folder),
        "ids": token_ids,
        "path": path,
        "head": request.head,
        "row": request.row,
        "key": request.key,
    }
    return workspace.jobs.start("pairs", args).to_dict()
