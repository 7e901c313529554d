"""Endpoints of the Attribution page: attribute a prediction to tokens and heads, and patch one head."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from regard._errors import RegardError
from regard.lab.attribution.jobs import MAX_TOKENS
from regard.lab.endpoint import Endpoints, Request
from regard.lab.shared_endpoints import Id
from regard.lab.workspace import Workspace

ENDPOINTS = Endpoints()
MAX_CHARACTERS = 64 * MAX_TOKENS
Position = Annotated[int, Meta(ge=0, le=MAX_TOKENS - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]


class AttributeRequest(Request, frozen=True):
    """Attribute the prediction after ``position`` (None: after the last token).

    ``target`` is the predicted token (None: the most likely one), ``against`` the token whose logit is subtracted.
    """

    model: Id
    text: Annotated[str, Meta(max_length=MAX_CHARACTERS)]
    position: Position | None = None
    target: TokenId | None = None
    against: TokenId | None = None


class PatchRequest(Request, frozen=True):
    """Replace the output of a head, or with ``key`` the value that it reads at this key, by zero or by its mean."""

    model: Id
    ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
    path: Annotated[str, Meta(max_length=200)]
    head: Annotated[int, Meta(ge=0, le=2**16)]
    position: Position
    target: TokenId
    key: Position | None = None
    by: Literal["zero", "mean"] = "zero"
    against: TokenId | None = None


@ENDPOINTS.post("/api/attribution", AttributeRequest)
def attribute(workspace: Workspace, request: AttributeRequest) -> dict[str, Any]:
    """Attribute a prediction to the tokens and heads of a text. Starts a job."""
    if not request.text.strip():
        raise RegardError("text must not be empty")
    return _start(workspace, "attribute", request)


@ENDPOINTS.post("/api/attribution/patch", PatchRequest)
def patch(workspace: Workspace, request: PatchRequest) -> dict[str, Any]:
    """Patch one head, and compare the prediction with and without the patch. Starts a job."""
    if max(request.position, request.key or 0) >= len(request.ids):
        raise RegardError(f"position and key must be below {len(request.ids)}, the number of tokens")
    return _start(workspace, "patch", request)


def _start(workspace: Workspace, kind: str, request: Request) -> dict[str, Any]:
    args = msgspec.structs.asdict(request)
    model = workspace.get(args["model"], "model")
    return workspace.jobs.start(kind, args | {"model": str(model.folder)}).to_dict()
