"""Watching against what people do for it today: weights stored as n × n, and measured afterwards."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.bench.race import OURS, Call, Case, Missing, same, tensors
from regard.observables import Observe
from regard.watching import Seen, watch

__all__ = ["watching"]

GROUP = "watching"
TOKENS = 2048


def watching() -> Iterator[Case]:
    """One layer, then every head of a model."""
    for n in (1024, 4096):
        yield Case(GROUP, f"8 heads on {n:,} tokens, rows and a map", lambda n=n: _layer(n), memory=True)  # type: ignore[misc]
    yield Case(GROUP, f"GPT-2, 6 × 8 heads on {TOKENS:,} tokens", _model, memory=True)


def _layer(n: int) -> Mapping[str, Call]:
    q, k, v = tensors(1, 8, n, 64)
    asked = Observe(map=64)

    def ours() -> tuple[Tensor, Tensor, Tensor]:
        out, seen = attention(q, k, v, observe=asked)
        assert seen.map is not None
        return out, seen.mean("entropy").float(), seen.map.float()

    def stored() -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.softmax(q @ k.mT / math.sqrt(64), -1)
        pooled = weights[0].unflatten(2, (64, -1)).sum(3).unflatten(1, (64, -1)).mean(2)
        return weights @ v, _entropy(weights)[0], pooled

    for a, b in zip(ours(), stored(), strict=True):
        same(a, b)
    return {OURS: ours, "weights stored": stored, "not watched": lambda: attention(q, k, v)}


def _entropy(weights: Tensor) -> Tensor:
    """Σ −A ln A a row, averaged over rows."""
    return torch.special.entr(weights).sum(-1).mean(-1)


def _model() -> Mapping[str, Call]:
    if importlib.util.find_spec("transformers") is None:
        raise Missing("transformers is not installed")
    from transformers import GPT2Config, GPT2Model

    sizes: dict[str, Any] = {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": TOKENS}
    sizes |= {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    plain: Any = GPT2Model(GPT2Config(**sizes | {"attn_implementation": "sdpa"})).eval()
    eager: Any = GPT2Model(GPT2Config(**sizes | {"attn_implementation": "eager"})).eval()
    eager.load_state_dict(plain.state_dict())
    ids = torch.arange(TOKENS)[None] * 7 % 1000

    @torch.no_grad()
    def ours() -> Seen:
        with watch(plain, Observe(map=64)) as seen:
            plain(ids, use_cache=False)
        return seen

    @torch.no_grad()
    def stored() -> Tensor:
        found = eager(ids, use_cache=False, output_attentions=True).attentions
        return torch.stack([_entropy(weights)[0] for weights in found])

    @torch.no_grad()
    def unwatched() -> Tensor:
        return plain(ids, use_cache=False).last_hidden_state

    same(torch.stack([one.mean("entropy") for one in ours().values()]).float(), stored(), 2e-3)
    return {OURS: ours, "weights stored": stored, "not watched": unwatched}
