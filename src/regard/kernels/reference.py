"""The truth: exact attention in plain PyTorch, tiled over queries and keys, O(n) memory forward and backward.

    forward    m ← max(m, max_j s),  l ← l·e^(m_old − m) + Σ_j e^(s − m),  o ← o·e^(m_old − m) + Σ_j e^(s − m) v_j
               out = o / l,  and m and l are what a row leaves behind: lse = m + log l
    backward   A = e^(s − m) / l,  Δ_i = out_i·g_i,  dS = A ∘ (g vᵀ − Δ)
               dq = scale·dS k,  dk = scale·dSᵀ q,  dv = Aᵀ g

A learned sink is where the running maximum and sum start: m = sink, l = 1, o = 0. Rows that see nothing end with
l = 0 and m = −inf; they give 0. Works on any device; on a CPU everything is computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels import measure
from regard.kernels.tiles import (
    Problem,
    Tile,
    best_products,
    dropout_tile,
    fold,
    pick,
    raise_high,
    score_tile,
    softmax_tile,
    start_sums,
    tiles,
    weigh,
)
from regard.observables import Observe
from regard.scores import RelativeTerm, Scores, term_index


class Forward(NamedTuple):
    """What a forward pass leaves for a backward one."""

    out: Tensor
    high: Tensor
    total: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Forward:
    """``out [B, H, n, e]`` in q's dtype; ``high`` and ``total [B, H, n]`` in the working dtype."""
    problem = Problem(q, k, scores)
    B, H, n, _ = problem.sizes
    out = q.new_zeros(B, H, n, v.shape[-1])
    highs = q.new_full((B, H, n), -math.inf, dtype=problem.dtype)
    totals = torch.zeros_like(highs)
    finite = _finite(v)
    for rows, spans in tiles(problem):
        best = best_products(problem, rows, spans)
        height = rows.stop - rows.start
        high, total = start_sums(problem, height)
        mixed = q.new_zeros(B, H, height, v.shape[-1], dtype=problem.dtype)
        for keys in spans:
            tile = score_tile(problem, rows, keys, best)
            high, weights, fade = raise_high(high, tile.logits)
            total = total * fade + weights.sum(-1, keepdim=True)
            drop = dropout_tile(problem, rows, keys)
            mixed = mixed * fade + _mix(weights if drop is None else weights * drop, v, keys, tile, finite)
        empty = total == 0
        out[:, :, rows] = torch.where(empty, 0.0, mixed / torch.where(empty, 1.0, total)).to(out.dtype)
        highs[:, :, rows], totals[:, :, rows] = high.squeeze(-1), total.squeeze(-1)
    return Forward(out, highs, totals)


def output(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """``forward``'s out alone."""
    return forward(q, k, v, scores)[0]


def _finite(*xs: Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in xs)


def _folded_visible(tile: Tile, groups: int) -> Tensor | None:
    return None if tile.visible is None else fold(tile.visible.expand(tile.logits.shape), groups)


def _mix(weights: Tensor, x: Tensor, keys: slice, tile: Tile, finite: bool) -> Tensor:
    """``[B, H, rows, keys] @ x[keys] → [B, H, rows, width]`` for ``x [B, G, m, width]`` shared by groups of heads."""
    x = pick(x, keys).to(weights.dtype)
    groups = x.shape[1]
    see = None if finite else _folded_visible(tile, groups)
    return weigh(fold(weights, groups), x, see, finite=finite).reshape(*weights.shape[:3], x.shape[-1])


def _gather(weights: Tensor, x: Tensor, tile: Tile, groups: int, finite: bool) -> Tensor:
    """``Σ_heads of a group weightsᵀ [.., keys, rows] @ x [B, H, rows, width] → [B, G, keys, width]``."""
    see = None if finite else _folded_visible(tile, groups)
    return weigh(
        fold(weights, groups).transpose(-1, -2),
        fold(x, groups),
        None if see is None else see.transpose(-1, -2),
        finite=finite,
    )


def observed(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, observe: Observe, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """``forward`` and every observable but lse, by name, in a second pass."""
    out, high, total = forward(q, k, v, scores)
    return out, high, total, measure.measure(q, k, (high, total), scores, observe, real)


@dataclass
class Gradients:
    """``dq, dk, dv`` in the inputs' dtype; the others where asked, shaped like what they belong to."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    tables: list[Tensor] = field(default_factory=list)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, made: Forward, scores: Scores, *, biases: bool = True
) -> Gradients:
    """Gradients of ``Σ grad ∘ out``; tiles are computed again. ``biases=False`` leaves out bias and tables."""
    out, high, total = made
    problem = Problem(q, k, scores)
    exact = problem.dtype
    B, H, n, m = problem.sizes
    groups = k.shape[1]
    moves = 0 < scores.scale < math.inf  # at scale 0 and ∞ the output does not move with q and k
    dq, dk, dv = (x.new_zeros(x.shape, dtype=exact) for x in (q, k, v))
    d_bias = scores.bias.new_zeros(scores.bias.shape, dtype=exact) if biases and scores.bias is not None else None
    d_tables = [t.table.new_zeros(t.table.shape, dtype=exact) for t in scores.terms] if biases else []
    delta = (out * grad).sum(-1) if out.dtype == exact else torch.zeros_like(high)
    finite = _finite(q, k, v, grad)
    for rows, spans in tiles(problem):
        best = best_products(problem, rows, spans)
        g, q_rows = pick(grad, rows).to(exact), pick(q, rows).to(exact)
        high_rows, total_rows, delta_rows = (pick(x, rows).unsqueeze(-1) for x in (high, total, delta))
        if out.dtype != exact:  # a rounded out would be the largest error of all: fill this part of delta from tiles
            for keys in spans:
                tile = score_tile(problem, rows, keys, best)
                pulled = _pull(g, v, keys) * softmax_tile(tile.logits, high_rows, total_rows)
                drop = dropout_tile(problem, rows, keys)
                pulled = pulled if drop is None else pulled * drop
                delta_rows += _seen(tile, pulled).sum(-1, keepdim=True)
        for keys in spans:
            tile = score_tile(problem, rows, keys, best)
            weights = softmax_tile(tile.logits, high_rows, total_rows)
            pulled = _pull(g, v, keys)
            drop = dropout_tile(problem, rows, keys)
            kept = weights if drop is None else weights * drop
            pulled = pulled if drop is None else pulled * drop
            d_logits = weights * (pulled - delta_rows)
            d_products = d_logits if tile.slope is None else d_logits * tile.slope
            kept, d_logits, d_products = (_seen(tile, x) for x in (kept, d_logits, d_products))
            pick(dv, keys).add_(_gather(kept, g, tile, groups, finite))
            if d_bias is not None:
                _add_to_bias(d_bias, d_logits, rows, keys)
            for d_table, term in zip(d_tables, scores.terms, strict=False):
                _add_to_table(d_table, term, d_logits, rows, keys)
            if moves:
                d_scores = d_products * scores.scale
                pick(dq, rows).add_(_mix(d_scores, k, keys, tile, finite))
                pick(dk, keys).add_(_gather(d_scores, q_rows, tile, groups, finite))
    return Gradients(
        dq.to(q.dtype),
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if d_bias is None or scores.bias is None else d_bias.to(scores.bias.dtype),
        sink_gradient(scores.sinks, high, total, delta),
        [d.to(t.table.dtype) for d, t in zip(d_tables, scores.terms, strict=False)],
    )


def _seen(tile: Tile, x: Tensor) -> Tensor:
    """``x`` with 0 at hidden pairs: not 0 · NaN, nor 0 · inf where a product overflowed."""
    return x if tile.visible is None else torch.where(tile.visible, x, 0.0)


def _pull(g: Tensor, v: Tensor, keys: slice) -> Tensor:
    """``g vᵀ``: ``[B, H, rows, e] × [B, G, keys, e] → [B, H, rows, keys]``."""
    v = pick(v, keys).to(g.dtype)
    return (fold(g, v.shape[1]) @ v.transpose(-1, -2)).reshape(*g.shape[:3], v.shape[2])


def sink_gradient(sinks: Tensor | None, high: Tensor, total: Tensor, delta: Tensor) -> Tensor | None:
    """``d sink_h = −Σ_{b,i} A_sink Δ_i``; a row that sees no key has out = 0, so its Δ is 0 whatever g is."""
    if sinks is None:
        return None
    sink = sinks.to(high.dtype).view(1, -1, 1)
    share = softmax_tile(sink, high, total)
    delta = torch.where((high == sink) & (total == 1) & delta.isnan(), 0.0, delta)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def reduce_to(x: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Sum the dimensions that are broadcast (size 1) in ``shape``."""
    dims = [d for d, size in enumerate(shape) if size == 1 and x.shape[d] != 1]
    return x.sum(dims, keepdim=True) if dims else x


def _add_to_bias(d_bias: Tensor, d_logits: Tensor, rows: slice, keys: slice) -> None:
    part = d_bias if d_bias.shape[2] == 1 else pick(d_bias, rows, 2)
    part = part if part.shape[3] == 1 else pick(part, keys, 3)
    part.add_(reduce_to(d_logits, part.shape))


def _add_to_table(d_table: Tensor, term: RelativeTerm, d_logits: Tensor, rows: slice, keys: slice) -> None:
    """Scatter a tile's gradient to the table's columns, over the few columns this tile can reach."""
    index, somewhere = term_index(term, rows, keys)
    low = int(index.min())
    columns = int(index.max()) - low + 1
    index = index - low
    lead = [1 if d_table.shape[0] == 1 else d_logits.shape[0], 1 if d_table.shape[1] == 1 else d_logits.shape[1]]
    d = reduce_to(torch.where(somewhere, d_logits, 0.0), (*lead, *d_logits.shape[2:]))
    if d_table.shape[2] == 1:
        found = d.new_zeros(*lead, columns).index_add_(2, index.flatten(), d.flatten(2)).unsqueeze(2)
        target = d_table
    else:
        found = d.new_zeros(*d.shape[:3], columns).scatter_add_(3, index.expand(d.shape), d)
        target = pick(d_table, rows, 2)
    target.narrow(3, low, columns).add_(found)
