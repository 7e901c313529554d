"""Attention over a sequence whose rows are sharded over a ``torch.distributed`` group; ``shard`` and ``gather``.

x_local = shard(x);   out_local = attention(q_local, k_local, v_local, mask=Causal());   out = gather(out_local)
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard._checks import check_integer, check_tensor
from regard._errors import RegardError, RegardTypeError
from regard._lowered_scores import Scores
from regard._observables import Observation, Observe
from regard._operator import apply_autocast, check_options, find_real_queries, refuse_transforms
from regard._operator import attention as whole_attention
from regard._shapes import Shape, attention_shape, flatten_batch, resolve_offset
from regard.kernels.choose_backend import resolve_backend
from regard.kernels.score_tiles import result_dtype, working_dtype
from regard.masks import Causal, Mask, Window
from regard.masks._mask import And
from regard.parallel._group import Ring
from regard.parallel._ring import Plan, RingAttention, RowSums, sum_weights_by_cell
from regard.parallel._shard_layout import LAYOUTS, Band, span_lengths, spans_from_lengths, split_sequence


class _Options(TypedDict, total=False):
    """The options of ``attention`` except ``observe``, for its overloads."""

    group: dist.ProcessGroup | None
    mask: Mask | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    layout: str
    backend: str


# The type of the result depends on ``observe``.
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, observe: None = ..., **options: Unpack[_Options]) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, observe: Observe, **options: Unpack[_Options]
) -> tuple[Tensor, Observation]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, observe: Observe | None, **options: Unpack[_Options]
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
    """Compute ``regard.attention`` over a sharded sequence: this rank's queries over the keys of **all** ranks.

    The ranks form a ring, and each one passes keys and values on to the next. A rank holds its own keys and values and
    those of one other rank, and combines the blocks by their row maxima and row totals. The backward pass sends keys
    and values round the ring again. Half precision is sent unchanged and computed in float32.

    All ranks must make the same call, and all or none must call backward. Each pass begins with one small message
    that compares the calls; if they differ, every rank raises the same ``RegardError``, which names the difference. If
    a rank ends or does not answer within the timeout of the group, the others raise an error that is a ``RegardError``
    and a ``RuntimeError``.

    Without a process group, or in a group of one rank, this function calls ``regard.attention``. It then refuses the
    same options as in a ring.

    Parameters
    ----------
    q, k, v: ``[*batch, H, n_local, d]``, ``[*batch, G, m_local, d]`` and ``[*batch, G, m_local, e]``: this rank's rows,
        as ``shard`` splits them.
    group: the process group; None means the default group.
    mask: None, ``Causal()``, ``Window(before, after)``, or several joined by ``&``. Positions count along the whole
        sequence (offset=None means M − N of the whole sequence). Blocks that are hidden completely are skipped.
    scale, softcap, backend: as in ``regard.attention``; ``scale=inf`` is refused.
    sinks: the same on all ranks. Each rank gets only its part of their gradient, as for any weight that all
        ranks share: sum it over the ranks.
    observe: observables to measure, for this rank's *rows* over *all* keys: row values are ``[B, H, n_local]``,
        n = n_local and m = M. A row counts if it is a real query, not padding, and sees at least one key. ``offset``,
        ``distance``, ``peak_at`` and ``queries`` (lengths ``[B]`` or bool ``[B, N]``, the same on all ranks) refer to
        positions in the whole sequence. ``map``, ``profile`` and ``key_mass [H, M]`` are means over this rank's counted
        rows. To get the means of the whole sequence, average them over the ranks with the weights ``map_rows``,
        ``profile_rows`` and ``rows``. ``top``, ``grid``, ``keep`` and ``groups`` are refused.
    layout: "zigzag" gives rank r the blocks r and 2P − 1 − r of 2P, so that causal work is the same on all ranks.
        "blocks" gives rank r block r of P; with this layout, ranks may have any number of rows.

    Returns
    -------
    ``[*batch, H, n_local, e]``; with ``observe`` the pair (out, Observation).

    >>> x = torch.eye(2).reshape(1, 2, 2)
    >>> attention(x, x, x, mask=Causal())[0, 0]
    tensor([1., 0.])
    """
    ring = Ring.from_group(group)
    # If only this rank's arguments are wrong, the others must not wait for it until the timeout.
    with ring.tell_refusal(_device_of(q)):
        q, k, v = apply_autocast(q, k, v)
        refuse_transforms()
        shape = attention_shape(q, k, v)
        beta, cap, _ = check_options(shape, scale, softcap, sinks, 0.0)
        kernel = resolve_backend(backend, q, v)
        _check_supported(mask, beta, observe, layout, shape)
    # One process needs no ring, but refuses the same options, so that a script behaves the same when it is scaled up.
    if ring.size == 1:
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "backend": backend}
        return whole_attention(q, k, v, mask=mask, observe=observe, **options)

    # All ranks must agree on the call before they exchange anything, or they would wait for each other.
    if sinks is not None:
        sinks = sinks.to(q.device)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    call = _describe_call(shape, q, mask, observe) | {
        "scale": beta,
        "softcap": cap,
        "sinks": sinks is not None,
        "layout": layout,
        "kernel": kernel,
        "gradients": needs_grad,
    }
    lengths = ring.agree(call, [shape.n, shape.m], q.device)
    query_lengths = [n for n, _ in lengths]
    key_lengths = [m for _, m in lengths]
    queries = spans_from_lengths(query_lengths, layout, "queries")
    keys = spans_from_lengths(key_lengths, layout, "keys")

    band = _mask_band(mask, sum(query_lengths), sum(key_lengths))
    dtype = torch.float32 if kernel == "native" else working_dtype(q)
    plan = Plan(ring, queries, keys, band, Scores(beta, cap), kernel, dtype)
    q4 = flatten_batch(q, shape.batch)
    k4 = flatten_batch(k, shape.batch)
    v4 = flatten_batch(v, shape.batch)
    row_values = None
    if observe is not None:
        row_values = Observe(sink=observe.sink, local=observe.local, offset=observe.offset)
    out, sums = RingAttention.apply(q4, k4, v4, sinks, plan, row_values)
    out = out.reshape(*shape.batch, shape.heads, shape.n, shape.e)
    if observe is None:
        return out
    return out, _observation(q4, k4, sums, plan, shape, observe)


def shard(x: Tensor, dim: int = -2, group: dist.ProcessGroup | None = None, layout: str = "zigzag") -> Tensor:
    """Return this rank's rows of ``x`` along ``dim``; every rank passes the whole x. Without a group, return x itself.

    If the number of blocks does not divide the length, block sizes differ by at most one row. Rotary positions need the
    positions of the rows: ``shard(torch.arange(n), 0)``. The gradient of x is 0 at the rows of other ranks: sum it over
    the ranks to get the whole gradient.

    >>> shard(torch.arange(8), 0)  # one process has all; under torchrun rank 0 of 2 has rows 0, 1, 6 and 7
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    ring = Ring.from_group(group)
    dim = _check_dim(x, dim, layout)
    spans = split_sequence(x.shape[dim], ring.size, layout)[ring.rank]
    parts = [x.narrow(dim, span.start, len(span)) for span in spans]
    if len(parts) == 1:  # no copy is needed
        return parts[0]
    return torch.cat(parts, dim)


def gather(x: Tensor, dim: int = -2, group: dist.ProcessGroup | None = None, layout: str = "zigzag") -> Tensor:
    """Return the rows of all ranks in the order of the sequence, on every rank: the inverse of ``shard``.

    The function is differentiable: the gradient of x is the sum of the gradients of all ranks at its rows. If all P
    ranks compute the same loss from the whole result, it is counted P times: divide it by P, or let each rank compute
    a part of it.

    >>> x = torch.randn(5, 3)
    >>> torch.equal(gather(shard(x)), x)
    True
    """
    ring = Ring.from_group(group)
    with ring.tell_refusal(_device_of(x)):
        dim = _check_dim(x, dim, layout)
    if ring.size == 1:
        return x
    call = {
        "operation": "gather",
        "dimensions": x.ndim,
        "dim": dim,
        "sizes besides dim": [*x.shape[:dim], *x.shape[dim + 1 :]],
        "dtype": x.dtype,
        "layout": layout,
        "gradients": torch.is_grad_enabled() and x.requires_grad,
    }
    # Ranks may have any number of rows in layout "blocks".
    lengths = [length for (length,) in ring.agree(call, [x.shape[dim]], x.device)]
    return _Gather.apply(x, dim, ring, spans_from_lengths(lengths, layout, "rows"))


class _Gather(torch.autograd.Function):
    """Collects the rows of all ranks in order; backward sums the ranks' gradients and selects this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ring: Ring, spans: list[list[range]]) -> Tensor:
        ctx.dim = dim
        ctx.ring = ring
        ctx.spans = spans
        lengths = span_lengths(spans)
        x = x.movedim(dim, 0)
        padded = x.new_zeros(max(lengths), *x.shape[1:])  # all_gather needs equal sizes
        padded[: len(x)] = x
        received = ring.gather_tensors(padded)
        whole = x.new_empty(sum(lengths), *x.shape[1:])
        for own, rows in zip(spans, received, strict=True):
            start = 0
            for span in own:
                whole[span.start : span.stop] = rows[start : start + len(span)]
                start += len(span)
        return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # All ranks have the whole result, so each one has a gradient for every row.
        grad = grad.movedim(ctx.dim, 0).contiguous().clone()
        ctx.ring.agree({"operation": "backward pass of gather", "sizes": list(grad.shape)}, [], grad.device)
        ctx.ring.sum_over_all(grad)
        own = torch.cat([grad[span.start : span.stop] for span in ctx.spans[ctx.ring.rank]])
        return own.movedim(0, ctx.dim), None, None, None


def _check_dim(x: Tensor, dim: int, layout: str) -> int:
    """Check x, dim and layout; return ``dim`` as a number ≥ 0."""
    check_tensor("x", x)
    _check_layout(layout)
    if not -x.ndim <= check_integer("dim", dim, least=None) < x.ndim:
        raise RegardError(f"dim is {dim}; x has {x.ndim} dimensions")
    return dim % x.ndim


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise RegardError(f"layout is {layout!r}; it must be {' or '.join(map(repr, LAYOUTS))}")


def _check_supported(mask: Mask | None, beta: float, observe: Observe | None, layout: str, shape: Shape) -> None:
    """Raise if a ring does not support an option. One process refuses the same options."""
    _check_layout(layout)
    if beta == math.inf:
        raise RegardError("scale is inf (hard attention), which needs all keys at once; here it must be finite")
    _mask_band(mask, 0, 0)
    if observe is None:
        return
    if not isinstance(observe, Observe):
        raise RegardTypeError(f"observe must be a regard.Observe, got {type(observe).__name__}")
    for name in ("top", "grid", "keep", "groups", "differentiable"):
        if getattr(observe, name):
            raise RegardError(
                f"Observe({name}=…) cannot be measured here, because the keys are on other ranks; "
                "row values, key_mass, map and profile can"
            )
    if observe.heads is not None and max(observe.heads) >= shape.heads:
        raise RegardError(f"Observe(heads=…) contains head {max(observe.heads)}; q has heads 0 … {shape.heads - 1}")


def _mask_band(mask: Mask | None, n: int, m: int) -> Band:
    """Return the band ``least ≤ j − i ≤ most`` that a mask shows of the whole sequence, limited to ±2(n + m)."""
    far = 2 * (n + m)  # limits beyond ± this number would hide the same keys
    if mask is None:
        return Band(-far, far)
    if type(mask) is And:
        a = _mask_band(mask.a, n, m)
        b = _mask_band(mask.b, n, m)
        return Band(max(a.least, b.least), min(a.most, b.most))
    if type(mask) not in (Causal, Window):
        name = mask._name() if isinstance(mask, Mask) else type(mask).__name__
        raise RegardError(f"mask is {name}; here it must be Causal, Window, or both joined by &")
    assert isinstance(mask, Causal | Window)
    offset = resolve_offset(n, m, mask.offset)
    least = -far
    most = offset
    if isinstance(mask, Window):
        least = offset - mask.before
        most = offset + (mask.before if mask.after is None else mask.after)
    return Band(max(-far, min(far, least)), max(-far, min(far, most)))


def _describe_call(shape: Shape, q: Tensor, mask: Mask | None, observe: Observe | None) -> dict[str, object]:
    """Return what must be equal on all ranks, by name. The numbers of queries and keys may differ."""
    mask_name = None if mask is None else mask._name()  # its repr is a drawing
    observables = None if observe is None else replace(observe, queries=None)
    return {
        "operation": "attention",
        "batch": shape.batch_size,
        "heads": shape.heads,
        "key/value heads": shape.kv_heads,
        "width of q and k": shape.d,
        "width of v": shape.e,
        "dtype": q.dtype,
        "mask": mask_name,
        "observe": observables,
        "queries of observe": _checksum(observe),
    }


def _checksum(observe: Observe | None) -> int | None:
    """Return a checksum of the real queries to observe, which may be a large tensor; None if all are real."""
    if observe is None or observe.queries is None:
        return None
    queries = torch.as_tensor(observe.queries).cpu()
    return zlib.crc32(repr(queries.shape).encode() + queries.numpy().tobytes())


def _device_of(x: object) -> torch.device:
    """Return the device for messages: that of x, or the CPU if x is not a tensor."""
    return x.device if isinstance(x, Tensor) else torch.device("cpu")


def _observation(q: Tensor, k: Tensor, sums: RowSums, plan: Plan, shape: Shape, observe: Observe) -> Observation:
    """Return the observation of this rank's rows, in the dtype of observables."""
    values = sums.values
    counted = values["visible"] > 0
    real = find_real_queries(observe, None, replace(shape, n=plan.n), q.device)
    if real is not None:
        counted = counted & real[:, plan.positions(q.device)].unsqueeze(1)
    values |= {"lse": sums.row_max + sums.total.log(), "counted": counted}
    per_head = {"rows": counted.sum((0, 2))}
    if observe.key_mass or observe.map or observe.profile is not None:
        # These need one more round of the keys, so they are measured only on request.
        with torch.no_grad():
            cells = sum_weights_by_cell(q.detach(), k.detach(), sums, counted, observe)
        per_head |= _cell_means(cells, counted, plan, observe)
    if observe.heads is not None:
        heads = list(observe.heads)
        values = {name: x[:, heads] for name, x in values.items()}
        per_head = {name: x[heads] for name, x in per_head.items()}

    dtype = result_dtype(q.dtype)
    fields: dict[str, Any] = values | per_head
    for name, x in fields.items():
        if x.is_floating_point():
            fields[name] = x.to(dtype)
    return Observation(observe=replace(observe, queries=None), n=shape.n, m=plan.m, **fields)


def _cell_means(cells: dict[str, Tensor], counted: Tensor, plan: Plan, observe: Observe) -> dict[str, Tensor]:
    """Divide the sums of key mass, map and profile by the number of rows that were added to each cell."""
    positions = plan.positions(counted.device)
    rows = counted.sum(0)  # [H, n]
    H = counted.shape[1]
    means: dict[str, Tensor] = {}
    if observe.key_mass:
        means["key_mass"] = cells["key_mass"] / rows.sum(1, keepdim=True).clamp(min=1)
    if observe.map:
        g = observe.map
        means["map_rows"] = rows.new_zeros(H, g).index_add_(1, positions * g // max(1, plan.n), rows)
        means["map"] = cells["map"].unflatten(1, (g, g)) / means["map_rows"].clamp(min=1).unsqueeze(-1)
    for r in observe.profile_radii():
        aligned = positions + resolve_offset(plan.n, plan.m, observe.offset)
        first = ((positions + plan.band.least).clamp(min=0) - aligned).clamp(-r, r + 1)
        last = ((positions + plan.band.most).clamp(max=plan.m - 1) - aligned).clamp(-r - 1, r)
        # A row sees one run of offsets: count where runs start and end, then sum along the offsets.
        visible = torch.where(first <= last, rows, 0)
        ends = rows.new_zeros(H, 2 * r + 2).index_add_(1, first + r, visible).index_add_(1, last + r + 1, -visible)
        means["profile_rows"] = ends.cumsum(1)[:, :-1]
        means["profile"] = cells["profile"] / means["profile_rows"].clamp(min=1)
    return means
