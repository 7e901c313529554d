"""The base class of training tasks: data, a model, a loss, a held-out score and the probes of the heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard._errors import RegardTypeError
from regard.interp._probes import Probe
from regard.training._recipe import Recipe

Batch = dict[str, Tensor]  # the first dimension of every tensor counts examples


class Task(ABC):
    """Base class of tasks: a model, its examples, its loss and its evaluation on held-out examples.

    Everything that a task returns depends only on the recipe and the step. A run that is killed and resumed therefore
    sees the same examples as one that was not.

    - ``recipe``: the settings of this run.
    - ``prepared``: the run's folder for data that is slow to prepare (a tokenizer, token ids). ``prepare`` writes it
      once; other processes and later runs read it. None keeps everything in memory.

    A task of your own sets the class attributes and implements the abstract methods, as the tasks of this package do:

    >>> from regard.training.tasks import TASKS
    >>> task = TASKS["repeats"](TASKS["repeats"].default_recipe)
    >>> batch = task.batch(step=0)
    >>> batch["ids"].shape, task.count_predictions(batch), task.loss(task.model(), batch).ndim
    (torch.Size([64, 65]), 1160, 0)
    >>> [probe.name for probe in task.probes()], task.score
    (['natural', 'repeated', 'random'], 'accuracy')
    """

    name: ClassVar[str]
    description: ClassVar[str]  # one line for people
    default_recipe: ClassVar[Recipe]
    score: ClassVar[str]  # the held-out value that decides which weights are best: a key of ``scores``
    higher_is_better: ClassVar[bool] = True  # whether a larger score is better
    unit: ClassVar[str] = "tokens"  # what is predicted

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        self.recipe = recipe
        self.prepared = prepared

    def prepare(self) -> None:  # noqa: B027 (most tasks make their data on the fly)
        """Prepare data that takes long and write it to ``prepared``; one process calls this before ``open``."""

    def open(self) -> None:  # noqa: B027
        """Read what ``prepare`` wrote; every process calls this before any other method."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model; the caller has seeded torch's generator."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return the examples of a step, counted from 0."""

    @abstractmethod
    def count_predictions(self, batch: Batch) -> int:
        """Return the number of predictions in a batch: the summed loss is divided by it."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss, summed over the predictions of a batch, so that the pieces of a batch add up."""

    @abstractmethod
    def held_out_batches(self) -> Sequence[Batch]:
        """Return the held-out examples, in batches that fit into memory."""

    @abstractmethod
    def evaluate_batch(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Return sums over a held-out batch or a part of it (correct answers, number of answers) for ``scores``."""

    @abstractmethod
    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the held-out values, "loss" and ``score`` among them, from the sums over all held-out batches."""

    @abstractmethod
    def probes(self) -> Sequence[Probe]:
        """Return the inputs on which the heads are recorded: "natural" first, then "repeated" and "random" if any.

        Return an empty list if the model has no heads; then nothing is recorded.
        """

    def run_probe(self, model: nn.Module, inputs: Tensor) -> Any:
        """Run the model on the ids or images ``[B, …]`` of a probe."""
        return model(inputs)

    @property
    def grid(self) -> tuple[int, int] | None:
        """(height, width) of the patches of an image task; None for other tasks."""
        return None

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a model folder that ``regard.models.load`` reads, and ``transformers`` if it knows the architecture."""
        save = getattr(model, "save", None)
        if not callable(save):
            raise RegardTypeError(f"{type(model).__name__} has no method save; override Task.save")
        save(folder)


def slice_batch(batch: Batch, part: slice) -> Batch:
    """Return some examples of a batch."""
    return {name: x[part] for name, x in batch.items()}


def held_out_scores(task: Task, model: nn.Module) -> dict[str, float]:
    """Return the scores of a model on all held-out examples, in one process; call ``model.eval()`` before."""
    sums: dict[str, float] = {}
    with torch.no_grad():
        for batch in task.held_out_batches():
            for name, value in task.evaluate_batch(model, batch).items():
                sums[name] = sums.get(name, 0.0) + value
    return task.scores(sums)


def seeded_generator(seed: int, *purpose: int) -> torch.Generator:
    """Return a generator seeded by a splitmix64 hash of the arguments; other arguments give unrelated numbers."""
    mixed = 0
    for number in (seed, *purpose):
        mixed = (mixed + 0x9E3779B97F4A7C15 + number) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return torch.Generator().manual_seed(mixed & 0x7FFFFFFFFFFFFFFF)
