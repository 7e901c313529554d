"""Benchmark cases of ``regard.watch`` against storing the n × n weights, and of what groups of keys add to a call."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard._devices import CPU
from regard._groups import Groups
from regard._observables import Observation, Observe
from regard._operator import attention
from regard.bench._race import OURS, Call, Case, MissingPeer, assert_same, random_qkv
from regard.interp import Recording, watch

GROUP = "watching"
TOKENS = 2048
GROUPED_TOKENS = 4096


def observation_cases(device: torch.device = CPU) -> Iterator[Case]:
    """Yield the cases: one layer at two lengths, then all heads of a model."""
    # What a call allocates is only recorded on the CPU.
    memory = device.type == "cpu"
    for n in (1024, 4096):
        name = f"8 heads on {n:,} tokens, rows and a map"
        yield Case(GROUP, name, partial(_layer, n, device), memory=memory, device=device)
    name = f"GPT-2, 6 × 8 heads on {TOKENS:,} tokens"
    yield Case(GROUP, name, partial(_model, device), memory=memory, device=device)


def group_cases(device: torch.device = CPU) -> Iterator[Case]:
    """Yield the case of groups of keys: on a CPU they may add 4% to an observed call."""
    least = 0.96 if device.type == "cpu" else None
    name = f"8 heads on {GROUPED_TOKENS:,} tokens, 8 groups of keys"
    yield Case("groups", name, partial(_groups, device), least=least, device=device)


def _layer(n: int, device: torch.device = CPU) -> Mapping[str, Call]:
    q, k, v = random_qkv(1, 8, n, 64, device=device)
    observe = Observe(map=64)

    def ours() -> tuple[Tensor, Tensor, Tensor]:
        out, observation = attention(q, k, v, observe=observe)
        assert observation.map is not None  # for the type checker
        return out, observation.mean("entropy").float(), observation.map.float()

    def stored() -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.softmax(q @ k.mT / math.sqrt(64), -1)
        pooled = weights[0].unflatten(2, (64, -1)).sum(3).unflatten(1, (64, -1)).mean(2)
        return weights @ v, _entropy(weights)[0], pooled

    for a, b in zip(ours(), stored(), strict=True):
        assert_same(a, b)
    return {OURS: ours, "weights stored": stored, "not watched": lambda: attention(q, k, v)}


def _groups(device: torch.device = CPU) -> Mapping[str, Call]:
    """The same observed call with interleaved groups, with groups that are runs of keys, and without groups."""
    n = GROUPED_TOKENS
    q, k, v = random_qkv(1, 8, n, 64, device=device)
    keys = torch.arange(n, device=device)
    interleaved = keys % 8
    runs = keys * 8 // n

    def observed(labels: Tensor | None) -> Observation:
        groups = None if labels is None else Groups(labels, names=list("abcdefgh"))
        return attention(q, k, v, observe=Observe(groups=groups))[1]

    weights = torch.softmax(q @ k.mT / math.sqrt(64), -1)
    for labels in (interleaved, runs):
        sums = torch.stack([weights[..., labels == group].sum(-1) for group in range(8)], -1)
        measured = observed(labels).groups
        assert measured is not None  # for the type checker
        assert_same(measured, sums)
    return {
        OURS: partial(observed, interleaved),
        "groups in runs": partial(observed, runs),
        "no groups": partial(observed, None),
    }


def _entropy(weights: Tensor) -> Tensor:
    """Return −Σ_j A_ij ln A_ij, averaged over the rows i."""
    return torch.special.entr(weights).sum(-1).mean(-1)


def _model(device: torch.device = CPU) -> Mapping[str, Call]:
    if importlib.util.find_spec("transformers") is None:
        raise MissingPeer("transformers is not installed")
    from transformers import GPT2Config, GPT2Model

    # Two models with the same parameters. regard observes the one with fused attention; the comparison needs eager
    # attention, because only that returns attention weights.
    sizes: dict[str, Any] = {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": TOKENS}
    sizes |= {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    plain: Any = GPT2Model(GPT2Config(**sizes | {"attn_implementation": "sdpa"})).eval()
    eager: Any = GPT2Model(GPT2Config(**sizes | {"attn_implementation": "eager"})).eval()
    eager.load_state_dict(plain.state_dict())
    plain.to(device)
    eager.to(device)
    ids = torch.arange(TOKENS, device=device)[None] * 7 % 1000

    @torch.no_grad()
    def ours() -> Recording:
        with watch(plain, Observe(map=64)) as recording:
            plain(ids, use_cache=False)
        return recording

    @torch.no_grad()
    def stored() -> Tensor:
        layers = eager(ids, use_cache=False, output_attentions=True).attentions
        return torch.stack([_entropy(weights)[0] for weights in layers])

    @torch.no_grad()
    def unwatched() -> Tensor:
        return plain(ids, use_cache=False).last_hidden_state

    # The two entropies add 2,048 float32 terms in different orders, so the tolerance is wider.
    entropies = torch.stack([one.mean("entropy") for one in ours().values()]).float()
    assert_same(entropies, stored(), tolerance=2e-3)
    return {OURS: ours, "weights stored": stored, "not watched": unwatched}
