"""Keys and values that go round a ring of ranks: forward, backward and what is measured on the way.

    join      high = max(high_a, high_b),  t_x = total_x e^(high_x − high),  total = t_a + t_b,  share_x = t_x / total
              out = share_a out_a + share_b out_b,  and so every mean over weights
              entropy = Σ_x share_x (entropy_x − log share_x)
    backward  A = e^(s − high) / total with the rows' final sums: each block gives its exact part of dq, dk and dv

A rank's rows are a few spans of the sequence. Each span of queries meets each span of keys as one rectangle of regard's
own operator; rectangles that the mask hides wholly are skipped. A rank holds the keys of two ranks at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.kernels import ops
from regard.kernels.reference import sink_gradient
from regard.kernels.tiles import working_dtype
from regard.observables import Observe
from regard.scores import RelativeTerm, Scores
from regard.training.spans import Band, Rectangle, rectangles

# Native products below this cannot overflow float32, whose largest number is 3.4e38.
TAME = 1e37
MEANS = ("offset", "distance", "sink", "local")


@dataclass(frozen=True)
class Ring:
    """A process group as a ring: what rank r holds goes to rank r + 1."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ring:
        """The ring of a group; of one alone where no process group is initialised."""
        if not dist.is_available() or not dist.is_initialized():
            if group is not None:
                raise ValueError("group was given, but torch.distributed is not initialised: call init_process_group")
            return cls(None, 0, 1)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"this process (rank {dist.get_rank()} of all) is not a member of the group")
        return cls(group, rank, dist.get_world_size(group))

    def gather(self, numbers: list[int], device: torch.device) -> list[list[int]]:
        """Every rank's numbers, by rank."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self.group)
        return [x.tolist() for x in found]

    def pass_on(self, sent: Tensor, length: int) -> Tensor:
        """Hand ``sent [B, G, m, width]`` to the next rank; what the one before had, of ``length`` keys."""
        received = sent.new_empty(*sent.shape[:2], length, sent.shape[3])
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        moves = [
            dist.P2POp(move, x, group=self.group, group_peer=peer)
            for move, x, peer in ((dist.isend, sent.contiguous(), after), (dist.irecv, received, before))
            if x.numel()  # both sides know the lengths: an empty message is not waited for
        ]
        for work in dist.batch_isend_irecv(moves) if moves else []:
            work.wait()
        return received


@dataclass(frozen=True)
class Plan:
    """One call: who has which queries and keys, what they see, and which kernel runs."""

    ring: Ring
    queries: list[list[range]]
    keys: list[list[range]]
    band: Band
    scores: Scores
    kernel: str
    dtype: torch.dtype  # of all sums

    @property
    def n(self) -> int:
        """Queries of the whole sequence."""
        return sum(len(span) for own in self.queries for span in own)

    @property
    def m(self) -> int:
        """Keys of the whole sequence."""
        return sum(len(span) for own in self.keys for span in own)

    def rows(self, device: torch.device) -> Tensor:
        """Where this rank's queries stand in the whole sequence."""
        return torch.cat([torch.arange(x.start, x.stop, device=device) for x in self.queries[self.ring.rank]])

    def owner(self, step: int) -> int:
        """Whose keys this rank holds at a step."""
        return (self.ring.rank - step) % self.ring.size

    def held(self, step: int) -> int:
        """How many keys this rank holds at a step."""
        return sum(map(len, self.keys[self.owner(step)]))

    def rectangles(self, step: int, device: torch.device) -> Iterator[tuple[Rectangle, Scores]]:
        """What this rank computes at a step."""
        for part in rectangles(self.queries[self.ring.rank], self.keys[self.owner(step)], self.band):
            lo, hi = part.bounds(self.band, device)
            yield part, replace(self.scores, lo=lo, hi=hi)


class Sums:
    """What the rows have after some keys: out, high, total, and the row values by name. Starts at the sinks."""

    def __init__(self, q: Tensor, width: int, sinks: Tensor | None, plan: Plan, observed: bool) -> None:
        exact = working_dtype(q)
        self.plan = plan
        self.out = q.new_zeros(*q.shape[:3], width, dtype=plan.dtype)
        self.high = q.new_full(q.shape[:3], -math.inf, dtype=exact)
        self.total = torch.zeros_like(self.high)
        if sinks is not None:
            self.high.copy_(sinks.to(plan.dtype).view(1, -1, 1).expand_as(self.high))
            self.total.fill_(1)
        self.values: dict[str, Tensor] = {}
        if observed:
            self.values = {name: torch.zeros_like(self.high) for name in ("entropy", "peak", *MEANS)}
            self.values["top"] = torch.full_like(self.high, -math.inf)  # the largest logit of a key, sinks apart
            self.values["peak_at"] = torch.full_like(self.high, -1, dtype=torch.int64)
            self.values["visible"] = torch.zeros_like(self.values["peak_at"])

    def join(self, rows: slice, out: Tensor, high: Tensor, total: Tensor, seen: dict[str, Tensor]) -> None:
        """Add one rectangle's result to its rows."""
        my_out, my_high, my_total = (x[:, :, rows] for x in (self.out, self.high, self.total))
        now = torch.maximum(my_high, high)
        safe = torch.where(now == -math.inf, 0.0, now)  # −inf − −inf is NaN, and a row may have seen nothing yet
        parts = [my_total * torch.exp(my_high - safe), total * torch.exp(high - safe)]
        whole = parts[0] + parts[1]
        mine, theirs = (x / torch.where(whole == 0, 1.0, whole) for x in parts)
        if seen:
            self._join_values(rows, high, mine, theirs, seen)
        joined = my_out * mine.unsqueeze(-1) + out * theirs.unsqueeze(-1)
        my_out.copy_(joined), my_high.copy_(now), my_total.copy_(whole)

    def _join_values(self, rows: slice, high: Tensor, mine: Tensor, theirs: Tensor, seen: dict[str, Tensor]) -> None:
        here = {name: x[:, :, rows] for name, x in self.values.items()}
        for name in MEANS:
            here[name].mul_(mine).add_(seen[name] * theirs)
        between = torch.special.entr(mine) + torch.special.entr(theirs)
        here["entropy"].mul_(mine).add_(seen["entropy"] * theirs + between)
        here["peak"].copy_(torch.maximum(here["peak"] * mine, seen["peak"] * theirs))
        # By logits: equal ones are equal there, whatever rounding did to the weights of two blocks.
        lower = (high == here["top"]) & (seen["peak_at"] < here["peak_at"])
        higher = (seen["visible"] > 0) & ((high > here["top"]) | lower | (here["visible"] == 0))
        here["peak_at"].copy_(torch.where(higher, seen["peak_at"], here["peak_at"]))
        here["top"].copy_(torch.maximum(here["top"], high))
        here["visible"] += seen["visible"]


def forward(q: Tensor, kv: Tensor, sinks: Tensor | None, plan: Plan, observe: Observe | None) -> Sums:
    """One round: every rank's keys and values pass by; ``kv [B, G, m, d + e]`` is k and v side by side."""
    d = q.shape[-1]
    sums = Sums(q, kv.shape[-1] - d, sinks, plan, observe is not None)
    q = q.to(plan.dtype)
    for step in range(plan.ring.size):
        if step:
            kv = plan.ring.pass_on(kv, plan.held(step))
        k, v = kv.to(plan.dtype).split([d, kv.shape[-1] - d], -1)
        for part, scores in plan.rectangles(step, q.device):
            given = (q[:, :, part.rows], k[:, :, part.keys], v[:, :, part.keys], *ops.options(scores, plan.kernel))
            if observe is None:
                out, high, total = ops.attention_op(*given)
                sums.join(part.rows, out, high, total, {})
                continue
            near = replace(observe, sink=min(max(0, observe.sink - part.first_key), part.sides[1]))
            shift = part.shift + (plan.m - plan.n if observe.offset is None else observe.offset)
            out, high, total, *values = ops.observed_op(*given, None, ops.encode(near, shift))
            seen = dict(zip(ops.measured_names(near), values, strict=True))
            seen["peak_at"] = torch.where(seen["visible"] > 0, seen["peak_at"] + part.first_key, -1)
            sums.join(part.rows, out, high, total, seen)
    return sums


def backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, high: Tensor, total: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv: keys and values go round again, and their gradients with them, one step further: home."""
    d = q.shape[-1]
    dq = q.new_zeros(q.shape, dtype=plan.dtype)
    moving = kv.new_zeros(kv.shape, dtype=plan.dtype)
    grad, q, out = (x.to(plan.dtype) for x in (grad, q, out))
    for step in range(plan.ring.size):
        if step:
            kv = plan.ring.pass_on(kv, plan.held(step))
        k, v = kv.to(plan.dtype).split([d, kv.shape[-1] - d], -1)
        for part, scores in plan.rectangles(step, q.device):
            g, o, x = (t[:, :, part.rows] for t in (grad, out, q))
            y, z = k[:, :, part.keys], v[:, :, part.keys]
            row = (high[:, :, part.rows].contiguous(), total[:, :, part.rows].contiguous())
            found = ops.backward_op(g, x, y, z, o.contiguous(), *row, *ops.options(scores, plan.kernel), False)
            dq[:, :, part.rows] += found[0]
            moving[:, :, part.keys, :d] += found[1]
            moving[:, :, part.keys, d:] += found[2]
        moving = plan.ring.pass_on(moving, plan.held(step + 1))
    return dq, moving[..., :d], moving[..., d:]


def settle(plan: Plan, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None = None, out: Tensor | None = None) -> Plan:
    """The plan, on the reference if in some rank's native products a number may leave float32: the same on all ranks.

    Where a result is not finite (huge numbers, NaN behind a mask) the native kernel starts again on the reference, with
    sums of its own. In a ring those are of one block only, and sums of two arithmetics do not fit together: so the
    kernel is settled before a round, from the largest numbers that any rank has, and holds for all blocks.
    """
    if plan.kernel != "native":
        return plan
    largest = [x.abs().max() if x is not None and x.numel() else q.new_zeros(()) for x in (q, k, v, grad, out)]
    mine = torch.stack([x.double() for x in largest])
    ranks = [torch.empty_like(mine) for _ in range(plan.ring.size)]
    dist.all_gather(ranks, mine, group=plan.ring.group)
    sizes = torch.stack(ranks).amax(0).tolist()  # amax hands NaN on, max() below may not: sizes are looked at too
    a, b, c, g, o = sizes
    scale, terms = max(1.0, plan.scores.scale), q.shape[1] * max(plan.n, plan.m)
    pulled = 2 * max(1, v.shape[-1]) * g * max(c, o, 1.0)
    products = (scale * q.shape[-1] * a * b, pulled * scale * terms * max(a, b, 1.0))
    if all(x < TAME for x in (*sizes, *products)):
        return plan
    return replace(plan, kernel="reference", dtype=working_dtype(q))


def weigh_cells(q: Tensor, k: Tensor, sums: Sums, counted: Tensor, observe: Observe) -> dict[str, Tensor]:
    """Σ A over the pairs of each cell of key_mass, map and profile, in one more round of the keys alone.

    The backward operator sums weights: dv = Aᵀ g is a key's mass where g is 1 in the rows that count.
    """
    plan, H, g = sums.plan, q.shape[1], observe.map
    room = {"key_mass": plan.m * observe.key_mass, "map": g * g, "profile": sum(2 * r + 1 for r in observe.radii())}
    found = {name: sums.high.new_zeros(H, size) for name, size in room.items()}
    # A row that does not count must not bring its NaN: 0 · NaN would.
    q = torch.where(counted.unsqueeze(-1), q, 0.0).to(plan.dtype)
    high, total = torch.where(counted, sums.high, -math.inf), torch.where(counted, sums.total, 0.0)
    offset = plan.m - plan.n if observe.offset is None else observe.offset
    by_bin, near = _cut(plan, max(1, g)), _around(plan, offset, observe.radii())
    for step in range(plan.ring.size):
        if step:
            k = plan.ring.pass_on(k, plan.held(step))
        held = k.to(plan.dtype)
        for part, scores in by_bin.rectangles(step, q.device) if observe.key_mass or g else ():
            at = torch.arange(part.first_key, part.first_key + part.sides[1], device=q.device)
            mass = _mass(q, held, high, total, counted, part, scores, plan.kernel)
            if observe.key_mass:
                found["key_mass"].index_add_(1, at, mass)
            if g:
                row_bin = part.first_row * g // plan.n
                found["map"].index_add_(1, row_bin * g + at * g // plan.m, mass)
        for part, scores in near.rectangles(step, q.device) if room["profile"] else ():
            given = (q, held, high, total, counted, part, scores, plan.kernel)
            found["profile"] += _diagonals(*given, offset, room["profile"] // 2)
    return found


def _cut(plan: Plan, bins: int) -> Plan:
    """The plan with this rank's spans of queries cut where the bins of a map meet: a rectangle has rows of one bin."""
    borders = {-(-b * plan.n // bins) for b in range(bins + 1)}
    mine = []
    for span in plan.queries[plan.ring.rank]:
        ends = sorted({span.start, span.stop, *(x for x in borders if span.start < x < span.stop)})
        mine += [range(a, b) for a, b in pairwise(ends)]
    return replace(plan, queries=[mine if r == plan.ring.rank else own for r, own in enumerate(plan.queries)])


def _around(plan: Plan, offset: int, radii: tuple[int, ...]) -> Plan:
    """The plan with the keys that a profile reaches alone: its cost is n·r, not n·m."""
    r = max((0, *radii))
    return replace(plan, band=Band(max(plan.band.least, offset - r), min(plan.band.most, offset + r)))


def _mass(
    q: Tensor, k: Tensor, high: Tensor, total: Tensor, counted: Tensor, part: Rectangle, scores: Scores, kernel: str
) -> Tensor:
    """``Σ_i A_ij [H, keys]`` over the rows of a rectangle that count."""
    H, G, keys = q.shape[1], k.shape[1], k[:, :, part.keys]
    found = high.new_zeros(H, keys.shape[2])
    v = keys.new_zeros(*keys.shape[:3], 1)
    for r in range(H // G):  # heads that share a key head one after the other: dv is summed over them
        x, top, sum_, real = (y[:, r :: H // G, part.rows].contiguous() for y in (q, high, total, counted))
        ones = real.unsqueeze(-1).to(q.dtype)
        lowered = ops.options(scores, kernel)
        dv = ops.backward_op(ones, x, keys, v, torch.zeros_like(ones), top, sum_, *lowered, False)[2]
        found[r :: H // G] = dv[..., 0].to(found.dtype).sum(0)
    return found


def _diagonals(
    q: Tensor,
    k: Tensor,
    high: Tensor,
    total: Tensor,
    counted: Tensor,
    part: Rectangle,
    scores: Scores,
    kernel: str,
    offset: int,
    radius: int,
) -> Tensor:
    """``Σ_i A_{i, i + offset + δ} [H, 2r + 1]`` for δ = −r … r over the rows of a rectangle that count.

    A table ``t[h, δ]`` on the logits has the gradient Σ dS along δ. With v = 0, g = 1 and out = −1 in the rows that
    count, dS = A ∘ (g v − out·g) is A itself.
    """
    x, top, sum_, real = (y[:, :, part.rows].contiguous() for y in (q, high, total, counted))
    keys = k[:, :, part.keys]
    table = q.new_zeros(1, q.shape[1], 1, 2 * radius + 1)
    places = [torch.arange(side, device=q.device) for side in part.sides]
    term = RelativeTerm(table, places[0] + (part.shift + offset), places[1], -radius)
    out = -real.unsqueeze(-1).to(q.dtype)
    lowered = ops.options(replace(scores, terms=(term,)), kernel)
    v = keys.new_zeros(*keys.shape[:3], 1)
    found = ops.backward_op(torch.ones_like(out), x, keys, v, out, top, sum_, *lowered, True)
    return found[3][0, :, 0]


class RingAttention(torch.autograd.Function):
    """Attention round the ring; backward goes round again. Every rank must call backward, or the others time out."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, observe: Observe | None
    ) -> tuple[Tensor, Sums]:
        # Weights are summed by cell as gradients of 1 are.
        one = None if observe is None else q.new_ones(1)
        ctx.plan = settle(plan, q, k, v, one)
        sums = forward(q, torch.cat([k, v], -1), sinks, ctx.plan, observe)
        out, exact = sums.out.to(q.dtype), sums.out
        sums.out = q.new_empty(0)  # out leaves as the first result alone: held here too it would be a cycle
        ctx.save_for_backward(q, k, v, sinks, out if out.dtype == exact.dtype else exact, sums.high, sums.total)
        return out, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, high, total = ctx.saved_tensors
        kv = torch.cat([k, v], -1)
        plan = settle(ctx.plan, q, k, v, grad, out)
        if plan is not ctx.plan:  # sums of the arithmetic that will be used
            sums = forward(q, kv, sinks, plan, None)
            out, high, total = sums.out, sums.high, sums.total
        dq, dk, dv = backward(grad, q, kv, out, high, total, plan)
        d_sinks = None
        if sinks is not None:
            delta = (out.to(high.dtype) * grad.to(high.dtype)).sum(-1)
            found = sink_gradient(sinks.to(plan.dtype), high, total, delta)
            d_sinks = None if found is None else found.to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None
