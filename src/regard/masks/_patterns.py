"""The common masks: causal, window, padding, prefix and packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._checks import as_lengths, as_tensor, can_read_values, check_integer
from regard._errors import RegardError, RegardTypeError
from regard._register_pytree import register_pytree
from regard._shapes import resolve_offset
from regard.masks._mask import Mask
from regard.masks._row_mask import RowMask


@register_pytree
@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """``j ≤ i + offset``: no query sees a later key.

    - ``offset``: None means m − n, so that the last query sees the last key (decoding with a cache). With 0, query 0
      sees key 0 alone. Where ``i + offset < 0`` the query sees nothing and its output is 0.

        Causal(), n=2, m=4:  ■ ■ ■ ·        Causal(offset=0):  ■ · · ·
                             ■ ■ ■ ■                           ■ ■ · ·

    >>> x = torch.eye(3).unsqueeze(0)
    >>> regard.attention(x, x, x, mask=Causal(), scale=0)  # each row is the mean of itself and of earlier rows
    tensor([[[1.0000, 0.0000, 0.0000],
             [0.5000, 0.5000, 0.0000],
             [0.3333, 0.3333, 0.3333]]])
    """

    offset: int | None = None

    def __post_init__(self) -> None:
        if self.offset is not None:
            check_integer("Causal offset", self.offset, least=None)

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        return RowMask(hi=torch.arange(n, device=device) + (_offset(n, m, self.offset) + 1))

    def _name(self) -> str:
        return "Causal()" if self.offset is None else f"Causal(offset={self.offset})"


@register_pytree
@dataclass(frozen=True, repr=False)
class Window(Mask):
    """``i + offset − before ≤ j ≤ i + offset + after``: a band around the query.

    - ``before``, ``after``: how many keys on each side; ``after=None`` means as many as ``before``.
    - ``offset``: None means m − n, which aligns the last query with the last key.

    ``Causal() & Window(255)`` is a decoder's sliding window of 256 tokens.

    >>> print(Causal() & Window(2))
    Causal() & Window(2, 2)
    ■ · · · · ·
    ■ ■ · · · ·
    ■ ■ ■ · · ·
    · ■ ■ ■ · ·
    · · ■ ■ ■ ·
    · · · ■ ■ ■
    (rows: 6 queries, columns: 6 keys; ■ may attend, · hidden)
    """

    before: int
    after: int | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        check_integer("Window before", self.before)
        if self.after is not None:
            check_integer("Window after", self.after)
        if self.offset is not None:
            check_integer("Window offset", self.offset, least=None)

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        positions = torch.arange(n, device=device) + _offset(n, m, self.offset)
        after = self.before if self.after is None else self.after
        # A window wider than all keys hides nothing; min() prevents an overflow.
        return RowMask(positions - min(self.before, n + m), positions + (min(after, n + m) + 1))

    def _name(self) -> str:
        after = self.before if self.after is None else self.after
        offset = "" if self.offset is None else f", offset={self.offset}"
        return f"Window({self.before}, {after}{offset})"


@register_pytree
@dataclass(frozen=True, repr=False, eq=False)
class Padding(Mask):
    """Hides padding: only keys ``j < lengths[b]``, or where ``keys[b, j]`` is True, are visible.

    - ``keys``: lengths ``[B]``, or a bool tensor ``[B, m]`` with True = a real key (left padding, gaps).

    A length of 0 hides every key: the outputs of that entry are 0. In self-attention (n = m) the same tensor
    defines which *queries* are real, so that observations do not count padding.

    >>> Padding([3, 1]).dense(1, 4).squeeze()  # two texts of 3 and 1 tokens, padded to 4
    tensor([[ True,  True,  True, False],
            [ True, False, False, False]])
    >>> Padding([[False, True, True, True]]).dense(1, 4).squeeze()  # padded on the left
    tensor([False,  True,  True,  True])
    """

    keys: Tensor

    def __init__(self, keys: Tensor | Sequence[int] | Sequence[Sequence[bool]] | int) -> None:
        x = as_tensor("Padding keys", keys)
        if x.dtype == torch.bool:
            if x.ndim == 0:
                raise RegardError("Padding keys must be lengths [B] or bool [B, m], True = a real key; got one bool")
        elif x.is_floating_point() or x.is_complex():
            raise RegardTypeError(
                f"Padding keys must be integer lengths [B] or bool [B, m], True = a real key; got {x.dtype}. "
                "For a float mask of 0 and −inf use regard.masks.from_torch(key_padding_mask=…)"
            )
        else:
            x = as_lengths("Padding lengths", x)
        object.__setattr__(self, "keys", x)

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        keys = self.keys.to(device)
        if keys.dtype != torch.bool:
            return _first_keys("Padding", keys, m)
        if keys.shape[-1] != m:
            raise RegardError(f"Padding has {keys.shape[-1]} keys, but there are {m}; they must be equal")

        # One run of real keys per entry is the usual case, and kernels skip what is outside a run.
        if m > 0 and can_read_values(keys):
            # argmax finds the first True; torch has no argmax for bool.
            lo = keys.to(torch.uint8).argmax(-1)
            hi = m - keys.flip(-1).to(torch.uint8).argmax(-1)
            count = keys.sum(-1)
            if bool(((hi - lo == count) | (count == 0)).all()):
                return RowMask(lo.unsqueeze(-1), torch.where(count == 0, lo, hi).unsqueeze(-1))
        return RowMask(dense=keys.unsqueeze(-2).unsqueeze(-3))

    def real_queries(self, n: int, m: int) -> Tensor | None:
        if n != m:
            return None
        if self.keys.dtype == torch.bool:
            return self.keys
        return torch.arange(n, device=self.keys.device) < self.keys.unsqueeze(-1)

    def _name(self) -> str:
        return f"Padding({_short(self.keys)})"

    def _preview(self) -> tuple[int, int]:
        size = self.keys.shape[-1] if self.keys.dtype == torch.bool else _longest(self.keys)
        return size, size


@register_pytree
@dataclass(frozen=True, repr=False, eq=False)
class Prefix(Mask):
    """``j < lengths[b]``: every query sees the first keys. ``Causal() | Prefix(lengths)`` is the mask of a prefix LM.

    - ``lengths``: integers ``[B]``, or one for all batch entries.

    >>> print(Causal() | Prefix(3))
    Causal() | Prefix([3])
    ■ ■ ■ · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    ■ ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■ ■
    (rows: 6 queries, columns: 6 keys; ■ may attend, · hidden)
    """

    lengths: Tensor

    def __init__(self, lengths: Tensor | Sequence[int] | int) -> None:
        object.__setattr__(self, "lengths", as_lengths("Prefix lengths", lengths))

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        return _first_keys("Prefix", self.lengths.to(device), m)

    def _name(self) -> str:
        return f"Prefix({_short(self.lengths)})"

    def _preview(self) -> tuple[int, int]:
        longest = max(6, _longest(self.lengths))
        return longest, longest


@register_pytree
@dataclass(frozen=True, repr=False, eq=False)
class Segments(Mask):
    """``ids[b, i] = key_ids[b, j]``: packed documents that do not see each other.

    - ``ids``: the document of each query, integers ``[n]`` or ``[B, n]``.
    - ``key_ids``: the document of each key, ``[m]`` or ``[B, m]``; None means ``ids``. If n < m and ``ids`` has m
      entries, query i has the id at its position i + (m − n).

    Ids may be in any order. Contiguous documents become runs of keys; scattered documents need a dense mask.

    >>> print(Causal() & Segments([0, 0, 1, 1, 1]))
    Causal() & Segments([0, 0, 1, 1, 1])
    ■ · · · ·
    ■ ■ · · ·
    · · ■ · ·
    · · ■ ■ ·
    · · ■ ■ ■
    (rows: 5 queries, columns: 5 keys; ■ may attend, · hidden)
    """

    ids: Tensor
    key_ids: Tensor | None = None

    def __init__(self, ids: Tensor | Sequence[int], key_ids: Tensor | Sequence[int] | None = None) -> None:
        object.__setattr__(self, "ids", _segment_ids("ids", ids))
        object.__setattr__(self, "key_ids", None if key_ids is None else _segment_ids("key_ids", key_ids))

    def _ids(self, n: int, m: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        ids = self.ids.to(device)
        key_ids = ids if self.key_ids is None else self.key_ids.to(device)
        # Decoding with a cache: the ids of all keys are known, the queries are the last ones.
        if self.key_ids is None and n < m and ids.shape[-1] == m:
            ids = ids[..., m - n :]
        if ids.shape[-1] != n or key_ids.shape[-1] != m:
            raise RegardError(
                f"Segments has ids for {ids.shape[-1]} queries and {key_ids.shape[-1]} keys, there are {n} and {m}; "
                "give key_ids too if queries and keys are not the same tokens"
            )
        return ids, key_ids

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        ids, key_ids = self._ids(n, m, device)
        if m > 0 and n > 0 and can_read_values(ids, key_ids):
            # A stable sort brings the keys of a document together in their order. The document is one piece if
            # last key − first key + 1 is its number of keys.
            lead = torch.broadcast_shapes(ids.shape[:-1], key_ids.shape[:-1])
            query_ids = ids.expand(*lead, n).contiguous()
            sorted_ids, order = key_ids.expand(*lead, m).contiguous().sort(dim=-1, stable=True)
            left = torch.searchsorted(sorted_ids, query_ids)
            count = torch.searchsorted(sorted_ids, query_ids, right=True) - left
            lo = order.gather(-1, left.clamp(max=m - 1))
            last = order.gather(-1, (left + count - 1).clamp(0, m - 1))
            if bool(((last - lo + 1 == count) | (count == 0)).all()):
                return RowMask(lo, lo + count)
        visible = ids.unsqueeze(-1) == key_ids.unsqueeze(-2)
        if visible.ndim > 2:
            visible = visible.unsqueeze(-3)
        return RowMask(dense=visible)

    def _name(self) -> str:
        key_ids = "" if self.key_ids is None else f", {_short(self.key_ids)}"
        return f"Segments({_short(self.ids)}{key_ids})"

    def _preview(self) -> tuple[int, int]:
        keys = self.ids if self.key_ids is None else self.key_ids
        return self.ids.shape[-1], keys.shape[-1]


def _segment_ids(name: str, ids: Tensor | Sequence[int]) -> Tensor:
    x = as_tensor(f"Segments {name}", ids)
    if x.is_floating_point() or x.is_complex() or x.ndim == 0:
        shape = list(x.shape)
        raise RegardTypeError(f"Segments {name} must be integers of shape [n] or [B, n], got {x.dtype} {shape}")
    return x.long()


def _first_keys(name: str, lengths: Tensor, m: int) -> RowMask:
    if can_read_values(lengths) and bool((lengths > m).any()):
        raise RegardError(f"{name} lengths must be at most m = {m}, the number of keys, got {int(lengths.max())}")
    return RowMask(hi=lengths.unsqueeze(-1))


def _offset(n: int, m: int, offset: int | None) -> int:
    """The offset of a mask, clamped to where it still changes something, so that sums with it cannot overflow."""
    limit = 2 * (n + m)
    return max(-limit, min(limit, resolve_offset(n, m, offset)))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() and can_read_values(lengths) else 0


def _short(x: Tensor) -> str:
    """A tensor in a repr: its values if they are few, else dtype and shape."""
    if x.numel() <= 8 and can_read_values(x):
        return str(x.tolist())
    return f"{x.dtype} {list(x.shape)}".replace("torch.", "")
