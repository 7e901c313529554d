"""The kernels as ``torch.library`` operators, with fake tensors, gradients and refusals.

    regard::attention           → out, row_max, row_sum
    regard::observed_attention  → out, row_max, row_sum, then the observables in the order of ``observable_names``
    regard::attention_backward  → gradients of q, k, v, then those of sinks, bias and tables that exist and are needed

Operators take plain arguments only; ``Scores.pack`` makes them. Calls that nothing traces or intercepts skip the
dispatcher and pass the ``Scores`` object itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regard._checks import is_tracing
from regard._lowered_scores import Scores, operator_schema
from regard._observables import Observe
from regard._shapes import resolve_offset
from regard.kernels import native, reference, triton
from regard.kernels.reference import Forward, Gradients
from regard.kernels.reference_observables import observable_names
from regard.kernels.score_tiles import full_precision, result_dtype, working_dtype

_KERNELS: dict[str, Any] = {"native": native, "reference": reference, "triton": triton}

# The parameters of regard::attention: the tensors, the lowered options and the kernel.
_PARAMETERS = ["Tensor q", "Tensor k", "Tensor v", *operator_schema(), "str backend"]
_NAMES = [parameter.split()[-1] for parameter in _PARAMETERS]
_OBSERVED_PARAMETERS = [*_PARAMETERS, "Tensor? real_queries", "SymInt[] observe"]
_RESULTS = ["Tensor out", "Tensor row_max", "Tensor row_sum"]
_BACKWARD_PARAMETERS = ["Tensor grad", *_PARAMETERS[:3], *_RESULTS, *_PARAMETERS[3:], "bool biases"]


# --- calls -----------------------------------------------------------------------------------------------------------


def attention_output(q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str) -> Tensor:
    """Compute the output of attention. The operator is used only if something traces or intercepts operators."""
    learned = scores.learned_tensors()
    # The dispatcher costs more than a small call: without tracing, modes and transforms it has nothing to do.
    if not can_skip_dispatcher(q, k, v, *learned):
        return attention_op(q, k, v, *scores.pack(), backend)[0]
    if _needs_gradients(q, k, v, *learned):
        return _EagerAttention.apply(scores, backend, q, k, v, *learned)
    with full_precision(q):
        return _KERNELS[backend].output(q, k, v, scores)


def observed_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str, observe: Observe, real_queries: Tensor | None
) -> list[Tensor]:
    """Compute out, row_max, row_sum and the observables. The operator is used as in ``attention_output``."""
    learned = scores.learned_tensors()
    if can_skip_dispatcher(q, k, v, *learned) and not _needs_gradients(q, k, v, *learned):
        return _observed(q, k, v, scores, backend, observe, real_queries)
    encoded = encode_observe(observe, q.shape[2], k.shape[2])
    return observed_op(q, k, v, *scores.pack(), backend, real_queries, encoded)


def _needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# Subclasses may intercept operators.
_ORDINARY = (Tensor, torch.nn.Parameter)


def can_skip_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors and nothing traces, transforms or intercepts operators."""
    if is_tracing() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    for x in tensors:  # noqa: SIM110 (a generator costs more than the rest)
        if x is not None and (type(x) not in _ORDINARY or x.is_meta or x.is_neg()):
            return False
    return True


# --- Observe as operator arguments -----------------------------------------------------------------------------------


def encode_observe(observe: Observe, n: int, m: int) -> list[int]:
    """``observe`` as integers, for the operator; its ``queries`` are passed separately, as a tensor."""
    # −1 stands for an axis without a radius, and a grid of 0 × 0 for none.
    radii = (*observe.profile_radii(), -1, -1)[:2]
    grid = observe.grid if observe.grid is not None else (0, 0)
    offset = resolve_offset(n, m, observe.offset)
    sizes = [observe.map, *radii, int(observe.key_mass), observe.top, observe.sink, observe.local]
    return [*sizes, *grid, offset]


def _decode_observe(encoded: Sequence[int]) -> Observe:
    map_size, radius_y, radius_x, key_mass, top, sink, local, height, width, offset = encoded
    profile: int | tuple[int, int] | None = None
    if radius_x >= 0:
        profile = (radius_y, radius_x)
    elif radius_y >= 0:
        profile = radius_y
    grid = (height, width) if height else None
    return Observe(map_size, profile, bool(key_mass), top, sink, local, grid, offset)


# --- what the operators compute --------------------------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str) -> Forward:
    with full_precision(q):
        return _KERNELS[backend].forward(q, k, v, scores)


def _observed(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str, observe: Observe, real_queries: Tensor | None
) -> list[Tensor]:
    with full_precision(q):
        out, row_max, row_sum, values = _KERNELS[backend].observed(q, k, v, scores, observe, real_queries)
    return [out, row_max, row_sum, *[values[name] for name in observable_names(observe)]]


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, forward: Forward, scores: Scores, backend: str, biases: bool
) -> Gradients:
    with full_precision(q):
        return _KERNELS[backend].backward(grad, q, k, v, forward, scores, biases=biases)


def _attention_body(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *packed, backend = arguments
    out, row_max, row_sum = _forward(q, k, v, Scores.unpack(packed), backend)
    return out, row_max, row_sum


def _observed_body(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    *packed, backend, real_queries, encoded = arguments
    return _observed(q, k, v, Scores.unpack(packed), backend, _decode_observe(encoded), real_queries)


def _backward_body(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    out, row_max, row_sum, *packed, backend, biases = arguments
    forward = Forward(out, row_max, row_sum)
    gradients = _backward(grad, q, k, v, forward, Scores.unpack(packed), backend, biases)
    existing = (gradients.q, gradients.k, gradients.v, gradients.sinks, gradients.bias, *gradients.tables)
    return [x for x in existing if x is not None]


# --- shapes of the results, for fake tensors -------------------------------------------------------------------------


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, H, n, _ = q.shape
    row_max = q.new_empty(B, H, n, dtype=working_dtype(q))
    return q.new_empty(B, H, n, v.shape[-1]), row_max, torch.empty_like(row_max)


def _observed_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    observe = _decode_observe(arguments[-1])
    B, H, n, _ = q.shape
    m = k.shape[2]
    g = observe.map
    sides = [2 * radius + 1 for radius in observe.profile_radii()]
    exact = result_dtype(q.dtype)
    shapes: dict[str, tuple[list[Any], torch.dtype]] = {
        "rows": ([H], torch.int64),
        "key_mass": ([H, m], exact),
        "map": ([H, g, g], exact),
        "map_rows": ([H, g], torch.int64),
        "profile": ([H, *sides], exact),
        "profile_rows": ([H, *sides], torch.int64),
        "top": ([B, H, n, observe.top], exact),
        "top_at": ([B, H, n, observe.top], torch.int64),
        "peak_at": ([B, H, n], torch.int64),
        "visible": ([B, H, n], torch.int64),
        "counted": ([B, H, n], torch.bool),
    }
    # Names that are not listed are row values.
    results = list(_attention_fake(q, k, v))
    for name in observable_names(observe):
        shape, dtype = shapes.get(name, ([B, H, n], exact))
        results.append(q.new_empty(shape, dtype=dtype))
    return results


def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    _out, _row_max, _row_sum, *packed, _backend, biases = arguments
    scores = Scores.unpack(packed)
    inputs: list[Tensor | None] = [q, k, v, scores.sinks]
    if biases:
        inputs += [scores.bias, *[term.table for term in scores.terms]]
    return [x.new_empty(x.shape) for x in inputs if x is not None]


# --- gradients -------------------------------------------------------------------------------------------------------


def _save_call(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, forward: Sequence[Tensor], scores: Scores, backend: str
) -> None:
    """Store what the backward pass needs, with the tensors of ``scores``, so that autograd detects changes in place."""
    leaves, ctx.scores_spec = pytree.tree_flatten(scores)
    ctx.save_for_backward(q, k, v, *forward, *leaves)
    ctx.backend = backend
    ctx.set_materialize_grads(False)


def _saved_gradients(ctx: Any, grad: Tensor, needs_bias: bool, needs_tables: bool) -> Gradients:
    """The gradients of a call that ``_save_call`` stored."""
    q, k, v, out, row_max, row_sum, *leaves = ctx.saved_tensors
    scores: Scores = pytree.tree_unflatten(leaves, ctx.scores_spec)
    biases = needs_bias or needs_tables
    # Gradients are enabled here only if a second derivative is wanted, and only the operator refuses it.
    if not torch.is_grad_enabled() and can_skip_dispatcher(grad, q, k, v, *scores.learned_tensors()):
        return _backward(grad, q, k, v, Forward(out, row_max, row_sum), scores, ctx.backend, biases)

    # The operator returns a flat list that leaves out what does not exist.
    results = iter(backward_op(grad, q, k, v, out, row_max, row_sum, *scores.pack(), ctx.backend, biases))
    gradients = Gradients(next(results), next(results), next(results))
    if scores.sinks is not None:
        gradients.sinks = next(results)
    if biases and scores.bias is not None:
        gradients.bias = next(results)
    gradients.tables = list(results)
    return gradients


class _EagerAttention(torch.autograd.Function):
    """``regard::attention`` without the dispatcher: the same kernels, the same gradients."""

    @staticmethod
    def forward(ctx: Any, scores: Scores, backend: str, q: Tensor, k: Tensor, v: Tensor, *learned: Any) -> Tensor:
        result = _forward(q, k, v, scores, backend)
        _save_call(ctx, q, k, v, result, scores, backend)
        return result.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        # The inputs are scores, backend, q, k, v, and then ``learned_tensors``: bias, sinks and the tables.
        needs_bias, _, *needs_tables = ctx.needs_input_grad[5:]
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        gradients = _saved_gradients(ctx, grad, needs_bias, any(needs_tables))
        tables: list[Any] = gradients.tables or [None] * len(needs_tables)
        return None, None, gradients.q, gradients.k, gradients.v, gradients.bias, gradients.sinks, *tables


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, *packed, backend = inputs[: len(_NAMES)]
    _save_call(ctx, q, k, v, output[:3], Scores.unpack(packed), backend)
    # Gradients mirror the inputs: a list for each list of tensors (an empty list counts as one), None for the rest.
    ctx.no_gradients = []
    for x in inputs:
        is_tensor_list = isinstance(x, list) and all(isinstance(y, Tensor) for y in x)
        ctx.no_gradients.append([None] * len(x) if is_tensor_list else None)


def _operator_gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    # regard::observed_attention returns one list, so its gradients come as one list.
    grad = grads[0][0] if isinstance(grads[0], list | tuple) else grads[0]
    result: list[Any] = list(ctx.no_gradients)
    if grad is None:
        return tuple(result)
    # Gradients of biases cost another sum per tile, so they are computed only where needed.
    needs_bias = ctx.needs_input_grad[_NAMES.index("bias")]
    needs_tables = ctx.needs_input_grad[_NAMES.index("term_table")]
    gradients = _saved_gradients(ctx, grad, needs_bias, any(needs_tables))
    result[:3] = [gradients.q, gradients.k, gradients.v]
    result[_NAMES.index("sinks")] = gradients.sinks
    result[_NAMES.index("bias")] = gradients.bias
    if gradients.tables:
        result[_NAMES.index("term_table")] = gradients.tables
    return tuple(result)


def _refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("regard.attention has no second derivative; for a small size write the n × n formula in torch")


def _refuse_vmap(*arguments: Any) -> Any:
    raise RuntimeError("regard.attention does not run under vmap; make the batch a dimension of q, k and v")


# --- registration ----------------------------------------------------------------------------------------------------


def _define(name: str, parameters: list[str], returns: str, body: Any, fake: Any) -> Any:
    schema = f"({', '.join(parameters)}) -> {returns}"
    op = torch.library.custom_op(name, body, mutates_args=(), schema=schema)
    op.register_fake(fake)
    torch.library.register_vmap(op, _refuse_vmap)
    return op


attention_op = _define("regard::attention", _PARAMETERS, "(Tensor, Tensor, Tensor)", _attention_body, _attention_fake)
observed_op = _define("regard::observed_attention", _OBSERVED_PARAMETERS, "Tensor[]", _observed_body, _observed_fake)
backward_op = _define("regard::attention_backward", _BACKWARD_PARAMETERS, "Tensor[]", _backward_body, _backward_fake)
torch.library.register_autograd(attention_op, _operator_gradients, setup_context=_setup_operator)
torch.library.register_autograd(observed_op, _operator_gradients, setup_context=_setup_operator)
torch.library.register_autograd(backward_op, _refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
