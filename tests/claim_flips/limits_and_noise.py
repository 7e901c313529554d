"""Flips of the claims about limits of softmax, noise, and equal heads."""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import torch
from torch import Tensor

import regard
from regard.claims.theorems.average_of_two import orthonormal
from regard.claims.theorems.orthogonal_keys_are_identity import layer_with_values
from regard.claims.theorems.same_initialisation_same_head import copy_all_but_output, copy_first_head
from regard.nn import MultiHeadAttention

CALLS = count()


def scaled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention with an additional factor of 1/√d."""
    out: Tensor = regard.attention(q, k, v, scale=scale / math.sqrt(q.shape[-1]))
    return out


def own_noise(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention that reorders the samples in each call, as if each head had its own noise."""
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(next(CALLS)))
    out: Tensor = regard.attention(q, k[order], v, scale=scale)
    return out


FLIPS: dict[str, list[dict[str, Any]]] = {
    "soft-limit": [
        {
            "attention_fn": lambda q, k, v, scale: regard.attention(q, k, v, scale=max(scale, 1.0))
        },  # the temperature has a limit
        {"attention_fn": lambda q, k, v, scale: regard.attention(q, k, v, scale=scale, mask=regard.Causal())},
        {"attention_fn": lambda q, k, v, scale: regard.attention(q, k, v, scale=scale**0.5)},  # another rate
    ],
    "copying": [
        {"attention_fn": scaled},
        {"needed": lambda n, short: math.log(1 / short)},  # ignores the number of keys
        {"needed": lambda n, short: 2 * math.log(n / short)},  # more than is needed
    ],
    "average-of-two": [
        {"attention_fn": scaled},
        {"formula": lambda beta, n: 1 / (2 + n * math.exp(-beta))},  # n instead of n − 2
        {"keys": lambda n, d, generator: torch.randn(n, d, generator=generator, dtype=torch.float64)},
    ],
    "noisy-key-breaks-one-head": [
        {"along": 0.0},  # nothing varies along μ_a
        {"attention_fn": scaled},
        {"attention_fn": lambda q, k, v, scale: regard.attention(q, k / k.norm(dim=-1, keepdim=True), v, scale=scale)},
    ],
    "two-heads-are-steadier": [
        {"corrected": lambda a, b, t: (t * (a + b), t * (a + b))},
        {"corrected": lambda a, b, t: (t * a, t * a)},
        {"proposed": lambda a, b, t: (t * a, t * b), "different": lambda a, b, t: (t * a, 2 * t * b)},
        {"attention_fn": own_noise},
    ],
    "zero-mean-key-noise": [
        {"attention_fn": lambda q, k, v, scale: regard.attention(q, k, v, scale=0.0)},  # ignores the scores
        {"mirror": lambda noise: noise},  # without pairs ±ε, the first order hides the second
        {"attention_fn": scaled},
    ],
    "key-scaling-first-order": [
        {"attention_fn": scaled},
        {"derivative": lambda a, i, beta: a[..., i : i + 1] * (torch.eye(a.shape[-1]).to(a)[i] - a)},  # no β
        {
            "derivative": lambda a, i, beta: beta * a[..., i : i + 1] * torch.eye(a.shape[-1]).to(a)[i]
        },  # only the diagonal
    ],
    "orthogonal-keys-are-identity": [
        {"make": lambda d, beta, value: layer_with_values(d, math.inf, value)},  # already hard
        {"make": lambda d, beta, value: layer_with_values(d, None, value)},  # always 1/√d
        {"items": lambda n, d, generator: 2 * orthonormal(n, d, generator)},
        {"items": lambda n, d, generator: torch.randn(n, d, generator=generator, dtype=torch.float64)},
    ],
    "average-under-isotropic-noise": [
        {"attention_fn": scaled},
        {
            "noise": lambda n_samples, n, d, generator: (
                torch.randn(n_samples, 1, d, generator=generator).double().expand(-1, n, d)
            )
        },
        {"query": lambda a, b, t: t * a},
        {"query": lambda a, b, t: min(t, 20.0) * (a + b)},  # a query of limited length
    ],
    "same-initialisation-same-head": [
        {"random": copy_first_head},  # equal heads
        {"equal": copy_all_but_output},  # without the output slices
        {"layer": lambda d, heads: MultiHeadAttention(d, heads, dropout=0.3)},  # dropout makes equal heads differ
    ],
}
