"""Endpoints that all pages of the lab use: what is open, jobs, and the glossary."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from regard.lab.endpoint import Endpoints, Request
from regard.lab.glossary import read_glossary
from regard.lab.workspace import Workspace

ENDPOINTS = Endpoints()

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+$", max_length=120)]  # of a model, a recording, a run or a job


class JobState(Request, frozen=True):
    """Request a job's state once its ``seq`` is larger than ``after``, or when ``wait`` seconds have passed."""

    after: Annotated[int, Meta(ge=-1, le=2**31)] = -1
    wait: Annotated[float, Meta(ge=0, le=20)] = 0.0


class CancelJob(Request, frozen=True):
    job: Id


class UndoClose(Request, frozen=True):
    """Name a recording or a run that was closed."""

    item: Id


@ENDPOINTS.get("/api/workspace")
def open_items(workspace: Workspace, request: Any) -> dict[str, Any]:
    """List the open models, recordings and runs, each with its id."""
    return workspace.to_dict()


@ENDPOINTS.get("/api/glossary")
def list_terms(workspace: Workspace, request: Any) -> dict[str, Any]:
    """List the terms of the glossary with their meanings, by group."""
    return {"groups": read_glossary()}


@ENDPOINTS.post("/api/workspace/undo", UndoClose)
def undo_close(workspace: Workspace, request: UndoClose) -> dict[str, Any]:
    """Open a recording or a run again that was closed a while ago."""
    return workspace.reopen(request.item).to_dict()


@ENDPOINTS.get("/api/jobs")
def list_jobs(workspace: Workspace, request: Any) -> dict[str, Any]:
    """List all current and recent jobs, without their results."""
    return {"jobs": [job.to_dict() | {"result": None} for job in workspace.jobs.all()]}


@ENDPOINTS.post("/api/jobs/cancel", CancelJob)
def cancel_job(workspace: Workspace, request: CancelJob) -> dict[str, Any]:
    """Stop a job."""
    return workspace.jobs.cancel(request.job).to_dict()
