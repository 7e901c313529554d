"""What all rooms of the lab share: what is open, and jobs."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from regard.lab.endpoints import Asked, Endpoints
from regard.lab.lab import Lab

__all__ = ["ENDPOINTS", "Id", "JobState"]

ENDPOINTS = Endpoints()

Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+$", max_length=120)]  # of a model, a recording, a run or a job


class JobState(Asked, frozen=True):
    """``after``: the last ``seq`` that was seen; the answer comes once there is a later one, or after ``wait`` s."""

    after: Annotated[int, Meta(ge=-1, le=2**31)] = -1
    wait: Annotated[float, Meta(ge=0, le=20)] = 0.0


class Cancel(Asked, frozen=True):
    job: Id


@ENDPOINTS.get("/api/workspace")
def workspace(lab: Lab, asked: Any) -> dict[str, Any]:
    """What is open: models, recordings and runs, each with its id."""
    return lab.to_dict()


@ENDPOINTS.get("/api/jobs")
def jobs(lab: Lab, asked: Any) -> dict[str, Any]:
    """All jobs that are remembered, without their results."""
    return {"jobs": [job.to_dict() | {"result": None} for job in lab.jobs.all()]}


@ENDPOINTS.post("/api/jobs/cancel", Cancel)
def cancel(lab: Lab, asked: Cancel) -> dict[str, Any]:
    """Asks a job to stop."""
    return lab.jobs.cancel(asked.job).to_dict()
