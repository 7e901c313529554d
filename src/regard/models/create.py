"""New models: built from a ``config.json``'s entries, their weights drawn and nothing learned yet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from regard.config import Config
from regard.models.load import FAMILIES
from regard.models.model import Model
from regard.models.text import text_of
from regard.nn import LayerNorm, MultiHeadAttention, RMSNorm

__all__ = ["create"]


def create(config: Mapping[str, Any], *, beside: Mapping[str, bytes] | None = None, std: float = 0.02) -> Model:
    """A model of a family that ``load`` knows, ready to be trained; ``save`` writes a folder that ``load`` reads.

        W ~ N(0, std²);  W_O, W_down ~ N(0, std² / 2L);  b = 0;  norms are 1 and 0

    L counts the residual blocks: each adds two sublayers, and the sum stays of one size. ``beside`` are small files of
    the folder to be, by name (``tokenizer.json``). T5's products are not divided by √d, so W_Q is smaller by that.

    >>> sizes = {"vocab_size": 256, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16}
    >>> model = create({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})
    >>> ids = torch.tensor([model.text.encode("bytes")])  # 256 tokens and no tokenizer.json: bytes
    >>> model(ids).shape, sum(p.numel() for p in model.parameters())
    (torch.Size([1, 5, 256]), 7056)
    """
    entries = Config(config)
    if entries.kind not in FAMILIES:
        raise ValueError(f"model_type is {entries.kind!r}; known are {', '.join(FAMILIES)}")
    model = FAMILIES[entries.kind](entries, lambda key: None)
    blocks = sum(isinstance(module, MultiHeadAttention) for module in model.modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, LayerNorm | RMSNorm):
                continue
            if name.endswith("bias") and parameter.ndim == 1:
                parameter.zero_()
                continue
            residual = ".out_proj." in name or ".down." in name
            nn.init.normal_(parameter, std=std / math.sqrt(2 * blocks) if residual else std)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and module.scale == 1.0:
            with torch.no_grad():
                module.q_proj.weight.mul_(module.d_key**-0.5)
    model.beside = dict(beside or {})
    model.text = text_of(model.beside, entries.get("vocab_size"))
    return model
