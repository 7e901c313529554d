"""Flips of the claims about limits of softmax, about noise, and about equal heads."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import torch
from torch import Tensor

import regard
from regard.claims.theorems.average_of_two import orthonormal
from regard.claims.theorems.orthogonal_keys_are_identity import layer
from regard.claims.theorems.same_initialisation_same_head import share, share_but_output
from regard.nn import MultiHeadAttention

CALLS = count()


def scaled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """1/√d on top of what is asked for."""
    out: Tensor = regard.attention(q, k, v, scale=scale / math.sqrt(q.shape[-1]))
    return out


def own_noise(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As if each call, so each head, saw samples of the keys of its own."""
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(next(CALLS)))
    out: Tensor = regard.attention(q, k[order], v, scale=scale)
    return out


FLIPS: dict[str, list[dict[str, Any]]] = {
    "soft-limit": [
        {"attend": lambda q, k, v, scale: regard.attention(q, k, v, scale=max(scale, 1.0))},  # never soft
        {"attend": lambda q, k, v, scale: regard.attention(q, k, v, scale=scale, mask=regard.Causal())},
        {"attend": lambda q, k, v, scale: regard.attention(q, k, v, scale=scale**0.5)},  # another rate
    ],
    "copying": [
        {"attend": scaled},
        {"needed": lambda n, short: math.log(1 / short)},  # the number of keys forgotten
        {"needed": lambda n, short: 2 * math.log(n / short)},  # enough, but not what is needed
    ],
    "average-of-two": [
        {"attend": scaled},
        {"formula": lambda beta, n: 1 / (2 + n * math.exp(-beta))},  # n for n − 2
        {"keys": lambda n, d, draw: torch.randn(n, d, generator=draw, dtype=torch.float64)},
    ],
    "noisy-key-breaks-one-head": [
        {"along": 0.0},  # nothing varies along μ_a
        {"attend": scaled},
        {"attend": lambda q, k, v, scale: regard.attention(q, k / k.norm(dim=-1, keepdim=True), v, scale=scale)},
    ],
    "two-heads-are-steadier": [
        {"corrected": lambda a, b, t: (t * (a + b), t * (a + b))},
        {"corrected": lambda a, b, t: (t * a, t * a)},
        {"proposed": lambda a, b, t: (t * a, t * b), "different": lambda a, b, t: (t * a, 2 * t * b)},
        {"attend": own_noise},
    ],
    "zero-mean-key-noise": [
        {"attend": lambda q, k, v, scale: regard.attention(q, k, v, scale=0.0)},  # no score is looked at
        {"mirror": lambda noise: noise},  # without pairs ±ε the first order hides the second
        {"attend": scaled},
    ],
    "key-scaling-first-order": [
        {"attend": scaled},
        {"derivative": lambda a, i, beta: a[..., i : i + 1] * (torch.eye(a.shape[-1]).to(a)[i] - a)},  # no β
        {"derivative": lambda a, i, beta: beta * a[..., i : i + 1] * torch.eye(a.shape[-1]).to(a)[i]},  # diagonal alone
    ],
    "orthogonal-keys-are-identity": [
        {"make": lambda d, beta, value: layer(d, math.inf, value)},  # hard already
        {"make": lambda d, beta, value: layer(d, None, value)},  # 1/√d whatever is asked for
        {"items": lambda n, d, draw: 2 * orthonormal(n, d, draw)},
        {"items": lambda n, d, draw: torch.randn(n, d, generator=draw, dtype=torch.float64)},
    ],
    "average-under-isotropic-noise": [
        {"attend": scaled},
        {"noise": lambda n_samples, n, d, draw: torch.randn(n_samples, 1, d, generator=draw).double().expand(-1, n, d)},
        {"query": lambda a, b, t: t * a},
        {"query": lambda a, b, t: min(t, 20.0) * (a + b)},  # a query that is never long
    ],
    "same-initialisation-same-head": [
        {"drawn": share},  # no randomness between heads
        {"same": share_but_output},  # the output slices forgotten
        {"layer": lambda d, heads: MultiHeadAttention(d, heads, dropout=0.3)},  # dropout parts equal heads
    ],
}
