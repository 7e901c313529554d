"""Attention as torch's own operations compute it, n × m stored: what the self-test holds ours against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.masks import Mask
from regard.scores import Bias

__all__ = ["Case", "formula", "torchs_own"]


@dataclass(frozen=True)
class Case:
    """One call: inputs in float64, and the options that `regard.attention` takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    mask: Mask | None = None
    bias: Bias | Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)


def formula(q: Tensor, k: Tensor, v: Tensor, case: Case, bias: Bias | Tensor | None) -> tuple[Tensor, Tensor]:
    """``softmax(softcap(q kᵀ/√d) + bias, −inf where masked) v`` and its weights; no row may be without keys."""
    k, v = _repeated(k, v, q.shape[1])
    s = q @ k.transpose(-1, -2) * case.options.get("scale", q.shape[-1] ** -0.5)
    cap = case.options.get("softcap")
    s = s if cap is None else cap * torch.tanh(s / cap)
    added = _added(q, k, case.mask, bias)
    s = s if added is None else s + added
    sinks = case.options.get("sinks")
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    weights = torch.softmax(s, -1)[..., : k.shape[2]]
    return weights @ v, weights


def torchs_own(q: Tensor, k: Tensor, v: Tensor, case: Case, bias: Bias | Tensor | None) -> Tensor:
    """`scaled_dot_product_attention`; the formula where it has no such option."""
    if case.options:
        return formula(q, k, v, case, bias)[0]
    k, v = _repeated(k, v, q.shape[1])
    seen = None if case.mask is None else case.mask.dense(q.shape[2], k.shape[2])
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen if bias is None else _added(q, k, case.mask, bias)
    )


def _repeated(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    times = heads // k.shape[1]
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _added(q: Tensor, k: Tensor, mask: Mask | None, bias: Bias | Tensor | None) -> Tensor | None:
    """Bias and mask as one tensor that broadcasts to ``[B, H, n, m]``."""
    n, m = q.shape[2], k.shape[2]
    dense = bias.dense(q, m) if isinstance(bias, Bias) else bias
    if mask is None:
        return dense
    zero = q.new_zeros(1, 1, n, m) if dense is None else dense
    return torch.where(mask.dense(n, m), zero, -math.inf)
