"""Repeats: random tokens in which a block comes twice; what follows can be looked up, and heads learn to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.models import Model, create
from regard.training.recipe import Recipe
from regard.training.task import Batch, Task, drawn
from regard.training.tasks.common import (
    BEGIN,
    LONGEST,
    NOTHING,
    NUMBERS,
    SPECIAL,
    VOCABULARY,
    check_batch,
    check_sizes,
    in_parts,
    llama,
    repeated,
    summed,
    whole,
    words,
)
from regard.training.tasks.looking_back import said_again
from regard.watching.probes import Probe

__all__ = ["RepeatsTask"]

TRAIN, CHECK = 11, 12  # what is drawn


class RepeatsTask(Task):
    """``<s> … block … block …``: tokens drawn at random, none twice but those of a block that is said again

    The block has ``data.shortest`` … n/2 tokens, and it and its copy begin anywhere (the copy after the block's end).
    Since no other token comes twice, a token of the copy tells exactly what follows: an induction head looks up where
    it stood before and takes the next one. Loss and score are of those tokens alone: the copy without its first one,
    which nothing announces. (A loss over all tokens would teach first of all that what was seen does not come again.)
    Texts are held out by being drawn from another stream: there are more than 10¹⁰⁰, and none is drawn twice.
    """

    name: ClassVar[str] = "repeats"
    about: ClassVar[str] = "random tokens with a repeated block: a small Llama grows induction heads, at once"
    recipe: ClassVar[Recipe] = Recipe(
        task="repeats",
        steps=600,
        batch=64,
        rate=2e-3,
        warmup=100,
        evaluate=25,
        record_every=25,
        model={"d": 64, "heads": 4, "layers": 2, "hidden": 128},
        data={"tokens": 64, "vocabulary": 96, "shortest": 8, "checks": 256},
    )
    score: ClassVar[str] = "accuracy"
    higher: ClassVar[bool] = True

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        self.n = whole(recipe, "data.tokens", 4, LONGEST)
        self.ordinary = whole(recipe, "data.vocabulary", 1, VOCABULARY)
        self.shortest = whole(recipe, "data.shortest", 2, LONGEST)
        self.checked = whole(recipe, "data.checks")
        if self.shortest > self.n // 2:
            raise ValueError(f"data.shortest is {self.shortest}; a block has 2 … {self.n // 2} tokens, half the text")
        if self.ordinary < self.n:
            raise ValueError(f"data.vocabulary is {self.ordinary}; {self.n} different tokens are needed")
        if self.checked * self.ordinary > NUMBERS:  # a text is the beginning of a shuffle of all tokens
            raise ValueError(
                f"data.checks is {self.checked:,} and data.vocabulary {self.ordinary:,}; their product must be at most "
                f"{NUMBERS:,}"
            )
        check_batch(recipe, self.ordinary, "a shuffle of data.vocabulary")
        check_sizes(recipe, 2 * (self.ordinary + len(SPECIAL)), rotary=True)

    def model(self) -> Model:
        vocabulary = (*SPECIAL, *(f"t{i}" for i in range(self.ordinary)))
        config = llama(self.given.model, len(vocabulary), longest=2 * self.n)
        return create(config, beside=words(vocabulary), std=0.05)

    def batch(self, step: int) -> Batch:
        return self.texts(drawn(self.given.seed, TRAIN, step), self.given.batch)

    def texts(self, draw: torch.Generator, count: int) -> Batch:
        """``ids [count, n + 1]``, and which of them can be known, ``copied``."""
        different = torch.rand(count, self.ordinary, generator=draw).argsort(-1)[:, : self.n] + len(SPECIAL)
        ids, copied = said_again(different, self.shortest, draw)
        first = torch.full((count, 1), BEGIN)
        return {"ids": torch.cat([first, ids], 1), "copied": torch.cat([first < 0, copied], 1)}

    def count(self, batch: Batch) -> int:
        return int(batch["copied"].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        targets = batch["ids"][:, 1:].masked_fill(~batch["copied"][:, 1:], NOTHING)
        return summed(model(batch["ids"][:, :-1]), targets)

    def checks(self) -> Sequence[Batch]:
        # The same for every seed of a recipe, so that scores of several seeds compare.
        return in_parts(self.texts(drawn(0, CHECK), self.checked), 128)

    def check(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        targets, copied = batch["ids"][:, 1:], batch["copied"][:, 1:]
        logits = model(batch["ids"][:, :-1])
        return {
            "loss": float(summed(logits, targets.masked_fill(~copied, NOTHING))),
            "right": float(((logits.argmax(-1) == targets) & copied).sum()),
            "copied": float(copied.sum()),
        }

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["copied"], "accuracy": sums["right"] / sums["copied"]}

    def probes(self) -> Sequence[Probe]:
        natural = self.texts(drawn(0, CHECK), 4)["ids"]
        vocabulary = len(SPECIAL) + self.ordinary
        return [
            Probe("natural", natural, torch.arange(self.n + 1) == 0),
            *repeated(vocabulary, self.n // 3, 3, 2),
        ]
