"""Creates new models from the entries of a ``config.json``, with random weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from regard._config_json import Config
from regard.models._families import build_function
from regard.models._model import Model
from regard.models._tokenizer import make_tokenizer
from regard.nn import LayerNorm, MultiHeadAttention, RMSNorm


def create(config: Mapping[str, Any], *, extra_files: Mapping[str, bytes] | None = None, std: float = 0.02) -> Model:
    """A model of a family that ``load`` knows, ready to be trained; ``save`` writes a folder that ``load`` reads.

        W ~ N(0, std²);  W_O, W_down ~ N(0, std² / 2L);  b = 0;  norms are 1 and 0

    L is the number of attention layers: the sum of all residual sublayers must not grow with L. T5 does not divide q·k
    by √d, so its W_Q is smaller by that factor.

    - ``config``: the entries of a ``config.json``.
    - ``extra_files``: small files of the folder, by name, e.g. ``tokenizer.json`` (default: none).
    - ``std``: standard deviation of the weights (default 0.02).

    >>> sizes = {"vocab_size": 256, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16}
    >>> model = create({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes})
    >>> ids = torch.tensor([model.tokenizer.encode("bytes")])  # 256 tokens and no tokenizer.json: bytes
    >>> model(ids).shape, sum(p.numel() for p in model.parameters())
    (torch.Size([1, 5, 256]), 7056)
    """
    entries = Config(config)
    model = build_function(entries.model_type)(entries, lambda key: None)
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if isinstance(model.get_submodule(name.rpartition(".")[0]), LayerNorm | RMSNorm):
                continue
            if name.endswith("bias") and parameter.ndim == 1:  # a bias on scores has more dimensions
                parameter.zero_()
            elif ".out_proj." in name or ".down." in name:
                nn.init.normal_(parameter, std=std / math.sqrt(2 * len(layers)))
            else:
                nn.init.normal_(parameter, std=std)
        for layer in layers:
            if layer.scale == 1.0:  # T5
                layer.q_proj.weight.mul_(layer.d_key**-0.5)
    model.extra_files = dict(extra_files or {})
    model.tokenizer = make_tokenizer(model.extra_files, entries.get("vocab_size"))
    return model
