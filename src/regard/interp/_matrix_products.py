"""Matrix products as models write them, ``matmul``, ``bmm``, ``einsum`` …, in one form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MATMULS = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.linalg.matmul}
    | {torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm}
)
_BATCH_PRODUCTS = frozenset({torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm})
EINSUMS = frozenset({torch.einsum, torch.functional.einsum})


@dataclass(frozen=True)
class MatrixProduct:
    """A product of two tensors. Each axis has a label; equal labels are the same axis.

    - ``a``, ``b``: the factors; ``a_axes``, ``b_axes``: the labels of their axes.
    - ``out_axes``: the labels of the axes of the result. An axis of both factors that is missing there is summed over.
    - ``memory_axes``: the labels of the result in the order of its memory.
    - ``added``, ``alpha``: the result is ``added + alpha · a·b``; None and 1 for all but ``baddbmm``.
    """

    a: Tensor
    b: Tensor
    a_axes: tuple[str, ...]
    b_axes: tuple[str, ...]
    out_axes: tuple[str, ...]
    memory_axes: tuple[str, ...]
    added: Tensor | None = None
    alpha: float = 1.0


def matrix_product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> MatrixProduct | None:
    """Read a call of a torch function; None if it is no product of two tensors with 3 axes or more.

    Factors whose sizes do not fit give None, too: torch refuses them.
    """
    product = _read_product(func, args, kwargs)
    return product if product is not None and _sizes_fit(product) else None


def _read_product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> MatrixProduct | None:
    if func in EINSUMS:
        return _read_einsum(args)
    if func not in MATMULS or "out" in kwargs:
        return None
    added = None
    alpha = 1.0
    if func in (torch.baddbmm, Tensor.baddbmm):
        added, *args = _positional(args, kwargs, ("input", "batch1", "batch2"))
        alpha = kwargs.get("alpha", 1.0)
        beta = kwargs.get("beta", 1.0)
        if not isinstance(alpha, int | float) or not isinstance(beta, int | float) or len(args) != 2:
            return None
        # ``added`` may be uninitialised memory where it has no weight.
        if beta == 0:
            added = None
        elif beta != 1:
            added = added * beta
    else:
        args = _positional(args, kwargs, ("input", "other" if func not in (torch.bmm, Tensor.bmm) else "mat2"))
    if len(args) != 2 or not all(isinstance(x, Tensor) and x.ndim >= 3 for x in args):
        return None
    a, b = args
    if func is Tensor.__rmatmul__:
        a, b = b, a
    # The products of two batches repeat nothing.
    if func in _BATCH_PRODUCTS and (a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0]):
        return None
    lead = max(a.ndim, b.ndim) - 2
    names = tuple(f"batch {i}" for i in range(lead))
    a_axes = (*names[lead - (a.ndim - 2) :], "row", "inner")
    b_axes = (*names[lead - (b.ndim - 2) :], "inner", "column")
    out_axes = (*names, "row", "column")
    return MatrixProduct(a, b, a_axes, b_axes, out_axes, out_axes, added, alpha)


def _sizes_fit(product: MatrixProduct) -> bool:
    sizes = dict(zip(product.a_axes, product.a.shape, strict=True))
    for axis, size in zip(product.b_axes, product.b.shape, strict=True):
        other = sizes.get(axis, size)
        may_repeat = axis in product.out_axes and 1 in (size, other)
        if size != other and not may_repeat:
            return False
    return True


def _positional(args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str]) -> list[Any]:
    """The arguments with these names, whether they were given by position or by name."""
    values = list(args)
    for name in names[len(values) :]:
        if name in kwargs:
            values.append(kwargs[name])
    return values


def _read_einsum(args: Sequence[Any]) -> MatrixProduct | None:
    if len(args) < 2 or not isinstance(args[0], str):
        return None
    factors = args[1:]
    if len(factors) == 1 and isinstance(factors[0], list | tuple):
        factors = factors[0]
    if len(factors) != 2 or not all(isinstance(x, Tensor) and x.ndim >= 2 for x in factors):
        return None
    equation = args[0].replace(" ", "")
    if "->" not in equation:
        return None
    inputs, out = equation.split("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        return None
    axes = []
    for term, x in zip(terms, factors, strict=True):
        labels = _expand_ellipsis(term, x.ndim)
        # A repeated label selects a diagonal, which is no product of attention.
        if labels is None or len(set(labels)) != len(labels):
            return None
        axes.append(labels)
    hidden = max((sum(label.startswith("…") for label in labels) for labels in axes), default=0)
    out_axes = _expand_ellipsis(out, len(out.replace("...", "")) + (hidden if "..." in out else 0))
    if out_axes is None:
        return None
    # Torch multiplies matrices: first come the axes of both factors, then those of one, then those of the other.
    long_axes = []
    for labels, x in zip(axes, factors, strict=True):
        long_axes.append({label for label, size in zip(labels, x.shape, strict=True) if size != 1})
    first, second = long_axes
    shared = [axis for axis in out_axes if axis in first & second]
    rows = [axis for axis in out_axes if axis in first - second]
    columns = [axis for axis in out_axes if axis not in first]
    # It changes the factors over if the result is contiguous then.
    if rows and columns and out_axes.index(columns[-1]) < out_axes.index(rows[0]):
        rows, columns = columns, rows
    return MatrixProduct(factors[0], factors[1], axes[0], axes[1], out_axes, (*shared, *rows, *columns))


def _expand_ellipsis(term: str, ndim: int) -> tuple[str, ...] | None:
    """The labels of a term of an einsum equation; the axes of its ellipsis are counted from the right."""
    if "..." not in term:
        return tuple(term) if len(term) == ndim else None
    before, after = term.split("...")
    count = ndim - len(before) - len(after)
    if count < 0:
        return None
    return (*before, *(f"…{count - i}" for i in range(count)), *after)


@dataclass(frozen=True)
class ValueProduct:
    """The product of attention weights with values, in the order of ``regard.attention``.

    - ``lead``: the sizes of the batch axes, in the order of the weights.
    - ``v [*lead, m, e]``: the values; batch axes that they do not have are 1.
    - ``weights_order``: the axes of the weights in the order ``(*lead, query, key)``.
    """

    lead: tuple[int, ...]
    n: int
    m: int
    v: Tensor
    weights_order: tuple[int, ...]
    _out_order: tuple[int, ...]
    _memory_order: tuple[int, ...]
    _value_shape: tuple[int, ...]

    def heads_first(self, out: Tensor) -> Tensor:
        """The result of the product as ``[*lead, n, e]``."""
        return out.permute(self._out_order).reshape(*self.lead, self.n, math.prod(self._value_shape))

    def as_model(self, out: Tensor) -> Tensor:
        """``[*lead, n, e]`` as the model's own product returns it, also in memory."""
        permuted = out.reshape(*self.lead, self.n, *self._value_shape)
        return in_memory_order(permuted.permute(_inverse(self._out_order)), self._memory_order)


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """The same tensor with its axes in this order in memory, the one with the longest steps first."""
    return x.permute(tuple(order)).contiguous().permute(_inverse(order))


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def value_product(
    product: MatrixProduct, weights_first: bool, key_axis: int, head_counts: Callable[[], list[int]]
) -> ValueProduct | None:
    """Read a product as attention weights times values; None if its sum is not over the keys alone.

    - ``weights_first``: whether the weights are the first factor.
    - ``key_axis``: the axis of the weights that counts keys.
    - ``head_counts``: the numbers of heads that the model names.
    """
    if product.added is not None or product.alpha != 1:
        return None
    weights, values = (product.a, product.b) if weights_first else (product.b, product.a)
    w_axes, v_axes = (product.a_axes, product.b_axes) if weights_first else (product.b_axes, product.a_axes)
    key = w_axes[key_axis]
    if key not in v_axes or key in product.out_axes:
        return None
    if any(axis not in product.out_axes for axis in (*w_axes, *v_axes) if axis != key):
        return None
    own = [axis for axis in w_axes if axis != key and axis not in v_axes]
    if not own:
        return None
    w_sizes = dict(zip(w_axes, weights.shape, strict=True))
    query = _query_axis(own, w_sizes, w_sizes[key], head_counts)
    if query is None:
        return None
    lead = [axis for axis in w_axes if axis not in (key, query)]
    value = [axis for axis in v_axes if axis != key and axis not in lead]
    if not value:
        return None
    sizes = dict(w_sizes)
    v_sizes = dict(zip(v_axes, values.shape, strict=True))
    # Broadcasting may repeat the weights, for example over the batch; there is one map for all entries then.
    for axis in lead:
        sizes[axis] = max(sizes[axis], v_sizes.get(axis, 1))
    if sizes[key] != v_sizes[key]:
        return None
    v_order = [v_axes.index(axis) for axis in (*lead, key, *value) if axis in v_axes]
    v = values.permute(v_order)
    width = math.prod(v_sizes[axis] for axis in value)
    v = v.reshape(*(v_sizes.get(axis, 1) for axis in lead), sizes[key], width)
    out_axes = (*lead, query, *value)
    if set(out_axes) != set(product.out_axes):
        return None
    out_order = [product.out_axes.index(axis) for axis in out_axes]
    return ValueProduct(
        lead=tuple(sizes[axis] for axis in lead),
        n=sizes[query],
        m=sizes[key],
        v=v,
        weights_order=tuple(w_axes.index(axis) for axis in (*lead, query, key)),
        _out_order=tuple(out_order),
        _memory_order=tuple(product.out_axes.index(axis) for axis in product.memory_axes),
        _value_shape=tuple(v_sizes[axis] for axis in value),
    )


def _query_axis(own: list[str], sizes: dict[str, int], m: int, head_counts: Callable[[], list[int]]) -> str | None:
    """The axis of queries among those that only the weights have; None if nothing says which one it is.

    Values may lack the heads, too, and in an equation heads may come before or after the queries.
    """
    last = own[-1]
    if len(own) == 1 or last in ("row", "column"):
        return last
    candidates = own[-2:]
    named = head_counts()
    others = [axis for axis in candidates if sizes[axis] not in named]
    if not named:
        # Self-attention has as many queries as keys.
        others = [axis for axis in candidates if sizes[axis] == m]
    return others[0] if len(others) == 1 else None
