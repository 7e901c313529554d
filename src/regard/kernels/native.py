"""Attention in C++: calls the compiled module ``regard._native`` with torch tensors.

The module is optional. If it was built without a compiler it is missing; this file then warns once, when ``regard`` is
imported, and everything runs on the reference backend.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from regard._errors import RegardError
from regard._lowered_scores import RelativeTerm, Scores
from regard._observables import Observe
from regard._shapes import aligned, resolve_offset
from regard.kernels import reference
from regard.kernels import reference_observables as measure
from regard.kernels.reference import Forward, Gradients
from regard.kernels.row_values import Contributions, RowValueGradients

# Without --no-cache-dir, pip would install the cached package again, which has no compiled module.
INSTALL = "install regard again with pip's --no-cache-dir --force-reinstall --no-deps and a C++17 compiler"

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


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
    # With a file name and line of ours, Python would print that line of source below the message.
    remedy = f"everything runs on the reference backend; to get it, {INSTALL}"
    warnings.warn_explicit(f"{_missing}: {remedy}", RuntimeWarning, filename="regard", lineno=0)


def built() -> bool:
    """Whether the compiled module is available."""
    return _module is not None


def compiled() -> ModuleType:
    """The compiled module. Call it only if ``built()``."""
    assert _module is not None
    return _module


def refusal(q: Tensor) -> str:
    """One line that says why `backend="native"` cannot compute a call; empty if it can."""
    if _missing:
        return _missing
    if q.device.type not in ("cpu", "meta"):
        return f"the native kernel runs on the CPU, q is on {q.device}"
    if q.dtype not in DTYPES:
        return f"the native kernel takes float32, bfloat16 and float16, q is {q.dtype}"
    return ""


def instruction_sets() -> tuple[str, ...]:
    """Names of the instruction sets this machine can run, weakest first, best last; empty without the compiled module.

    Each set contains the sets before it: `portable` (plain C++, everywhere), `avx2` (with FMA and F16C), `avx512`
    (F, BW, DQ and VL), `avx512bf16`. A set is listed only if the operating system saves its registers too. Builds for
    tests also have `emulated`, which is listed before `avx2`: the code of `avx512bf16`, compiled for AVX2. On 64-bit
    ARM the sets are `portable`, `neon`, and `neonbf16` (with products of bfloat16 pairs).
    """
    if _module is None:
        return ()
    return tuple(_module.instruction_sets())


def instruction_set() -> str:
    """The instruction set in use: the best one, or the one that the environment variable `REGARD_ISA` names.

    The variable is read once, at the first call. A set that this machine cannot run raises ``ValueError``, and a
    missing compiled module raises ``RuntimeError``.
    """
    if _module is None:
        raise RuntimeError(f"no instruction set is in use: {_missing}")
    return _selected.get() or str(_module.chosen_instruction_set())


_selected: ContextVar[str] = ContextVar("selected_instruction_set", default="")


@contextmanager
def use_instruction_set(name: str) -> Iterator[None]:
    """Compute with another instruction set of this machine inside the ``with`` block, for comparisons.

    Raises:
        RegardError: this machine cannot run the set, or the compiled module is missing.
    """
    if name not in instruction_sets():
        available = ", ".join(instruction_sets()) or "none"
        raise RegardError(f"instruction_set must be one that this machine can run ({available}), got {name!r}")
    token = _selected.set(name)
    try:
        yield
    finally:
        _selected.reset(token)


# --- arguments of the compiled module ---------------------------------------------------------------------------------


def _new_call(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scores: Scores) -> Any:
    """An ``AttentionCall`` of the compiled module, which checks every tensor and keeps it alive."""
    # Keyword arguments cost little, and two swapped tensors of one shape would give wrong numbers.
    call = compiled().AttentionCall(
        q=contiguous_rows(q),
        k=contiguous_rows(k),
        v=contiguous_rows(v),
        out=out,
        scale=scores.scale,
        softcap=scores.softcap,
        dropout=scores.dropout,
        seed=0 if scores.seed is None else int(scores.seed),
        threads=torch.get_num_threads(),
    )
    # Most calls have no options. An absent option costs one check here and nothing in the kernel.
    if scores.lo is not None:
        call.set_lo(contiguous_rows(scores.lo))
    if scores.hi is not None:
        call.set_hi(contiguous_rows(scores.hi))
    if scores.mask is not None:
        call.set_mask(scores.mask)
    if scores.bias is not None:
        call.set_bias(aligned(as_float32(scores.bias)))
    if scores.sinks is not None:
        call.set_sinks(aligned(scores.sinks.float().contiguous()))
    for term in scores.terms:
        call.add_term(
            table=contiguous_rows(as_float32(term.table)),
            query_positions=aligned(term.query_positions.contiguous()),
            key_positions=aligned(term.key_positions.contiguous()),
            first_offset=term.first_offset,
        )
    return call


def contiguous_rows(x: Tensor) -> Tensor:
    """``x`` if its last dimension is contiguous and its elements are aligned, else a copy for which both hold."""
    # A dimension of size 1 may have any stride.
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return aligned(x)
    return x.contiguous()


def as_float32(x: Tensor) -> Tensor:
    """A bias in float32. A finite number that overflows becomes NaN, which is reported; −inf would hide a key."""
    if x.dtype != torch.float64:
        return x.float()
    single = x.float()
    return torch.where(single.isinf() & x.isfinite(), math.nan, single)


def _new_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized out, row_max and row_sum."""
    B, H, n, _ = q.shape
    out = q.new_empty(B, H, n, v.shape[3])
    row_max = q.new_empty(B, H, n, dtype=torch.float64)
    return out, row_max, torch.empty_like(row_max)


def _reference_may_be_finite(scores: Scores, *tensors: Tensor) -> bool:
    """Whether the reference may find a finite result where the kernel did not.

    It may if a key can be hidden from a row (the kernel computes 0 · NaN), or if all inputs are finite (float32
    overflowed).
    """
    options = (scores.lo, scores.hi, scores.mask, scores.bias, scores.sinks)
    if scores.terms or any(x is not None for x in options):
        return True
    return all(bool(x.isfinite().all()) for x in tensors)


# --- forward ----------------------------------------------------------------------------------------------------------


def output(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """``out`` of ``forward`` alone: in a small call, allocating row_max and row_sum costs time too."""
    out = q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    finite = _new_call(q, k, v, out, scores).forward(instruction_set())
    if not finite and _reference_may_be_finite(scores, q, k, v):
        return reference.output(q, k, v, scores)
    return out


def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Forward:
    """``out [B, H, n, e]`` in q's dtype, ``row_max`` and ``row_sum [B, H, n]``, as ``reference.forward``.

    The kernel computes 0 · NaN of hidden keys, may overflow in float32, and reports a result that is not finite. Such a
    call is computed again by the reference, which leaves hidden keys out and computes in float64.
    """
    out, row_max, row_sum = _new_outputs(q, v)
    call = _new_call(q, k, v, out, scores)
    call.set_row_sums(row_max=row_max, row_sum=row_sum)
    if not call.forward(instruction_set()) and _reference_may_be_finite(scores, q, k, v):
        return reference.forward(q, k, v, scores)
    return Forward(out, row_max, row_sum)


def row_max_and_sum(q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor] | None:
    """``row_max`` and ``row_sum [B, H, n]`` alone; None if a logit is not finite and the reference must be used."""
    # The kernel needs values: one column of zeros, which takes the memory of one number.
    v = k.new_zeros(1).expand(*k.shape[:3], 1)
    out, row_max, row_sum = _new_outputs(q, v)
    call = _new_call(q, k, v, out, scores)
    call.set_row_sums(row_max=row_max, row_sum=row_sum)
    if not call.forward(instruction_set()):
        return None
    return row_max, row_sum


# --- observables ------------------------------------------------------------------------------------------------------

_UNIT = 2.0**-32  # the kernel sums weights over rows as integers in this unit
_INTEGER_ROWS = ("peak_at", "visible")


def observed(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, observe: Observe, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """``forward`` and every observable: row values, groups and map in the same pass, the rest in a second one.

    The reference measures on a grid, and if a result is not finite.
    """
    if observe.grid is not None:
        out, row_max, row_sum = forward(q, k, v, scores)
        return out, row_max, row_sum, measure.measure(q, k, None, scores, observe, real)
    # The kernel writes row values, and adds to the map, which therefore starts at 0.
    B, H, n, _ = q.shape
    m = k.shape[2]
    out, row_max, row_sum = _new_outputs(q, v)
    values = {name: torch.empty(B, H, n, dtype=torch.float32) for name in measure.FLOAT_ROWS}
    for name in _INTEGER_ROWS:
        values[name] = torch.empty(B, H, n, dtype=torch.int64)
    map_sums = torch.zeros(H, observe.map, observe.map, dtype=torch.int64)
    query_offset = resolve_offset(n, m, observe.offset)
    groups: dict[str, Tensor] = {}
    if observe.groups is not None:
        groups["groups"] = torch.empty(B, H, n, len(observe.groups), dtype=torch.float32)
        groups["key_groups"] = observe.groups.labels

    call = _new_call(q, k, v, out, scores)
    call.set_row_sums(row_max=row_max, row_sum=row_sum)
    finite = call.forward_observed(
        instruction_set(),
        **values,
        **groups,
        map=map_sums,
        real_queries=None if real is None else real.contiguous(),
        query_offset=query_offset,
        sink_keys=observe.sink,
        local_radius=observe.local,
    )
    if not finite:
        return reference.observed(q, k, v, scores, observe, real)
    if observe.groups is not None:
        values["groups"] = groups["groups"]

    # A row counts if it sees a key and is not padding. Means over rows divide by the rows that count.
    counted = values["visible"] > 0
    if real is not None:
        counted = counted & real.unsqueeze(1)
    values["counted"] = counted
    values["rows"] = counted.sum((0, 2))
    if observe.map:
        map_row = torch.arange(n) * observe.map // max(1, n)
        map_rows = torch.zeros(H, observe.map, dtype=torch.int64).index_add_(1, map_row, counted.sum(0))
        values["map_rows"] = map_rows
        values["map"] = _mean_weight(map_sums, map_rows.unsqueeze(-1))
    if observe.key_mass or observe.top or observe.profile is not None:
        values |= _second_pass(call, observe, values, m, query_offset)
    return out, row_max, row_sum, values


def _second_pass(
    call: Any, observe: Observe, values: dict[str, Tensor], m: int, query_offset: int
) -> dict[str, Tensor]:
    """Key mass, profile and the largest weights of each row, measured from row_max and row_sum."""
    counted = values["counted"]
    B, H, n = counted.shape
    buffers = {}
    if observe.key_mass:
        buffers["key_mass"] = torch.zeros(H, m, dtype=torch.int64)
    if observe.profile is not None:
        offsets = 2 * observe.profile_radii()[0] + 1
        buffers["profile"] = torch.zeros(H, offsets, dtype=torch.int64)
        buffers["profile_rows"] = torch.zeros(H, offsets, dtype=torch.int64)
    if observe.top:
        buffers["top"] = torch.empty(B, H, n, observe.top, dtype=torch.float32)
        buffers["top_at"] = torch.empty(B, H, n, observe.top, dtype=torch.int64)
    call.second_pass(instruction_set(), counted=counted, query_offset=query_offset, **buffers)

    # The kernel sums in units over rows; observables are means.
    if observe.key_mass:
        buffers["key_mass"] = _mean_weight(buffers["key_mass"], values["rows"].unsqueeze(-1))
    if observe.profile is not None:
        buffers["profile"] = _mean_weight(buffers["profile"], buffers["profile_rows"])
    return buffers


def _mean_weight(sums: Tensor, rows: Tensor) -> Tensor:
    """The mean over ``rows`` of weights that the kernel summed in units of 2^−32."""
    return (sums.double() * _UNIT / rows.clamp(min=1)).float()


def bin_masses(q: Tensor, k: Tensor, row_max: Tensor, row_sum: Tensor, scores: Scores, edges: Tensor) -> Tensor:
    """``[B, H, n, bins]``: each row's weight on the keys ``edges[t] ≤ j < edges[t + 1]``."""
    v = k.new_zeros(1).expand(*k.shape[:3], 1)
    call = _new_call(q, k, v, v.new_empty(*q.shape[:3], 1), scores)
    call.set_row_sums(row_max=aligned(row_max.contiguous()), row_sum=aligned(row_sum.contiguous()))
    masses = torch.zeros(*q.shape[:3], len(edges) - 1, dtype=torch.float32)
    if masses.numel():
        call.sum_bins(instruction_set(), edges=edges.to(torch.int64).contiguous(), masses=masses)
    return masses


# --- backward ---------------------------------------------------------------------------------------------------------


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Forward,
    scores: Scores,
    *,
    biases: bool = True,
    row_values: RowValueGradients | None = None,
    attribution: int | None = None,
) -> Gradients:
    """Gradients of all inputs, as ``reference.backward``."""
    out, row_max, row_sum = result
    B, H, n, _ = q.shape
    m = k.shape[2]
    call = _new_call(q, k, v, out, scores)
    call.set_row_sums(row_max=row_max, row_sum=row_sum)
    # Sums over many rows are kept in float32 whatever the dtype, and rounded once at the end.
    dq = q.new_zeros(q.shape, dtype=torch.float32)
    dk = k.new_zeros(k.shape, dtype=torch.float32)
    dv = v.new_zeros(v.shape, dtype=torch.float32)
    delta = torch.empty_like(row_max, dtype=torch.float32)

    # Terms that depend on i − j alone share one gradient; each other term has its own.
    bias_grad = None
    toeplitz_grad = None
    term_grads: list[Tensor | None] = []
    if biases:
        if scores.bias is not None:
            bias_grad = _new_bias_gradient(scores.bias, delta)
        for t, term in enumerate(scores.terms):
            if not call.is_toeplitz(t):
                term_grads.append(delta.new_zeros(B, H, *term.table.shape[2:]))
                continue
            term_grads.append(None)
            if toeplitz_grad is None:
                toeplitz_grad = delta.new_zeros(B, H, n + m)

    # Absent options cost one check per block of keys.
    options = {}
    if row_values is not None:
        options = row_values.native_arguments()
    if attribution is not None:
        options["contributed_keys"] = delta.new_zeros(B, H, m)
        if attribution:
            options["contributed_map"] = delta.new_zeros(B, H, attribution, attribution)

    finite = call.backward(
        instruction_set(),
        grad_out=contiguous_rows(grad),
        dq=dq,
        dk=dk,
        dv=dv,
        delta=delta,
        toeplitz_grad=toeplitz_grad,
        bias_grad=bias_grad,
        term_grads=term_grads,
        **options,
    )
    if not finite and _reference_may_be_finite(scores, grad, q, k, v):
        # The reference needs its own row sums: with those of the kernel its weights would not add up to 1.
        result = reference.forward(q, k, v, scores)
        return reference.backward(
            *(grad, q, k, v, result, scores), biases=biases, row_values=row_values, attribution=attribution
        )

    # The kernel's gradients have one part per head; those of broadcast inputs are the sums of the parts.
    if bias_grad is not None and scores.bias is not None:
        bias_grad = reference.reduce_to(bias_grad, scores.bias.shape).to(scores.bias.dtype)
    tables = []
    for term, term_grad in zip(scores.terms, term_grads, strict=False):
        if term_grad is None:
            assert toeplitz_grad is not None
            term_grad = _toeplitz_term_gradient(term, toeplitz_grad, n, m)
        tables.append(reference.reduce_to(term_grad, term.table.shape).to(term.table.dtype))
    sink_grad = None
    if scores.sinks is not None:
        # As in the reference, but with float32 sinks, because the kernel reads float32.
        entropy = None if row_values is None else row_values.entropy
        sums = (row_max, row_sum, delta.double())
        sink_grad = reference.sink_gradient(scores.sinks.float(), *sums, entropy, row_values).to(scores.sinks.dtype)
    gradients = Gradients(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), bias_grad, sink_grad, tables)
    if attribution is not None:
        # The sum of a row's contributions is g·out, which the kernel has computed for the gradients.
        gradients.contributions = Contributions(options["contributed_keys"], delta, options.get("contributed_map"))
    return gradients


def _new_bias_gradient(bias: Tensor, delta: Tensor) -> Tensor:
    """Zeros for the gradient of a dense bias: one part per head if that costs little, else the shape of the bias."""
    shape = (*delta.shape[:2], *bias.shape[2:])
    if math.prod(shape) <= max(bias.numel(), 2**20):
        return delta.new_zeros(shape)
    return delta.new_zeros(bias.shape)


def _toeplitz_term_gradient(term: RelativeTerm, toeplitz_grad: Tensor, n: int, m: int) -> Tensor:
    """The gradient of a term's table ``[B, H, 1, T]`` from the gradient by i − j + m that all Toeplitz terms share."""
    # Each place i − j + m belongs to one column of the table, that of the offset j − i = m − place.
    columns = term.table.shape[3]
    place = torch.arange(n + m, device=toeplitz_grad.device)
    query_offset = int(term.query_positions[0]) if n else 0
    column = (m - place - query_offset - term.first_offset).clamp(0, columns - 1)
    return toeplitz_grad.new_zeros(*toeplitz_grad.shape[:2], columns).index_add_(2, column, toeplitz_grad).unsqueeze(2)
