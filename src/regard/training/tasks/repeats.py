"""Task "repeats": random tokens with a repeated block, on which induction heads form quickly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard._errors import RegardError
from regard.interp._probes import Probe
from regard.models import Model, create
from regard.training._recipe import Recipe
from regard.training._task import Batch, Task, seeded_generator
from regard.training.tasks import common
from regard.training.tasks.induction_aids import repeat_passage


class RepeatsTask(Task):
    """Predict the repetition in ``<s> … block … block …``, a text of random tokens.

    The block has ``data.shortest`` … n/2 tokens. It begins anywhere, and its copy begins anywhere after its end. No
    other token occurs twice, so each token of the copy determines the next one: an induction head attends to the
    earlier occurrence of the token and copies the token after that.

    Loss and score count only the copy without its first token, which cannot be predicted. (With a loss over all tokens,
    the model would first learn that a token does not occur again.) Held-out texts come from another random stream:
    there are more than 10¹⁰⁰ texts, and none is drawn twice.
    """

    name: ClassVar[str] = "repeats"
    description: ClassVar[str] = "random tokens with a repeated block: a small Llama grows induction heads, at once"
    default_recipe: ClassVar[Recipe] = Recipe(
        task="repeats",
        steps=600,
        batch=64,
        rate=2e-3,
        evaluate=25,
        record_every=25,
        model={"d": 64, "heads": 4, "layers": 2, "hidden": 128},
        data={"tokens": 64, "vocabulary": 96, "shortest": 8, "checks": 256},
    )
    score: ClassVar[str] = "accuracy"

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        self.n = common.integer_setting(recipe, "data.tokens", 4, common.MAX_TOKENS)
        self.ordinary = common.integer_setting(recipe, "data.vocabulary", 1, common.MAX_VOCABULARY)
        self.shortest = common.integer_setting(recipe, "data.shortest", 2, common.MAX_TOKENS)
        self.held_out_count = common.integer_setting(recipe, "data.checks")
        if self.shortest > self.n // 2:
            raise RegardError(f"data.shortest is {self.shortest}; it must be 2 … {self.n // 2}, half of data.tokens")
        if self.ordinary < self.n:
            raise RegardError(f"data.vocabulary is {self.ordinary}; it must be at least data.tokens, which is {self.n}")
        # A text is the beginning of a permutation of all tokens.
        if self.held_out_count * self.ordinary > common.MAX_BATCH_NUMBERS:
            sizes = f"data.checks is {self.held_out_count:,} and data.vocabulary {self.ordinary:,}"
            raise RegardError(f"{sizes}; their product must be at most {common.MAX_BATCH_NUMBERS:,}")
        common.check_batch(recipe, self.ordinary, "a permutation of data.vocabulary")
        common.check_model_size(recipe, 2 * (self.ordinary + len(common.SPECIAL_TOKENS)), rotary=True)

    def model(self) -> Model:
        vocabulary = (*common.SPECIAL_TOKENS, *(f"t{i}" for i in range(self.ordinary)))
        config = common.llama_config(self.recipe.model, len(vocabulary), max_tokens=2 * self.n)
        return create(config, extra_files=common.word_tokenizer_files(vocabulary), std=0.05)

    def batch(self, step: int) -> Batch:
        return self.texts(seeded_generator(self.recipe.seed, common.TRAIN, step), self.recipe.batch)

    def texts(self, generator: torch.Generator, count: int) -> Batch:
        """Return ``ids [count, n + 1]``, and the mask ``copied`` of the tokens that can be predicted."""
        # Sorting random numbers gives one random permutation per row.
        orders = torch.rand(count, self.ordinary, generator=generator).argsort(-1)
        different = orders[:, : self.n] + len(common.SPECIAL_TOKENS)
        ids, copied = repeat_passage(different, self.shortest, generator)
        begin = torch.full((count, 1), common.BEGIN)
        return {"ids": torch.cat([begin, ids], 1), "copied": torch.cat([begin < 0, copied], 1)}

    def count_predictions(self, batch: Batch) -> int:
        return int(batch["copied"].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        targets = batch["ids"][:, 1:].masked_fill(~batch["copied"][:, 1:], common.IGNORED)
        return common.summed_cross_entropy(model(batch["ids"][:, :-1]), targets)

    def held_out_batches(self) -> Sequence[Batch]:
        # The same texts for every seed of a recipe, so that the scores of several seeds can be compared.
        return common.split_batches(self.texts(seeded_generator(0, common.HELD_OUT), self.held_out_count), 128)

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        targets = batch["ids"][:, 1:]
        copied = batch["copied"][:, 1:]
        logits = model(batch["ids"][:, :-1])
        return {
            "loss": float(common.summed_cross_entropy(logits, targets.masked_fill(~copied, common.IGNORED))),
            "right": float(((logits.argmax(-1) == targets) & copied).sum()),
            "copied": float(copied.sum()),
        }

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["copied"], "accuracy": sums["right"] / sums["copied"]}

    def probes(self) -> Sequence[Probe]:
        natural = self.texts(seeded_generator(0, common.HELD_OUT), 4)["ids"]
        vocabulary = len(common.SPECIAL_TOKENS) + self.ordinary
        return [
            Probe("natural", natural, torch.arange(self.n + 1) == 0),
            *common.repeated_probes(vocabulary, self.n // 3, 3, 2),
        ]
