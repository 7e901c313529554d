"""Task "agreement": the verb agrees with its subject although other nouns stand between them (generated grammar)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.interp._probes import Probe
from regard.models import Model, create
from regard.training._recipe import Recipe
from regard.training._task import Batch, Task, seeded_generator
from regard.training.tasks import common

# Singular and plural forms alternate in the lists of nouns and verbs. All other words have one form.
NOUNS = (
    *("key", "keys", "cabinet", "cabinets", "window", "windows", "car", "cars", "child", "children"),
    *("woman", "women", "man", "men", "tree", "trees", "house", "houses", "book", "books"),
    *("picture", "pictures", "table", "tables", "city", "cities", "river", "rivers", "box", "boxes"),
    *("dog", "dogs", "knife", "knives", "letter", "letters", "church", "churches", "mouse", "mice"),
)
VERBS = (
    *("is", "are", "was", "were", "seems", "seem", "looks", "look"),
    *("remains", "remain", "appears", "appear", "becomes", "become", "stays", "stay"),
)
OPENINGS = ("today", "often", "sometimes", "perhaps")
DETERMINERS = ("the", "my", "your", "our")
PREPOSITIONS = ("to", "near", "of", "with", "behind", "beside", "above", "under")
ADJECTIVES = ("old", "new", "red", "small", "clean", "quiet", "strange", "famous")
WORDS = (*OPENINGS, *DETERMINERS, *ADJECTIVES, *PREPOSITIONS, *NOUNS, *VERBS, ".")
VOCABULARY = (*common.SPECIAL_TOKENS, *WORDS)
IDS = common.word_ids(VOCABULARY)
FIRST_VERB = IDS["is"]  # then are, was, were …: even offsets from here are singular

MAX_DISTRACTORS = 5
MAX_WORDS = 4 * MAX_DISTRACTORS + 9  # slots for words, including <s> and </s>
MIN_SCORED_DISTRACTORS = 3  # in held-out sentences; fewer would be too easy for the score
HELD_OUT_SHARE = 16  # one in 16 combinations of nouns is never used for training


class AgreementTask(Task):
    """Sentences ``[opening] det [adj] NOUN (prep det [adj] noun)* VERB adj .`` with 0 … 5 prepositional phrases.

    Whether a noun is singular or plural (its grammatical number) is drawn independently for each noun, so only the
    subject determines the form of the verb. The other nouns are distractors. All held-out sentences have at least 3 of
    them. The score is the share in which the most likely of all verb forms has the subject's number; chance is 1/2.

    A hash decides which *combinations of nouns* are held out. A combination is the ordered list of the subject and the
    distractors; the singular and the plural of a word are different nouns. No sentence with a held-out combination is
    used for training, whatever its other words are.
    """

    name: ClassVar[str] = "agreement"
    description: ClassVar[str] = "subject–verb agreement across distractors: a small Llama on a generated grammar"
    default_recipe: ClassVar[Recipe] = Recipe(
        task="agreement",
        steps=600,
        batch=128,
        rate=3e-3,
        warmup=50,
        model={"d": 64, "heads": 4, "layers": 1, "hidden": 128},
        data={"checks": 2048},
    )
    score: ClassVar[str] = "accuracy"

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        common.check_model_size(recipe, 2 * len(VOCABULARY), rotary=True)
        self.held_out_count = common.integer_setting(recipe, "data.checks")
        common.check_batch(recipe, MAX_WORDS, "slots for words")

    def model(self) -> Model:
        config = common.llama_config(self.recipe.model, len(VOCABULARY), max_tokens=64)
        return create(config, extra_files=common.word_tokenizer_files(VOCABULARY), std=0.05)

    def batch(self, step: int) -> Batch:
        generator = seeded_generator(self.recipe.seed, common.TRAIN, step)
        return draw_sentences(generator, self.recipe.batch, held_out=False)

    def count_predictions(self, batch: Batch) -> int:
        return int((batch["ids"][:, 1:] != common.PAD).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return common.summed_cross_entropy(model(batch["ids"][:, :-1]), _targets(batch))

    def held_out_batches(self) -> Sequence[Batch]:
        return common.split_batches(_held_out_sentences(self.held_out_count))

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        logits = model(batch["ids"][:, :-1])
        correct = self.is_correct(logits, batch)
        opposed = batch["opposed"]
        return {
            "loss": float(common.summed_cross_entropy(logits, _targets(batch))),
            "tokens": float(self.count_predictions(batch)),
            "right": float(correct.sum()),
            "sentences": float(len(correct)),
            "right, opposed": float((correct & opposed).sum()),
            "opposed": float(opposed.sum()),
        }

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {
            "loss": sums["loss"] / sums["tokens"],
            "accuracy": sums["right"] / sums["sentences"],
            # accuracy on the sentences whose last noun before the verb differs in number from the subject
            "opposed": sums["right, opposed"] / max(sums["opposed"], 1.0),
        }

    def is_correct(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return bool ``[B]``: whether the most likely verb form has the subject's number. Logits are ``[B, n, V]``."""
        rows, _ = self.verb_and_subject_positions(batch)
        # Singular and plural forms alternate, so an even index is singular and an odd index is plural.
        forms = logits[torch.arange(len(rows)), rows, FIRST_VERB : FIRST_VERB + len(VERBS)]
        return forms.argmax(-1) % 2 == batch["plural"]

    def verb_and_subject_positions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return two tensors ``[B]``: the positions whose logits predict the verbs, and those of the subjects."""
        return batch["verb"] - 1, batch["subject"]

    def probes(self) -> Sequence[Probe]:
        """Return the probes: held-out sentences of equal length (no padding), then repeated and random words."""
        sentences = _held_out_sentences(2048)["ids"]
        lengths = (sentences != common.PAD).sum(-1)
        length = int(lengths.mode().values)
        ids = sentences[lengths == length][:8, :length]
        return [Probe("natural", ids, torch.arange(length) == 0), *common.repeated_probes(len(VOCABULARY), 12, 3, 4)]


def _held_out_sentences(count: int) -> Batch:
    # The same sentences for every seed of a recipe, so that the scores of several seeds can be compared.
    generator = seeded_generator(0, common.HELD_OUT)
    return draw_sentences(generator, count, held_out=True, min_distractors=MIN_SCORED_DISTRACTORS)


def _targets(batch: Batch) -> Tensor:
    """Return the next words, ``[B, n]``; padding is set to ``IGNORED``, so nothing is predicted after the end."""
    following = batch["ids"][:, 1:]
    return following.masked_fill(following == common.PAD, common.IGNORED)


def draw_sentences(generator: torch.Generator, count: int, *, held_out: bool, min_distractors: int = 0) -> Batch:
    """Draw sentences with ``min_distractors`` … 5 distractors.

    Returns ``ids [count, n]`` between ``<s>`` and ``</s>``; the positions ``subject`` and ``verb``; whether the subject
    is ``plural``; and whether the last noun before the verb differs in number from the subject (``opposed``).
    """
    # Draw more combinations than needed, because the hash rejects some; repeat if too few are left.
    attempts = 32 * count if held_out else count + count // 4 + 16
    accepted_nouns = torch.zeros(0, MAX_DISTRACTORS + 1, dtype=torch.int64)
    accepted_distractors = torch.zeros(0, dtype=torch.int64)
    while len(accepted_nouns) < count:
        nouns = torch.randint(len(NOUNS), (attempts, MAX_DISTRACTORS + 1), generator=generator)
        distractors = torch.randint(min_distractors, MAX_DISTRACTORS + 1, (attempts,), generator=generator)
        in_split = (hash_nouns(nouns, _present(distractors)) % HELD_OUT_SHARE == 0) == held_out
        accepted_nouns = torch.cat([accepted_nouns, nouns[in_split]])
        accepted_distractors = torch.cat([accepted_distractors, distractors[in_split]])
    nouns = accepted_nouns[:count]
    distractors = accepted_distractors[:count]

    plural = nouns[:, 0] % 2
    last_noun = nouns.gather(1, distractors.unsqueeze(-1)).squeeze(-1)
    slots = _fill_slots(generator, nouns, _present(distractors))
    order = (slots < 0).to(torch.int8).argsort(dim=-1, stable=True)  # moves empty slots to the end
    ids = slots.gather(1, order).clamp(min=common.PAD)
    length = int((ids != common.PAD).sum(-1).max())
    positions = (slots >= 0).cumsum(-1) - 1  # the position of each slot's word in the sentence
    return {
        "ids": ids[:, :length],
        "subject": positions[:, 4],
        "verb": positions[:, -4],
        "plural": plural,
        "opposed": last_noun % 2 != plural,
    }


def _present(distractors: Tensor) -> Tensor:
    """Return bool ``[B, 6]``: which noun slots are used, given the number of distractors in each sentence."""
    return torch.arange(MAX_DISTRACTORS + 1) <= distractors.unsqueeze(-1)


def hash_nouns(nouns: Tensor, present: Tensor) -> Tensor:
    """Return a hash ``[B]`` of the nouns that are ``present`` in each sentence; their order matters."""
    mixed = torch.full((len(nouns),), 17, dtype=torch.int64)
    # The constants are arbitrary but must not change, because they decide the split.
    for k in range(nouns.shape[1]):
        mixed = torch.where(present[:, k], (mixed * 1_000_003 + nouns[:, k] + 1) & 0x7FFFFFFF, mixed)
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & 0x7FFFFFFF
    return mixed ^ (mixed >> 16)


def _fill_slots(generator: torch.Generator, nouns: Tensor, present: Tensor) -> Tensor:
    """Return ``[B, 29]``: ``<s> opening det adj noun``, 5 × ``prep det adj noun``, ``verb adj . </s>``; −1 if empty."""
    size = present.shape
    count = len(present)

    def draw(words: Sequence[str], *shape: int) -> Tensor:
        return torch.randint(len(words), shape, generator=generator) + IDS[words[0]]

    def keep_quarter(x: Tensor) -> Tensor:
        return x.where(torch.rand(x.shape, generator=generator) < 1 / 4, -1)

    # Do not reorder these draws: every batch would change, and old runs could not be reproduced.
    prepositions = draw(PREPOSITIONS, *size)
    determiners = draw(DETERMINERS, *size)
    adjectives = keep_quarter(draw(ADJECTIVES, *size))
    phrases = torch.stack([prepositions, determiners, adjectives, nouns + IDS[NOUNS[0]]], -1)
    phrases = phrases.masked_fill(~present.unsqueeze(-1), -1)
    # The subject has no preposition; its slot is used for the opening.
    phrases[:, 0, 0] = keep_quarter(draw(OPENINGS, count))
    verb = FIRST_VERB + 2 * torch.randint(len(VERBS) // 2, (count,), generator=generator) + nouns[:, 0] % 2
    last = [verb, draw(ADJECTIVES, count), torch.full((count,), IDS["."]), torch.full((count,), common.END)]
    return torch.cat([torch.full((count, 1), common.BEGIN), phrases.flatten(1), torch.stack(last, -1)], 1)
