"""``Mask``, the base class of masks, with ``&``, ``|`` and drawing; and ``Dense``, a mask from a bool tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard._checks import as_tensor, can_read_values, check_integer, describe_value, is_tracing
from regard._errors import RegardError, RegardTypeError
from regard._register_pytree import register_pytree
from regard._shapes import broadcasts
from regard.masks._row_mask import RowMask, combine

LARGEST_DRAWING = 24  # rows or columns; the repr of a larger mask is its name


class Mask:
    """Which keys each query may attend to. ``a & b`` allows what both allow, ``a | b`` what either allows.

    A bool tensor combined with a mask counts as ``Dense``: ``Causal() & tensor``. A subclass implements ``lower``. The
    subclass in this example allows every other key. Query i is at position i + m − n, so that the last query sees the
    same keys for every n:

    >>> from regard.masks import RowMask
    >>> class EveryOther(Mask):
    ...     def lower(self, n, m, device="cpu"):
    ...         queries = torch.arange(n, device=device) + m - n
    ...         return RowMask(dense=(queries[:, None] - torch.arange(m, device=device)) % 2 == 0)
    >>> torch.equal(EveryOther().dense(1, 6)[-1], EveryOther().dense(6, 6)[-1])
    True
    >>> print(regard.Causal() & EveryOther())
    Causal() & EveryOther()
    ■ · · · · ·
    · ■ · · · ·
    ■ · ■ · · ·
    · ■ · ■ · ·
    ■ · ■ · ■ ·
    · ■ · ■ · ■
    (rows: 6 queries, columns: 6 keys; ■ may attend, · hidden)
    """

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        """The mask for n queries and m keys: runs of keys where possible, else a dense bool mask.

        >>> regard.Causal().lower(2, 5).hi  # the keys of a row are lo ≤ j < hi
        tensor([4, 5])
        """
        raise RegardTypeError(f"{type(self).__name__} must implement lower(n, m, device)")

    def dense(self, n: int, m: int, device: torch.device | str = "cpu") -> Tensor:
        """The bool tensor ``[n, m]`` (``[B, 1, n, m]`` where it differs by batch entry), True = may attend.

        >>> regard.Causal().dense(2, 3)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        return self.lower(n, m, device).as_dense(n, m).to(device)

    def real_queries(self, n: int, m: int) -> Tensor | None:
        """``[B, n]``: the queries that are not padding, if the mask contains a ``Padding`` and n = m; else None.

        >>> (regard.Causal() & regard.Padding([3, 1])).real_queries(3, 3)
        tensor([[ True,  True,  True],
                [ True, False, False]])
        """
        return None

    def __and__(self, other: Mask | Tensor) -> Mask:
        if isinstance(other, Tensor):
            other = Dense(other)
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask | Tensor) -> Mask:
        if isinstance(other, Tensor):
            other = Dense(other)
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    __rand__ = __and__  # tensor & mask: the order does not matter
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise RegardTypeError("a mask has no truth value: combine masks with & and |, not with and, or")

    def _name(self) -> str:
        """The expression that creates the mask."""
        return f"{type(self).__name__}()"

    def _preview(self) -> tuple[int, int]:
        """n and m of the drawing."""
        return 6, 6

    def draw(self, n: int, m: int | None = None) -> str:
        """The mask of n queries and m keys (default: n) as lines of ■ and ·; ``print`` draws a small one.

        If batch entries or heads differ, the first one is drawn.

        >>> print(regard.Causal().draw(2, 3))
        Causal()
        ■ ■ ·
        ■ ■ ■
        (rows: 2 queries, columns: 3 keys; ■ may attend, · hidden)
        """
        n = check_integer("n", n)
        if m is None:
            m = n
        check_integer("m", m)
        if max(n, m) > LARGEST_DRAWING:
            raise RegardError(f"a drawing has at most {LARGEST_DRAWING} rows and columns, got {n} × {m}")
        visible = self.dense(n, m)
        first = visible.reshape(-1, n, m)[0] if visible.numel() else visible.reshape(n, m)
        lines = [self._name()]
        for row in first.tolist():
            lines.append(" ".join("■" if allowed else "·" for allowed in row))
        which = "" if visible.ndim == 2 else ", first batch entry"
        lines.append(f"(rows: {n} queries, columns: {m} keys{which}; ■ may attend, · hidden)")
        return "\n".join(lines)

    def __repr__(self) -> str:
        # A repr must never fail or read values that do not exist.
        if is_tracing():
            return self._name()
        try:
            n, m = self._preview()
            if max(n, m) > LARGEST_DRAWING or not can_read_values(self.dense(n, m)):
                return self._name()
            return self.draw(n, m)
        except (ValueError, RuntimeError):  # parts of different sizes cannot be drawn together
            return self._name()


@register_pytree
@dataclass(frozen=True, repr=False, eq=False)
class Dense(Mask):
    """A bool tensor broadcastable to ``[*batch, H, n, m]``; **True = may attend**. It is not copied.

    >>> print(Dense(torch.tensor([[True, False], [True, True]])))
    Dense(bool [2, 2])
    ■ ·
    ■ ■
    (rows: 2 queries, columns: 2 keys; ■ may attend, · hidden)
    """

    visible: Tensor

    def __init__(self, visible: Tensor) -> None:
        visible = as_tensor("Dense visible", visible)
        if visible.dtype != torch.bool:
            hint = "where 1 = may attend, give mask.bool()"
            if visible.is_floating_point():
                hint = "an additive mask (0 and −inf) is a bias: pass it as bias="
            raise RegardTypeError(f"a mask must be bool with True = may attend, got {visible.dtype}; {hint}")
        object.__setattr__(self, "visible", visible)

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        visible = self.visible.to(device)
        rows, keys = (1, 1, *visible.shape)[-2:]
        if not (broadcasts(rows, n) and broadcasts(keys, m)):
            shape = list(visible.shape)
            raise RegardError(f"the mask has shape {shape}; it must broadcast to [*batch, heads, {n}, {m}]")
        return RowMask(dense=visible)

    def _name(self) -> str:
        return f"Dense(bool {list(self.visible.shape)})"

    def _preview(self) -> tuple[int, int]:
        n, m = (1, 1, *self.visible.shape)[-2:]
        return n, m


@dataclass(frozen=True, repr=False)
class _Pair(Mask):
    """Two masks that are combined."""

    a: Mask
    b: Mask

    def _preview(self) -> tuple[int, int]:
        # A size at which both masks can be drawn: the size of the one that has tensors.
        size = self.a._preview()
        return size if size != (6, 6) else self.b._preview()


@register_pytree
class And(_Pair):
    """``a & b``."""

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        return self.a.lower(n, m, device) & self.b.lower(n, m, device)

    def real_queries(self, n: int, m: int) -> Tensor | None:
        a = self.a.real_queries(n, m)
        b = self.b.real_queries(n, m)
        # The lengths of two masks may be on different devices.
        if a is not None and b is not None:
            b = b.to(a.device)
        return combine(a, b, torch.logical_and)

    def _name(self) -> str:
        names = []
        for part in (self.a, self.b):
            names.append(f"({part._name()})" if isinstance(part, Or) else part._name())
        return " & ".join(names)


@register_pytree
class Or(_Pair):
    """``a | b``."""

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        return self.a.lower(n, m, device).union(self.b.lower(n, m, device), n, m)

    def real_queries(self, n: int, m: int) -> Tensor | None:
        a = self.a.real_queries(n, m)
        b = self.b.real_queries(n, m)
        return None if a is None or b is None else a | b.to(a.device)

    def _name(self) -> str:
        return f"{self.a._name()} | {self.b._name()}"


def check_mask(name: str, mask: object) -> None:
    """``mask`` must be None, a mask value or a bool tensor."""
    if mask is None or isinstance(mask, Mask) or (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        return
    if not isinstance(mask, Tensor):
        hint = "; for lengths use Padding(lengths)" if isinstance(mask, list | tuple) else ""
        raise RegardTypeError(
            f"{name} must be a mask value or a bool tensor with True = may attend, got {describe_value(mask)}{hint}"
        )
    if mask.is_floating_point():
        hint = "numbers that are added to scores are a position=, or a bias= of regard.attention"
    else:
        hint = "for a mask of 0 and 1 use mask.bool()"
    raise RegardTypeError(f"{name} must be bool with True = may attend, got {mask.dtype}; {hint}")
