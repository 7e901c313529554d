"""The kernels as ``torch.library`` operators, with fake tensors, gradients and refusals.

    regard::attention           → out, row_max, row_sum
    regard::observed_attention  → out, row_max, row_sum, then the observables in the order of ``observable_names``
    regard::attention_backward  → gradients of q, k, v, then those of sinks, bias and tables that exist and are needed

A loss may contain the output, and with ``Observe(differentiable=True)`` also ``entropy`` and ``logit_max``.

Operators take plain arguments only; ``Scores.pack`` makes them. Calls that nothing traces or intercepts skip the
dispatcher and pass the ``Scores`` object itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regard._attribution import AttributionRequest
from regard._checks import is_tracing
from regard._lowered_scores import Scores, operator_schema
from regard._observables import Observe
from regard.kernels import native, reference, triton
from regard.kernels.encoded_observe import decode_observe, encode_observe, key_groups
from regard.kernels.reference import Forward, Gradients
from regard.kernels.reference_observables import observable_names
from regard.kernels.row_values import RowValueGradients
from regard.kernels.score_tiles import full_precision, result_dtype, working_dtype

_KERNELS: dict[str, Any] = {"native": native, "reference": reference, "triton": triton}

# The parameters of regard::attention: the tensors, the lowered options and the kernel.
_PARAMETERS = ["Tensor q", "Tensor k", "Tensor v", *operator_schema(), "str backend"]
_NAMES = [parameter.split()[-1] for parameter in _PARAMETERS]
_OBSERVED_PARAMETERS = [*_PARAMETERS, "Tensor? real_queries", "Tensor? key_groups", "SymInt[] observe"]
_RESULTS = ["Tensor out", "Tensor row_max", "Tensor row_sum"]
# What the gradients of row values need; None without them.
_ROW_VALUES = ["Tensor? entropy=None", "Tensor? peak_at=None"]
_ROW_VALUES += ["Tensor? grad_entropy=None", "Tensor? grad_logit_max=None"]
_BACKWARD_PARAMETERS = ["Tensor grad", *_PARAMETERS[:3], *_RESULTS, *_PARAMETERS[3:], "bool biases", *_ROW_VALUES]


# --- calls -----------------------------------------------------------------------------------------------------------


def attention_output(q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str) -> Tensor:
    """Compute the output of attention. The operator is used only if something traces or intercepts operators."""
    learned = scores.learned_tensors()
    # The dispatcher costs more than a small call: without tracing, modes and transforms it has nothing to do.
    if not can_skip_dispatcher(q, k, v, *learned):
        return attention_op(q, k, v, *scores.pack(), backend)[0]
    if _needs_gradients(q, k, v, *learned):
        return _EagerAttention.apply(scores, backend, None, q, k, v, *learned)
    with full_precision(q):
        return _KERNELS[backend].output(q, k, v, scores)


def observed_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str, observe: Observe, real_queries: Tensor | None
) -> list[Tensor]:
    """Compute out, row_max, row_sum and the observables. The operator is used as in ``attention_output``.

    The groups of ``observe`` are those of this call (``Groups.for_call``).
    """
    learned = scores.learned_tensors()
    if can_skip_dispatcher(q, k, v, *learned):
        if _needs_gradients(q, k, v, *learned):
            return list(_EagerObserved.apply(scores, backend, observe, real_queries, q, k, v, *learned))
        return _observed(q, k, v, scores, backend, observe, real_queries)
    encoded = encode_observe(observe, q.shape[2], k.shape[2])
    return observed_op(q, k, v, *scores.pack(), backend, real_queries, key_groups(observe), encoded)


def attributed_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str, request: AttributionRequest
) -> Tensor:
    """Compute the output of attention. Its backward pass fills the request."""
    learned = scores.learned_tensors()
    request.sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    # The GPU kernels do not collect contributions.
    kernel = "reference" if backend == "triton" else backend
    if torch.is_grad_enabled() and not _needs_gradients(q, k, v, *learned):
        v = request.require_gradient(v)
    return _EagerAttention.apply(scores, kernel, request, q, k, v, *learned)


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
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Forward,
    scores: Scores,
    backend: str,
    biases: bool,
    row_values: RowValueGradients | None = None,
    attribution: int | None = None,
) -> Gradients:
    # Not every kernel has these options; calls that need them were given to one that has.
    options: dict[str, Any] = {}
    if row_values is not None:
        options["row_values"] = row_values
    if attribution is not None:
        options["attribution"] = attribution
    with full_precision(q):
        return _KERNELS[backend].backward(grad, q, k, v, forward, scores, biases=biases, **options)


def _attention_body(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *packed, backend = arguments
    out, row_max, row_sum = _forward(q, k, v, Scores.unpack(packed), backend)
    return out, row_max, row_sum


def _observed_body(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    *packed, backend, real_queries, labels, encoded = arguments
    return _observed(q, k, v, Scores.unpack(packed), backend, decode_observe(encoded, labels), real_queries)


def _backward_body(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    (out, row_max, row_sum, *packed, backend, biases), row_values = _split_row_values(arguments)
    forward = Forward(out, row_max, row_sum)
    gradients = _backward(grad, q, k, v, forward, Scores.unpack(packed), backend, biases, row_values)
    existing = (gradients.q, gradients.k, gradients.v, gradients.sinks, gradients.bias, *gradients.tables)
    return [x for x in existing if x is not None]


def _split_row_values(arguments: Sequence[Any]) -> tuple[Sequence[Any], RowValueGradients | None]:
    """The arguments of the backward operator after v: those that every call has, and the row values."""
    # Arguments that have their default may be left out.
    count = len(_BACKWARD_PARAMETERS) - len(_ROW_VALUES) - 4
    values = arguments[count:]
    if not values or values[0] is None:
        return arguments[:count], None
    entropy, peak_at, grad_entropy, grad_logit_max = [*values, None, None][: len(_ROW_VALUES)]
    return arguments[:count], RowValueGradients(entropy, peak_at, grad_entropy, grad_logit_max)


# --- shapes of the results, for fake tensors -------------------------------------------------------------------------


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, H, n, _ = q.shape
    row_max = q.new_empty(B, H, n, dtype=working_dtype(q))
    return q.new_empty(B, H, n, v.shape[-1]), row_max, torch.empty_like(row_max)


def _observed_fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> list[Tensor]:
    observe = decode_observe(arguments[-1], arguments[-2])
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
        "groups": ([B, H, n, len(observe.groups) if observe.groups is not None else 0], exact),
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
    (_out, _row_max, _row_sum, *packed, _backend, biases), _ = _split_row_values(arguments)
    scores = Scores.unpack(packed)
    inputs: list[Tensor | None] = [q, k, v, scores.sinks]
    if biases:
        inputs += [scores.bias, *[term.table for term in scores.terms]]
    return [x.new_empty(x.shape) for x in inputs if x is not None]


# --- gradients -------------------------------------------------------------------------------------------------------


def _save_call(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Sequence[Tensor],
    scores: Scores,
    backend: str,
    measured: Sequence[Tensor] = (),
) -> None:
    """Store what the backward pass needs, with the tensors of ``scores``, so that autograd detects changes in place.

    ``measured``: entropy and peak_at, if a loss may contain row values.
    """
    leaves, ctx.scores_spec = pytree.tree_flatten(scores)
    ctx.save_for_backward(q, k, v, *forward, *measured, *leaves)
    ctx.measured_count = len(measured)
    ctx.backend = backend
    ctx.set_materialize_grads(False)


@dataclass
class _OutputGradients:
    """The gradients that reach a call, and what is collected on the way; None where the loss contains no such value."""

    out: Tensor | None
    entropy: Tensor | None = None
    logit_max: Tensor | None = None
    request: AttributionRequest | None = None

    @property
    def is_empty(self) -> bool:
        return self.out is None and self.entropy is None and self.logit_max is None


def _saved_gradients(ctx: Any, grads: _OutputGradients, needs_bias: bool, needs_tables: bool) -> Gradients:
    """The gradients of a call that ``_save_call`` stored."""
    q, k, v, out, row_max, row_sum, *rest = ctx.saved_tensors
    measured = rest[: ctx.measured_count]
    scores: Scores = pytree.tree_unflatten(rest[ctx.measured_count :], ctx.scores_spec)
    biases = needs_bias or needs_tables
    grad = grads.out if grads.out is not None else torch.zeros_like(out)
    row_values = None
    if measured and (grads.entropy is not None or grads.logit_max is not None):
        entropy, peak_at = measured
        row_values = RowValueGradients(entropy, peak_at, grads.entropy, grads.logit_max)
    # Gradients are enabled here only if a second derivative is wanted, and only the operator refuses it.
    if not torch.is_grad_enabled() and can_skip_dispatcher(grad, q, k, v, *scores.learned_tensors()):
        attribution = None if grads.request is None else grads.request.map
        forward = Forward(out, row_max, row_sum)
        gradients = _backward(grad, q, k, v, forward, scores, ctx.backend, biases, row_values, attribution)
        if grads.request is not None and gradients.contributions is not None:
            sums = gradients.contributions
            grads.request.store(sums.keys, sums.rows, sums.map)
        return gradients

    # The operator returns a flat list that leaves out what does not exist.
    arguments = [grad, q, k, v, out, row_max, row_sum, *scores.pack(), ctx.backend, biases]
    if row_values is not None:
        arguments += [*measured, grads.entropy, grads.logit_max]
    results = iter(backward_op(*arguments))
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
    def forward(
        ctx: Any,
        scores: Scores,
        backend: str,
        request: AttributionRequest | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *learned: Any,
    ) -> Tensor:
        result = _forward(q, k, v, scores, backend)
        _save_call(ctx, q, k, v, result, scores, backend)
        ctx.request = request
        return result.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return None, None, None, *_tensor_gradients(ctx, _OutputGradients(grad, request=ctx.request), first=3)


class _EagerObserved(torch.autograd.Function):
    """``regard::observed_attention`` without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Scores,
        backend: str,
        observe: Observe,
        real_queries: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *learned: Any,
    ) -> tuple[Tensor, ...]:
        results = _observed(q, k, v, scores, backend, observe, real_queries)
        ctx.observe = observe
        _save_call(ctx, q, k, v, results[:3], scores, backend, _values_to_save(observe, results))
        differentiable = {0}
        if observe.differentiable:
            differentiable |= {_result_index(observe, "entropy"), _result_index(observe, "logit_max")}
        ctx.mark_non_differentiable(*[x for index, x in enumerate(results) if index not in differentiable])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, None, *_tensor_gradients(ctx, _observed_gradients(ctx.observe, grads), first=4)


def _tensor_gradients(ctx: Any, grads: _OutputGradients, first: int) -> list[Tensor | None]:
    """The gradients of q, k, v and ``learned_tensors``, the inputs of an eager function from ``first`` on."""
    needs_bias, _, *needs_tables = ctx.needs_input_grad[first + 3 :]
    if grads.is_empty:
        return [None] * (len(ctx.needs_input_grad) - first)
    gradients = _saved_gradients(ctx, grads, needs_bias, any(needs_tables))
    tables: list[Any] = gradients.tables or [None] * len(needs_tables)
    return [gradients.q, gradients.k, gradients.v, gradients.bias, gradients.sinks, *tables]


def _result_index(observe: Observe, name: str) -> int:
    """The index of an observable among the results of ``regard::observed_attention``."""
    return len(_RESULTS) + observable_names(observe).index(name)


def _values_to_save(observe: Observe, results: Sequence[Tensor]) -> list[Tensor]:
    if not observe.differentiable:
        return []
    return [results[_result_index(observe, name)] for name in ("entropy", "peak_at")]


def _observed_gradients(observe: Observe, grads: Sequence[Tensor | None]) -> _OutputGradients:
    """The gradients of the results that a loss may contain."""
    if not observe.differentiable:
        return _OutputGradients(grads[0])
    entropy = grads[_result_index(observe, "entropy")]
    return _OutputGradients(grads[0], entropy, grads[_result_index(observe, "logit_max")])


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, *packed, backend = inputs[: len(_NAMES)]
    # Only regard::observed_attention has more arguments.
    measured: list[Tensor] = []
    ctx.observe = None
    if len(inputs) > len(_NAMES):
        ctx.observe = decode_observe(inputs[-1], inputs[-2])
        measured = _values_to_save(ctx.observe, output)
    _save_call(ctx, q, k, v, output[:3], Scores.unpack(packed), backend, measured)
    # Gradients mirror the inputs: a list for each list of tensors (an empty list counts as one), None for the rest.
    ctx.no_gradients = []
    for x in inputs:
        is_tensor_list = isinstance(x, list) and all(isinstance(y, Tensor) for y in x)
        ctx.no_gradients.append([None] * len(x) if is_tensor_list else None)


def _operator_gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    # regard::observed_attention returns one list, so its gradients come as one list.
    if ctx.observe is not None:
        of_results = _observed_gradients(ctx.observe, grads[0])
    else:
        of_results = _OutputGradients(grads[0])
    result: list[Any] = list(ctx.no_gradients)
    if of_results.is_empty:
        return tuple(result)
    # Gradients of biases cost another sum per tile, so they are computed only where needed.
    needs_bias = ctx.needs_input_grad[_NAMES.index("bias")]
    needs_tables = ctx.needs_input_grad[_NAMES.index("term_table")]
    gradients = _saved_gradients(ctx, of_results, needs_bias, any(needs_tables))
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
