"""Task "dates": translate written dates into ISO dates, character by character, with an encoder–decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard._config_json import Config
from regard.interp._probes import Probe
from regard.models import Model, create
from regard.training._recipe import Recipe
from regard.training._task import Batch, Task, seeded_generator
from regard.training.tasks import common
from regard.training.tasks.written_dates import FIRST, FORMS, LAST, SPELLED, change_spaces, is_held_out

CHARACTERS = " ,.-/0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
VOCABULARY = (*common.SPECIAL_TOKENS, *CHARACTERS)
IDS = common.word_ids(VOCABULARY)
TARGET_LENGTH = 11  # 1987-03-03 and </s>
MAX_SOURCE_LENGTH = 64  # longer than any written date

LETTER_CASES = (str, str, str.lower, str.upper)  # str twice: half of the texts stay unchanged
# Training uses the hardest form four times as often as the others; held-out dates use all forms equally.
TRAINING_FORMS = (*range(len(FORMS)), *[SPELLED] * 3)


class DatesTask(Task):
    """Translate ``Tue 3 Mar 1987`` into ``1987-03-03``: 19 written forms, three letter cases, three spacings.

    The dates are all days from 1900 to 2099. A hash holds out one *date* in 16: it is never used for training, in any
    form. The score is the exact match on held-out dates: every character and the end token are correct.
    """

    name: ClassVar[str] = "dates"
    description: ClassVar[str] = "written dates to ISO dates: a small T5, character by character"
    default_recipe: ClassVar[Recipe] = Recipe(
        task="dates",
        steps=1600,
        batch=128,
        rate=3e-3,
        model={"d": 64, "heads": 4, "layers": 2, "hidden": 256},
        data={"checks": 2048},
    )
    score: ClassVar[str] = "exact"
    unit: ClassVar[str] = "characters"

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        common.check_model_size(recipe, len(VOCABULARY))
        self.held_out_count = common.integer_setting(recipe, "data.checks")
        common.check_batch(recipe, MAX_SOURCE_LENGTH + TARGET_LENGTH, "characters")

    def model(self) -> Model:
        sizes = self.recipe.model
        d = int(sizes["d"])
        heads = int(sizes["heads"])
        generation = {"decoder_start_token_id": common.PAD, "eos_token_id": common.END, "pad_token_id": common.PAD}
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
            "dropout_rate": 0.0,  # every batch is new, so there is nothing to overfit
            "feed_forward_proj": "relu",
            "layer_norm_epsilon": 1e-6,
            "tie_word_embeddings": True,
            **generation,
        }
        files = common.character_tokenizer_files(VOCABULARY)
        files["generation_config.json"] = json.dumps(generation, indent=2).encode() + b"\n"
        model = create(config, extra_files=files, std=0.05)
        model.generation_config = Config(generation)
        # The tied output layer divides logits by √d: with small embeddings they stay small for many steps. With T5's
        # std of 1 the untrained model predicts its last input token with high confidence. 0.2 avoids both.
        nn.init.normal_(model.get_parameter("encoder.tokens.embedding.weight"), std=0.2)
        return model

    def batch(self, step: int) -> Batch:
        generator = seeded_generator(self.recipe.seed, common.TRAIN, step)
        return draw_pairs(generator, self.recipe.batch, held_out=False)

    def count_predictions(self, batch: Batch) -> int:
        return int(batch["target"].numel())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return common.summed_cross_entropy(self._logits(model, batch), batch["target"])

    def held_out_batches(self) -> Sequence[Batch]:
        # The same dates for every seed of a recipe, so that the scores of several seeds can be compared.
        generator = seeded_generator(0, common.HELD_OUT)
        return common.split_batches(draw_pairs(generator, self.held_out_count, held_out=True))

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        logits = self._logits(model, batch)
        # Greedy decoding produces the target if and only if every target character has the largest logit when the
        # decoder reads the *true* characters before it (teacher forcing). So one pass is enough.
        correct = logits.argmax(-1) == batch["target"]
        return {
            "loss": float(common.summed_cross_entropy(logits, batch["target"])),
            "characters": float(correct.numel()),
            "right characters": float(correct.sum()),
            "right": float(correct.all(-1).sum()),
            "dates": float(len(correct)),
        }

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {
            "loss": sums["loss"] / sums["characters"],
            "exact": sums["right"] / sums["dates"],
            "characters": sums["right characters"] / sums["characters"],
        }

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        source = batch["source"]
        logits: Tensor = model(source, _decoder_input(batch["target"]), padding=source != common.PAD)
        return logits

    def probes(self) -> Sequence[Probe]:
        """Return one probe, "natural": held-out dates whose sources have equal length, so there is no padding.

        Each row is the source followed by the input of the decoder.
        """
        pairs = draw_pairs(seeded_generator(0, common.HELD_OUT), 2048, held_out=True)
        lengths = (pairs["source"] != common.PAD).sum(-1)
        length = int(lengths.mode().values)
        chosen = lengths == length
        ids = torch.cat([pairs["source"][chosen, :length], _decoder_input(pairs["target"][chosen])], 1)[:8]
        return [Probe("natural", ids, torch.zeros(ids.shape[1], dtype=torch.bool))]

    def run_probe(self, model: nn.Module, inputs: Tensor) -> Any:
        """Run the model on rows that hold the source and, in the last 11 positions, the input of the decoder."""
        return model(inputs[:, :-TARGET_LENGTH], inputs[:, -TARGET_LENGTH:])


def _decoder_input(target: Tensor) -> Tensor:
    """Return the input of the decoder: the start token, then the target without its last token."""
    return torch.cat([torch.full_like(target[:, :1], common.PAD), target[:, :-1]], 1)


@cache
def _days(held_out: bool) -> Tensor:
    """Return all held-out dates, or all training dates, as days since ``FIRST``."""
    return torch.tensor([day for day in range((LAST - FIRST).days + 1) if is_held_out(day) == held_out])


def _encode(text: str) -> list[int]:
    """Return the ids of a text's characters, followed by ``</s>``."""
    return [IDS.get(character, common.UNKNOWN) for character in text] + [common.END]


def draw_pairs(generator: torch.Generator, count: int, *, held_out: bool) -> Batch:
    """Draw ``source [count, m]``, padded with ``<pad>``, and ``target [count, 11]``; each text ends with ``</s>``."""
    days = _days(held_out)
    known_forms = range(len(FORMS)) if held_out else TRAINING_FORMS

    def draw(limit: int) -> Tensor:
        return torch.randint(limit, (count,), generator=generator)

    # Do not reorder these draws: every batch would change, and old runs could not be reproduced.
    chosen_days = days[draw(len(days))].tolist()
    forms = draw(len(known_forms)).tolist()
    cases = draw(len(LETTER_CASES)).tolist()
    spacings = draw(4).tolist()
    sources = []
    targets = []
    for day, form, case, spacing in zip(chosen_days, forms, cases, spacings, strict=True):
        date = FIRST + timedelta(day)
        text = LETTER_CASES[case](change_spaces(FORMS[known_forms[form]](date), spacing))
        sources.append(_encode(text))
        targets.append(_encode(date.isoformat()))
    # All sources of a batch get the length of the longest one.
    width = max(map(len, sources))
    padded = [row + [common.PAD] * (width - len(row)) for row in sources]
    return {"source": torch.tensor(padded), "target": torch.tensor(targets)}
