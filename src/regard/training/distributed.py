"""Context parallelism: exact attention over a sequence whose rows are spread over a ``torch.distributed`` group.

x_local = shard(x);   out_local = attention(q_local, k_local, v_local, mask=Causal());   out = gather(out_local)
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention import attention as whole_attention
from regard.attention import autocast, numbers, real_queries, refuse_transforms
from regard.kernels.choose import choose
from regard.kernels.tiles import result_dtype, working_dtype
from regard.masks import Causal, Mask, Window
from regard.masks.base import And
from regard.observables import Observation, Observe
from regard.scores import Scores
from regard.shapes import Shape, attention_shape, check_tensor, flatten_batch, integer, offset_of
from regard.training.ring import Plan, Ring, RingAttention, Sums, weigh_cells
from regard.training.spans import LAYOUTS, Band, spans, spans_of

__all__ = ["attention", "gather", "shard"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    observe: None = ...,
    layout: str = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    observe: Observe,
    layout: str = ...,
    backend: str = ...,
) -> tuple[Tensor, Observation]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    observe: Observe | None,
    layout: str = ...,
    backend: str = ...,
) -> Tensor | tuple[Tensor, Observation]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    observe: Observe | None = None,
    layout: str = "zigzag",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Observation]:
    """out_i = Σ_j A_ij v_j over the keys j of **all** ranks, for this rank's queries i: ``regard.attention``, spread.

    ``q [*batch, H, n_local, d]``, ``k [*batch, G, m_local, d]``, ``v [*batch, G, m_local, e]`` are this rank's rows, as
    ``shard`` splits them; → ``[*batch, H, n_local, e]``. Keys and values go round a ring, so a rank holds its own and
    one more rank's, and each block joins by its rows' maxima and totals. Backward goes round again. All ranks make the
    same call, and all call backward or none; one that does not leaves the others to the group's timeout, an error.

    Parameters
    ----------
    mask: None, ``Causal()``, ``Window(before, after)`` or several joined by ``&``, counted along the whole sequence
        (offset=None is M − N of the whole). Blocks that it hides wholly are skipped.
    scale, softcap, sinks, backend: as in ``regard.attention``; ``scale=inf`` is refused. ``sinks`` are the same on all
        ranks, and get this rank's part of the gradient, as any weight does that all ranks share: sum over ranks.
    layout: ``"zigzag"`` gives rank r the blocks r and 2P − 1 − r of 2P: causal work is the same on all ranks.
        ``"blocks"`` gives it block r of P, and here ranks may hold any number of rows.
    observe: the result is then ``(out, Observation)``. The observation is that of this rank's *rows* over *all* keys:
        row values ``[B, H, n_local]``, n = n_local and m = M; ``offset``, ``distance`` and ``peak_at`` are positions of
        the whole sequence, and so are ``queries`` (lengths ``[B]`` or bool ``[B, N]``, the same on all ranks).
        ``key_mass [H, M]``, ``map`` and ``profile`` are means over this rank's rows that count; averaged by ``rows``,
        ``map_rows`` and ``profile_rows`` the ranks' ones make the whole sequence's. ``top``, ``grid`` and ``keep`` are
        refused.

    Half precision is sent as it is and computed in float32. Without a process group, or in a group of one, this is
    ``regard.attention`` itself, with the same refusals.

    >>> x = torch.eye(2).reshape(1, 2, 2)
    >>> attention(x, x, x, mask=Causal())[0, 0]
    tensor([1., 0.])
    """
    ring = Ring.of(group)
    q, k, v = autocast(q, k, v)
    refuse_transforms()
    shape = attention_shape(q, k, v)
    beta, cap, _ = numbers(shape, scale, softcap, sinks, 0.0)
    kernel = choose(backend, q)
    _check(mask, beta, observe, layout, shape)
    if ring.size == 1:
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "backend": backend}
        return whole_attention(q, k, v, mask=mask, observe=observe, **options)
    sinks = None if sinks is None else sinks.to(q.device)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    lengths = _agree(ring, shape, q, (beta, cap, sinks is not None, layout, kernel, learns), mask, observe)
    queries, keys = (spans_of(x, layout, what) for x, what in zip(lengths, ("queries", "keys"), strict=True))
    n, m = (sum(x) for x in lengths)
    dtype = torch.float32 if kernel == "native" else working_dtype(q)
    plan = Plan(ring, queries, keys, _band(mask, n, m), Scores(beta, cap), kernel, dtype)
    q4, k4, v4 = (flatten_batch(x, shape.batch) for x in (q, k, v))
    rows_only = None if observe is None else Observe(sink=observe.sink, local=observe.local, offset=observe.offset)
    out, sums = RingAttention.apply(q4, k4, v4, sinks, plan, rows_only)
    out = out.reshape(*shape.batch, shape.heads, shape.n, shape.e)
    return out if observe is None else (out, _observation(q4, k4, sums, plan, shape, observe))


def shard(x: Tensor, dim: int = -2, group: dist.ProcessGroup | None = None, layout: str = "zigzag") -> Tensor:
    """x_local = x at this rank's rows of ``dim``; every rank gives the whole x. Without a group, x itself.

    Sizes differ by one block at most where the length does not divide. ``shard(torch.arange(n), 0)`` are the rows'
    places, for rotary positions. The gradient of x is 0 at other ranks' rows: sum over ranks for the whole.

    >>> shard(torch.arange(8), 0)  # one process has all; under torchrun rank 0 of 2 has rows 0, 1, 6 and 7
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    ring, dim = Ring.of(group), _dim(x, dim, layout)
    parts = spans(x.shape[dim], ring.size, layout)[ring.rank]
    mine = [x.narrow(dim, part.start, len(part)) for part in parts]
    return mine[0] if len(mine) == 1 else torch.cat(mine, dim)


def gather(x: Tensor, dim: int = -2, group: dist.ProcessGroup | None = None, layout: str = "zigzag") -> Tensor:
    """x = the rows of all ranks in the order of the sequence, on every rank: the inverse of ``shard``.

    Differentiable: x_local gets the sum over ranks of the gradients at its rows. A loss that all ranks compute alike
    from the whole is so counted P times: divide it by P, or let each rank compute a part.

    >>> x = torch.randn(5, 3)
    >>> torch.equal(gather(shard(x)), x)
    True
    """
    ring, dim = Ring.of(group), _dim(x, dim, layout)
    if ring.size == 1:
        return x
    lengths = [one for (one,) in ring.gather([x.shape[dim]], x.device)]
    return _Gather.apply(x, dim, ring, spans_of(lengths, layout, "rows"))


class _Gather(torch.autograd.Function):
    """All ranks' rows in order; backward sums the ranks' gradients and takes this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ring: Ring, parts: list[list[range]]) -> Tensor:
        ctx.dim, ctx.ring, ctx.parts = dim, ring, parts
        lengths = [sum(map(len, own)) for own in parts]
        x = x.movedim(dim, 0)
        padded = x.new_zeros(max(lengths), *x.shape[1:])  # collectives want one size
        padded[: len(x)] = x
        received = [torch.empty_like(padded) for _ in parts]
        dist.all_gather(received, padded, group=ring.group)
        whole = x.new_empty(sum(lengths), *x.shape[1:])
        for own, rows in zip(parts, received, strict=True):
            for span, block in zip(own, rows[: sum(map(len, own))].split([len(s) for s in own]), strict=True):
                whole[span.start : span.stop] = block
        return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.movedim(ctx.dim, 0).contiguous().clone()
        dist.all_reduce(grad, group=ctx.ring.group)
        mine = torch.cat([grad[span.start : span.stop] for span in ctx.parts[ctx.ring.rank]])
        return mine.movedim(0, ctx.dim), None, None, None


def _dim(x: Tensor, dim: int, layout: str) -> int:
    """``dim`` counted from the front; x and layout are checked with it."""
    check_tensor("x", x)
    _check_layout(layout)
    if not -x.ndim <= integer("dim", dim, least=None) < x.ndim:
        raise ValueError(f"dim is {dim}, but x has {x.ndim} dimensions")
    return dim % x.ndim


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; known are {', '.join(map(repr, LAYOUTS))}")


def _check(mask: Mask | None, beta: float, observe: Observe | None, layout: str, shape: Shape) -> None:
    """What a ring cannot honour is refused by name, on one process as on many."""
    _check_layout(layout)
    if beta == math.inf:
        raise ValueError(
            "distributed attention takes a finite scale; scale=inf (hard attention) needs all keys at once"
        )
    _band(mask, 0, 0)
    if observe is None:
        return
    if not isinstance(observe, Observe):
        raise TypeError(f"observe must be a regard.Observe, got {type(observe).__name__}")
    for name in ("top", "grid", "keep"):
        if getattr(observe, name):
            raise ValueError(
                f"distributed attention does not measure Observe({name}=…): its keys are on other ranks; "
                "row values, key_mass, map and profile are measured"
            )
    if observe.heads is not None and max(observe.heads) >= shape.heads:
        raise ValueError(f"Observe heads go up to {max(observe.heads)}, but q has heads 0 … {shape.heads - 1}")


def _band(mask: Mask | None, n: int, m: int) -> Band:
    """``least ≤ j − i ≤ most`` of a mask over the whole sequence; within ±2(n + m), which hides the same keys."""
    far = 2 * (n + m)
    if mask is None:
        return Band(-far, far)
    if type(mask) is And:
        a, b = _band(mask.a, n, m), _band(mask.b, n, m)
        return Band(max(a.least, b.least), min(a.most, b.most))
    if type(mask) not in (Causal, Window):
        name = mask._name() if isinstance(mask, Mask) else type(mask).__name__
        raise ValueError(f"distributed attention takes Causal, Window and both joined by &, not {name}")
    assert isinstance(mask, Causal | Window)
    offset = offset_of(n, m, mask.offset)
    least, most = -far, offset
    if isinstance(mask, Window):
        least, most = offset - mask.before, offset + (mask.before if mask.after is None else mask.after)
    return Band(max(-far, min(far, least)), max(-far, min(far, most)))


def _agree(
    ring: Ring, shape: Shape, q: Tensor, options: tuple[Any, ...], mask: Mask | None, observe: Observe | None
) -> list[list[int]]:
    """The lengths of queries and of keys, by rank; ranks that make different calls, and would hang, are refused."""
    sizes = replace(shape, n=0, m=0, batch=(shape.batches,))
    name = None if mask is None else mask._name()  # its repr is a drawing
    call = repr((sizes, q.dtype, name, options, None if observe is None else replace(observe, queries=None)))
    found = ring.gather([shape.n, shape.m, zlib.crc32(call.encode())], q.device)
    if len({seen for *_, seen in found}) > 1:
        raise ValueError(f"the ranks make different calls of distributed attention; that of rank {ring.rank} is {call}")
    return [[n for n, _, _ in found], [m for _, m, _ in found]]


def _observation(q: Tensor, k: Tensor, sums: Sums, plan: Plan, shape: Shape, observe: Observe) -> Observation:
    """The observation of this rank's rows, in the dtype of observables."""
    exact, values = result_dtype(q.dtype), sums.values
    values.pop("top")  # the largest logits: they have served
    counted = values["visible"] > 0
    real = real_queries(observe, None, replace(shape, n=plan.n), q.device)
    if real is not None:
        counted = counted & real[:, plan.rows(q.device)].unsqueeze(1)
    values |= {"lse": sums.high + sums.total.log(), "counted": counted}
    per_head = {"rows": counted.sum((0, 2))}
    if observe.key_mass or observe.map or observe.profile is not None:
        with torch.no_grad():
            cells = weigh_cells(q.detach(), k.detach(), sums, counted, observe)
        per_head |= _means(cells, counted, plan, observe)
    if observe.heads is not None:
        heads = list(observe.heads)
        values, per_head = {x: y[:, heads] for x, y in values.items()}, {x: y[heads] for x, y in per_head.items()}
    found: dict[str, Any] = {
        name: x.to(exact) if x.is_floating_point() else x for name, x in (values | per_head).items()
    }
    return Observation(observe=replace(observe, queries=None), n=shape.n, m=plan.m, **found)


def _means(cells: dict[str, Tensor], counted: Tensor, plan: Plan, observe: Observe) -> dict[str, Tensor]:
    """Key mass, map and profile from sums of weights, and how many rows went into each."""
    at, rows, H = plan.rows(counted.device), counted.sum(0), counted.shape[1]  # rows [H, n]
    found: dict[str, Tensor] = {}
    if observe.key_mass:
        found["key_mass"] = cells["key_mass"] / rows.sum(1, keepdim=True).clamp(min=1)
    if observe.map:
        g = observe.map
        found["map_rows"] = rows.new_zeros(H, g).index_add_(1, at * g // max(1, plan.n), rows)
        found["map"] = cells["map"].unflatten(1, (g, g)) / found["map_rows"].clamp(min=1).unsqueeze(-1)
    for r in observe.radii():
        place = at + offset_of(plan.n, plan.m, observe.offset)
        first = (at + plan.band.least).clamp(min=0) - place
        last = (at + plan.band.most).clamp(max=plan.m - 1) - place
        first, last = first.clamp(-r, r + 1), last.clamp(-r - 1, r)
        seen = torch.where(first <= last, rows, 0)  # a row sees one run of offsets: count its ends, then sum along
        ends = rows.new_zeros(H, 2 * r + 2).index_add_(1, first + r, seen).index_add_(1, last + r + 1, -seen)
        found["profile_rows"] = ends.cumsum(1)[:, :-1]
        found["profile"] = cells["profile"] / found["profile_rows"].clamp(min=1)
    return found
