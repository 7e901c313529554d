"""What the tasks share: the summed loss, small tokenizers, a small Llama's config, probes of a task's own tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F

from regard.watching.probes import Probe

__all__ = ["BEGIN", "END", "NOTHING", "PAD", "SPECIAL", "UNKNOWN", "characters", "llama", "repeated", "summed", "words"]

NOTHING = -100  # a target that asks for nothing
PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")  # the first ids of every vocabulary here


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
