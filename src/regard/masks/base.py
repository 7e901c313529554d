"""What a mask is, how two combine, how one is drawn; and ``Dense``, which any bool tensor is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.scores import RowMask
from regard.shapes import as_tensor, broadcasts, integer, readable, tracing
from regard.values import value

LARGEST_DRAWING = 24  # rows or columns; a larger mask is only named


class Mask:
    """Which keys each query may attend to. ``a & b`` allows what both allow, ``a | b`` what either allows.

    A bool tensor beside a mask is taken as ``Dense``: ``Causal() & tensor``. A mask of your own implements ``lower``,
    here every other key. Query i stands at i + m − n, so that the last query is the same however many there are:

    >>> from regard.scores import RowMask
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
        """The mask for n queries and m keys, as runs of keys where it can be, else as a dense bool mask.

        >>> regard.Causal().lower(2, 5).hi  # the keys of a row are lo ≤ j < hi
        tensor([4, 5])
        """
        raise TypeError(f"{type(self).__name__} must say what it allows")

    def dense(self, n: int, m: int, device: torch.device | str = "cpu") -> Tensor:
        """The bool tensor ``[n, m]`` (``[B, 1, n, m]`` where it differs by batch entry), True = may attend.

        >>> regard.Causal().dense(2, 3)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        return self.lower(n, m, device).as_dense(n, m).to(device)

    def real_queries(self, n: int, m: int) -> Tensor | None:
        """``[B, n]``: the queries that are no padding, where the mask knows (n = m and a ``Padding`` in it); else None.

        >>> (regard.Causal() & regard.Padding([3, 1])).real_queries(3, 3)
        tensor([[ True,  True,  True],
                [ True, False, False]])
        """
        return None

    def __and__(self, other: Mask | Tensor) -> Mask:
        other = Dense(other) if isinstance(other, Tensor) else other
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask | Tensor) -> Mask:
        other = Dense(other) if isinstance(other, Tensor) else other
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    __rand__, __ror__ = __and__, __or__  # tensor & mask: either order allows the same keys

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false: combine masks with & and |, not with and, or")

    def _name(self) -> str:
        """How the mask is written."""
        return f"{type(self).__name__}()"

    def _preview(self) -> tuple[int, int]:
        """n and m of the drawing."""
        return 6, 6

    def draw(self, n: int, m: int | None = None) -> str:
        """The mask of n queries and m keys (n, unless given) as lines of ■ and ·; ``print`` draws a small one.

        Of a mask that differs over a batch or over heads the first entry is drawn.

        >>> print(regard.Causal().draw(2, 3))
        Causal()
        ■ ■ ·
        ■ ■ ■
        (rows: 2 queries, columns: 3 keys; ■ may attend, · hidden)
        """
        n = integer("n", n)
        m = n if m is None else integer("m", m)
        if max(n, m) > LARGEST_DRAWING:
            raise ValueError(f"a drawing has at most {LARGEST_DRAWING} rows and columns, got {n} × {m}")
        see = self.dense(n, m)
        first = see.reshape(-1, n, m)[0] if see.numel() else see.reshape(n, m)
        lines = [" ".join("■" if allowed else "·" for allowed in row) for row in first.tolist()]
        which = "" if see.ndim == 2 else ", first batch entry"
        return "\n".join(
            [self._name(), *lines, f"(rows: {n} queries, columns: {m} keys{which}; ■ may attend, · hidden)"]
        )

    def __repr__(self) -> str:
        if tracing():
            return self._name()
        try:
            n, m = self._preview()
            if max(n, m) > LARGEST_DRAWING or not readable(self.dense(n, m)):
                return self._name()
            return self.draw(n, m)
        except (ValueError, RuntimeError):  # parts made for different sizes still have a name
            return self._name()


@value
@dataclass(frozen=True, repr=False, eq=False)
class Dense(Mask):
    """Any bool tensor broadcastable to ``[*batch, H, n, m]``; **True = may attend**. It is stored as it is given.

    >>> print(Dense(torch.tensor([[True, False], [True, True]])))
    Dense(bool [2, 2])
    ■ ·
    ■ ■
    (rows: 2 queries, columns: 2 keys; ■ may attend, · hidden)
    """

    see: Tensor

    def __init__(self, see: Tensor) -> None:
        see = as_tensor("Dense see", see)
        if see.dtype != torch.bool:
            raise TypeError(
                f"a mask is bool with True = may attend, got {see.dtype}; "
                + (
                    "an additive mask (0 and −inf) is a bias: pass it as bias="
                    if see.is_floating_point()
                    else "where 1 = may attend, give mask.bool()"
                )
            )
        object.__setattr__(self, "see", see)

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        see = self.see.to(device)
        rows, keys = (1, 1, *see.shape)[-2:]
        if not (broadcasts(rows, n) and broadcasts(keys, m)):
            raise ValueError(f"the mask has shape {list(see.shape)}; it must broadcast to [*batch, heads, {n}, {m}]")
        return RowMask(dense=see)

    def _name(self) -> str:
        return f"Dense(bool {list(self.see.shape)})"

    def _preview(self) -> tuple[int, int]:
        n, m = (1, 1, *self.see.shape)[-2:]
        return n, m


@value
@dataclass(frozen=True, repr=False)
class And(Mask):
    """``a & b``."""

    a: Mask
    b: Mask

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        return self.a.lower(n, m, device) & self.b.lower(n, m, device)

    def real_queries(self, n: int, m: int) -> Tensor | None:
        a, b = self.a.real_queries(n, m), self.b.real_queries(n, m)
        return b if a is None else a if b is None else a & b

    def _name(self) -> str:
        return " & ".join(f"({x._name()})" if isinstance(x, Or) else x._name() for x in (self.a, self.b))

    def _preview(self) -> tuple[int, int]:
        return _preview_of(self.a, self.b)


@value
@dataclass(frozen=True, repr=False)
class Or(Mask):
    """``a | b``."""

    a: Mask
    b: Mask

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        return self.a.lower(n, m, device).union(self.b.lower(n, m, device), n, m)

    def real_queries(self, n: int, m: int) -> Tensor | None:
        a, b = self.a.real_queries(n, m), self.b.real_queries(n, m)
        return None if a is None or b is None else a | b

    def _name(self) -> str:
        return f"{self.a._name()} | {self.b._name()}"

    def _preview(self) -> tuple[int, int]:
        return _preview_of(self.a, self.b)


def _preview_of(a: Mask, b: Mask) -> tuple[int, int]:
    """A size both masks can be drawn at: the one with tensors in it decides."""
    sizes = [x._preview() for x in (a, b) if x._preview() != (6, 6)]
    return sizes[0] if sizes else (6, 6)
