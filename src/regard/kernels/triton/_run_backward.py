"""The backward pass on a GPU: gradients of q, k, v, dense biases, tables and sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._lowered_scores import RelativeTerm, Scores
from regard.kernels.native import contiguous_rows
from regard.kernels.reference import Forward, Gradients, reduce_to, sink_gradient
from regard.kernels.score_tiles import convert_bias
from regard.kernels.triton._backward import backward_keys, backward_queries, fill_delta
from regard.kernels.triton._bias_gradients import bias_gradients
from regard.kernels.triton._call import BiasGradients, Call, TermGradient, View, new_call, rows_view
from regard.kernels.triton._launch import (
    choose_tile,
    count_row_tiles,
    new_flags,
    run_kernel,
    score_mode,
    widths,
    with_hard_max,
)
from regard.kernels.triton._tile_sizes import TileSize, careful_tile

# Integers of tables have this many bits for the size of a sum.
UNIT_BITS = 61
# The largest factor that is a float32, with a margin.
MOST_UNIT_BITS = 126


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Forward, scores: Scores, *, biases: bool
) -> Gradients:
    """Gradients of all inputs, as ``reference.backward``."""
    call = with_hard_max(new_call(q, k, v, scores))
    tile = choose_tile("backward", call)
    row_tiles = count_row_tiles(call, tile)
    grad_out = rows_view(contiguous_rows(grad))
    delta = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    sizes = widths(call)
    delta_arguments = {
        "call": call,
        "out": rows_view(contiguous_rows(result.out)),
        "grad_out": grad_out,
        "delta_of_rows": delta,
        "E": sizes["E"],
        "E_PADDED": sizes["E_PADDED"],
        "ROWS": tile.rows,
    }
    run_kernel(fill_delta, row_tiles, tile, delta_arguments)

    # At scale 0 and inf the output does not depend on small changes of q and k.
    mode = score_mode(scores.scale)
    new_gradient = torch.empty if mode == "scaled" else torch.zeros
    dq = new_gradient(q.shape, dtype=q.dtype, device=q.device)
    dk = new_gradient(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shared: dict[str, Any] = {
        "call": call,
        "grad_out": grad_out,
        "row_max_of_rows": result.row_max.contiguous(),
        "row_sum_of_rows": result.row_sum.contiguous(),
        "delta_of_rows": delta,
        "SCORES": mode,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
    }
    shared |= sizes
    d_logit_sizes = torch.empty_like(delta) if biases and scores.terms else None
    if mode == "scaled" or d_logit_sizes is not None:
        views = {"dq": rows_view(dq) if mode == "scaled" else None, "d_logit_sizes": d_logit_sizes}
        _run_twice_if_needed(backward_queries, row_tiles, tile, shared | views, scores)
    views = {"dk": rows_view(dk) if mode == "scaled" else None, "dv": rows_view(dv)}
    key_tiles = call.B * call.G * -(-call.M // tile.keys)
    _run_twice_if_needed(backward_keys, key_tiles, tile, shared | views, scores)

    bias_grad = None
    tables: list[Tensor] = []
    if biases and (scores.bias is not None or scores.terms):
        bias_grad, tables = _run_bias_gradients(call, scores, shared, d_logit_sizes)
    sink_grad = None
    if scores.sinks is not None:
        # As in the reference, but with float32 sinks, because the kernel reads float32.
        delta = delta.to(result.row_max.dtype)
        sinks = convert_bias(scores.sinks, torch.float32)
        sink_grad = sink_gradient(sinks, result.row_max, result.row_sum, delta).to(scores.sinks.dtype)
    return Gradients(dq, dk, dv, bias_grad, sink_grad, tables)


def _run_twice_if_needed(kernel: Any, programs: int, tile: TileSize, arguments: dict[str, Any], scores: Scores) -> None:
    """Run a kernel, and again with care the programs whose result was not finite."""
    nonfinite = new_flags(programs, arguments["call"], scores)
    if arguments.get("dq", arguments.get("dv")) is None:
        nonfinite = None
    arguments = arguments | {"nonfinite": nonfinite}
    run_kernel(kernel, programs, tile, arguments | {"CAREFUL": False})
    if nonfinite is not None:
        run_kernel(kernel, programs, careful_tile(tile), arguments | {"CAREFUL": True})


# --- biases and tables ------------------------------------------------------------------------------------------------


def _run_bias_gradients(
    call: Call, scores: Scores, shared: dict[str, Any], d_logit_sizes: Tensor | None
) -> tuple[Tensor | None, list[Tensor]]:
    """The gradients of the dense bias and of the tables."""
    device = call.q.data.device
    tile = choose_tile("bias gradients", call)
    shared_batches = call.B
    shared_heads = call.H
    row_tiles = -(-call.N // tile.rows)
    key_tiles = -(-call.M // tile.keys)
    parts = None
    gradients = BiasGradients(None, None, None, ())
    if scores.bias is not None:
        shared_batches, shared_heads, rows, columns = scores.bias.shape
        one_row = 1 if rows == 1 and call.N != 1 else None
        one_column = 1 if columns == 1 and call.M != 1 else None
        shape = (
            shared_batches,
            shared_heads,
            row_tiles if one_row else call.N,
            key_tiles if one_column else call.M,
        )
        parts = torch.empty(shape, dtype=torch.float32, device=device)
        # Heads and batch entries are numbered together.
        view = View(parts, 0, parts.stride(1), parts.stride(2), 1)
        gradients = gradients._replace(bias=view, one_row=one_row, one_column=one_column)

    units_per_one = None
    if scores.terms:
        assert d_logit_sizes is not None
        # Σ |dS| of a head is below 2^exponent.
        exponents = torch.frexp(d_logit_sizes.double().sum(-1)).exponent
        bits = (UNIT_BITS - exponents).clamp(max=MOST_UNIT_BITS)
        units_per_one = torch.exp2(bits.float())
        terms = tuple(_new_term_gradient(call, term) for term in scores.terms)
        gradients = gradients._replace(terms=terms)

    arguments = shared | {
        "gradients": gradients,
        "shared_batches": shared_batches,
        "shared_heads": shared_heads,
        "units_per_one": units_per_one,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
    }
    run_kernel(bias_gradients, shared_batches * shared_heads * row_tiles * key_tiles, tile, arguments)

    bias_grad = None
    if scores.bias is not None:
        assert parts is not None
        bias_grad = reduce_to(parts, scores.bias.shape).to(scores.bias.dtype)
    tables = []
    for term, gradient in zip(scores.terms, gradients.terms, strict=True):
        assert units_per_one is not None
        tables.append(_table_gradient(term, gradient, units_per_one))
    return bias_grad, tables


def _new_term_gradient(call: Call, term: RelativeTerm) -> TermGradient:
    shape = (call.B, call.H, *term.table.shape[2:])
    device = call.q.data.device
    return TermGradient(
        units=torch.zeros(shape, dtype=torch.int64, device=device),
        nonfinite=torch.zeros(shape, dtype=torch.int32, device=device),
        # A table with one row for one query is the same for both kernels.
        per_row=1 if term.table.shape[2] != 1 else None,
    )


def _table_gradient(term: RelativeTerm, gradient: TermGradient, units_per_one: Tensor) -> Tensor:
    """The sums of integers as numbers, added up over the heads and batch entries that share the table."""
    sums = gradient.units.double() / units_per_one.double()[..., None, None]
    sums = torch.where(gradient.nonfinite > 0, torch.nan, sums)
    return reduce_to(sums, term.table.shape).to(term.table.dtype)
