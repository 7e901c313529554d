"""Whole models against transformers on the same weights: reading, padded batches, writing token by token.

Weights are drawn, in the sizes of models that people know: time does not depend on what was learned.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.bench.race import OURS, Call, Case, Missing, same
from regard.models import Model, create, load

__all__ = ["models"]

GROUP = "models"
WRITTEN = 32  # tokens

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}


def models() -> Iterator[Case]:
    """An encoder of MiniLM's size, a decoder of SmolLM2-135M's."""
    yield Case(GROUP, "BERT 22M reads 8 padded texts of 16–128", _encoder)
    yield Case(GROUP, "Llama 135M reads 1,024 tokens", _reads)
    yield Case(GROUP, "Llama 135M writes, a token", lambda: _writes(torch.float32), unit=WRITTEN)
    yield Case(GROUP, "Llama 135M bfloat16 writes, a token", lambda: _writes(torch.bfloat16), unit=WRITTEN)


def _pair(config: Mapping[str, Any], kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Our model and that of transformers, from one folder."""
    if importlib.util.find_spec("transformers") is None:
        raise Missing("transformers is not installed")
    import transformers

    torch.manual_seed(0)
    fresh: Model = create(config)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        fresh.save(folder)
        ours = load(folder, dtype=dtype)
        theirs = getattr(transformers, kind).from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)
    return ours.eval(), theirs.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers without its bars and its report of a pooler that nobody asks for."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _encoder() -> Mapping[str, Call]:
    ours, theirs = _pair(BERT, "AutoModel")
    ids = torch.arange(8 * 128).view(8, 128) * 13 % 30000 + 500
    lengths = torch.linspace(16, 128, 8).long()
    real = torch.arange(128) < lengths[:, None]

    @torch.no_grad()
    def our() -> Tensor:
        return ours(ids, padding=lengths)

    @torch.no_grad()
    def their() -> Tensor:
        return theirs(ids, attention_mask=real.long()).last_hidden_state

    same(our()[real], their()[real])
    return {OURS: our, "transformers": their}


def _reads() -> Mapping[str, Call]:
    ours, theirs = _pair(LLAMA, "AutoModelForCausalLM")
    ids = torch.arange(1024)[None] * 37 % 49152

    @torch.no_grad()
    def our() -> Tensor:
        return ours.hidden(ids)

    @torch.no_grad()
    def their() -> Tensor:
        return theirs.model(ids, use_cache=False).last_hidden_state

    same(our(), their())
    return {OURS: our, "transformers": their}


def _writes(dtype: torch.dtype) -> Mapping[str, Call]:
    ours, theirs = _pair(LLAMA, "AutoModelForCausalLM", dtype)
    theirs.generation_config.eos_token_id = None
    ids = torch.arange(4)[None] * 37 % 49152  # few: writing is to be timed, not reading

    def our() -> Tensor:
        return ours.generate(ids, WRITTEN, end=None)

    def their() -> Tensor:
        return theirs.generate(ids, max_new_tokens=WRITTEN, do_sample=False)[:, ids.shape[1] :]

    if dtype == torch.float32 and not torch.equal(our(), their()):  # bfloat16 rounds near ties either way
        raise AssertionError("the two models write different tokens")
    return {OURS: our, "transformers": their}
