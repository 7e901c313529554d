"""Benchmark cases of whole models against transformers: one forward pass, padded batches, generation.

The models have the sizes of well-known ones. Their weights are random: the time does not depend on the values.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard._devices import CPU
from regard.bench._race import OURS, Call, Case, MissingPeer, assert_same
from regard.models import Model, create, load

GROUP = "models"
GENERATED_TOKENS = 32

LLAMA = {  # the sizes of SmolLM2-135M
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
BERT = {  # the sizes of MiniLM
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


def model_cases(device: torch.device = CPU) -> Iterator[Case]:
    """Yield the cases: an encoder of the size of MiniLM, and a decoder of the size of SmolLM2-135M."""
    yield Case(GROUP, "BERT 22M reads 8 texts of 16–128 tokens", partial(_encoder, device), device=device)
    yield Case(GROUP, "Llama 135M reads 1,024 tokens", partial(_long_prompt, device), device=device)
    for label, dtype in (("", torch.float32), (" bfloat16", torch.bfloat16)):
        name = f"Llama 135M{label} generates, per token"
        generate = partial(_generate, dtype, device)
        yield Case(GROUP, name, generate, units_per_call=GENERATED_TOKENS, device=device)


def _pair(
    config: Mapping[str, Any], kind: str, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> tuple[Any, Any]:
    """Return regard's model and that of transformers, loaded from the same folder."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingPeer("transformers is not installed")
    import transformers

    # Both models read the same folder, so that their weights are equal.
    torch.manual_seed(0)
    fresh: Model = create(config)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        fresh.save(folder)
        ours = load(folder, dtype=dtype)
        theirs = getattr(transformers, kind).from_pretrained(
            folder, attn_implementation="sdpa", dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    return ours.eval().to(device), theirs.eval().to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars of transformers, and its warning that the folder has no pooler weights."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _encoder(device: torch.device = CPU) -> Mapping[str, Call]:
    ours, theirs = _pair(BERT, "AutoModel", device=device)
    ids = torch.arange(8 * 128, device=device).view(8, 128) * 13 % 30000 + 500
    lengths = torch.linspace(16, 128, 8).long().to(device)
    real = torch.arange(128, device=device) < lengths[:, None]

    @torch.no_grad()
    def ours_call() -> Tensor:
        return ours(ids, padding=lengths)

    @torch.no_grad()
    def peer_call() -> Tensor:
        return theirs(ids, attention_mask=real.long()).last_hidden_state

    assert_same(ours_call()[real], peer_call()[real])  # nobody reads the outputs at padding
    return {OURS: ours_call, "transformers": peer_call}


def _long_prompt(device: torch.device = CPU) -> Mapping[str, Call]:
    ours, theirs = _pair(LLAMA, "AutoModelForCausalLM", device=device)
    ids = torch.arange(1024, device=device)[None] * 37 % 49152

    @torch.no_grad()
    def ours_call() -> Tensor:
        return ours.hidden_states(ids)

    @torch.no_grad()
    def peer_call() -> Tensor:
        return theirs.model(ids, use_cache=False).last_hidden_state

    assert_same(ours_call(), peer_call())
    return {OURS: ours_call, "transformers": peer_call}


def _generate(dtype: torch.dtype, device: torch.device = CPU) -> Mapping[str, Call]:
    ours, theirs = _pair(LLAMA, "AutoModelForCausalLM", dtype, device)
    # Random weights may produce an end token at any time; both must generate the same number of tokens.
    theirs.generation_config.eos_token_id = None
    ids = torch.arange(4, device=device)[None] * 37 % 49152  # a short prompt: generation is timed, not the prompt

    def ours_call() -> Tensor:
        return ours.generate(ids, GENERATED_TOKENS, end=None)

    def peer_call() -> Tensor:
        return theirs.generate(ids, max_new_tokens=GENERATED_TOKENS, do_sample=False)[:, ids.shape[1] :]

    if dtype == torch.float32 and not torch.equal(ours_call(), peer_call()):  # bfloat16 may round ties differently
        raise AssertionError("the two models generate different tokens")
    return {OURS: ours_call, "transformers": peer_call}
