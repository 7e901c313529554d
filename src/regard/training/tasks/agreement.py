"""Agreement: a generated grammar whose verbs agree with a subject that other nouns stand between."""

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
    END,
    NOTHING,
    PAD,
    SPECIAL,
    check_batch,
    check_sizes,
    in_parts,
    llama,
    repeated,
    summed,
    whole,
    words,
)
from regard.watching.probes import Probe

__all__ = ["AgreementTask"]

# Pairs are (singular, plural). Nothing else tells a number: these determiners, adjectives and prepositions have one
# form each.
NOUNS = (
    *(("key", "keys"), ("cabinet", "cabinets"), ("window", "windows"), ("car", "cars"), ("child", "children")),
    *(("woman", "women"), ("man", "men"), ("tree", "trees"), ("house", "houses"), ("book", "books")),
    *(("picture", "pictures"), ("table", "tables"), ("city", "cities"), ("river", "rivers"), ("box", "boxes")),
    *(("dog", "dogs"), ("knife", "knives"), ("letter", "letters"), ("church", "churches"), ("mouse", "mice")),
)
VERBS = (
    *(("is", "are"), ("was", "were"), ("seems", "seem"), ("looks", "look")),
    *(("remains", "remain"), ("appears", "appear"), ("becomes", "become"), ("stays", "stay")),
)
OPENINGS = ("today", "often", "sometimes", "perhaps")
DETERMINERS = ("the", "my", "your", "our")
PREPOSITIONS = ("to", "near", "of", "with", "behind", "beside", "above", "under")
ADJECTIVES = ("old", "new", "red", "small", "clean", "quiet", "strange", "famous")
LISTS = (
    *(OPENINGS, DETERMINERS, ADJECTIVES, PREPOSITIONS),
    *([form for pair in pairs for form in pair] for pairs in (NOUNS, VERBS)),
    (".",),
)
VOCABULARY = (*SPECIAL, *(word for words_ in LISTS for word in words_))
MOST = 5  # distractors
WORDS = 4 * MOST + 9  # places that a word can take, with those around the sentence
FAR = 3  # distractors from which a sentence counts for the score
HELD_OUT = 16  # one combination of nouns in so many is never trained on
TRAIN, CHECK = 11, 12  # what is drawn
OF = {word: i for i, word in enumerate(VOCABULARY)}
FIRST_VERB = OF["is"]  # then is, are, was, were …: even places are singular


class AgreementTask(Task):
    """``[opening] det [adj] NOUN (prep det [adj] noun)* VERB adj .`` with 0 … 5 prepositional phrases

    Every noun's number is drawn by itself, so that the subject alone tells the verb's. The score: of all verb forms the
    likeliest one has the subject's number, in held-out sentences of 3 distractors or more (chance is 1/2).
    Held out are *combinations of nouns*, subject and distractors with their numbers in order, by a hash of them: no
    sentence with one of those is ever trained on, whatever its other words are.
    """

    name: ClassVar[str] = "agreement"
    about: ClassVar[str] = "subject–verb agreement across distractors: a small Llama on a generated grammar"
    recipe: ClassVar[Recipe] = Recipe(
        task="agreement",
        steps=600,
        batch=128,
        rate=3e-3,
        warmup=50,
        model={"d": 64, "heads": 4, "layers": 1, "hidden": 128},
        data={"checks": 2048},
    )
    score: ClassVar[str] = "accuracy"
    higher: ClassVar[bool] = True

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        check_sizes(recipe, 2 * len(VOCABULARY), rotary=True)
        self.checked = whole(recipe, "data.checks")
        check_batch(recipe, WORDS, "places of words")

    def model(self) -> Model:
        config = llama(self.given.model, len(VOCABULARY), longest=64)
        return create(config, beside=words(VOCABULARY), std=0.05)

    def batch(self, step: int) -> Batch:
        return sentences(drawn(self.given.seed, TRAIN, step), self.given.batch, held_out=False)

    def count(self, batch: Batch) -> int:
        return int((batch["ids"][:, 1:] != PAD).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return summed(model(batch["ids"][:, :-1]), _targets(batch))

    def checks(self) -> Sequence[Batch]:
        # The same for every seed of a recipe, so that scores of several seeds compare.
        return in_parts(sentences(drawn(0, CHECK), self.checked, held_out=True, least=FAR))

    def check(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        logits = model(batch["ids"][:, :-1])
        right = self.agrees(logits, batch)
        opposed = batch["opposed"]
        return {
            "loss": float(summed(logits, _targets(batch))),
            "tokens": float(self.count(batch)),
            "right": float(right.sum()),
            "sentences": float(len(right)),
            "right, opposed": float((right & opposed).sum()),
            "opposed": float(opposed.sum()),
        }

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {
            "loss": sums["loss"] / sums["tokens"],
            "accuracy": sums["right"] / sums["sentences"],
            # where the noun before the verb has the other number
            "opposed": sums["right, opposed"] / max(sums["opposed"], 1.0),
        }

    def agrees(self, logits: Tensor, batch: Batch) -> Tensor:
        """``[B]`` whether the likeliest of all verb forms has the subject's number; logits ``[B, n, V]``."""
        at, _ = self.places(batch)
        forms = logits[torch.arange(len(at)), at, FIRST_VERB : FIRST_VERB + 2 * len(VERBS)]
        return forms.argmax(-1) % 2 == batch["plural"]

    def places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """``[B]`` the positions whose outputs predict the verbs, and the subjects' positions."""
        return batch["verb"] - 1, batch["subject"]

    def probes(self) -> Sequence[Probe]:
        """Natural: held-out sentences of one length, so that nothing is padded."""
        found = sentences(drawn(0, CHECK), 2048, held_out=True, least=FAR)
        lengths = (found["ids"] != PAD).sum(-1)
        length = int(lengths.mode().values)
        ids = found["ids"][lengths == length][:8, :length]
        first = torch.arange(length) == 0
        return [Probe("natural", ids, first), *repeated(len(VOCABULARY), 12, 3, 4)]


def _targets(batch: Batch) -> Tensor:
    """``[B, n]`` the next words; nothing is asked for after the end."""
    following = batch["ids"][:, 1:]
    return following.masked_fill(following == PAD, NOTHING)


def sentences(draw: torch.Generator, count: int, *, held_out: bool, least: int = 0) -> Batch:
    """Sentences ``ids [count, n]`` between ``<s>`` and ``</s>``, of ``least`` … 5 distractors; where subject and verb
    stand, whether the subject is plural, and whether the noun before the verb is not of its number."""
    more = 32 * count if held_out else count + count // 4 + 16  # about as many as are needed
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    while sum(len(nouns) for nouns, *_ in kept) < count:
        nouns = torch.randint(2 * len(NOUNS), (more, MOST + 1), generator=draw)
        distractors = torch.randint(least, MOST + 1, (more,), generator=draw)
        there = torch.arange(MOST + 1) <= distractors.unsqueeze(-1)
        wanted = (combination(nouns, there) % HELD_OUT == 0) == held_out
        kept.append((nouns[wanted], distractors[wanted], there[wanted]))
    nouns, distractors, there = (torch.cat(parts)[:count] for parts in zip(*kept, strict=True))
    plural = nouns[:, 0] % 2
    near = nouns.gather(1, distractors.unsqueeze(-1)).squeeze(-1) % 2
    slots = _slots(draw, nouns, there)
    order = (slots < 0).to(torch.int8).argsort(dim=-1, stable=True)  # absent words go to the end
    ids = slots.gather(1, order).clamp(min=PAD)
    length = int((ids != PAD).sum(-1).max())
    before = (slots >= 0).cumsum(-1) - 1  # where each slot's word stands
    return {
        "ids": ids[:, :length],
        "subject": before[:, 4],
        "verb": before[:, -4],
        "plural": plural,
        "opposed": near != plural,
    }


def combination(nouns: Tensor, there: Tensor) -> Tensor:
    """``[B]`` a hash of the nouns of each sentence, numbers and order included; ``there`` says which are said."""
    mixed = torch.full((len(nouns),), 17, dtype=torch.int64)
    for at in range(nouns.shape[1]):
        mixed = torch.where(there[:, at], (mixed * 1_000_003 + nouns[:, at] + 1) & 0x7FFFFFFF, mixed)
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & 0x7FFFFFFF
    return mixed ^ (mixed >> 16)


def _slots(draw: torch.Generator, nouns: Tensor, there: Tensor) -> Tensor:
    """``[B, 29]`` every place that a word can take, −1 where none does: ``<s> opening det adj noun`` (prep det adj
    noun) × 5 ``verb adj . </s>``."""
    count, phrases = there.shape

    def drawn_of(words: Sequence[str], *shape: int) -> Tensor:
        return torch.randint(len(words), shape, generator=draw) + OF[words[0]]

    def sometimes(x: Tensor) -> Tensor:
        return x.where(torch.rand(x.shape, generator=draw) < 1 / 4, -1)

    size = (count, phrases)
    parts = (
        drawn_of(PREPOSITIONS, *size),
        drawn_of(DETERMINERS, *size),
        sometimes(drawn_of(ADJECTIVES, *size)),
        nouns + OF[NOUNS[0][0]],
    )
    phrase = torch.stack(parts, -1).masked_fill(~there.unsqueeze(-1), -1)
    phrase[:, 0, 0] = sometimes(drawn_of(OPENINGS, count))  # the subject has no preposition, but perhaps an opening
    verb = FIRST_VERB + 2 * torch.randint(len(VERBS), (count,), generator=draw) + nouns[:, 0] % 2
    last = [verb, drawn_of(ADJECTIVES, count), torch.full((count,), OF["."]), torch.full((count,), END)]
    return torch.cat([torch.full((count, 1), BEGIN), phrase.flatten(1), torch.stack(last, -1)], 1)
