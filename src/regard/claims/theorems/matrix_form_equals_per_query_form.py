"""Checks that the matrix formula gives, row by row, the weighted sum for each query."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, largest_difference, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention


def sums_per_query(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """``z_i = Σ_j α_ij v_j`` with ``α_ij = exp(e_ij) / Σ_k exp(e_ik)``, evaluated exactly as written."""
    rows = []
    for q in queries:
        e = torch.stack([(q * k).sum() * scale for k in keys])
        alpha = e.exp() / e.exp().sum()
        z = torch.zeros_like(values[0])
        for weight, v in zip(alpha, values, strict=True):
            z = z + weight * v
        rows.append(z)
    return torch.stack(rows)


def layer_outputs(x: Tensor, heads: int, seed: int, attention_fn: AttentionFn) -> tuple[Tensor, Tensor]:
    """The output of a random layer by the matrix formula and by the layer itself, stacked; then by per-query sums."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Different widths of keys and values show a scale by the wrong one.
        layer = MultiHeadAttention(x.shape[-1], heads, d_key=3, d_value=5, out_bias=False).double()
    with torch.no_grad():
        q = layer.q_proj(x).unflatten(-1, (heads, -1)).transpose(0, 1)
        k = layer.k_proj(x).unflatten(-1, (heads, -1)).transpose(0, 1)
        v = layer.v_proj(x).unflatten(-1, (heads, -1)).transpose(0, 1)
        sums = torch.stack([sums_per_query(*head, 1 / math.sqrt(3)) for head in zip(q, k, v, strict=True)])
        expected: Tensor = layer.out_proj(sums.transpose(0, 1).flatten(1))
        joined = layer.out_proj(attention_fn(q, k, v).transpose(0, 1).flatten(1))
        return torch.stack([joined, layer(x)]), expected


def check(
    *,
    n: int = 7,
    m: int = 10,
    d: int = 6,
    d_value: int = 4,
    heads: int = 2,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    per_query: Callable[[Tensor, Tensor, Tensor, float], Tensor] = sums_per_query,
) -> Evidence:
    """Run the operator on whole matrices, on one query at a time, and in a layer; compare with the sums as written."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    q = random_normal(generator, n, d)
    k = random_normal(generator, m, d)
    v = random_normal(generator, m, d_value)
    scale = 1 / math.sqrt(d)
    matrix = attention_fn(q[None], k[None], v[None])[0]
    sum_error = largest_difference(matrix, per_query(q, k, v, scale))
    evidence.add_statement(
        "The matrix formula gives per-query sums.", sum_error < 1e-12, f"{n} queries, {m} keys: within {sum_error:.1e}"
    )
    # If rows influenced each other, one query alone would give another output.
    separate = torch.cat([attention_fn(q[None, i : i + 1], k[None], v[None])[0] for i in range(n)])
    row_error = largest_difference(matrix, separate)
    evidence.add_statement(
        "Each row is the output for its query alone.", row_error < 1e-12, f"queries one by one: within {row_error:.1e}"
    )
    outputs, expected = layer_outputs(random_normal(generator, n, 6), heads, seed, attention_fn)
    layer_error = largest_difference(outputs, expected)
    evidence.add_statement(
        "The same is true of the heads of a layer.", layer_error < 1e-12, f"{heads} heads: within {layer_error:.1e}"
    )

    # A control: its statement must be false. Without the scale the weights are sharper, so the sums must differ.
    unscaled = largest_difference(matrix, per_query(q, k, v, 1.0))
    evidence.add_control(
        "Sums of exp(score) without the scale, as one formula has them, equal the matrix formula.",
        unscaled < 1e-12,
        f"they differ by {unscaled:.3g}",
    )
    scales = [scale * step / 8 for step in range(0, 25)]
    lines = {f"1/√d = {scale:.3g}": (scales, [largest_difference(matrix, per_query(q, k, v, s)) for s in scales])}
    evidence.add_series(
        "distance of the per-query sums from the matrix form, by their scale", lines, x="scale", y="distance"
    )
    evidence.numbers |= {"largest difference": max(sum_error, row_error, layer_error), "unscaled": unscaled}
    return evidence


CLAIM = Claim(
    id="matrix-form-equals-per-query-form",
    title="The matrix formula equals the weighted sum of each query",
    citations=(("assignment-6", "1.3"), ("exam-answers", "1 (a)")),
    papers=("vaswani-2017",),
    statement="Row i of the matrix formula is the sum of the values, weighted by the softmax of query i's scaled "
    "scores.",
    formula=r"\left(\operatorname{softmax}\!\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V\right)_{i} \allowbreak = "
    r"\sum_{j=1}^{n} \frac{\exp(q_i^\top k_j / \sqrt{d_k})}{\sum_{l=1}^{n} \exp(q_i^\top k_l / \sqrt{d_k})} \, v_j",
    refuted_by="A query whose row of the matrix formula is not its own sum.",
    control="Sums without the scale, as Assignment 6 writes one weight next to its scaled matrix formula: they must "
    "differ.",
    verdict=HOLDS,
    check=check,
)
