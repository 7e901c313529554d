"""Dates: from the many ways that people write one to ISO's, character by character, with an encoder–decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.config import Config
from regard.models import Model, create
from regard.training.recipe import Recipe
from regard.training.task import Batch, Task, drawn
from regard.training.tasks.common import (
    END,
    PAD,
    SPECIAL,
    UNKNOWN,
    characters,
    check_batch,
    check_sizes,
    in_parts,
    summed,
    whole,
)
from regard.training.tasks.written_dates import FIRST, FORMS, LAST, SPELLED, held_out, spaced
from regard.watching.probes import Probe

__all__ = ["DatesTask"]

CHARACTERS = " ,.-/0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
VOCABULARY = (*SPECIAL, *CHARACTERS)
OF = {character: i for i, character in enumerate(VOCABULARY)}
TARGET = 11  # 1987-03-03 and its end
LONGEST = 64  # a written date has fewer characters
TRAIN, CHECK = 11, 12  # what is drawn
CASES = (str, str, str.lower, str.upper)
# What is trained on has the hardest form four times as often as the others; what is held out has all of them alike.
TRAINED = (*range(len(FORMS)), *[SPELLED] * 3)


class DatesTask(Task):
    """``Tue 3 Mar 1987 → 1987-03-03``: 19 written forms in small, large or mixed letters, with spaces as people type

    Dates are those of 1900 … 2099. One *date* in 16 is held out, by a hash of it: it is never trained on, in any form.
    The score is exact match on them: every character of the answer and its end are right.
    """

    name: ClassVar[str] = "dates"
    about: ClassVar[str] = "written dates to ISO dates: a small T5, character by character"
    recipe: ClassVar[Recipe] = Recipe(
        task="dates",
        steps=1600,
        batch=128,
        rate=3e-3,
        warmup=100,
        model={"d": 64, "heads": 4, "layers": 2, "hidden": 256},
        data={"checks": 2048},
    )
    score: ClassVar[str] = "exact"
    higher: ClassVar[bool] = True
    unit: ClassVar[str] = "characters"

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        check_sizes(recipe, len(VOCABULARY))
        self.checked = whole(recipe, "data.checks")
        check_batch(recipe, LONGEST + TARGET, "characters")

    def model(self) -> Model:
        sizes = self.given.model
        d, heads = int(sizes["d"]), int(sizes["heads"])
        ends = {"decoder_start_token_id": PAD, "eos_token_id": END, "pad_token_id": PAD}
        config: dict[str, Any] = {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "is_encoder_decoder": True,
            "vocab_size": len(VOCABULARY),
            "d_model": d,
            "d_kv": d // heads,
            "d_ff": sizes["hidden"],
            "num_layers": sizes["layers"],
            "num_decoder_layers": sizes["layers"],
            "num_heads": heads,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "dropout_rate": 0.0,  # no two batches are alike: there is nothing to learn by heart
            "feed_forward_proj": "relu",
            "layer_norm_epsilon": 1e-6,
            "tie_word_embeddings": True,
            **ends,
        }
        beside = {
            **characters(VOCABULARY),
            "generation_config.json": json.dumps(ends, indent=2).encode() + b"\n",
        }
        model = create(config, beside=beside, std=0.05)
        model.generation = Config(ends)
        # The tied head divides logits by √d, so that small embeddings say little for long; but with T5's own, of size
        # 1, a model begins by repeating what it has just read, sure of itself.
        nn.init.normal_(model.get_parameter("encoder.tokens.embedding.weight"), std=0.2)
        return model

    def batch(self, step: int) -> Batch:
        return pairs(drawn(self.given.seed, TRAIN, step), self.given.batch, held_out=False)

    def count(self, batch: Batch) -> int:
        return int(batch["target"].numel())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return summed(self._logits(model, batch), batch["target"])

    def checks(self) -> Sequence[Batch]:
        # The same for every seed of a recipe, so that scores of several seeds compare.
        return in_parts(pairs(drawn(0, CHECK), self.checked, held_out=True))

    def check(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        logits = self._logits(model, batch)
        # Greedy writing goes as the target does for as long as it is right. So it writes the target exactly if every
        # character is the likeliest one after the *true* ones before it, and one pass tells.
        right = logits.argmax(-1) == batch["target"]
        return {
            "loss": float(summed(logits, batch["target"])),
            "characters": float(right.numel()),
            "right characters": float(right.sum()),
            "right": float(right.all(-1).sum()),
            "dates": float(len(right)),
        }

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {
            "loss": sums["loss"] / sums["characters"],
            "exact": sums["right"] / sums["dates"],
            "characters": sums["right characters"] / sums["characters"],
        }

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        source, target = batch["source"], batch["target"]
        logits: Tensor = model(source, _shifted(target), padding=source != PAD)
        return logits

    def probes(self) -> Sequence[Probe]:
        """Natural: held-out dates whose sources are of one length, so that nothing is padded; source, then target."""
        found = pairs(drawn(0, CHECK), 2048, held_out=True)
        lengths = (found["source"] != PAD).sum(-1)
        length = int(lengths.mode().values)
        chosen = lengths == length
        ids = torch.cat([found["source"][chosen, :length], _shifted(found["target"][chosen])], 1)[:8]
        return [Probe("natural", ids, torch.zeros(ids.shape[1], dtype=torch.bool))]

    def ask(self, model: nn.Module, inputs: Tensor) -> Any:
        """A probe's row holds the source, and in its last 11 places what the decoder reads."""
        return model(inputs[:, :-TARGET], inputs[:, -TARGET:])


def _shifted(target: Tensor) -> Tensor:
    """What the decoder reads: the start, then the target without its end."""
    return torch.cat([torch.full_like(target[:, :1], PAD), target[:, :-1]], 1)


@cache
def _days(held: bool) -> Tensor:
    """The dates of one side of the split, as days from the first."""
    return torch.tensor([day for day in range((LAST - FIRST).days + 1) if held_out(day) == held])


def pairs(draw: torch.Generator, count: int, *, held_out: bool) -> Batch:
    """``source [count, m]`` and ``target [count, 11]``, both with their ends; sources are filled up with ``<pad>``."""
    days = _days(held_out)
    which = torch.randint(len(days), (count,), generator=draw)
    known = range(len(FORMS)) if held_out else TRAINED
    forms, cases, spaces = (torch.randint(n, (count,), generator=draw).tolist() for n in (len(known), len(CASES), 4))
    sources, targets = [], []
    for day, form, case, space in zip(days[which].tolist(), forms, cases, spaces, strict=True):
        date = FIRST + timedelta(day)
        text = CASES[case](spaced(FORMS[known[form]](date), space))
        sources.append([*(OF.get(x, UNKNOWN) for x in text), END])
        targets.append([*(OF[x] for x in date.isoformat()), END])
    width = max(map(len, sources))
    return {
        "source": torch.tensor([row + [PAD] * (width - len(row)) for row in sources]),
        "target": torch.tensor(targets),
    }
