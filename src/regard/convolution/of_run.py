"""Heads of a trained model of pictures replaced by convolutions: what it does to accuracy, and to the time it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from regard.convolution.replace import Comparison, Replaced, compare, replace, swap
from regard.models.relative_attention import RelativeAttention
from regard.shapes import integer
from regard.training.folder import read_run
from regard.training.tasks.picture_task import PictureTask
from regard.training.train import task_of, trained

__all__ = ["ReplacedRun", "replace_in_run"]

LOOKED_AT = 16  # held-out pictures on which heads are looked at: exact weights of each are taken
LARGEST = 128  # pixels a side: attention compares each with each


@dataclass(frozen=True)
class ReplacedRun:
    """``accuracy`` before and after, on all held-out pictures; ``larger`` compares both at ``side`` pixels a side."""

    replaced: Replaced
    accuracy: tuple[float, float]
    pictures: int
    side: int
    larger: Comparison


def replace_in_run(
    folder: str | os.PathLike[str], threshold: float = 0.9, *, radius: int = 3, side: int = 64
) -> ReplacedRun:
    """The best model of a run of pictures, with heads of ``fit ≥ threshold`` replaced.

    Heads are looked at on some held-out pictures. A model with the quadratic encoding is the same at any size: it is
    also run on a random picture of ``side`` pixels a side, with the kernels found on small ones. Of other models
    ``side`` must be the size that they read.
    """
    path = Path(folder)
    name, recipe = read_run(path)
    kind = task_of(name)
    if not issubclass(kind, PictureTask):
        raise ValueError(f"{path} is a run of {name}; heads are replaced in runs of pictures: digits and pixels")
    task = kind(kind.recipe.changed(recipe), path / "data")
    task.open()
    model = trained(path)
    integer("side", side, least=1, most=LARGEST)
    if side != task.side and not isinstance(model, RelativeAttention):
        raise ValueError(f"side is {side}; {type(model).__name__} reads pictures of {task.side} alone")
    larger = model if side == task.side else model.resized(side)  # type: ignore[operator]
    images = torch.cat([batch["images"] for batch in task.checks()])
    done = replace(model, threshold, inputs=images[:LOOKED_AT], radius=radius, grid=task.grid)
    scores = [_accuracy(task, one) for one in (model, done.model.eval())]
    one = torch.rand(1, task.channels, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1
    grid = (side // task.patch, side // task.patch)
    seen = compare(larger, swap(larger, done.swapped, grid=grid), one, repeat=3)
    return ReplacedRun(done, (scores[0], scores[1]), len(images), side, seen)


def _accuracy(task: PictureTask, model: nn.Module) -> float:
    sums: dict[str, float] = {}
    with torch.no_grad():
        for batch in task.checks():
            for name, value in task.check(model, batch).items():
                sums[name] = sums.get(name, 0.0) + value
    return task.scores(sums)["accuracy"]
