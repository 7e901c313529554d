"""Tasks that a test can afford."""

from __future__ import annotations

import torch

from regard.training.task import Task
from regard.training.tasks import TASKS

SMALL = {
    "agreement": {"batch": 12, "data.checks": 40},
    "repeats": {"batch": 12, "data.checks": 40},
    "dates": {"batch": 12, "data.checks": 40},
    "digits": {"batch": 12},
    "digits of attention": {"batch": 12, "model.kind": "attention"},
    "pixels": {"batch": 12},
    "pixels by content": {"batch": 12, "model.kind": "content"},
}


def made(name: str, **changes: object) -> Task:
    kind = TASKS[name.split()[0]]
    task = kind(kind.recipe.changed({**SMALL[name], **changes}))
    task.prepare()
    task.open()
    return task


def fresh(task: Task) -> torch.nn.Module:
    torch.manual_seed(0)
    return task.model().eval()
