"""Replace heads by convolutions in a trained image model of a run folder, and measure accuracy and time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from regard._checks import check_integer
from regard._errors import RegardError
from regard.convolution._replace import Comparison, Replacement, compare, replace, swap
from regard.training._run_folder import read_run
from regard.training._task import held_out_scores
from regard.training._train import load_trained_model, task_class
from regard.training.image_models.relative_attention import RelativeAttention
from regard.training.tasks.image_task import ImageTask

OBSERVED_PICTURES = 16  # few, because the exact weights of each picture are computed
LARGEST_SIDE = 128  # pixels; the cost of attention grows with the fourth power of the side


@dataclass(frozen=True)
class ReplacementInRun:
    """The result of ``replace_in_run``.

    - ``replacement``: the models and the kernels.
    - ``accuracy``: before and after, on all held-out pictures.
    - ``pictures``: how many held-out pictures there are.
    - ``side``, ``larger``: the comparison of both models on a picture of ``side`` pixels per side.
    """

    replacement: Replacement
    accuracy: tuple[float, float]
    pictures: int
    side: int
    larger: Comparison


def replace_in_run(
    folder: str | os.PathLike[str], threshold: float = 0.9, *, radius: int = 3, side: int = 64
) -> ReplacementInRun:
    """Replace the heads with ``fit ≥ threshold`` in the best model of a run on pictures.

    The heads are observed on some held-out pictures. Both models are also compared on a random picture of ``side``
    pixels per side, with the same kernels. A model with the quadratic encoding works at any size; for other models
    ``side`` must be the size that they read.
    """
    path = Path(folder)
    name, recipe = read_run(path)
    task_type = task_class(name)
    if not issubclass(task_type, ImageTask):
        raise RegardError(f"{path} must be a run on pictures (digits or pixels), got a run of {name}")
    task = task_type(task_type.default_recipe.with_changes(recipe), path / "data")
    task.open()
    model = load_trained_model(path)

    check_integer("side", side, least=1, most=LARGEST_SIDE)
    larger = model
    if side != task.side:
        if not isinstance(model, RelativeAttention):
            raise RegardError(f"side must be {task.side}, the size that {type(model).__name__} reads, got {side}")
        larger = model.resized(side)

    images = torch.cat([batch["images"] for batch in task.held_out_batches()])
    result = replace(model, threshold, inputs=images[:OBSERVED_PICTURES], radius=radius, grid=task.grid)
    accuracy = (held_out_scores(task, model)["accuracy"], held_out_scores(task, result.model.eval())["accuracy"])

    picture = torch.rand(1, task.channels, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1
    grid = (side // task.patch, side // task.patch)
    comparison = compare(larger, swap(larger, result.replaced, grid=grid), picture, repeat=3)
    return ReplacementInRun(result, accuracy, len(images), side, comparison)
