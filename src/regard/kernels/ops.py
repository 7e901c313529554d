"""The kernels as ``torch.library`` operators, with fake tensors, gradients and refusals; options arrive lowered.

regard::attention           → out, high, total               regard::attention_backward → gradients
regard::observed_attention  → out, high, total, then the observables in the order of ``measured_names``
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.kernels import measure, native, reference
from regard.kernels.tiles import full_precision, result_dtype, working_dtype
from regard.observables import Observe
from regard.scores import RelativeTerm, Scores
from regard.shapes import tracing

# One lowered option list for all three operators; ``torch.library`` wants it spelled out in the signatures.
_OPTIONS = (
    "Tensor? lo, Tensor? hi, Tensor? mask, Tensor? bias, Tensor[] tables, Tensor[] query_at, Tensor[] key_at, "
    "SymInt[] first, Tensor? sinks, Tensor? seed, float scale, float softcap, float dropout, str backend"
)
# The names of attention's inputs in order: where a gradient belongs.
_INPUTS = ("q", "k", "v", *(part.split()[-1] for part in _OPTIONS.split(",")))
_KERNELS: dict[str, Any] = {"native": native, "reference": reference}


def options(scores: Scores, backend: str) -> tuple[Any, ...]:
    """``scores`` as the operators' arguments."""
    terms = scores.terms
    return (
        scores.lo,
        scores.hi,
        scores.mask,
        scores.bias,
        [t.table for t in terms],
        [t.query_at for t in terms],
        [t.key_at for t in terms],
        [t.first for t in terms],
        scores.sinks,
        scores.seed,
        scores.scale,
        scores.softcap,
        scores.dropout,
        backend,
    )


def _scores(given: tuple[Any, ...]) -> Scores:
    lo, hi, mask, bias, tables, query_at, key_at, first, sinks, seed, scale, softcap, dropout, _ = given
    terms = tuple(RelativeTerm(*term) for term in zip(tables, query_at, key_at, first, strict=True))
    return Scores(scale, softcap, lo, hi, mask, bias, terms, sinks, dropout, seed)


def encode(observe: Observe, offset: int) -> list[int]:
    """``observe`` as whole numbers, for the operator's signature; queries are passed as a tensor beside it."""
    radii = (*observe.radii(), -1, -1)[:2]
    return [
        observe.map,
        *radii,
        int(observe.key_mass),
        observe.top,
        observe.sink,
        observe.local,
        *(observe.grid or (0, 0)),
        offset,
    ]


def _decode(spec: list[int]) -> Observe:
    map_, ry, rx, key_mass, top, sink, local, height, width, offset = spec
    profile = None if ry < 0 else ry if rx < 0 else (ry, rx)
    grid = (height, width) if height else None
    return Observe(map_, profile, bool(key_mass), top, sink, local, grid, offset)


def measured_names(observe: Observe) -> tuple[str, ...]:
    """The names of what ``regard::observed_attention`` returns after out, high and total."""
    return (*measure.row_names(), *measure.head_names(observe))


def run(q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str) -> Tensor:
    """out: through the operator, or straight from the kernel where nobody would notice.

    The dispatcher costs more than a small call: without tracing, modes and transforms it has nothing to do.
    """
    tables = [t.table for t in scores.terms]
    if not unwatched(q, k, v, scores.bias, scores.sinks, *tables):
        return attention_op(q, k, v, *options(scores, backend))[0]
    if not (torch.is_grad_enabled() and _learns(q, k, v, scores.bias, scores.sinks, *tables)):
        with full_precision(q):
            return _KERNELS[backend].output(q, k, v, scores)
    if _learns(*tables):  # a list of tensors has gradients in the operator only
        return attention_op(q, k, v, *options(scores, backend))[0]
    return _Eager.apply(q, k, v, *options(scores, backend))


def run_observed(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str, real: Tensor | None, spec: list[int]
) -> list[Tensor]:
    """out, high, total and the observables, in the same two ways."""
    learned = (scores.bias, scores.sinks, *(t.table for t in scores.terms))
    straight = unwatched(q, k, v, *learned) and not (torch.is_grad_enabled() and _learns(q, k, v, *learned))
    return (_observed if straight else observed_op)(q, k, v, *options(scores, backend), real, spec)


def _learns(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


_ORDINARY = (Tensor, torch.nn.Parameter)


def unwatched(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors and nothing traces, transforms or intercepts operators."""
    if tracing() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    for x in tensors:  # noqa: SIM110 (a generator costs more than the rest)
        if x is not None and (type(x) not in _ORDINARY or x.is_meta or x.is_neg()):
            return False
    return True


# --- bodies ----------------------------------------------------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    with full_precision(q):
        return tuple(_KERNELS[given[-1]].forward(q, k, v, _scores(given)))


def _observed(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    *lowered, real, spec = given
    scores, observe = _scores(tuple(lowered)), _decode(spec)
    with full_precision(q):
        out, high, total, values = _KERNELS[lowered[-1]].observed(q, k, v, scores, observe, real)
    return [out, high, total, *(values[name] for name in measured_names(observe))]


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    out, high, total, *lowered, biases = given
    scores = _scores(tuple(lowered))
    with full_precision(q):
        g = _KERNELS[lowered[-1]].backward(grad, q, k, v, reference.Forward(out, high, total), scores, biases=biases)
    return [x for x in (g.q, g.k, g.v, g.sinks, g.bias, *g.tables) if x is not None]


# --- shapes alone ----------------------------------------------------------------------------------------------------


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, H, n, _ = q.shape
    high, total = (q.new_empty(B, H, n, dtype=working_dtype(q)) for _ in range(2))
    return q.new_empty(B, H, n, v.shape[-1]), high, total


def _observed_fake(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    observe = _decode(given[-1])
    B, H, n, _ = q.shape
    exact, m, g = result_dtype(q.dtype), k.shape[2], observe.map
    sides = [2 * r + 1 for r in observe.radii()]
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
    measured = [shapes.get(name, ([B, H, n], exact)) for name in measured_names(observe)]
    return [*_attention_fake(q, k, v), *(q.new_empty(shape, dtype=dtype) for shape, dtype in measured)]


def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    _out, _high, _total, *lowered, biases = given
    scores = _scores(tuple(lowered))
    like = [q, k, v] + ([] if scores.sinks is None else [scores.sinks])
    if biases:
        like += ([] if scores.bias is None else [scores.bias]) + [t.table for t in scores.terms]
    return [x.new_empty(x.shape) for x in like]


# --- gradients -------------------------------------------------------------------------------------------------------


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v = inputs[:3]
    lowered = inputs[3 : len(_INPUTS)]
    lo, hi, mask, bias, tables, query_at, key_at, first, sinks, seed, *numbers = lowered
    ctx.save_for_backward(q, k, v, *output[:3], lo, hi, mask, bias, sinks, seed, *tables, *query_at, *key_at)
    ctx.first, ctx.numbers = list(first), numbers
    # Gradients mirror the inputs: a list for each list of tensors (an empty list counts as one), None for the rest.
    ctx.empty = [[None] * len(x) if isinstance(x, list) and all(map(_is_tensor, x)) else None for x in inputs]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    grad = grads[0][0] if isinstance(grads[0], list | tuple) else grads[0]
    q, k, v, out, high, total, lo, hi, mask, bias, sinks, seed, *lists = ctx.saved_tensors
    terms = len(ctx.first)
    tables, query_at, key_at = lists[:terms], lists[terms : 2 * terms], lists[2 * terms :]
    result: list[Any] = list(ctx.empty)
    if grad is not None:
        lowered = (lo, hi, mask, bias, tables, query_at, key_at, ctx.first, sinks, seed, *ctx.numbers)
        at = _INPUTS.index
        tables_need = ctx.needs_input_grad[at("tables")]  # a list in the operator, False in _Eager
        biases = bool(ctx.needs_input_grad[at("bias")] or (any(tables_need) if tables_need else False))
        straight = not torch.is_grad_enabled() and unwatched(grad, q, k, v, bias, sinks, *tables)
        call = _backward if straight else backward_op
        found = iter(call(grad, q, k, v, out, high, total, *lowered, biases))
        result[:3] = next(found), next(found), next(found)
        result[at("sinks")] = None if sinks is None else next(found)
        result[at("bias")] = next(found) if biases and bias is not None else None
        result[at("tables")] = [next(found) if biases else None for _ in range(terms)]
    return tuple(result)


class _Eager(torch.autograd.Function):
    """``regard::attention`` without the dispatcher: the same body, the same gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _attention(*inputs)
        _setup(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(None if isinstance(x, list) else x for x in _gradients(ctx, *grads))


def _no_double_backward(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "regard.attention has no second derivative; for one, write the n × n formula in torch, at a small size"
    )


def _no_vmap(*args: Any) -> Any:
    raise RuntimeError(
        "regard.attention does not run under vmap; give the batch as leading dimensions of q, k and v instead"
    )


def _define(name: str, schema: str, body: Any, fake: Any) -> Any:
    op = torch.library.custom_op(name, body, mutates_args=(), schema=schema)
    op.register_fake(fake)
    torch.library.register_vmap(op, _no_vmap)
    return op


attention_op = _define(
    "regard::attention",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _attention,
    _attention_fake,
)
observed_op = _define(
    "regard::observed_attention",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}, Tensor? real, SymInt[] observe) -> Tensor[]",
    _observed,
    _observed_fake,
)
backward_op = _define(
    "regard::attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor high, Tensor total, "
    f"{_OPTIONS}, bool biases) -> Tensor[]",
    _backward,
    _backward_fake,
)
torch.library.register_autograd(attention_op, _gradients, setup_context=_setup)
torch.library.register_autograd(observed_op, _gradients, setup_context=_setup)
torch.library.register_autograd(backward_op, _no_double_backward, setup_context=lambda ctx, inputs, output: None)
