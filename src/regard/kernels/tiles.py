"""One tile of scores, the way every pass of the reference kernel sees it.

    s = softcap·tanh(scale·q·k / softcap) + bias + Σ terms,   −inf where hidden

All tensors of a tile are ``[B, H, rows, keys]`` in the working dtype. A row's softmax is kept as two numbers, its
largest logit ``high`` and ``total = Σ e^(s − high)``: one rounded lse would lose digits of every weight where scores
are large.
``rows`` and ``keys`` are slices, or index tensors where a few scattered rows are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.scores import Scores, dropout_keep, term_tile

Span = slice | Tensor

# Elements of one [B, H, rows, keys] tile, 2 MiB of float64: large enough that torch's own cost per call disappears.
TILE_ELEMENTS = 2**18
# Elements of a tile in one head of one batch entry, at least: with very many heads tiles would become slivers.
HEAD_ELEMENTS = 64
# The exact products of hard attention are formed one by one, [B, H, rows, keys, d]; their tiles are smaller by d.
HARD_ELEMENTS = 2**22


def working_dtype(q: Tensor) -> torch.dtype:
    """What the reference computes in: float64 on a CPU, whatever q is, because there it is what others are held to.

    Other devices are slow at float64, or have none: they take float32 unless q is float64.
    """
    return torch.float64 if q.dtype == torch.float64 or q.device.type in ("cpu", "meta") else torch.float32


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of observables and exact weights for q of this one."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def full_precision(q: Tensor) -> AbstractContextManager[object]:
    """No autocast inside: tiles are computed in the working dtype, whatever surrounds the call."""
    kind = q.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


@dataclass(frozen=True)
class Problem:
    """One call: ``q [B, H, n, d]``, ``k [B, G, m, d]`` and the lowered options."""

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
        return math.isinf(self.scores.scale)


def tile_sides(problem: Problem) -> tuple[int, int]:
    """Rows and keys of a tile: about 1 to 4, within the budget whatever B and H are."""
    B, H, n, m = problem.sizes
    budget = TILE_ELEMENTS
    if problem.hard:
        budget = min(budget, HARD_ELEMENTS // problem.q.shape[3])
    cells = max(HEAD_ELEMENTS, budget // max(1, B * H))
    rows = max(2, int(math.sqrt(cells) / 2))
    return min(rows, max(1, n)), min(max(2, cells // rows), max(1, m))


def tiles(problem: Problem) -> Iterator[tuple[slice, list[slice]]]:
    """Query tiles, each with the key tiles that at least one of its rows may see."""
    B, _, n, m = problem.sizes
    if B == 0:
        return
    rows, keys = tile_sides(problem)
    lo, hi = problem.scores.lo, problem.scores.hi
    starts = range(0, n, rows)
    first = [0] * len(starts) if lo is None else [int(x) for x in _by_tile(lo, starts, rows, torch.amin)]
    last = [m] * len(starts) if hi is None else [int(x) for x in _by_tile(hi, starts, rows, torch.amax)]
    for start, begin, end in zip(starts, first, last, strict=True):
        begin -= begin % keys  # the grid of tiles is the same for every row, so each score is always computed alike
        spans = [slice(j, min(j + keys, m)) for j in range(begin, min(end, m), keys)]
        yield slice(start, min(start + rows, n)), spans


def _by_tile(bound: Tensor, starts: range, rows: int, reduce) -> list[int]:  # type: ignore[no-untyped-def]
    return torch.stack([reduce(bound[:, i : i + rows]) for i in starts]).tolist() if len(starts) else []


def pick(x: Tensor, span: Span, dim: int = 2) -> Tensor:
    """``x`` at the rows or keys of a tile."""
    if isinstance(span, slice):
        return x.narrow(dim, span.start, span.stop - span.start)
    return x.index_select(dim, span)


def take(x: Tensor, span: Span, dim: int) -> Tensor:
    """``x`` at the rows or keys of a tile; a broadcast dimension of size 1 stays as it is."""
    return x if x.shape[dim] == 1 else pick(x, span, dim)


def indices(span: Span, device: torch.device) -> Tensor:
    """The places of a span, as int64."""
    return torch.arange(span.start, span.stop, device=device) if isinstance(span, slice) else span


def fold(x: Tensor, groups: int) -> Tensor:
    """``[B, H, rows, d] → [B, G, R·rows, d]``: heads that share keys become rows, so that keys are never repeated."""
    B, H, rows, width = x.shape
    return x.reshape(B, groups, H // groups * rows, width)


def visible_tile(problem: Problem, rows: Span, keys: Span, bias: Tensor | None) -> Tensor | None:
    """Which keys may be attended to, broadcastable to ``[B, H, rows, keys]``; None if all. A bias of −inf hides."""
    s = problem.scores
    see: Tensor | None = None
    j = indices(keys, problem.q.device)
    for bound, inside in ((s.lo, torch.ge), (s.hi, torch.lt)):
        if bound is not None:
            part = inside(j, take(bound, rows, 1)[:, None, :, None])
            see = part if see is None else see & part
    if s.mask is not None:
        part = take(take(s.mask, rows, 2), keys, 3)
        see = part if see is None else see & part
    if bias is not None:
        part = bias != -math.inf
        see = part if see is None else see & part
    return see


def bias_tile(problem: Problem, rows: Span, keys: Span) -> Tensor | None:
    """The sum of all biases on the tile, in the working dtype; None if there is none."""
    s = problem.scores
    parts = [] if s.bias is None else [take(take(s.bias, rows, 2), keys, 3).to(problem.dtype)]
    parts += [term_tile(term, rows, keys).to(problem.dtype) for term in s.terms]
    total: Tensor | None = None
    for part in parts:
        total = part if total is None else total + part
    return total


def products(problem: Problem, q: Tensor, keys: Span) -> Tensor:
    """``q·k`` for ``q [B, H, rows, d]`` in the working dtype.

    For hard attention each product is a sum of its own over the same d numbers in the same order, so that equal keys
    tie exactly, wherever they stand; a matrix product does not promise that.
    """
    B, H, rows, _ = q.shape
    k = pick(problem.k, keys).to(problem.dtype)
    folded = fold(q, k.shape[1])
    if problem.hard:
        # Contiguous: for other layouts torch sums in another order, and not in the same one for every key.
        flat = (folded.contiguous().unsqueeze(-2) * k.contiguous().unsqueeze(-3)).sum(-1)
    else:
        flat = folded @ k.transpose(-1, -2)
    return flat.reshape(B, H, rows, k.shape[2])


@dataclass(frozen=True)
class Tile:
    """``logits`` with −inf where hidden; ``visible`` (None: all); ``slope`` = ∂logit/∂(scale·q·k), None for 1."""

    logits: Tensor
    visible: Tensor | None
    slope: Tensor | None


def score_tile(problem: Problem, rows: Span, keys: Span, best: Tensor | None = None) -> Tile:
    """The final logits of a tile. ``best [B, H, rows, 1]``: the rows' largest product, for hard attention."""
    s = problem.scores
    bias = bias_tile(problem, rows, keys)
    see = visible_tile(problem, rows, keys, bias)
    B, H, _, _ = problem.sizes
    q = pick(problem.q, rows).to(problem.dtype)
    slope: Tensor | None = None
    if s.scale == 0:  # exactly: q·k is not looked at, not even a NaN in it
        logits = q.new_zeros(B, H, q.shape[2], pick(problem.k, keys).shape[2])
    elif problem.hard:
        assert best is not None
        product = products(problem, q, keys)
        logits = torch.where(product == best, 0.0, -math.inf).to(problem.dtype)
        logits = torch.where(best.isnan(), best, logits)
    else:
        logits = products(problem, q, keys) * s.scale
        if s.softcap:
            bent = torch.tanh(logits / s.softcap)
            slope = 1 - bent * bent
            logits = bent * s.softcap
    if bias is not None:
        logits = logits + bias
    if see is not None:
        logits = torch.where(see, logits, -math.inf)
    return Tile(logits, see, slope)


def softmax_tile(logits: Tensor, high: Tensor, total: Tensor) -> Tensor:
    """``A = e^(s − high) / total`` of a tile, ``high`` and ``total [B, H, rows, 1]``; 0 in a row that sees nothing."""
    empty = total == 0
    return torch.exp(logits - torch.where(empty, 0.0, high)) / torch.where(empty, 1.0, total)


def best_products(problem: Problem, rows: Span, spans: list[slice]) -> Tensor | None:
    """For hard attention: each row's largest visible q·k, ``[B, H, rows, 1]`` (−inf in an empty row, NaN if one is)."""
    if not problem.hard:
        return None
    B, H, _, _ = problem.sizes
    q = pick(problem.q, rows).to(problem.dtype)
    best = q.new_full((B, H, q.shape[2], 1), -math.inf)
    for keys in spans:
        product = products(problem, q, keys)
        see = visible_tile(problem, rows, keys, bias_tile(problem, rows, keys))
        if see is not None:
            product = torch.where(see, product, -math.inf)
        best = torch.maximum(best, product.amax(-1, keepdim=True))
    return best


def start_sums(problem: Problem, height: int) -> tuple[Tensor, Tensor]:
    """``high`` and ``total [B, H, height, 1]`` before any key: a learned sink is the first term."""
    B, H, _, _ = problem.sizes
    sinks = problem.scores.sinks
    start = problem.q.new_full((H,), -math.inf, dtype=problem.dtype) if sinks is None else sinks.to(problem.dtype)
    high = start.view(1, H, 1, 1).expand(B, H, height, 1)
    return high, (high != -math.inf).to(problem.dtype)


def raise_high(high: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum with one more tile, ``e^(logits − it)``, and what everything summed so far fades by."""
    now = torch.maximum(high, logits.amax(-1, keepdim=True))
    safe = torch.where(now == -math.inf, 0.0, now)  # −inf − −inf is NaN, and a row may see nothing
    return now, torch.exp(logits - safe), torch.exp(high - safe)


def row_sums(problem: Problem, rows: Span, spans: list[slice], best: Tensor | None) -> tuple[Tensor, Tensor]:
    """``high`` and ``total [B, H, rows, 1]`` of some rows over all keys."""
    high, total = start_sums(problem, indices(rows, problem.q.device).shape[0])
    for keys in spans:
        high, weights, fade = raise_high(high, score_tile(problem, rows, keys, best).logits)
        total = total * fade + weights.sum(-1, keepdim=True)
    return high, total


def dropout_tile(problem: Problem, rows: slice, keys: slice) -> Tensor | None:
    """What dropout multiplies each weight by, 0 or 1/(1 − p); None without dropout."""
    s = problem.scores
    if s.dropout == 0 or s.seed is None:
        return None
    B, H, _, _ = problem.sizes
    device = problem.q.device
    b = torch.arange(B, device=device).view(-1, 1, 1, 1)
    h = torch.arange(H, device=device).view(1, -1, 1, 1)
    i = indices(rows, device).view(1, 1, -1, 1)
    keep = dropout_keep(s.seed, b, h, i, indices(keys, device), s.dropout)
    return keep.to(problem.dtype) * (0.0 if s.dropout == 1 else 1 / (1 - s.dropout))


def weigh(weights: Tensor, x: Tensor, visible: Tensor | None, *, finite: bool) -> Tensor:
    """``weights [B, G, rows, keys] @ x [B, G, keys, width]`` in which a hidden pair adds nothing, be x NaN there.

    0 · NaN is never formed: rows of x that are not finite leave the product and are added for the pairs that see them.
    """
    if finite or visible is None:
        return weights @ x
    bad = (~x.isfinite()).any(-1)
    clean = x.masked_fill(bad.unsqueeze(-1), 0)
    out = weights @ clean
    places = bad.any(0).any(0).nonzero().flatten()
    if places.numel() == 0:
        return out
    w = weights[..., places]
    see = visible[..., places] & bad[:, :, places].unsqueeze(-2)
    odd = x[:, :, places]
    extra = [torch.where(see, w * odd[:, :, :, c].unsqueeze(-2), 0).sum(-1) for c in range(x.shape[-1])]
    return out + torch.stack(extra, -1) if extra else out
