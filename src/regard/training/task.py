"""What is learned: data, a model for it, a loss, a score, and what its heads are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.training.recipe import Recipe
from regard.watching.probes import Probe

__all__ = ["Batch", "Task", "drawn"]

Batch = dict[str, Tensor]  # tensors whose first dimension counts examples


class Task(ABC):
    """What is learned: a model, its examples, its loss, and what is asked on held-out examples.

    Everything a task gives is a function of the recipe (and of a step) alone: a run that is killed and goes on sees
    what it would have seen. ``prepared`` is the run's folder for data that is slow to make (a tokenizer, token ids).
    ``prepare`` writes it once, and another process or a later start reads it.

    A task of your own names itself, has a recipe, and implements what is abstract here; the ones that are there show
    how:

    >>> from regard.training.tasks import TASKS
    >>> task = TASKS["repeats"](TASKS["repeats"].recipe)
    >>> batch = task.batch(step=0)
    >>> batch["ids"].shape, task.count(batch), task.loss(task.model(), batch).ndim
    (torch.Size([64, 65]), 1160, 0)
    >>> [probe.name for probe in task.probes()], task.score
    (['natural', 'repeated', 'random'], 'accuracy')
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one line for people
    recipe: ClassVar[Recipe]  # the default one
    score: ClassVar[str]  # the held-out number that says which weights are best: a key of ``scores``
    higher: ClassVar[bool]  # whether more of it is better
    unit: ClassVar[str] = "tokens"  # what is predicted

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        self.given, self.prepared = recipe, prepared

    def prepare(self) -> None:  # noqa: B027 (most tasks make their data on the fly)
        """Make what is slow to make, and write it to ``prepared``; called by one process, before ``open``."""

    def open(self) -> None:  # noqa: B027
        """Read what ``prepare`` wrote; called by every process, before anything else is asked."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; torch's generator is seeded by the caller."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The examples of a step, counted from 0: a function of the recipe and the step alone."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """How many predictions a batch asks for: what the summed loss is divided by."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss, summed over a batch's predictions, so that pieces of a batch add up."""

    @abstractmethod
    def checks(self) -> Sequence[Batch]:
        """The held-out examples, in batches that fit the memory."""

    @abstractmethod
    def check(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Sums over a held-out batch or a part of it (right answers, how many there were): what ``scores`` divides."""

    @abstractmethod
    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Held-out numbers from the sums of all checks: ``loss`` and ``score`` among them."""

    @abstractmethod
    def probes(self) -> Sequence[Probe]:
        """What the heads are asked as they evolve: ``natural`` first, ``repeated`` and ``random`` where they exist.

        None, and nothing is recorded: for a model that has no heads.
        """

    def ask(self, model: nn.Module, inputs: Tensor) -> Any:
        """Run the model on a probe's ids or pictures ``[B, …]``."""
        return model(inputs)

    @property
    def grid(self) -> tuple[int, int] | None:
        """(height, width) of the patches, of tasks that read pictures."""
        return None

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a model folder that ``regard.models.load`` reads, and ``transformers`` where it knows the family."""
        save = getattr(model, "save", None)
        if not callable(save):
            raise TypeError(f"{type(model).__name__} cannot save itself; override Task.save")
        save(folder)


def drawn(seed: int, *what: int) -> torch.Generator:
    """A generator for one purpose: the same for the same numbers, unrelated for others (a splitmix64 of them)."""
    mixed = 0
    for number in (seed, *what):
        mixed = (mixed + 0x9E3779B97F4A7C15 + number) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return torch.Generator().manual_seed(mixed & 0x7FFFFFFFFFFFFFFF)
