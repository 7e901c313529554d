"""Make the plan of a model: check the arguments, and fill in defaults."""

from __future__ import annotations

from typing import overload

import sympy

from regard._checks import check_integer
from regard._errors import RegardError, RegardTypeError
from regard.budget import _flops as flops
from regard.budget._attention_parts import Attention
from regard.budget._counted_model import CountedModel
from regard.budget._counted_plan import CountedPlan
from regard.budget._largest_size import parse_memory_limit
from regard.budget._machine import Machine, find_machine
from regard.budget._machine_benchmark import this_machine
from regard.budget._memory import COMPUTE_DTYPES, OPTIMIZERS, bytes_per_value, dtype_name
from regard.budget._model import Lengths, Model, PlacedPart, as_model
from regard.budget._plan import Plan
from regard.budget._presets import preset
from regard.budget._symbols import to_int

DEFAULT_TOKENS = 512  # a length that most models can read
LEAST_TEXT = 64  # tokens of text that follow an image if no length is given


@overload
def plan(
    model: CountedModel,
    tokens: int | None = None,
    *,
    source: int | None = None,
    batch: int = 1,
    dtype: object = "float32",
    weights: object = None,
    training: bool = False,
    optimizer: str = "adam",
    machine: Machine | str | None = None,
    memory_limit: int | str | None = None,
) -> CountedPlan: ...


@overload
def plan(
    model: Model | Attention | tuple[PlacedPart, ...] | str,
    tokens: int | None = None,
    *,
    source: int | None = None,
    batch: int = 1,
    dtype: object = "float32",
    weights: object = None,
    training: bool = False,
    optimizer: str = "adam",
    machine: Machine | str | None = None,
    memory_limit: int | str | None = None,
) -> Plan: ...


def plan(
    model: Model | CountedModel | Attention | tuple[PlacedPart, ...] | str,
    tokens: int | None = None,
    *,
    source: int | None = None,
    batch: int = 1,
    dtype: object = "float32",
    weights: object = None,
    training: bool = False,
    optimizer: str = "adam",
    machine: Machine | str | None = None,
    memory_limit: int | str | None = None,
) -> Plan | CountedPlan:
    """Count the parameters, FLOPs, memory and time of a model.

    - `model`: a model, the name of a preset, one attention layer, or the parts that `block` returned. For a model that
      `from_config` found no formula for, the result is a `CountedPlan`, which has fewer figures.
    - `tokens`: n, the tokens per sequence; default: the length of the preset; for other models 512, or fewer if the
      model has fewer positions, or more if an image needs them. An image model has a fixed n.
    - `source`: m, tokens of the source that an encoder reads; default n.
    - `batch`: number of sequences.
    - `dtype`, `weights`: names or torch dtypes. `weights` is needed only if weights are stored in another dtype.
    - `training`, `optimizer`: plan a training step instead of a forward pass, and its optimizer.
    - `machine`: a `Machine`, a name that `find_machine` knows, or "this"; without a machine there are no times.
    - `memory_limit`: bytes, or text such as "24GB": what the model may use, to find the longest n and the largest batch
      that fit; default: the machine's memory.

    >>> plan(regard.budget.encoder(512, heads=8, layers=1), tokens=512).forward_flops
    3758096384
    """
    if isinstance(model, CountedModel):
        if machine is not None or memory_limit is not None:
            name = "memory_limit" if machine is None else "machine"
            raise RegardError(f"{name} needs formulas, but {model.title} is counted by walking; leave it out")
        return _counted_plan(model, tokens, source, batch, dtype, weights, training, optimizer)
    model = preset(model) if isinstance(model, str) else as_model(model)
    # Parameters and FLOPs together contain every size of the model.
    symbols = sympy.sympify(model.parameters + flops.unmasked(model, Lengths(1, 8, 8))).free_symbols
    if symbols:
        names = ", ".join(sorted(map(str, symbols)))
        raise RegardError(f"model has symbols for sizes ({names}); a plan needs numbers, use formulas(model) instead")
    if isinstance(machine, str):
        machine = this_machine() if machine == "this" else find_machine(machine)
    elif machine is not None and not isinstance(machine, Machine):
        raise RegardTypeError(f'machine must be a name, "this" or a Machine, got {type(machine).__name__}')
    dtype = dtype_name(dtype)
    weights = None if weights is None else dtype_name(weights)

    if model.fixed_tokens is not None:
        if tokens not in (None, model.fixed_tokens):
            raise RegardError(f"tokens must be {model.fixed_tokens} for this image model, got {tokens}")
        tokens = to_int(model.fixed_tokens)
    if tokens is None:
        tokens = default_tokens(model)
    _check_length("tokens", tokens, model)
    if source is not None:
        if not model.has_source:
            raise RegardError(f"source={source} is given, but {model.title} reads no source; leave it out")
        _check_length("source", source, model)
    check_integer("batch", batch, least=1)
    if memory_limit is not None:
        memory_limit = parse_memory_limit(memory_limit)
    if machine is not None:
        _check_dtype(dtype, machine)

    result = Plan(model, Lengths(batch, tokens, source), dtype, weights, training, optimizer, machine, memory_limit)
    result.memory  # noqa: B018  wrong dtypes and optimizers raise here, not when a number is read
    return result


def _counted_plan(
    model: CountedModel,
    tokens: int | None,
    source: int | None,
    batch: int,
    dtype: object,
    weights: object,
    training: bool,
    optimizer: str,
) -> CountedPlan:
    """The plan of a model without a formula, with the same checks as for other models."""
    if not model.reads_tokens:
        if tokens is not None:
            raise RegardError(f"tokens={tokens} is given, but {model.title} reads no text; leave it out")
        tokens = 1
    elif tokens is None:
        tokens = min(DEFAULT_TOKENS, model.context_length or DEFAULT_TOKENS)
    check_integer("tokens", tokens, least=1)
    check_integer("batch", batch, least=1)
    if source is not None:
        if model.reads != "text and source":
            raise RegardError(f"source={source} is given, but {model.title} reads no source; leave it out")
        check_integer("source", source, least=1)
    name = dtype_name(dtype)
    if name not in COMPUTE_DTYPES:
        raise RegardError(f"dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {name!r}")
    weights_name = None
    if weights is not None:
        weights_name = dtype_name(weights)
        bytes_per_value(weights_name)  # raises if the name is unknown
    if training and weights_name not in (None, name):
        raise RegardError(f"weights in {weights_name} cannot be trained with dtype {name}; leave weights out")
    if optimizer not in OPTIMIZERS:
        raise RegardError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    return CountedPlan(model, Lengths(batch, tokens, source), name, weights_name, training, optimizer)


def default_tokens(model: Model) -> int:
    """The length of a plan if none is given."""
    if model.default_tokens is not None:
        return model.default_tokens
    if model.image_tokens is not None:
        return max(DEFAULT_TOKENS, model.image_tokens + LEAST_TEXT)
    return min(DEFAULT_TOKENS, to_int(model.max_tokens or DEFAULT_TOKENS))


def _check_length(name: str, length: int, model: Model) -> None:
    check_integer(name, length, least=1)
    if model.max_tokens is not None and length > to_int(model.max_tokens):
        raise RegardError(f"{name} must be at most {to_int(model.max_tokens):,}, the learned positions, got {length}")
    if model.image_tokens is not None and length < model.image_tokens:
        raise RegardError(f"{name} must be at least {model.image_tokens:,}, the tokens of the image, got {length}")


def _check_dtype(dtype: str, machine: Machine) -> None:
    """Raise an error if the machine has no figure for this dtype, or a plan cannot be computed in it."""
    # A machine may have figures for int8 and tfloat32, in which no plan can be computed.
    accepted = [name for name in COMPUTE_DTYPES if name in machine.peak]
    if dtype in accepted:
        return
    if not accepted:
        raise RegardError(f"{machine.name} has no peak rate of {', '.join(COMPUTE_DTYPES)}; give another machine")
    raise RegardError(f"dtype must be one of {', '.join(accepted)} on {machine.name}, got {dtype}")
