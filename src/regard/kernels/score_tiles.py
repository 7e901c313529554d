"""One tile of scores, as every pass of the reference kernel computes it.

    s = softcap·tanh(scale·q·k / softcap) + bias + Σ terms,   −inf where hidden

All tensors of a tile are ``[B, H, rows, keys]`` in the working dtype. The softmax of a row is kept as two numbers, its
largest logit ``row_max`` and ``row_sum = Σ e^(s − row_max)``: one rounded lse would lose digits of every weight where
scores are large. ``rows`` and ``keys`` are slices, or index tensors where a few scattered rows are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from regard._lowered_scores import Scores, dropout_keep, term_tile

Span = slice | Tensor

# Elements of one [B, H, rows, keys] tile, 2 MiB of float64: large enough that torch's own cost per call disappears.
TILE_ELEMENTS = 2**18
# On other devices tiles are larger, 16 MiB of float32: there the time of a call to the device has to disappear.
DEVICE_TILE_ELEMENTS = 2**22
# At least this many elements per head and batch entry: with very many heads tiles would become too thin.
HEAD_ELEMENTS = 64
# The exact products of hard attention are formed one by one, [B, H, rows, keys, d]; their tiles are smaller by d.
HARD_ELEMENTS = 2**22


def working_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype that the reference computes in.

    On a CPU it is float64 for every q, because other kernels are compared with the reference.
    Other devices are slow at float64, or do not have it: they use float32 unless q is float64. The softmax of a row is
    a pair of numbers there too, row_max and row_sum, so that a weight has the error of its logit and of the sum alone.
    """
    if q.device.type in ("cpu", "meta"):
        return torch.float64
    return result_dtype(q.dtype)


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of observables and exact weights, from the dtype of q."""
    return torch.promote_types(dtype, torch.float32)


def full_precision(q: Tensor) -> AbstractContextManager[object]:
    """A context without autocast: tiles are computed in the working dtype."""
    device = q.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@dataclass(frozen=True)
class Problem:
    """The inputs of the scores of one call: ``q [B, H, n, d]``, ``k [B, G, m, d]`` and the lowered options."""

    q: Tensor
    k: Tensor
    scores: Scores

    @property
    def dtype(self) -> torch.dtype:
        return working_dtype(self.q)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, n, m."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    @property
    def hard(self) -> bool:
        """Whether scale is inf."""
        return math.isinf(self.scores.scale)


# --- how a call is cut into tiles ------------------------------------------------------------------------------------


def tile_shape(problem: Problem) -> tuple[int, int]:
    """Return the rows and keys of a tile, in a ratio of about 1 to 4, within the budget for every B and H."""
    B, H, n, m = problem.sizes
    budget = TILE_ELEMENTS if problem.q.is_cpu else DEVICE_TILE_ELEMENTS
    if problem.hard:
        budget = min(budget, HARD_ELEMENTS // problem.q.shape[3])
    elements = max(HEAD_ELEMENTS, budget // max(1, B * H))
    # Wide tiles: sums over keys are contiguous in memory.
    rows = max(2, int(math.sqrt(elements) / 2))
    keys = max(2, elements // rows)
    return min(rows, max(1, n)), min(keys, max(1, m))


def iterate_tiles(problem: Problem) -> Iterator[tuple[slice, list[slice]]]:
    """Tiles of queries, each with the tiles of keys that at least one of its rows may see."""
    B, _, n, m = problem.sizes
    if B == 0:
        return
    rows, keys = tile_shape(problem)
    starts = range(0, n, rows)
    first_keys = [0] * len(starts)
    last_keys = [m] * len(starts)
    if problem.scores.lo is not None:
        first_keys = _reduce_rows(problem.scores.lo, starts, rows, torch.amin)
    if problem.scores.hi is not None:
        last_keys = _reduce_rows(problem.scores.hi, starts, rows, torch.amax)
    for start, first, last in zip(starts, first_keys, last_keys, strict=True):
        # All rows share one grid of tiles, so that a score is always computed in the same way.
        first -= first % keys
        spans = [slice(j, min(j + keys, m)) for j in range(first, min(last, m), keys)]
        yield slice(start, min(start + rows, n)), spans


def _reduce_rows(bound: Tensor, starts: range, rows: int, pick) -> list[int]:  # type: ignore[no-untyped-def]
    """The smallest or largest bound of each tile of queries."""
    if len(starts) == 0:
        return []
    return torch.stack([pick(bound[:, i : i + rows]) for i in starts]).tolist()


def take_span(x: Tensor, span: Span, dim: int = 2) -> Tensor:
    """``x`` at the rows or keys of a tile."""
    if isinstance(span, slice):
        return x.narrow(dim, span.start, span.stop - span.start)
    return x.index_select(dim, span)


def take_span_or_broadcast(x: Tensor, span: Span, dim: int) -> Tensor:
    """``x`` at the rows or keys of a tile; a broadcast dimension of size 1 is left alone."""
    return x if x.shape[dim] == 1 else take_span(x, span, dim)


def span_indices(span: Span, device: torch.device) -> Tensor:
    """The indices of a span, as int64."""
    return torch.arange(span.start, span.stop, device=device) if isinstance(span, slice) else span


def fold_heads(x: Tensor, groups: int) -> Tensor:
    """``[B, H, rows, d] → [B, G, R·rows, d]``: heads that share keys become rows, so that keys are never repeated."""
    B, H, rows, width = x.shape
    return x.reshape(B, groups, H // groups * rows, width)


# --- scores of a tile ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """``logits`` with −inf where hidden; ``visible`` (None: all); ``slope`` = ∂logit/∂(scale·q·k), None for 1."""

    logits: Tensor
    visible: Tensor | None
    slope: Tensor | None


def visible_tile(problem: Problem, rows: Span, keys: Span, bias: Tensor | None) -> Tensor | None:
    """Which keys are visible, broadcastable to ``[B, H, rows, keys]``; None if all. A bias of −inf hides a key."""
    scores = problem.scores
    key_indices = span_indices(keys, problem.q.device)
    conditions = []
    if scores.lo is not None:
        conditions.append(key_indices >= take_span_or_broadcast(scores.lo, rows, 1)[:, None, :, None])
    if scores.hi is not None:
        conditions.append(key_indices < take_span_or_broadcast(scores.hi, rows, 1)[:, None, :, None])
    if scores.mask is not None:
        conditions.append(take_span_or_broadcast(take_span_or_broadcast(scores.mask, rows, 2), keys, 3))
    if bias is not None:
        conditions.append(bias != -math.inf)
    if not conditions:
        return None
    return reduce(torch.logical_and, conditions)


def convert_bias(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits in another dtype. A finite number stays finite: one that overflows would become −inf and hide its key.

    >>> convert_bias(torch.tensor([-1e300, -torch.inf], dtype=torch.float64), torch.float32).isinf()
    tensor([False,  True])
    """
    if x.dtype != torch.float64 or dtype == torch.float64:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(dtype)


def bias_tile(problem: Problem, rows: Span, keys: Span) -> Tensor | None:
    """The sum of all biases on the tile, in the working dtype; None if there is none."""
    scores = problem.scores
    total: Tensor | None = None
    if scores.bias is not None:
        bias = take_span_or_broadcast(take_span_or_broadcast(scores.bias, rows, 2), keys, 3)
        total = convert_bias(bias, problem.dtype)
    for term in scores.terms:
        part = convert_bias(term_tile(term, rows, keys), problem.dtype)
        total = part if total is None else _add_biases(total, part)
    return total


def _add_biases(a: Tensor, b: Tensor) -> Tensor:
    """a + b; a float32 sum of two finite numbers does not become −inf, which would hide its key."""
    total = a + b
    if total.dtype == torch.float64:
        return total
    hidden = (a == -math.inf) | (b == -math.inf)
    return torch.where(hidden, -math.inf, total.clamp(min=torch.finfo(total.dtype).min))


def dot_products(problem: Problem, q: Tensor, keys: Span) -> Tensor:
    """``q·k`` for ``q [B, H, rows, d]`` in the working dtype."""
    B, H, rows, _ = q.shape
    k = take_span(problem.k, keys).to(problem.dtype)
    folded = fold_heads(q, k.shape[1])
    if problem.hard:
        # Each product is its own sum over the same d numbers in the same order, so that equal keys tie exactly; a
        # matrix product does not promise that. For layouts that are not contiguous torch sums in another order.
        flat = (folded.contiguous().unsqueeze(-2) * k.contiguous().unsqueeze(-3)).sum(-1)
    else:
        flat = folded @ k.transpose(-1, -2)
    return flat.reshape(B, H, rows, k.shape[2])


def largest_products(problem: Problem, rows: Span, spans: list[slice]) -> Tensor | None:
    """For hard attention: each row's largest visible q·k, ``[B, H, rows, 1]``; −inf in an empty row. Else None."""
    if not problem.hard:
        return None
    B, H, _, _ = problem.sizes
    q = take_span(problem.q, rows).to(problem.dtype)
    largest = q.new_full((B, H, q.shape[2], 1), -math.inf)
    for keys in spans:
        product = dot_products(problem, q, keys)
        visible = visible_tile(problem, rows, keys, bias_tile(problem, rows, keys))
        if visible is not None:
            product = torch.where(visible, product, -math.inf)
        # torch.maximum propagates NaN, so that a visible NaN reaches its row.
        largest = torch.maximum(largest, product.amax(-1, keepdim=True))
    return largest


def score_tile(problem: Problem, rows: Span, keys: Span, largest: Tensor | None = None) -> Tile:
    """The logits of a tile. ``largest [B, H, rows, 1]``: the rows' ``largest_products``, for hard attention."""
    scores = problem.scores
    bias = bias_tile(problem, rows, keys)
    visible = visible_tile(problem, rows, keys, bias)
    B, H, _, _ = problem.sizes
    q = take_span(problem.q, rows).to(problem.dtype)
    slope: Tensor | None = None
    if scores.scale == 0:
        # q·k is not computed at all, because it may be NaN
        logits = q.new_zeros(B, H, q.shape[2], take_span(problem.k, keys).shape[2])
    elif problem.hard:
        assert largest is not None
        product = dot_products(problem, q, keys)
        logits = torch.where(product == largest, 0.0, -math.inf).to(problem.dtype)
        # A visible NaN reaches its whole row, as in ordinary attention.
        logits = torch.where(largest.isnan(), largest, logits)
    else:
        logits = dot_products(problem, q, keys) * scores.scale
        if scores.softcap:
            tanh = torch.tanh(logits / scores.softcap)
            slope = 1 - tanh * tanh
            logits = tanh * scores.softcap
    if bias is not None:
        logits = logits + bias
    if visible is not None:
        logits = torch.where(visible, logits, -math.inf)
    return Tile(logits, visible, slope)


def dropout_tile(problem: Problem, rows: slice, keys: slice) -> Tensor | None:
    """What dropout multiplies each weight by, 0 or 1/(1 − p); None without dropout."""
    scores = problem.scores
    if scores.dropout == 0 or scores.seed is None:
        return None
    B, H, _, _ = problem.sizes
    device = problem.q.device
    b = torch.arange(B, device=device).view(-1, 1, 1, 1)
    h = torch.arange(H, device=device).view(1, -1, 1, 1)
    i = span_indices(rows, device).view(1, 1, -1, 1)
    keep = dropout_keep(scores.seed, b, h, i, span_indices(keys, device), scores.dropout)
    # p = 1 drops everything; 1/(1 − p) would be infinite.
    factor = 0.0 if scores.dropout == 1 else 1 / (1 - scores.dropout)
    return keep.to(problem.dtype) * factor


# --- softmax over tiles ----------------------------------------------------------------------------------------------


def softmax_tile(logits: Tensor, row_max: Tensor, row_sum: Tensor) -> Tensor:
    """``A = e^(s − row_max) / row_sum`` with ``row_max`` and ``row_sum [B, H, rows, 1]``; 0 in a row without keys."""
    empty = row_sum == 0
    return torch.exp(logits - torch.where(empty, 0.0, row_max)) / torch.where(empty, 1.0, row_sum)


def initial_max_and_sum(problem: Problem, height: int) -> tuple[Tensor, Tensor]:
    """``row_max`` and ``row_sum [B, H, height, 1]`` before any key: a learned sink is the first summand."""
    B, H, _, _ = problem.sizes
    sinks = problem.scores.sinks
    if sinks is None:
        initial = problem.q.new_full((H,), -math.inf, dtype=problem.dtype)
    else:
        initial = convert_bias(sinks, problem.dtype)
    row_max = initial.view(1, H, 1, 1).expand(B, H, height, 1)
    return row_max, (row_max != -math.inf).to(problem.dtype)


def update_max(row_max: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum including one more tile, ``e^(logits − maximum)``, and the factor for everything summed so far."""
    updated = torch.maximum(row_max, logits.amax(-1, keepdim=True))
    safe = torch.where(updated == -math.inf, 0.0, updated)  # −inf − −inf would be NaN in a row without keys
    return updated, torch.exp(logits - safe), torch.exp(row_max - safe)


def row_max_and_sum(problem: Problem, rows: Span, spans: list[slice], largest: Tensor | None) -> tuple[Tensor, Tensor]:
    """``row_max`` and ``row_sum [B, H, rows, 1]`` of some rows over all keys."""
    row_max, row_sum = initial_max_and_sum(problem, span_indices(rows, problem.q.device).shape[0])
    for keys in spans:
        row_max, weights, rescale = update_max(row_max, score_tile(problem, rows, keys, largest).logits)
        row_sum = row_sum * rescale + weights.sum(-1, keepdim=True)
    return row_max, row_sum


def weighted_sum(weights: Tensor, x: Tensor, visible: Tensor | None, *, finite: bool) -> Tensor:
    """``weights [B, G, rows, keys] @ x [B, G, keys, width]`` in which a hidden pair adds nothing, even if x is NaN.

    0 · NaN is never formed: rows of x that are not finite are left out of the product and added only where visible.
    """
    if finite or visible is None:
        return weights @ x
    nonfinite = (~x.isfinite()).any(-1)
    out = weights @ x.masked_fill(nonfinite.unsqueeze(-1), 0)
    keys = nonfinite.any(0).any(0).nonzero().flatten()
    if keys.numel() == 0:
        return out
    key_weights = weights[..., keys]
    adds = visible[..., keys] & nonfinite[:, :, keys].unsqueeze(-2)

    # Column by column: a product with all columns at once would need width times the memory of a tile.
    columns = []
    for column in range(x.shape[-1]):
        values = x[:, :, keys, column].unsqueeze(-2)
        columns.append(torch.where(adds, key_weights * values, 0).sum(-1))
    return out + torch.stack(columns, -1) if columns else out
