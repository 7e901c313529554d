"""Find the heads that carry subject–verb agreement: by ablation, and by their attention from verb to subject."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from regard._observables import Observation, Observe
from regard.interp import ablate, watch
from regard.training._recorder import evaluation_mode
from regard.training._task import Batch, held_out_scores
from regard.training.tasks.agreement import AgreementTask


def rank_agreement_heads(task: AgreementTask, model: nn.Module) -> list[dict[str, Any]]:
    """Rank the heads of a model by the accuracy that is lost when a head is ablated.

        lost      = accuracy − accuracy with the head replaced by its mean
        attention = mean A[position that predicts the verb, position of the subject]

    Replacing a head by its mean output removes only the part that varies with the input; its constant part stays.

    Returns rows ``{path, head, lost, attention}`` over the task's held-out sentences, the largest ``lost`` first.
    """
    batch = task.held_out_batches()[0]
    with evaluation_mode(model, torch.device("cpu")):
        accuracy = held_out_scores(task, model)["accuracy"]
        rows = []
        for (path, head), attention in _attention_to_subject(task, model, batch).items():
            with ablate(model, [(path, head)], by="mean", over=batch["ids"][:, :-1]):
                lost = accuracy - held_out_scores(task, model)["accuracy"]
            rows.append({"path": path, "head": head, "lost": lost, "attention": attention})
    return sorted(rows, key=lambda row: -row["lost"])


def _attention_to_subject(task: AgreementTask, model: nn.Module, batch: Batch) -> dict[tuple[str, int], float]:
    """Return the mean attention weight from the position that predicts the verb to the subject, by path and head."""
    rows, keys = task.verb_and_subject_positions(batch)
    with watch(model, Observe(keep=True)) as recording:
        model(batch["ids"][:, :-1])
    means = {}
    for path in recording:
        observation: Observation = recording[path]
        for head in observation.heads:
            total = 0.0
            for b in range(len(rows)):
                total += float(observation.weights(head, rows[b : b + 1], keys[b : b + 1], batch=b))
            means[path, head] = total / len(rows)
    return means
