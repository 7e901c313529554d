"""Parts that several tasks share: checks of settings, the summed loss, small tokenizers, a Llama config, probes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F

from regard._config_json import MOST_LAYERS
from regard._errors import RegardError
from regard.interp._probes import Probe
from regard.training._recipe import Recipe
from regard.training._task import Batch, seeded_generator, slice_batch

# Larger sizes are refused before anything is built: they would exhaust the memory or take too long.
MAX_PARAMETERS = 10**9
MAX_WIDTH = 2**20
MAX_BATCH_NUMBERS = 2**26  # numbers in a batch: 0.25 GiB in float32, and training needs several such arrays
MAX_VOCABULARY = 2**20
MAX_TOKENS = 2**16
MAX_HELD_OUT = 2**16

# Stream ids for seeded_generator: training and held-out examples use different random numbers.
TRAIN = 11
HELD_OUT = 12

IGNORED = -100  # a target that is not predicted
PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # the first ids of every vocabulary here


def integer_setting(recipe: Recipe, name: str, least: int = 1, most: int = MAX_HELD_OUT) -> int:
    """Return ``model.…`` or ``data.…`` of a recipe, checked: an integer from ``least`` to ``most``."""
    table, _, inner = name.partition(".")
    value = getattr(recipe, table)[inner]
    if type(value) is not int or not least <= value <= most:
        shown = repr(value)
        if isinstance(value, int) and abs(value) >= 10**30:
            shown = "a number of over 30 digits"
        raise RegardError(f"{name} is {shown}; it must be an integer from {least} to {most:,}")
    return value


def share_setting(recipe: Recipe, name: str) -> float:
    """Return ``data.…`` of a recipe, checked: a number from 0 to 1."""
    value = float(recipe.data[name.partition(".")[2]])
    if not 0 <= value <= 1:
        raise RegardError(f"{name} is {value:g}; it must be a share from 0 to 1, for example 0.25")
    return value


def check_model_size(recipe: Recipe, vectors: int = 0, *, rotary: bool = False, hidden: bool = True) -> None:
    """Raise an error that names the setting if a size is invalid or the model is too large for one machine.

        parameters ≈ vectors·d + layers·(4·d² + 3·d·hidden)

    - ``vectors``: the number of embedding vectors, for tokens and positions together.
    - ``rotary``: rotary positions rotate pairs of features, so a head needs an even number of features.
    - ``hidden``: False for a model without feed-forward networks.
    """
    d = integer_setting(recipe, "model.d", most=MAX_WIDTH)
    heads = integer_setting(recipe, "model.heads", most=MAX_WIDTH)
    layers = integer_setting(recipe, "model.layers", most=MOST_LAYERS)
    width = integer_setting(recipe, "model.hidden", most=MAX_WIDTH) if hidden else 0
    if d % heads:
        raise RegardError(f"model.heads is {heads}; it must divide model.d, which is {d}")
    if rotary and d // heads % 2:
        features = f"model.d is {d} and model.heads {heads}, so a head has {d // heads} features"
        raise RegardError(f"{features}; rotary positions need an even number")
    dropout = float(recipe.model.get("dropout", 0.0))
    if not 0 <= dropout < 1:
        raise RegardError(f"model.dropout is {dropout:g}; it must be ≥ 0 and < 1")
    count = vectors * d + layers * (4 * d * d + 3 * d * width)
    if count > MAX_PARAMETERS:
        sizes = f"model.d={d}, model.layers={layers}"
        if hidden:
            sizes += f", model.hidden={width}"
        if vectors:
            sizes += f" and {vectors:,} embedding vectors"
        raise RegardError(f"{sizes} make about {count:.1g} parameters; at most {MAX_PARAMETERS:.0g} are accepted")


def check_batch(recipe: Recipe, size: int, what: str) -> None:
    """Raise unless a batch fits into memory. An example has ``size`` numbers; ``what`` names them in the message."""
    if recipe.batch * size > MAX_BATCH_NUMBERS:
        examples = f"{recipe.batch:,} examples of {size:,} numbers each ({what})"
        raise RegardError(f"batch is {examples}; a batch may have at most {MAX_BATCH_NUMBERS:,} numbers")


def user_path(name: str, value: object) -> Path:
    """Return the path that the user gave as the setting ``name``; ``~`` is the home folder."""
    try:
        return Path(str(value)).expanduser()
    except RuntimeError:
        raise RegardError(f"{name} is {value}; there is no such home folder") from None


def split_batches(examples: Batch, size: int = 256) -> list[Batch]:
    """Split held-out examples into batches of at most ``size``, which fit into memory."""
    count = len(next(iter(examples.values())))
    return [slice_batch(examples, slice(start, start + size)) for start in range(0, count, size)]


def examples_by_epoch(recipe: Recipe, stream: int, step: int, count: int) -> Iterator[tuple[Tensor, torch.Generator]]:
    """Yield the numbers of a step's examples, and the generator that drew their order; a batch may span two epochs.

    In every epoch each of ``count`` examples is used once, in a new order.
    """
    numbers = torch.arange(step * recipe.batch, (step + 1) * recipe.batch)
    epochs = numbers // count
    for epoch in epochs.unique().tolist():
        generator = seeded_generator(recipe.seed, stream, epoch)
        order = torch.randperm(count, generator=generator)
        yield order[numbers[epochs == epoch] % count], generator


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return ``−Σ ln p(target)``: logits ``[…, V]``, targets ``[…]``; targets that are ``IGNORED`` add nothing."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def word_ids(vocabulary: Sequence[str]) -> dict[str, int]:
    """Return the id of each word, which is its index in the vocabulary."""
    return {word: i for i, word in enumerate(vocabulary)}


def word_tokenizer_files(vocabulary: Sequence[str]) -> dict[str, bytes]:
    """Return the files of a tokenizer that splits at spaces and puts ``<s>`` before a text."""
    tokenizer = _tokenizer(vocabulary, f"{SPECIAL_TOKENS[BEGIN]} $A")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _tokenizer_files(tokenizer)


def character_tokenizer_files(vocabulary: Sequence[str]) -> dict[str, bytes]:
    """Return the files of a tokenizer of single characters that puts ``</s>`` after a text."""
    tokenizer = _tokenizer(vocabulary, f"$A {SPECIAL_TOKENS[END]}")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # joins the characters without spaces
    return _tokenizer_files(tokenizer)


def _tokenizer(vocabulary: Sequence[str], template: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(word_ids(vocabulary), unk_token=SPECIAL_TOKENS[UNKNOWN]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    special = list(word_ids(SPECIAL_TOKENS).items())
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return ``tokenizer.json`` and its config; without the config ``transformers`` would use Llama's or T5's class."""
    names = zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(names)}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode() + b"\n",
    }


def llama_config(sizes: Mapping[str, Any], vocabulary: int, max_tokens: int) -> dict[str, Any]:
    """Return ``config.json`` of a small Llama (rotary positions, RMSNorm, no biases) with a recipe's ``sizes``."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": sizes["d"],
        "intermediate_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["heads"],
        "max_position_embeddings": max_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }


def repeated_probes(vocabulary: int, block: int, times: int, texts: int) -> list[Probe]:
    """Return two probes: ``<s>`` and a block of random tokens that is repeated, and a control without repetition."""
    generator = torch.Generator().manual_seed(0)
    ordinary = vocabulary - len(SPECIAL_TOKENS)
    orders = torch.stack([torch.randperm(ordinary, generator=generator) for _ in range(texts)])
    different = orders[:, : block * times] + len(SPECIAL_TOKENS)
    same = different[:, :block].repeat(1, times)
    begin = different.new_full((texts, 1), BEGIN)
    special = torch.arange(1 + block * times) == 0
    return [
        Probe("repeated", torch.cat([begin, same], 1), special, block, 1),
        Probe("random", torch.cat([begin, different], 1), special, block, 1),
    ]
