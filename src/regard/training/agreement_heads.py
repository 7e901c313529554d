"""Which heads carry agreement: what accuracy each is worth, and how much it looks from the verb to the subject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from regard.observables import Observation, Observe
from regard.training.task import Batch
from regard.training.tasks.agreement import AgreementTask
from regard.watching import ablate, watch

__all__ = ["carriers"]


@torch.no_grad()
def carriers(task: AgreementTask, model: nn.Module) -> list[dict[str, Any]]:
    """``lost = accuracy − accuracy without the head``, ``attention = mean A[verb's place, subject]``, a row a head

    Rows ``{path, head, lost, attention}``, the costliest head first, over the task's held-out sentences. A head is
    taken out by its mean: what it tells apart is gone, what it always says stays. The verb's place is the position
    whose output predicts the verb.
    """
    batches = task.checks()
    training = model.training
    model.eval()
    try:
        before = _accuracy(task, model, batches)
        looks = _attention(task, model, batches[0])
        rows = []
        for (path, head), attention in looks.items():
            with ablate(model, [(path, head)], by="mean", over=batches[0]["ids"][:, :-1]):
                after = _accuracy(task, model, batches)
            rows.append({"path": path, "head": head, "lost": before - after, "attention": attention})
    finally:
        model.train(training)
    return sorted(rows, key=lambda row: -row["lost"])


def _accuracy(task: AgreementTask, model: nn.Module, batches: Sequence[Batch]) -> float:
    right = sum(int(task.agrees(model(batch["ids"][:, :-1]), batch).sum()) for batch in batches)
    return right / sum(len(batch["ids"]) for batch in batches)


def _attention(task: AgreementTask, model: nn.Module, batch: Batch) -> dict[tuple[str, int], float]:
    """The mean weight from the verb's place to the subject, by path and head."""
    rows, keys = task.places(batch)
    with watch(model, Observe(keep=True)) as seen:
        model(batch["ids"][:, :-1])
    found = {}
    for path in seen:
        observation: Observation = seen[path]
        for head in observation.heads:
            weights = [
                float(observation.weights(head, rows[b : b + 1], keys[b : b + 1], batch=b)) for b in range(len(rows))
            ]
            found[path, head] = sum(weights) / len(weights)
    return found
