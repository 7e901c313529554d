"""The reference kernel: exact attention in plain PyTorch, tiled over queries and keys, O(n) memory in both passes.

    forward    m ← max(m, max_j s),  l ← l·e^(m_old − m) + Σ_j e^(s − m),  o ← o·e^(m_old − m) + Σ_j e^(s − m) v_j
               out = o / l; each row keeps row_max = m and row_sum = l, and lse = m + log l
    backward   A = e^(s − m) / l,  Δ_i = out_i·g_i,  dS = A ∘ (g vᵀ − Δ)
               dq = scale·dS k,  dk = scale·dSᵀ q,  dv = Aᵀ g

A learned sink is the initial value of the running maximum and sum: m = sink, l = 1, o = 0. A row that sees nothing ends
with l = 0 and m = −inf, and gives 0.

The kernel works on any device. On a CPU it computes in float64. Elsewhere it computes in float32 (float64 if q is), and
its results have the error of plain PyTorch in float32; so a device without float64 is enough. The CPU reads values of
the device a fixed number of times per call, never per tile: the bounds of masks, and whether all inputs are finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard._lowered_scores import RelativeTerm, Scores, term_index
from regard._observables import Observe
from regard.kernels.reference_observables import measure
from regard.kernels.row_values import (
    Contributions,
    ContributionSums,
    RowValueGradients,
    RowValueTiles,
    sink_gradient_of_entropy,
)
from regard.kernels.score_tiles import (
    Problem,
    Tile,
    convert_bias,
    dropout_tile,
    fold_heads,
    initial_max_and_sum,
    iterate_tiles,
    largest_products,
    result_dtype,
    score_tile,
    softmax_tile,
    take_span,
    take_span_or_broadcast,
    update_max,
    weighted_sum,
)


class Forward(NamedTuple):
    """The results of a forward pass that a backward pass needs."""

    out: Tensor
    row_max: Tensor
    row_sum: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Forward:
    """``out [B, H, n, e]`` in q's dtype; ``row_max`` and ``row_sum [B, H, n]`` in the working dtype."""
    problem = Problem(q, k, scores)
    B, H, n, _ = problem.sizes
    out = q.new_zeros(B, H, n, v.shape[-1])
    row_max = q.new_full((B, H, n), -math.inf, dtype=problem.dtype)
    row_sum = torch.zeros_like(row_max)
    # Checked once: the usual case needs no care for 0 · NaN in every tile.
    finite = _all_finite(v)
    for rows, spans in iterate_tiles(problem):
        largest = largest_products(problem, rows, spans)
        height = rows.stop - rows.start
        tile_max, tile_sum = initial_max_and_sum(problem, height)
        mixed = q.new_zeros(B, H, height, v.shape[-1], dtype=problem.dtype)
        for keys in spans:
            tile = score_tile(problem, rows, keys, largest)
            tile_max, weights, rescale = update_max(tile_max, tile.logits)
            tile_sum = tile_sum * rescale + weights.sum(-1, keepdim=True)
            drop = dropout_tile(problem, rows, keys)
            if drop is not None:
                weights = weights * drop
            mixed = mixed * rescale + _mix_values(weights, v, keys, tile, finite)
        # A row without keys divides by 1 instead of 0.
        empty = tile_sum == 0
        out[:, :, rows] = torch.where(empty, 0.0, mixed / torch.where(empty, 1.0, tile_sum)).to(out.dtype)
        row_max[:, :, rows] = tile_max.squeeze(-1)
        row_sum[:, :, rows] = tile_sum.squeeze(-1)
    return Forward(out, row_max, row_sum)


def output(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """The ``out`` of ``forward`` alone."""
    return forward(q, k, v, scores).out


def observed(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, observe: Observe, real_queries: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """``forward``, and every observable except lse by name, measured in a second pass."""
    out, row_max, row_sum = forward(q, k, v, scores)
    return out, row_max, row_sum, measure(q, k, (row_max, row_sum), scores, observe, real_queries)


@dataclass
class Gradients:
    """Gradients, each in the shape and dtype of its input; None or [] for what is absent or was not requested."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    tables: list[Tensor] = field(default_factory=list)
    contributions: Contributions | None = None


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Forward,
    scores: Scores,
    *,
    biases: bool = True,
    row_values: RowValueGradients | None = None,
    attribution: int | None = None,
) -> Gradients:
    """Gradients of ``Σ grad ∘ out``; tiles are computed again.

    - ``biases``: False leaves out bias and tables.
    - ``row_values``: adds the gradients of a loss by entropy and logit_max.
    - ``attribution``: the size of the map of contributions, 0 for none; None collects no contributions.
    """
    out, row_max, row_sum = saved
    problem = Problem(q, k, scores)
    exact = problem.dtype
    groups = k.shape[1]
    dq = q.new_zeros(q.shape, dtype=exact)
    dk = k.new_zeros(k.shape, dtype=exact)
    dv = v.new_zeros(v.shape, dtype=exact)
    d_bias = None
    d_tables: list[Tensor] = []
    if biases:
        if scores.bias is not None:
            d_bias = scores.bias.new_zeros(scores.bias.shape, dtype=exact)
        d_tables = [term.table.new_zeros(term.table.shape, dtype=exact) for term in scores.terms]
    reachable = [_ReachableColumns(term) for term in scores.terms] if biases else []
    delta = (out * grad).sum(-1) if out.dtype == exact else torch.zeros_like(row_max)
    finite = _all_finite(q, k, v, grad)
    sums = None if attribution is None else ContributionSums(problem, attribution)
    entropy = torch.zeros_like(row_max)

    for rows, spans in iterate_tiles(problem):
        largest = largest_products(problem, rows, spans)
        g = take_span(grad, rows).to(exact)
        q_rows = take_span(q, rows).to(exact)
        tile_max = take_span(row_max, rows).unsqueeze(-1)
        tile_sum = take_span(row_sum, rows).unsqueeze(-1)
        tile_delta = take_span(delta, rows).unsqueeze(-1)

        # If out was rounded, Δ from it would have a large error, so Δ is computed from tiles. It fills a view of delta.
        if out.dtype != exact:
            for keys in spans:
                tile = score_tile(problem, rows, keys, largest)
                pulled = _times_values(g, v, keys) * softmax_tile(tile.logits, tile_max, tile_sum)
                drop = dropout_tile(problem, rows, keys)
                if drop is not None:
                    pulled = pulled * drop
                tile_delta += _zero_hidden(tile, pulled).sum(-1, keepdim=True)

        of_rows = None
        if row_values is not None:
            of_rows = RowValueTiles(problem, rows, spans, largest, (tile_max, tile_sum), row_values)
            entropy[:, :, rows] = of_rows.entropy.squeeze(-1)

        for keys in spans:
            tile = score_tile(problem, rows, keys, largest)
            weights = softmax_tile(tile.logits, tile_max, tile_sum)
            pulled = _times_values(g, v, keys)
            drop = dropout_tile(problem, rows, keys)
            # dv comes from the weights that dropout left; dS from all of them.
            surviving = weights
            if drop is not None:
                surviving = weights * drop
                pulled = pulled * drop
            if sums is not None:
                sums.add(_zero_hidden(tile, weights * pulled), rows, keys)
            d_logits = weights * (pulled - tile_delta)
            if of_rows is not None:
                d_logits = d_logits + of_rows.d_logits(tile, weights, keys)
            d_products = d_logits if tile.slope is None else d_logits * tile.slope
            d_logits = _zero_hidden(tile, d_logits)
            take_span(dv, keys).add_(_sum_over_rows(_zero_hidden(tile, surviving), g, tile, groups, finite))
            if d_bias is not None:
                _add_to_bias(d_bias, d_logits, rows, keys)
            for d_table, term, columns in zip(d_tables, scores.terms, reachable, strict=False):
                _add_to_table(d_table, term, d_logits, rows, keys, columns)

            # At scale 0 and ∞ the output does not depend on small changes of q and k.
            if 0 < scores.scale < math.inf:
                d_scores = _zero_hidden(tile, d_products) * scores.scale
                take_span(dq, rows).add_(_mix_values(d_scores, k, keys, tile, finite))
                take_span(dk, keys).add_(_sum_over_rows(d_scores, q_rows, tile, groups, finite))

    gradients = Gradients(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))
    if d_bias is not None and scores.bias is not None:
        gradients.bias = d_bias.to(scores.bias.dtype)
    if scores.sinks is not None:
        gradients.sinks = sink_gradient(scores.sinks, row_max, row_sum, delta, entropy, row_values)
    gradients.tables = [d_table.to(term.table.dtype) for d_table, term in zip(d_tables, scores.terms, strict=False)]
    if sums is not None:
        gradients.contributions = sums.result(result_dtype(q.dtype))
    return gradients


# --- products with values and keys -----------------------------------------------------------------------------------


def _all_finite(*tensors: Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


def _mix_values(weights: Tensor, x: Tensor, keys: slice, tile: Tile, finite: bool) -> Tensor:
    """``[B, H, rows, keys] @ x[keys] → [B, H, rows, width]`` for ``x [B, G, m, width]`` shared by groups of heads."""
    x = take_span(x, keys).to(weights.dtype)
    groups = x.shape[1]
    visible = _folded_visible(tile, groups, finite)
    mixed = weighted_sum(fold_heads(weights, groups), x, visible, finite=finite)
    return mixed.reshape(*weights.shape[:3], x.shape[-1])


def _sum_over_rows(weights: Tensor, x: Tensor, tile: Tile, groups: int, finite: bool) -> Tensor:
    """``Σ over the heads of a group of weightsᵀ @ x [B, H, rows, width] → [B, G, keys, width]``."""
    visible = _folded_visible(tile, groups, finite)
    if visible is not None:
        visible = visible.transpose(-1, -2)
    weights = fold_heads(weights, groups).transpose(-1, -2)
    return weighted_sum(weights, fold_heads(x, groups), visible, finite=finite)


def _times_values(g: Tensor, v: Tensor, keys: slice) -> Tensor:
    """``g vᵀ``: ``[B, H, rows, e] × [B, G, keys, e] → [B, H, rows, keys]``."""
    v = take_span(v, keys).to(g.dtype)
    return (fold_heads(g, v.shape[1]) @ v.transpose(-1, -2)).reshape(*g.shape[:3], v.shape[2])


def _folded_visible(tile: Tile, groups: int, finite: bool) -> Tensor | None:
    """Which pairs are visible, with folded heads; None where it is not needed, because all is finite or visible."""
    if finite or tile.visible is None:
        return None
    return fold_heads(tile.visible.expand(tile.logits.shape), groups)


def _zero_hidden(tile: Tile, x: Tensor) -> Tensor:
    """``x`` with 0 at hidden pairs, even where x is NaN or inf."""
    return x if tile.visible is None else torch.where(tile.visible, x, 0.0)


# --- gradients of sinks, biases and tables ---------------------------------------------------------------------------


def sink_gradient(
    sinks: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    delta: Tensor,
    entropy: Tensor | None = None,
    row_values: RowValueGradients | None = None,
) -> Tensor:
    """``d sink_h = −Σ_{b,i} A_sink Δ_i``; a row that sees no key has out = 0, so its Δ is 0 for every g.

    The gradient of the rows' ``entropy``, if ``row_values`` has one, adds its own part.
    """
    sink = convert_bias(sinks, row_max.dtype).view(1, -1, 1)
    weight = softmax_tile(sink, row_max, row_sum)
    # NaN in g would make the Δ of such a row NaN.
    delta = torch.where((row_max == sink) & (row_sum == 1) & delta.isnan(), 0.0, delta)
    gradient = -(weight * delta).sum((0, 2))
    if entropy is not None and row_values is not None and row_values.grad_entropy is not None:
        gradient += sink_gradient_of_entropy(sinks, row_max, row_sum, entropy, row_values.grad_entropy)
    return gradient.to(sinks.dtype)


def reduce_to(x: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Sum the dimensions that are broadcast (size 1) in ``shape``."""
    dims = [dim for dim, size in enumerate(shape) if size == 1 and x.shape[dim] != 1]
    return x.sum(dims, keepdim=True) if dims else x


def _add_to_bias(d_bias: Tensor, d_logits: Tensor, rows: slice, keys: slice) -> None:
    region = take_span_or_broadcast(take_span_or_broadcast(d_bias, rows, 2), keys, 3)
    region.add_(reduce_to(d_logits, region.shape))


class _ReachableColumns:
    """The table columns that the pairs of a tile can have, without a look at the tile.

    Positions are copied to the CPU once per call: to read the smallest and the largest index of every tile, the CPU
    would wait for the device each time.
    """

    def __init__(self, term: RelativeTerm) -> None:
        self.term = term
        self.query_positions = term.query_positions.cpu()
        self.key_positions = term.key_positions.cpu()

    def of_tile(self, rows: slice, keys: slice) -> tuple[int, int]:
        """The first column and the number of columns."""
        queries = self.query_positions[rows]
        key_positions = self.key_positions[keys]
        last = self.term.table.shape[-1] - 1
        lowest = int(key_positions.min() - queries.max()) - self.term.first_offset
        highest = int(key_positions.max() - queries.min()) - self.term.first_offset
        first = min(max(lowest, 0), last)
        return first, min(max(highest, 0), last) - first + 1


def _add_to_table(
    d_table: Tensor, term: RelativeTerm, d_logits: Tensor, rows: slice, keys: slice, reachable: _ReachableColumns
) -> None:
    """Add a tile's gradient to the table's columns, over the few columns that this tile can reach."""
    index, has_position = term_index(term, rows, keys)
    first, columns = reachable.of_tile(rows, keys)
    index = index - first

    # Sum over the batch and the heads first where the table does not have them.
    B = min(d_table.shape[0], d_logits.shape[0])
    H = min(d_table.shape[1], d_logits.shape[1])
    d = reduce_to(torch.where(has_position, d_logits, 0.0), (B, H, *d_logits.shape[2:]))
    if d_table.shape[2] == 1:
        gradient = d.new_zeros(B, H, columns).index_add_(2, index.flatten(), d.flatten(2)).unsqueeze(2)
        target = d_table
    else:
        gradient = d.new_zeros(*d.shape[:3], columns).scatter_add_(3, index.expand(d.shape), d)
        target = take_span(d_table, rows, 2)
    target.narrow(3, first, columns).add_(gradient)
