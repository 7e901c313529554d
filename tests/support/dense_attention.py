"""The one dense oracle of the tests: attention and its weights as n × m formulas, without tiles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._lowered_scores import Bias, dropout_keep
from regard.masks import Mask


def visible(mask, bias: Tensor | None, batch, H: int, n: int, m: int) -> Tensor:
    """bool [B, H, n, m]."""
    see = torch.ones(*batch, H, n, m, dtype=torch.bool)
    if isinstance(mask, Mask):
        see = see & mask.dense(n, m)
    elif mask is not None:
        see = see & mask
    see = see.reshape(math.prod(batch), H, n, m)
    return see if bias is None else see & (bias != -math.inf)


def dense_bias(bias, q: Tensor, batch, m: int) -> Tensor | None:
    """float64 [B, H, n, m], or None."""
    if bias is None:
        return None
    B, H, n, _ = q.shape
    if isinstance(bias, Bias):
        return bias.dense(q, m).expand(B, H, n, m)
    return bias.to(q.dtype).expand(*batch, H, n, m).reshape(B, H, n, m)


def logits(q: Tensor, k: Tensor, see: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Final logits with −inf where hidden; q, k [B, H, ·, d] with heads already repeated."""
    if math.isinf(scale) and see.shape[-1]:
        product = torch.where(see, (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1), -math.inf)
        s = torch.where(product == product.amax(-1, keepdim=True), 0.0, -math.inf).to(q.dtype)
    else:
        s = torch.zeros(see.shape, dtype=q.dtype) if scale in (0, math.inf) else q @ k.transpose(-1, -2) * scale
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if bias is None else s + torch.where(bias == -math.inf, 0.0, bias)
    return torch.where(see, s, -math.inf)


def weights(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """A [B, H, n, m] and lse [B, H, n]; rows without keys are 0."""
    B, H, n, m = s.shape
    extra = s if sinks is None else torch.cat([s, sinks.to(s.dtype).view(1, H, 1, 1).expand(B, H, n, 1)], -1)
    if extra.shape[-1] == 0:
        return s, s.new_full((B, H, n), -math.inf)
    top = extra.amax(-1, keepdim=True).detach()
    top = torch.where(top == -math.inf, 0.0, top)
    e = torch.exp(extra - top)
    total = e.sum(-1, keepdim=True)
    A = e[..., :m] / torch.where(total == 0, 1.0, total)
    return A, (top + total.log()).squeeze(-1)


def attention(q, k, v, *, mask=None, bias=None, scale=None, softcap=None, sinks=None, dropout=0.0, seed=None):
    """out [*batch, H, n, e], A [B, H, n, m], lse [B, H, n] and final logits, in q's dtype."""
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    H, n, d = q.shape[-3:]
    m = k.shape[-2]
    repeat = H // k.shape[-3]
    B = math.prod(batch)
    q4 = q.expand(*batch, *q.shape[-3:]).reshape(B, H, n, d)
    k4, v4 = (x.expand(*batch, *x.shape[-3:]).reshape(B, *x.shape[-3:]).repeat_interleave(repeat, 1) for x in (k, v))
    b = dense_bias(bias, q4, batch, m)
    see = visible(mask, None if b is None else b.detach(), batch, H, n, m)
    s = logits(q4, k4, see, b, 1 / math.sqrt(d) if scale is None else scale, softcap)
    A, lse = weights(s, sinks)
    used = A
    if dropout:
        i = [torch.arange(size).view([-1 if a == x else 1 for x in range(4)]) for a, size in enumerate(A.shape)]
        keep = dropout_keep(seed, *i, dropout)
        used = A * keep / (1 - dropout) if dropout < 1 else A * 0
    return (used @ v4).reshape(*batch, H, n, v.shape[-1]), A, lse, s


def on_grid(x: torch.Tensor) -> torch.Tensor:
    """x rounded to at most 128 equal steps on each side of 0, so that sums of products are exact and equal keys tie."""
    largest = x.abs().max().item() if x.numel() else 0.0
    if not 0 < largest < math.inf:
        return x
    step = 2.0 ** (math.ceil(math.log2(largest)) - 7)
    return (x / step).round() * step
