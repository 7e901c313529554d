"""The tasks of regard.training in small sizes, for fast tests."""

from __future__ import annotations

import torch

from regard.training._task import Task
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
    task = kind(kind.default_recipe.with_changes({**SMALL[name], **changes}))
    task.prepare()
    task.open()
    return task


def fresh(task: Task) -> torch.nn.Module:
    torch.manual_seed(0)
    return task.model().eval()
