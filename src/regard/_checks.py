"""Checks of arguments. Each one raises an error that names the argument, what was given and what is accepted.

A ``check_*`` function raises if the value is wrong; some also return the converted value. ``as_*`` functions return a
tensor. Checks that must read the values of a tensor are skipped where ``can_read_values`` is False.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from regard._errors import RegardError, RegardTypeError


def is_tracing() -> bool:
    """Whether ``torch.compile`` or ``torch.export`` is tracing. The values of tensors cannot be read then."""
    return torch.compiler.is_compiling()


def can_read_values(*tensors: Tensor) -> bool:
    """Whether the values of all tensors can be read: not while tracing, and not for meta and fake tensors."""
    return not is_tracing() and not any(x.is_meta or is_fake(x) for x in tensors)


def describe_value(x: object) -> str:
    """How an error message names a value: short values as they are, tensors by dtype and shape, others by class."""
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, Tensor):
        return f"a tensor, {x.dtype} {list(x.shape)}"
    if isinstance(x, int | float | str | list | tuple):
        text = repr(x)
        if len(text) <= 60 and "\n" not in text:
            return text
    return type(x).__name__


# --- numbers ---------------------------------------------------------------------------------------------------------


def check_integer(name: str, value: object, *, least: int | None = 0, most: int | None = None) -> int:
    """Return ``value`` as an int between ``least`` and ``most``; None means no limit."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt | numbers.Integral):
        raise RegardTypeError(f"{name} must be an integer, got {value!r}")
    if not isinstance(value, int | torch.SymInt):
        value = int(value)  # a NumPy integer
    if least is not None and value < least:
        raise RegardError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise RegardError(f"{name} must be at most {most}, got {value}")
    return value  # type: ignore[return-value]


def check_number(name: str, value: object, *, least: float | None = None) -> float:
    """Return ``value`` as a float that is not NaN and not below ``least``."""
    # The usual case first: the other checks cost more than a small attention call. NaN fails the comparison.
    if type(value) is float and value >= (-math.inf if least is None else least):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat | torch.SymInt | numbers.Real):
        raise RegardTypeError(f"{name} must be a number, got {value!r}")
    # float() would raise OverflowError, which does not name the argument.
    if isinstance(value, int) and abs(value) > 1e308:
        # Not len(str(value)): Python refuses to print more than 4,300 digits.
        digits = int(value.bit_length() * math.log10(2)) + 1
        raise RegardError(f"{name} must fit into a float, got an integer of about {digits} digits")
    # Not math.isnan, which does not accept symbolic numbers.
    if value != value or (least is not None and value < least):
        accepted = "a number" if least is None else f"a number ≥ {least}"
        raise RegardError(f"{name} must be {accepted}, got {value}")
    return float(value)


def check_positive(name: str, value: object) -> float:
    """Return ``value`` as a finite float > 0."""
    number = check_number(name, value)
    if not 0 < number < math.inf:
        raise RegardError(f"{name} must be a finite number > 0, got {value}")
    return number


def check_probability(name: str, value: object) -> float:
    """Return ``value`` as a float between 0 and 1."""
    probability = check_number(name, value, least=0.0)
    if probability > 1:
        raise RegardError(f"{name} must be between 0 and 1, got {probability}")
    return probability


def check_finite_scale(scale: float | None, d: int) -> float:
    """Return ``scale`` as a finite float ≥ 0; None means 1/√d."""
    if scale is None:
        return float(d**-0.5)
    scale = check_number("scale", scale, least=0.0)
    if scale == math.inf:
        raise RegardError("scale must be a finite number ≥ 0 for a term that is added to scores, got inf")
    return scale


def check_optional_integer(name: str, value: int | None, *, least: int | None = 0) -> int | None:
    """Return None, or ``value`` as an int that is at least ``least``."""
    return None if value is None else check_integer(name, value, least=least)


def check_offset(offset: int | None) -> int | None:
    """Return ``offset`` unchanged: any integer, or None (the last query is aligned with the last key)."""
    return check_optional_integer("offset", offset, least=None)


def check_grid(name: str, grid: object) -> tuple[int, int]:
    """Return ``grid`` as ``(height, width)``, both at least 1."""
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise RegardTypeError(f"{name} must be (height, width), two integers, got {grid!r}")
    return check_integer(f"{name} height", grid[0], least=1), check_integer(f"{name} width", grid[1], least=1)


# --- tensors ---------------------------------------------------------------------------------------------------------


def check_tensor(name: str, x: object) -> None:
    """Raise unless ``x`` is an ordinary (strided) tensor."""
    if not isinstance(x, Tensor):
        raise RegardTypeError(f"{name} must be a tensor, got {type(x).__name__}")
    # A nested tensor also reports the strided layout, so is_nested is tested first.
    if x.is_nested:
        raise RegardTypeError(f"{name} must be a strided tensor, got a nested one")
    if x.layout != torch.strided:
        raise RegardTypeError(f"{name} must be a strided tensor, got layout {x.layout}")


def check_float_tensor(name: str, x: object) -> None:
    """Raise unless ``x`` is a floating-point tensor."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise RegardTypeError(f"{name} must be a floating-point tensor, got {describe_value(x)}")


def check_integer_tensor(name: str, x: object) -> None:
    """Raise unless ``x`` is a tensor of integers."""
    if not isinstance(x, Tensor) or not is_integer_dtype(x.dtype):
        raise RegardTypeError(f"{name} must be a tensor of integers, got {describe_value(x)}")


def is_integer_dtype(dtype: torch.dtype) -> bool:
    """Whether a dtype is an integer type; bool is not one."""
    return not (dtype == torch.bool or dtype.is_floating_point or dtype.is_complex)


def as_tensor(name: str, x: object) -> Tensor:
    """Return ``x`` as a tensor."""
    # torch would convert an empty list to a float tensor.
    if isinstance(x, list | tuple) and len(x) == 0:
        return torch.zeros(0, dtype=torch.int64)
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise RegardTypeError(f"{name} must be a tensor or numbers, got {x!r}") from None


def as_lengths(name: str, lengths: Tensor | Sequence[int] | int) -> Tensor:
    """Return lengths ≥ 0 as an int64 tensor ``[B]``; one number gives ``[1]``."""
    # torch would convert a bool to a bool tensor, and that is a mask, not a length.
    if isinstance(lengths, bool):
        raise RegardTypeError(f"{name} must be integers, got {lengths!r}")
    x = as_tensor(name, lengths)
    if not is_integer_dtype(x.dtype):
        raise RegardTypeError(f"{name} must be integers, got {x.dtype}")
    x = x.long()
    if x.ndim == 0:
        x = x.reshape(1)
    if can_read_values(x) and bool((x < 0).any()):
        raise RegardError(f"{name} must not be negative, got {x.tolist()}")
    return x


def as_finite_tensor(name: str, values: Tensor | Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    """Return finite numbers as a floating-point tensor. Such a tensor keeps its dtype; other inputs become float64."""
    if isinstance(values, Tensor):
        x = values
    elif isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise RegardTypeError(f"{name} must be a tensor or a sequence of numbers, got {values!r}")
    else:
        # On the CPU even if the default device is "meta": a meta tensor has no values to check or to store.
        try:
            x = torch.tensor(values, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError):
            raise RegardTypeError(f"{name} must be a tensor or a sequence of numbers, got {values!r}") from None
    if x.dtype == torch.bool or x.is_complex():
        raise RegardTypeError(f"{name} must be real numbers, got {x.dtype}")
    if not x.is_floating_point():
        x = x.double()
    if can_read_values(x) and not bool(x.isfinite().all()):
        raise RegardError(f"{name} must be finite numbers, got {x.tolist()}")
    return x


def check_position_ids(position_ids: object, n: int, batch: Sequence[int], x: Tensor) -> None:
    """Raise unless ``position_ids`` are integers whose shape broadcasts to ``[*batch, n]`` and ends with ``n``."""
    check_integer_tensor("position_ids", position_ids)
    assert isinstance(position_ids, Tensor)
    fits = position_ids.ndim >= 1 and position_ids.shape[-1] == n and position_ids.ndim - 1 <= len(batch)
    for size, expected in zip(reversed(position_ids.shape[:-1]), reversed(batch), strict=False):
        fits = fits and size in (1, expected)
    if not fits:
        shape = list(position_ids.shape)
        raise RegardError(f"position_ids has shape {shape}; for x {list(x.shape)} it must be [{n}] or {[*batch, n]}")


# --- layers and position schemes -------------------------------------------------------------------------------------


def check_instance(name: str, x: object, *classes: type) -> None:
    """Raise unless ``x`` is an instance of one of the classes."""
    if isinstance(x, classes):
        return
    accepted = []
    for cls in classes:
        prefix = "regard."
        if cls.__module__.startswith("torch."):
            prefix = "nn."
        elif cls.__module__.startswith("regard.nn."):
            prefix = "regard.nn."
        accepted.append(prefix + cls.__name__)
    raise RegardTypeError(f"{name} must be {' or '.join(accepted)}, got {describe_value(x)}")


def check_dtype(name: str, x: Tensor, layer: nn.Module) -> None:
    """Raise unless ``x`` has the dtype of the layer's weight.

    Every dtype is accepted under autocast, and if the layer has no floating-point weight.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or x.dtype == weight.dtype:
        return
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return
    remedy = f"convert it with {name}.to({weight.dtype})"
    if x.is_floating_point():
        remedy += f", or the layer with layer.to({x.dtype})"
    raise RegardTypeError(f"{name} is {x.dtype}, but the weights of this layer are {weight.dtype}; {remedy}")


def check_head_count(scheme: object, heads: int, q: Tensor) -> None:
    """Raise unless the queries ``q [B, H, n, d]`` have the number of heads that the scheme was built for."""
    if q.shape[1] != heads:
        raise RegardError(f"{type(scheme).__name__} is made for {heads} heads, but q has {q.shape[1]}")


def check_query_width(scheme: object, d: int, q: Tensor) -> None:
    """Raise unless the queries have the width ``d`` that the scheme was built for."""
    if q.shape[-1] != d:
        raise RegardError(f"{type(scheme).__name__} is made for d={d}, but q has width {q.shape[-1]}")
