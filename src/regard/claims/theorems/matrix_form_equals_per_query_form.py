"""The matrix formula is the per-query sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention


def by_query(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """``z_i = Σ_j α_ij v_j`` with ``α_ij = exp(e_ij) / Σ_k exp(e_ik)``, number by number as it is written."""
    rows = []
    for one in q:
        e = torch.stack([(one * key).sum() * scale for key in k])
        alpha = e.exp() / e.exp().sum()
        rows.append(sum((a * value for a, value in zip(alpha, v, strict=True)), torch.zeros_like(v[0])))
    return torch.stack(rows)


def of_layer(x: Tensor, heads: int, seed: int, attend: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """A layer's heads: ``softmax(Z W_q (Z W_k)ᵀ / √d_k) (Z W_v)`` by its matrices, and the sums over its rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(x.shape[-1], heads, d_key=3, d_value=5, out_bias=False).double()
    maps = (layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight)
    q, k, v = ((x @ w.detach().T).unflatten(-1, (heads, -1)).transpose(0, 1) for w in maps)
    sums = torch.stack([by_query(*one, 1 / math.sqrt(3)) for one in zip(q, k, v, strict=True)])
    with torch.no_grad():
        wanted = sums.transpose(0, 1).flatten(1) @ layer.out_proj.weight.T
        joined = attend(q, k, v).transpose(0, 1).flatten(1) @ layer.out_proj.weight.T
        whole: Tensor = layer(x)
    return torch.stack([joined, whole]), wanted


def check(
    *,
    n: int = 7,
    m: int = 10,
    d: int = 6,
    d_value: int = 4,
    heads: int = 2,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    per_query: Callable[[Tensor, Tensor, Tensor, float], Tensor] = by_query,
) -> Evidence:
    """The operator on whole matrices, on one query at a time, and the sums as they are written; a layer too."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(size, generator=draw, dtype=torch.float64) for size in ((n, d), (m, d), (m, d_value)))
    scale = 1 / math.sqrt(d)
    matrix = attend(q[None], k[None], v[None])[0]
    apart = float((matrix - per_query(q, k, v, scale)).abs().max())
    found.written(
        "the matrix formula gives the per-query sums",
        apart < 1e-12,
        f"{n} queries, {m} keys: within {apart:.1e}",
    )
    alone = torch.cat([attend(q[None, i : i + 1], k[None], v[None])[0] for i in range(n)])
    each = float((matrix - alone).abs().max())
    found.written("each row is what its query gives alone", each < 1e-12, f"queries one by one: within {each:.1e}")
    z = torch.randn(n, 6, generator=draw, dtype=torch.float64)
    got, wanted = of_layer(z, heads, seed, attend)
    layer = float((got - wanted).abs().max())
    found.written("so it is for the heads of a layer, from Z on", layer < 1e-12, f"{heads} heads: within {layer:.1e}")
    raw = float((matrix - per_query(q, k, v, 1.0)).abs().max())
    found.control(
        "sums with exp(score) unscaled, as one formula prints them, equal the matrix form",
        raw < 1e-12,
        f"off {raw:.3g}",
    )
    scales = [scale * step / 8 for step in range(0, 25)]
    off = [float((matrix - per_query(q, k, v, one)).abs().max()) for one in scales]
    lines = {f"1/√d = {scale:.3g}": (scales, off)}
    found.draw("distance of the per-query sums from the matrix form, by their scale", lines, x="scale", y="distance")
    found.numbers |= {"largest difference": max(apart, each, layer), "unscaled": raw}
    return found


CLAIM = Claim(
    id="matrix-form-equals-per-query-form",
    sources=("000", "001"),
    statement="Row i of the matrix formula is the sum of values weighted by the softmax of query i's scaled scores.",
    formula=r"\left(\operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V\right)_{i} \allowbreak = "
    r"\sum_{j=1}^{n} \frac{\exp(q_i^\top k_j / \sqrt{d_k})}{\sum_{l=1}^{n} \exp(q_i^\top k_l / \sqrt{d_k})} \, v_j",
    refuted="A query whose row of the matrix formula is not its own sum.",
    control="The sums without the scale, as 000 prints one weight beside its scaled matrix form.",
    verdict=HOLDS,
    check=check,
)
