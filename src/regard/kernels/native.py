"""The door to the compiled module `regard._native`: attention in C++, or why not, if not.

The module is optional. A build without a compiler leaves it out; then this file says so once, when `regard` is
imported, and everything runs on the reference backend.
"""

from __future__ import annotations

import importlib
import math
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from regard.kernels import measure, reference
from regard.kernels.reference import Forward, Gradients
from regard.observables import Observe
from regard.scores import Scores
from regard.shapes import offset_of

# Without --no-cache-dir pip would install the pure package that it built the first time once more.
INSTALL = "install regard again with pip's --no-cache-dir --force-reinstall --no-deps and a C++17 compiler"

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _load() -> tuple[ModuleType | None, str]:
    """The compiled module, or None and the reason why it is missing."""
    try:
        return importlib.import_module("regard._native"), ""
    except ModuleNotFoundError:
        return None, "the native module of regard was not built"
    except ImportError as error:
        return None, f"the native module of regard was built but cannot be loaded ({error})"


_module, _missing = _load()
if _module is None:
    # From nowhere: a place would be a line of ours, which Python would print below the message.
    remedy = f"everything runs on the reference backend; to get it, {INSTALL}"
    warnings.warn_explicit(f"{_missing}: {remedy}", RuntimeWarning, filename="regard", lineno=0)


def built() -> bool:
    """Whether the compiled module is there."""
    return _module is not None


def compiled() -> ModuleType:
    """The compiled module; only where ``built`` says that it is there."""
    assert _module is not None
    return _module


def refusal(q: Tensor) -> str:
    """One line that says why `backend="native"` cannot honour a call; empty where it can."""
    if _missing:
        return _missing
    if q.device.type not in ("cpu", "meta"):
        return f"the native kernel runs on the CPU, q is on {q.device}"
    if q.dtype not in DTYPES:
        return f"the native kernel takes float32, bfloat16 and float16, q is {q.dtype}"
    return ""


def instruction_sets() -> tuple[str, ...]:
    """What the compiled module can run on this machine, weakest first, best last; empty if it was not built.

    Each contains those before it: `portable` (plain C++, everywhere), `avx2` (with FMA and F16C), `avx512`
    (F, BW, DQ and VL), `avx512bf16`. A set counts only if the operating system saves its registers too.
    """
    return () if _module is None else tuple(_module.instruction_sets())


def instruction_set() -> str:
    """The instruction set in use: the best one, or the one that the environment variable `REGARD_ISA` names.

    The variable is read once, at the first call.

    Raises:
        ValueError: `REGARD_ISA` is unknown or this machine cannot run it; the message lists what it can run.
        RuntimeError: the compiled module was not built.
    """
    if _module is None:
        raise RuntimeError(f"no instruction set is in use: {_missing}")
    return str(_module.chosen())


class _Call:
    """A call in the compiled module's form, with the tensors it points to."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        high: Tensor | None,
        total: Tensor | None,
        scores: Scores,
    ) -> None:
        assert _module is not None
        q, k, v = _rows(q), _rows(k), _rows(v)
        self.alive = [x for x in (q, k, v, out, high, total) if x is not None]
        self.raw = _module.Call(
            DTYPES[q.dtype],
            scores.scale,
            scores.softcap,
            scores.dropout,
            0 if scores.seed is None else int(scores.seed),
            torch.get_num_threads(),
            *_parts(q),
            *_parts(k),
            *_parts(v),
            out.data_ptr(),
            out.stride(),
            0 if high is None else high.data_ptr(),
            0 if total is None else total.data_ptr(),
        )
        if scores.scale == math.inf:
            self.raw.best(self.keep(q.new_empty(q.shape[:3], dtype=torch.float32)).data_ptr())
        if scores.mask is not None:
            self.raw.mask(*_parts(self.keep(scores.mask)))
        if scores.bias is not None:
            self.raw.bias(*_parts(self.keep(_as_float32(scores.bias))))
        if scores.sinks is not None:
            self.raw.sinks(self.keep(scores.sinks.float().contiguous()).data_ptr())
        for name, bound in (("lo", scores.lo), ("hi", scores.hi)):
            if bound is not None:
                bound = self.keep(bound if bound.stride(1) == 1 else bound.contiguous())
                getattr(self.raw, name)(bound.data_ptr(), _strides(bound)[0])
        for term in scores.terms:
            table = _rows(_as_float32(term.table))
            # stride 0 says that rows share; the gradient's room goes by the size
            table = self.keep(table.contiguous() if table.shape[2] > 1 and table.stride(2) == 0 else table)
            query_at, key_at = self.keep(term.query_at.contiguous()), self.keep(term.key_at.contiguous())
            places = (table.shape[3], query_at.data_ptr(), key_at.data_ptr(), term.first)
            self.raw.term(table.data_ptr(), *_strides(table)[:3], *places)

    def keep(self, x: Tensor) -> Tensor:
        """``x``, alive as long as the call."""
        self.alive.append(x)
        return x


def _as_float32(x: Tensor) -> Tensor:
    """A bias in float32; what would become −inf there, and so hide a key, becomes NaN: the kernel then reports it."""
    if x.dtype != torch.float64:
        return x.float()
    single = x.float()
    return torch.where(single.isinf() & x.isfinite(), math.nan, single)


def _rows(x: Tensor) -> Tensor:
    """``x`` with contiguous rows: itself wherever that is so already."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _parts(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return x.data_ptr(), x.shape, x.stride()


def _strides(x: Tensor) -> list[int]:
    """Strides in elements, 0 for a dimension of size 1, which broadcasts."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def _worth_another_look(scores: Scores, *tensors: Tensor) -> bool:
    """Whether a result that is not finite may be the kernel's own doing.

    It may where a key can be hidden from a row (0 · NaN), and where all inputs are finite (float32 overflowed).
    """
    if any(x is not None for x in (scores.lo, scores.hi, scores.mask, scores.bias, scores.sinks)) or scores.terms:
        return True
    return all(bool(x.isfinite().all()) for x in tensors)


def output(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """``forward``'s out alone: a small call would feel the room for the rest."""
    out = q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    call = _Call(q, k, v, out, None, None, scores)
    if not call.raw.forward(instruction_set(), [], []) and _worth_another_look(scores, q, k, v):
        return reference.output(q, k, v, scores)
    return out


def _room(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for out, high and total."""
    B, H, n, _ = q.shape
    high, total = (q.new_empty(B, H, n, dtype=torch.float64) for _ in range(2))
    return q.new_empty(B, H, n, v.shape[3]), high, total


def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Forward:
    """``out [B, H, n, e]`` in q's dtype, ``high`` and ``total [B, H, n]``, as ``reference.forward``.

    The kernel lets 0 · NaN happen and float32 overflow, and says when a result is not finite; such a call is computed
    again by the reference, which keeps hidden keys out and computes in float64.
    """
    out, high, total = _room(q, v)
    call = _Call(q, k, v, out, high, total, scores)  # named: what it points to must live while the kernel runs
    if not call.raw.forward(instruction_set(), [], []) and _worth_another_look(scores, q, k, v):
        return reference.forward(q, k, v, scores)
    return Forward(out, high, total)


_UNIT = 2.0**-32  # the kernel sums weights over rows in whole numbers of this
_ROWS = ("entropy", "peak", "offset", "distance", "sink", "local", "peak_at", "visible")


def observed(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, observe: Observe, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """``forward`` and every observable: row values and the map in the same pass, the rest in a second one.

    On a grid, and where a result is not finite, the reference measures.
    """
    if observe.grid is not None:
        out, high, total = forward(q, k, v, scores)
        return out, high, total, measure.measure(q, k, None, scores, observe, real)
    (B, H, n, _), m, g = q.shape, k.shape[2], observe.map
    out, high, total = _room(q, v)
    values = {x: high.new_empty(B, H, n, dtype=torch.int64 if i > 5 else torch.float32) for i, x in enumerate(_ROWS)}
    pooled = torch.zeros(H, g, g, dtype=torch.int64)
    call = _Call(q, k, v, out, high, total, scores)
    counts = None if real is None else call.keep(real.contiguous())
    addresses = [x.data_ptr() for x in (*values.values(), pooled)] + [0 if counts is None else counts.data_ptr()]
    shift = offset_of(n, m, observe.offset)
    numbers = [shift, observe.sink, observe.local, g, 0 if counts is None or counts.shape[0] == 1 else n]
    if not call.raw.forward(instruction_set(), addresses, numbers):
        return reference.observed(q, k, v, scores, observe, real)
    counted = values["visible"] > 0
    values["counted"] = counted if real is None else counted & real.unsqueeze(1)
    values["rows"] = values["counted"].sum((0, 2))
    if g:
        bins = torch.arange(n) * g // max(1, n)
        values["map_rows"] = torch.zeros(H, g, dtype=torch.int64).index_add_(1, bins, values["counted"].sum(0))
        values["map"] = (pooled.double() * _UNIT / values["map_rows"].clamp(min=1).unsqueeze(-1)).float()
    if observe.key_mass or observe.top or observe.profile is not None:
        values |= _look(call, observe, values, shift)
    return out, high, total, values


def _look(call: _Call, observe: Observe, values: dict[str, Tensor], shift: int) -> dict[str, Tensor]:
    """Key mass, profile and top keys, in a second pass from the rows' highs and totals."""
    counted = values["counted"]
    (B, H, n), m, k = counted.shape, call.alive[1].shape[2], observe.top
    radius = observe.radii()[0] if observe.profile is not None else 0
    sums = {"key_mass": m if observe.key_mass else 0, "profile": 2 * radius + 1, "profile_rows": 2 * radius + 1}
    if observe.profile is None:
        sums["profile"] = sums["profile_rows"] = 0
    room = {name: torch.zeros(H, size, dtype=torch.int64) for name, size in sums.items()}
    top, top_at = torch.empty(B, H, n, k), torch.empty(B, H, n, k, dtype=torch.int64)
    addresses = [x.data_ptr() if x.numel() else 0 for x in room.values()]
    call.raw.look(
        instruction_set(), counted.data_ptr(), *addresses, radius, shift, k, top.data_ptr(), top_at.data_ptr()
    )
    found = {"top": top, "top_at": top_at} if k else {}
    if observe.key_mass:
        rows = values["rows"].clamp(min=1).unsqueeze(-1)
        found["key_mass"] = (room["key_mass"].double() * _UNIT / rows).float()
    if observe.profile is not None:
        rows = room["profile_rows"]
        found |= {"profile": (room["profile"].double() * _UNIT / rows.clamp(min=1)).float(), "profile_rows": rows}
    return found


def row_sums(q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor] | None:
    """``high`` and ``total [B, H, n]`` alone; None where a logit is not finite, and the reference must look."""
    v = k.new_zeros(1).expand(*k.shape[:3], 1)
    out, high, total = _room(q, v)
    call = _Call(q, k, v, out, high, total, scores)
    return (high, total) if call.raw.forward(instruction_set(), [], []) else None


def row_bins(q: Tensor, k: Tensor, high: Tensor, total: Tensor, scores: Scores, edges: Tensor) -> Tensor:
    """``[B, H, n, bins]``: what each row gives to the keys ``edges[t] ≤ j < edges[t + 1]``, from its sums."""
    v = k.new_zeros(1).expand(*k.shape[:3], 1)
    call = _Call(q, k, v, v.new_empty(*q.shape[:3], 1), high.contiguous(), total.contiguous(), scores)
    edges = call.keep(edges.to(torch.int64).contiguous())
    masses = torch.zeros(*q.shape[:3], len(edges) - 1)
    if masses.numel():
        call.raw.bins(instruction_set(), len(edges) - 1, edges.data_ptr(), masses.data_ptr())
    return masses


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, made: Forward, scores: Scores, *, biases: bool = True
) -> Gradients:
    """As ``reference.backward``."""
    out, high, total = made
    call = _Call(q, k, v, out, high, total, scores)
    B, H, n, d = q.shape
    m = k.shape[2]
    dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    delta = torch.empty_like(high, dtype=torch.float32)
    grad = call.keep(_rows(grad))
    d_bias = _bias_gradient(scores.bias, delta) if biases and scores.bias is not None else None
    if d_bias is not None and d_bias.shape[:2] != (B, H):
        call.raw.one_thread()  # heads add to the same numbers: in order, so that the sum does not depend on chance
    on_line = [call.raw.on_line(t) for t in range(len(scores.terms))] if biases else []
    line = delta.new_zeros(B, H, n + m) if any(on_line) else None
    tables = [
        None if flat else delta.new_zeros(B, H, t.table.shape[2], t.table.shape[3])
        for t, flat in zip(scores.terms, on_line, strict=False)
    ]
    finite = call.raw.backward(
        instruction_set(),
        [grad.data_ptr(), *_strides(grad)[:3]],
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        delta.data_ptr(),
        0 if line is None else line.data_ptr(),
        [] if d_bias is None else [d_bias.data_ptr(), *_strides(d_bias)],
        [0 if t is None else t.data_ptr() for t in tables],
    )
    if not finite and _worth_another_look(scores, grad, q, k, v):
        # with the reference's own sums: those of another arithmetic would make weights that do not add up to 1
        return reference.backward(grad, q, k, v, reference.forward(q, k, v, scores), scores, biases=biases)
    return Gradients(
        dq.to(q.dtype),
        dk.to(k.dtype),
        dv.to(v.dtype),
        None
        if d_bias is None or scores.bias is None
        else reference.reduce_to(d_bias, scores.bias.shape).to(scores.bias.dtype),
        _sink_gradient(scores.sinks, high, total, delta),
        [_table_gradient(t, d, line, n, m) for t, d in zip(scores.terms, tables, strict=False)],
    )


def _sink_gradient(sinks: Tensor | None, high: Tensor, total: Tensor, delta: Tensor) -> Tensor | None:
    """The reference's, for the sinks as the kernel has seen them: in float32."""
    if sinks is None:
        return None
    found = reference.sink_gradient(sinks.float(), high, total, delta.double())
    return None if found is None else found.to(sinks.dtype)


def _bias_gradient(bias: Tensor, delta: Tensor) -> Tensor:
    """Room for the gradient of a dense bias: one part a head where that costs little, else the bias' own shape."""
    parts = (*delta.shape[:2], *bias.shape[2:])
    return delta.new_zeros(parts if math.prod(parts) <= max(bias.numel(), 2**20) else bias.shape)


def _table_gradient(term: Any, found: Tensor | None, line: Tensor | None, n: int, m: int) -> Tensor:
    """A term's gradient from what the kernel summed: by column, or by i − j + m for terms on a line."""
    if found is None:
        assert line is not None
        place = torch.arange(n + m, device=line.device)  # i − j + m, so the key stands at m − place before the query
        offset = int(term.query_at[0]) if n else 0
        column = (m - place - offset - term.first).clamp(0, term.table.shape[3] - 1)
        found = line.new_zeros(*line.shape[:2], term.table.shape[3]).index_add_(2, column, line).unsqueeze(2)
    return reference.reduce_to(found, term.table.shape).to(term.table.dtype)
