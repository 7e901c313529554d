"""What torch functions do to values that depend linearly on something: which keep them linear, and in which way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def _names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Functions of one tensor that are linear in it: layouts, casts, selections and sums.
LAYOUTS = _names(
    "alias as_strided broadcast_to chunk clone contiguous cpu cuda cumsum diagonal double dropout expand expand_as "
    "flatten flip float bfloat16 half gather getitem hsplit imag index_select mH mT H T mean movedim moveaxis narrow "
    "neg negative pad permute pos positive ravel real repeat repeat_interleave reshape reshape_as roll select split "
    "split_with_sizes squeeze sum sum_to_size swapaxes swapdims t take take_along_dim tensor_split tile to transpose "
    "tril triu type type_as unbind unflatten unfold unsqueeze unsqueeze_ view view_as view_as_complex view_as_real "
    "vsplit masked_select conj resolve_conj"
)
# Functions that add up, join or insert tensors.
JOINS = _names(
    "add radd iadd sub rsub isub subtract cat concat concatenate stack hstack vstack dstack where index_add "
    "index_copy index_put scatter scatter_add setitem copy masked_fill masked_scatter"
)
# Of these, the functions that only add: the others put values beside each other.
SUMS = _names("add radd iadd sub rsub isub subtract")
# Elementwise products and quotients.
PRODUCTS = _names("mul rmul imul multiply div divide true_divide truediv itruediv")
QUOTIENTS = _names("div divide true_divide truediv itruediv")
# Products of a tensor with a matrix.
MATRIX_PRODUCTS = _names("linear matmul rmatmul mm bmm mv addmm baddbmm einsum grouped_mm _grouped_mm tensordot inner")
# Functions that change nothing in an ordinary forward pass: they only repair numbers out of range.
GUARDS = _names("clamp clip clamp_min clamp_max nan_to_num")
# Functions that make a tensor of constants in the shape of another one.
FACTORIES = _names("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_tensor")
# Functions that normalise a vector; their scale is frozen.
NORMS = _names("layer_norm rms_norm normalize")

_OPERATORS_IN_PLACE = _names("__iadd__ __isub__ __imul__ __itruediv__ __setitem__")


def function_name(func: Any) -> str:
    """The name of a torch function, the same for ``torch.add``, ``x.add_``, ``x + y`` and ``x += y`` up to i and r.

    >>> function_name(torch.add), function_name(Tensor.add_), function_name(Tensor.T.__get__)
    ('add', 'add', 'T')
    """
    name = str(getattr(func, "__name__", ""))
    # The getter of a property.
    if name == "__get__":
        return str(getattr(func.__self__, "__name__", ""))
    if name.startswith("__"):
        return name.strip("_")
    return name.rstrip("_")


def is_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to its first argument."""
    name = str(getattr(func, "__name__", ""))
    if name in _OPERATORS_IN_PLACE:
        return True
    return (name.endswith("_") and not name.startswith("__")) or kwargs.get("out") is not None


def tensors_of(args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among arguments, also those in a list or a tuple."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (entry for entry in value if isinstance(entry, Tensor))


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with every tensor in it changed."""
    return tree_map_only(Tensor, change, value)


def is_number_tensor(x: Tensor) -> bool:
    """Whether a tensor holds real or complex numbers, not ids or truth values."""
    return x.is_floating_point() or x.is_complex()


def frozen_norm(
    name: str, x: Tensor, add_bias: Callable[[Tensor, Tensor], Tensor], args: Any, kwargs: dict[str, Any]
) -> Tensor:
    """A norm of ``x`` as a linear function: the mean is subtracted, and the scale 1/σ does not depend on ``x``.

        layer_norm   y = γ ⊙ (x − μ(x)) · s + β      s = 1/√(σ²(x) + ε), a constant
        rms_norm     y = γ ⊙ x · s                   s = 1/√(mean(x²) + ε)
        normalize    y = x · s                       s = 1/max(‖x‖, ε)

    - ``name``: the function of ``torch.nn.functional``; ``args``, ``kwargs``: its arguments after ``x``.
    - ``add_bias``: adds β to the result.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if name == "normalize":
        options = _named(("p", "dim", "eps"), args, kwargs)
        norm = wide.detach().norm(options.get("p", 2.0), options.get("dim", 1), keepdim=True)
        return (wide / norm.clamp_min(options.get("eps", 1e-12))).to(x.dtype)
    names = (
        ("normalized_shape", "weight", "bias", "eps") if name == "layer_norm" else ("normalized_shape", "weight", "eps")
    )
    options = _named(names, args, kwargs)
    dims = tuple(range(-len(options["normalized_shape"]), 0))
    eps = options.get("eps")
    if name == "layer_norm":
        wide = wide - wide.mean(dims, keepdim=True)
        if eps is None:
            eps = 1e-5
    elif eps is None:
        eps = torch.finfo(x.dtype).eps
    scale = torch.rsqrt(wide.detach().square().mean(dims, keepdim=True) + eps)
    y = wide * scale
    if options.get("weight") is not None:
        y = y * options["weight"]
    y = y.to(x.dtype)
    if options.get("bias") is not None:
        y = add_bias(y, options["bias"])
    return y


def _named(names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names."""
    return dict(zip(names, args, strict=False)) | kwargs


@dataclass(frozen=True, eq=False)
class TorchCall:
    """A call of a torch function, with the arguments that have a linear path, and those that depend otherwise."""

    func: Any
    name: str
    args: Any
    kwargs: dict[str, Any]
    linear: list[Tensor]
    dependent: list[Tensor]

    @property
    def in_place(self) -> bool:
        return is_in_place(self.func, self.kwargs)


def bias_of(call: TorchCall) -> Tensor | None:
    """The constant that a matrix product adds; None if it adds none, or something else."""
    bias = None
    if call.name == "linear":
        bias = call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")
    elif call.name == "addmm" and not call.kwargs and len(call.args) == 3:
        bias = call.args[0]
    if not isinstance(bias, Tensor) or any(bias is x for x in (*call.linear, *call.dependent)):
        return None
    return bias


def without_bias(call: TorchCall) -> tuple[Any, dict[str, Any], Any]:
    """Arguments and function of a matrix product without its bias."""
    if call.name == "addmm":
        return call.args[1:], {}, torch.mm
    args = call.args
    if len(args) > 2:
        args = (*args[:2], None, *args[3:])
    kwargs = {name: value for name, value in call.kwargs.items() if name != "bias"}
    return args, kwargs, call.func
