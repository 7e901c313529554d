"""Attention round a ring of ranks: keys and values are passed on, and each rank joins the results of its own queries.

    join      row_max = max(row_max_a, row_max_b),  t_x = total_x e^(row_max_x − row_max),  total = t_a + t_b,
              share_x = t_x / total,  out = share_a out_a + share_b out_b (the same for every mean over weights),
              entropy = Σ_x share_x (entropy_x − log share_x)
    backward  A = e^(s − row_max) / total with the final row_max and total: each block adds its exact part of dq, dk, dv

The rows of a rank are a few spans of the sequence. Each span of queries meets each span of keys in one rectangle, which
regard's own operator computes; rectangles that the mask hides completely are skipped. A rank holds the keys of at most
two ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard._lowered_scores import RelativeTerm, Scores
from regard._observables import Observe
from regard._shapes import resolve_offset
from regard.kernels import ops
from regard.kernels.encoded_observe import encode_observe
from regard.kernels.reference import sink_gradient
from regard.kernels.score_tiles import working_dtype
from regard.parallel._group import Ring
from regard.parallel._shard_layout import Band, Rectangle, ranges, rectangles, span_lengths

# Native products below this cannot overflow float32, whose largest number is 3.4e38.
SAFE_PRODUCT = 1e37
MEANS = ("offset", "distance", "sink", "local")


@dataclass(frozen=True)
class Plan:
    """One call: which rank has which queries and keys, which keys a query sees, and which kernel runs."""

    ring: Ring
    queries: list[list[range]]
    keys: list[list[range]]
    band: Band
    scores: Scores
    kernel: str
    dtype: torch.dtype  # of all sums

    @property
    def n(self) -> int:
        """The number of queries of the whole sequence."""
        return sum(span_lengths(self.queries))

    @property
    def m(self) -> int:
        """The number of keys of the whole sequence."""
        return sum(span_lengths(self.keys))

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's queries in the whole sequence."""
        spans = self.queries[self.ring.rank]
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])

    def key_owner(self, step: int) -> int:
        """Return the rank whose keys this rank holds at a step."""
        return (self.ring.rank - step) % self.ring.size

    def key_count(self, step: int) -> int:
        """Return how many keys this rank holds at a step."""
        return span_lengths(self.keys)[self.key_owner(step)]

    def rounds(self, keys: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each step and the keys that this rank holds then: first its own, then those that it receives."""
        for step in range(self.ring.size):
            if step:
                keys = self.ring.pass_on(keys, self.key_count(step))
            # Converted only here: half precision is sent unchanged, with half the bytes.
            yield step, keys.to(self.dtype)

    def rectangles(self, step: int, device: torch.device) -> Iterator[tuple[Rectangle, Scores]]:
        """Yield the rectangles that this rank computes at a step, each with its lowered scores."""
        for part in rectangles(self.queries[self.ring.rank], self.keys[self.key_owner(step)], self.band):
            lo, hi = part.bounds(self.band, device)
            yield part, replace(self.scores, lo=lo, hi=hi)


class RowSums:
    """The results of this rank's rows over the keys so far: out, maximum, total, row values. Sinks are added first."""

    def __init__(self, q: Tensor, width: int, sinks: Tensor | None, plan: Plan, observed: bool) -> None:
        self.plan = plan
        self.out = q.new_zeros(*q.shape[:3], width, dtype=plan.dtype)
        self.row_max = q.new_full(q.shape[:3], -math.inf, dtype=working_dtype(q))
        self.total = torch.zeros_like(self.row_max)
        # A sink is one more logit without a value: it is the first block of every row.
        if sinks is not None:
            self.row_max.copy_(sinks.to(plan.dtype).view(1, -1, 1).expand_as(self.row_max))
            self.total.fill_(1)
        self.values: dict[str, Tensor] = {}
        if observed:
            self.values = {name: torch.zeros_like(self.row_max) for name in ("entropy", "peak", *MEANS)}
            self.values["logit_max"] = torch.full_like(self.row_max, -math.inf)
            self.values["peak_at"] = torch.full_like(self.row_max, -1, dtype=torch.int64)
            self.values["visible"] = torch.zeros_like(self.values["peak_at"])

    def join(self, rows: slice, out: Tensor, row_max: Tensor, total: Tensor, values: dict[str, Tensor]) -> None:
        """Add the result of one rectangle to its rows."""
        own_out = self.out[:, :, rows]
        own_max = self.row_max[:, :, rows]
        own_total = self.total[:, :, rows]
        new_max = torch.maximum(own_max, row_max)
        safe_max = torch.where(new_max == -math.inf, 0.0, new_max)  # −inf − −inf is NaN: a row may have no key yet
        own_part = own_total * torch.exp(own_max - safe_max)
        other_part = total * torch.exp(row_max - safe_max)
        new_total = own_part + other_part
        divisor = torch.where(new_total == 0, 1.0, new_total)
        own_share = own_part / divisor
        other_share = other_part / divisor
        if values:
            self._join_values(rows, row_max, own_share, other_share, values)
        own_out.copy_(own_out * own_share.unsqueeze(-1) + out * other_share.unsqueeze(-1))
        own_max.copy_(new_max)
        own_total.copy_(new_total)

    def _join_values(
        self, rows: slice, row_max: Tensor, own_share: Tensor, other_share: Tensor, other: dict[str, Tensor]
    ) -> None:
        own = {name: x[:, :, rows] for name, x in self.values.items()}
        for name in MEANS:
            own[name].mul_(own_share).add_(other[name] * other_share)
        between = torch.special.entr(own_share) + torch.special.entr(other_share)
        own["entropy"].mul_(own_share).add_(other["entropy"] * other_share + between)
        own["peak"].copy_(torch.maximum(own["peak"] * own_share, other["peak"] * other_share))

        # Peaks are compared by logits, because the weights of two blocks are rounded differently; ties go to the
        # lowest key.
        tie_before = (row_max == own["logit_max"]) & (other["peak_at"] < own["peak_at"])
        is_higher = (row_max > own["logit_max"]) | tie_before | (own["visible"] == 0)
        moves = (other["visible"] > 0) & is_higher
        own["peak_at"].copy_(torch.where(moves, other["peak_at"], own["peak_at"]))
        # A block has no sinks: its maximum is the largest logit of its keys.
        own["logit_max"].copy_(torch.maximum(own["logit_max"], row_max))
        own["visible"] += other["visible"]


def forward(q: Tensor, kv: Tensor, sinks: Tensor | None, plan: Plan, observe: Observe | None) -> RowSums:
    """Compute this rank's rows in one round of the ring; ``kv [B, G, m, d + e]`` is the concatenation of k and v."""
    d = q.shape[-1]
    sums = RowSums(q, kv.shape[-1] - d, sinks, plan, observe is not None)
    q = q.to(plan.dtype)
    for step, held in plan.rounds(kv):
        k, v = held.split([d, held.shape[-1] - d], -1)
        for part, scores in plan.rectangles(step, q.device):
            tensors = (q[:, :, part.rows], k[:, :, part.keys], v[:, :, part.keys])
            options = (*scores.pack(), plan.kernel)
            if observe is None:
                out, row_max, total = ops.attention_op(*tensors, *options)
                sums.join(part.rows, out, row_max, total, {})
                continue
            # The operator counts keys and offsets within the rectangle.
            sink = min(max(0, observe.sink - part.first_key), part.sides[1])
            local = replace(observe, sink=sink, offset=part.shift + resolve_offset(plan.n, plan.m, observe.offset))
            encoded = encode_observe(local, *part.sides)
            out, row_max, total, *measured = ops.observed_op(*tensors, *options, None, None, encoded)
            values = dict(zip(ops.observable_names(local), measured, strict=True))
            values["peak_at"] = torch.where(values["visible"] > 0, values["peak_at"] + part.first_key, -1)
            sums.join(part.rows, out, row_max, total, values)
    return sums


def backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, row_max: Tensor, total: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv. Keys and values go round again with their gradients, which end at their owner."""
    d = q.shape[-1]
    dq = q.new_zeros(q.shape, dtype=plan.dtype)
    dkv = kv.new_zeros(kv.shape, dtype=plan.dtype)
    grad = grad.to(plan.dtype)
    q = q.to(plan.dtype)
    out = out.to(plan.dtype)
    for step, held in plan.rounds(kv):
        k, v = held.split([d, held.shape[-1] - d], -1)
        for part, scores in plan.rectangles(step, q.device):
            rows = part.rows
            inputs = (grad[:, :, rows], q[:, :, rows], k[:, :, part.keys], v[:, :, part.keys])
            sums = (row_max[:, :, rows].contiguous(), total[:, :, rows].contiguous())
            options = (*scores.pack(), plan.kernel, False)
            gradients = ops.backward_op(*inputs, out[:, :, rows].contiguous(), *sums, *options)
            dq[:, :, rows] += gradients[0]
            dkv[:, :, part.keys, :d] += gradients[1]
            dkv[:, :, part.keys, d:] += gradients[2]
        # The gradients of keys travel with the keys, and after the last step they are back at their owner.
        dkv = plan.ring.pass_on(dkv, plan.key_count(step + 1))
    return dq, dkv[..., :d], dkv[..., d:]


def choose_common_kernel(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None = None, out: Tensor | None = None
) -> Plan:
    """Return the plan, with the reference kernel if some rank's native products may overflow float32.

    If a result is not finite (huge numbers, NaN behind a mask), the native kernel repeats the call with the reference
    kernel. In a ring it would do so for one block only, and the row sums of the two kernels must not be mixed. So all
    ranks choose one kernel for all blocks before a round, based on the largest numbers of all ranks.
    """
    if plan.kernel != "native":
        return plan
    largest = []
    for x in (q, k, v, grad, out):
        value = q.new_zeros(())
        if x is not None and x.numel():
            value = x.abs().max()
        largest.append(value.double())
    sizes = plan.ring.gather_tensors(torch.stack(largest)).amax(0).tolist()
    q_size, k_size, v_size, grad_size, out_size = sizes
    scale = max(1.0, plan.scores.scale)
    logits = scale * q.shape[-1] * q_size * k_size
    terms = q.shape[1] * max(plan.n, plan.m)
    d_logits = 2 * max(1, v.shape[-1]) * grad_size * max(v_size, out_size, 1.0)
    gradients = d_logits * scale * terms * max(q_size, k_size, 1.0)
    # The sizes are checked too, because max() above may drop a NaN.
    if all(x < SAFE_PRODUCT for x in (*sizes, logits, gradients)):
        return plan
    return replace(plan, kernel="reference", dtype=working_dtype(q))


def sum_weights_by_cell(q: Tensor, k: Tensor, sums: RowSums, counted: Tensor, observe: Observe) -> dict[str, Tensor]:
    """Return Σ A over the pairs of each cell of key_mass, map and profile. This needs one more round of the keys.

    The backward operator computes these sums: dv = Aᵀ g is the mass of each key if g is 1 in counted rows, else 0.
    """
    plan = sums.plan
    H = q.shape[1]
    g = observe.map
    profile_cells = sum(2 * r + 1 for r in observe.profile_radii())
    cells = {
        "key_mass": sums.row_max.new_zeros(H, plan.m * observe.key_mass),
        "map": sums.row_max.new_zeros(H, g * g),
        "profile": sums.row_max.new_zeros(H, profile_cells),
    }
    # A row that does not count must not bring in a NaN, because 0 · NaN is NaN.
    q = torch.where(counted.unsqueeze(-1), q, 0.0).to(plan.dtype)
    row_max = torch.where(counted, sums.row_max, -math.inf)
    total = torch.where(counted, sums.total, 0.0)
    rows = _Rows(q, row_max, total, counted)
    offset = resolve_offset(plan.n, plan.m, observe.offset)
    # Two passes over the keys: all rectangles for masses and maps, those near the diagonal for profiles.
    by_bin = _split_at_bins(plan, max(1, g))
    near = _limit_to_profile(plan, offset, observe.profile_radii())
    for step, keys in plan.rounds(k):
        if observe.key_mass or g:
            for part, scores in by_bin.rectangles(step, q.device):
                positions = torch.arange(part.first_key, part.first_key + part.sides[1], device=q.device)
                mass = _key_mass(rows, keys, part, scores, plan.kernel)
                if observe.key_mass:
                    cells["key_mass"].index_add_(1, positions, mass)
                if g:
                    row_bin = part.first_row * g // plan.n
                    cells["map"].index_add_(1, row_bin * g + positions * g // plan.m, mass)
        if profile_cells:
            for part, scores in near.rectangles(step, q.device):
                cells["profile"] += _diagonal_mass(rows, keys, part, scores, plan.kernel, offset, profile_cells // 2)
    return cells


@dataclass(frozen=True)
class _Rows:
    """This rank's queries with the final maxima and totals of their rows, and which rows are counted."""

    q: Tensor
    row_max: Tensor
    total: Tensor
    counted: Tensor

    def select(self, heads: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, row_max, total and counted of some heads and rows, contiguous."""
        tensors = (self.q, self.row_max, self.total, self.counted)
        q, row_max, total, counted = (x[:, heads, rows].contiguous() for x in tensors)
        return q, row_max, total, counted


def _split_at_bins(plan: Plan, bins: int) -> Plan:
    """Split this rank's spans of queries at the borders of a map's bins: a rectangle then has rows of one bin."""
    borders = {-(-b * plan.n // bins) for b in range(bins + 1)}
    spans = []
    for span in plan.queries[plan.ring.rank]:
        inside = [border for border in borders if span.start < border < span.stop]
        ends = sorted({span.start, span.stop, *inside})
        spans += ranges(ends)
    queries = list(plan.queries)
    queries[plan.ring.rank] = spans
    return replace(plan, queries=queries)


def _limit_to_profile(plan: Plan, offset: int, radii: tuple[int, ...]) -> Plan:
    """Limit the plan to the keys that a profile contains, so that its cost is n·r instead of n·m."""
    r = max((0, *radii))
    return replace(plan, band=Band(max(plan.band.least, offset - r), min(plan.band.most, offset + r)))


def _key_mass(rows: _Rows, k: Tensor, part: Rectangle, scores: Scores, kernel: str) -> Tensor:
    """Return ``Σ_i A_ij`` over the counted rows of a rectangle, ``[H, keys]``."""
    H = rows.q.shape[1]
    group = H // k.shape[1]
    keys = k[:, :, part.keys]
    mass = rows.row_max.new_zeros(H, keys.shape[2])
    v = keys.new_zeros(*keys.shape[:3], 1)
    options = (*scores.pack(), kernel)
    # dv is summed over the heads that share a key head, so these are computed one after the other.
    for r in range(group):
        q, row_max, total, counted = rows.select(slice(r, None, group), part.rows)
        grad = counted.unsqueeze(-1).to(q.dtype)
        dv = ops.backward_op(grad, q, keys, v, torch.zeros_like(grad), row_max, total, *options, False)[2]
        mass[r::group] = dv[..., 0].to(mass.dtype).sum(0)
    return mass


def _diagonal_mass(
    rows: _Rows, k: Tensor, part: Rectangle, scores: Scores, kernel: str, offset: int, radius: int
) -> Tensor:
    """Return ``Σ_i A_{i, i + offset + δ}`` for δ = −r … r over the counted rows of a rectangle, ``[H, 2r + 1]``.

    A table ``t[h, δ]`` added to the logits has the gradient Σ dS along δ. With v = 0, g = 1, and out = −1 in the
    counted rows, dS = A ∘ (g v − out·g) is A itself.
    """
    q, row_max, total, counted = rows.select(slice(None), part.rows)
    keys = k[:, :, part.keys]
    table = q.new_zeros(1, q.shape[1], 1, 2 * radius + 1)
    row_positions = torch.arange(part.sides[0], device=q.device) + (part.shift + offset)
    key_positions = torch.arange(part.sides[1], device=q.device)
    term = RelativeTerm(table, row_positions, key_positions, -radius)
    out = -counted.unsqueeze(-1).to(q.dtype)
    v = keys.new_zeros(*keys.shape[:3], 1)
    options = (*replace(scores, terms=(term,)).pack(), kernel)
    gradients = ops.backward_op(torch.ones_like(out), q, keys, v, out, row_max, total, *options, True)
    return gradients[3][0, :, 0]


class RingAttention(torch.autograd.Function):
    """Attention round the ring; backward goes round again. All ranks must call backward, or the others time out."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, observe: Observe | None
    ) -> tuple[Tensor, RowSums]:
        # Cell sums of observed weights are computed as gradients, with an output gradient of 1.
        unit_grad = None if observe is None else q.new_ones(1)
        ctx.plan = choose_common_kernel(plan, q, k, v, unit_grad)
        sums = forward(q, torch.cat([k, v], -1), sinks, ctx.plan, observe)
        exact = sums.out
        out = exact.to(q.dtype)
        sums.out = q.new_empty(0)  # out is the first result; a second reference to it would be a cycle
        saved_out = out if out.dtype == exact.dtype else exact
        ctx.save_for_backward(q, k, v, sinks, saved_out, sums.row_max, sums.total)
        return out, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, row_max, total = ctx.saved_tensors
        # A rank that makes another call now, instead of this backward pass, is an error instead of wrong numbers.
        call = {"operation": "backward pass of attention", "q": list(q.shape[:2]), "queries": ctx.plan.n}
        ctx.plan.ring.agree(call, [], q.device)
        kv = torch.cat([k, v], -1)
        plan = choose_common_kernel(ctx.plan, q, k, v, grad, out)
        # Row sums must come from the same kernel, so another kernel has to compute them again.
        if plan is not ctx.plan:
            sums = forward(q, kv, sinks, plan, None)
            out = sums.out
            row_max = sums.row_max
            total = sums.total
        dq, dk, dv = backward(grad, q, kv, out, row_max, total, plan)
        d_sinks = None
        if sinks is not None:
            delta = (out.to(row_max.dtype) * grad.to(row_max.dtype)).sum(-1)
            d_sinks = sink_gradient(sinks.to(plan.dtype), row_max, total, delta)
            if d_sinks is not None:
                d_sinks = d_sinks.to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None
