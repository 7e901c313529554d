"""What the tasks share: checked sizes, the summed loss, small tokenizers, a small Llama's config, probes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F

from regard.config import MOST_LAYERS
from regard.training.recipe import Recipe
from regard.training.task import Batch
from regard.watching.probes import Probe

__all__ = [
    *("BEGIN", "END", "LONGEST", "NOTHING", "NUMBERS", "PAD", "PARAMETERS", "SPECIAL", "UNKNOWN", "VOCABULARY"),
    *("characters", "check_batch", "check_sizes", "in_parts", "llama", "own_path", "repeated", "share", "summed"),
    *("WIDEST", "whole", "words"),
]

# What is larger than these is refused before anything is built: it would end in no memory, or never.
PARAMETERS = 10**9  # of a model
WIDEST = 2**20  # features
NUMBERS = 2**26  # of a batch: a quarter of a GiB, a few times over
VOCABULARY = 2**20  # tokens
LONGEST = 2**16  # tokens of a text
CHECKS = 2**16  # held-out examples that are made
NOTHING = -100  # a target that asks for nothing
PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")  # the first ids of every vocabulary here


def whole(recipe: Recipe, name: str, least: int = 1, most: int = CHECKS) -> int:
    """What ``model.…`` or ``data.…`` of a recipe is, a whole number from ``least`` to ``most``."""
    table, _, inner = name.partition(".")
    value = getattr(recipe, table)[inner]
    if type(value) is not int or not least <= value <= most:
        said = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number of over 30 digits"
        raise ValueError(f"{name} is {said}; it must be a whole number from {least} to {most:,}")
    return value


def share(recipe: Recipe, name: str) -> float:
    """What ``data.…`` of a recipe is, a number from 0 to 1."""
    value = float(recipe.data[name.partition(".")[2]])
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value:g}; it must be a share from 0 to 1, e.g. 0.25")
    return value


def check_sizes(recipe: Recipe, tables: int = 0, *, rotary: bool = False, hidden: bool = True) -> None:
    """Raise, by the names that can be set, unless a model has these sizes and could be trained on one machine.

        parameters ≈ tables·d + layers·(4·d² + 3·d·hidden)

    ``tables``: how many vectors of d features there are, of tokens and positions. Rotary positions turn features of a
    head in pairs. ``hidden=False`` is for models without a feed-forward network.
    """
    d, heads = (whole(recipe, f"model.{name}", most=WIDEST) for name in ("d", "heads"))
    layers = whole(recipe, "model.layers", most=MOST_LAYERS)
    inside = whole(recipe, "model.hidden", most=WIDEST) if hidden else 0
    if d % heads:
        raise ValueError(f"model.heads is {heads}; it must divide model.d, which is {d}")
    if rotary and d // heads % 2:
        raise ValueError(
            f"model.d is {d} and model.heads {heads}, so a head has {d // heads} features; rotary positions turn them "
            "in pairs: give sizes that make it even"
        )
    dropout = float(recipe.model.get("dropout", 0.0))
    if not 0 <= dropout < 1:
        raise ValueError(f"model.dropout is {dropout:g}; it must be ≥ 0 and < 1")
    count = tables * d + layers * (4 * d * d + 3 * d * inside)
    if count > PARAMETERS:
        sizes = f"model.d={d}, model.layers={layers}" + (f", model.hidden={inside}" if hidden else "")
        also = f" and {tables:,} vectors for tokens and places" if tables else ""
        raise ValueError(f"{sizes}{also} make about {count:.1g} parameters; at most {PARAMETERS:.0g} are trained here")


def check_batch(recipe: Recipe, each: int, what: str) -> None:
    """Raise unless a batch fits: ``each`` numbers an example, because of ``what``."""
    if recipe.batch * each > NUMBERS:
        raise ValueError(
            f"batch is {recipe.batch:,}, of {each:,} numbers each ({what}); at most {NUMBERS:,} numbers fit in one"
        )


def own_path(name: str, told: object) -> Path:
    """A path that the user gave as ``name``; ``~`` is the home folder."""
    try:
        return Path(str(told)).expanduser()
    except RuntimeError:
        raise ValueError(f"{name} is {told}; there is no such home folder") from None


def in_parts(examples: Batch, most: int = 256) -> list[Batch]:
    """Held-out examples in batches that fit the memory: ``most`` in each."""
    count = len(next(iter(examples.values())))
    return [{name: x[at : at + most] for name, x in examples.items()} for at in range(0, count, most)]


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    """``−Σ ln p(target)``: logits ``[…, V]``, targets ``[…]``; those that are ``NOTHING`` add nothing."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=NOTHING, reduction="sum")


def words(vocabulary: Sequence[str]) -> dict[str, bytes]:
    """The files of a tokenizer of words between spaces; a text begins with ``<s>``."""
    tokenizer = _tokenizer(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[BEGIN]} $A", special_tokens=_marks())
    return _files(tokenizer)


def characters(vocabulary: Sequence[str]) -> dict[str, bytes]:
    """The files of a tokenizer of characters; a text ends with ``</s>``."""
    tokenizer = _tokenizer(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {SPECIAL[END]}", special_tokens=_marks())
    tokenizer.decoder = decoders.Fuse()  # without spaces between them
    return _files(tokenizer)


def _tokenizer(vocabulary: Sequence[str]) -> Tokenizer:
    model = models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=SPECIAL[UNKNOWN])
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def _files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """``tokenizer.json``, and what keeps ``transformers`` from reading it as the family's own kind."""
    names = zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(names)}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode() + b"\n",
    }


def _marks() -> list[tuple[str, int]]:
    return [(name, i) for i, name in enumerate(SPECIAL)]


def llama(sizes: Mapping[str, Any], vocabulary: int, longest: int) -> dict[str, Any]:
    """``config.json`` of a small Llama: rotary positions, RMSNorm, no biases; sizes are d, heads, layers and hidden."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": sizes["d"],
        "intermediate_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["heads"],
        "max_position_embeddings": longest,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }


def repeated(vocabulary: int, block: int, times: int, texts: int) -> tuple[Probe, Probe]:
    """A block of ordinary tokens ``times`` times over after ``<s>``, and its control: as many tokens, all different."""
    draw = torch.Generator().manual_seed(0)
    ordinary = vocabulary - len(SPECIAL)
    orders = torch.stack([torch.randperm(ordinary, generator=draw) for _ in range(texts)])
    different = orders[:, : block * times] + len(SPECIAL)
    first = different.new_full((texts, 1), BEGIN)

    def probe(name: str, ids: Tensor) -> Probe:
        whole = torch.cat([first, ids], 1)
        return Probe(name, whole, torch.arange(whole.shape[1]) == 0, block, 1)

    return probe("repeated", different[:, :block].repeat(1, times)), probe("random", different)
