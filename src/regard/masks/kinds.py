"""The masks people use: causal, window, padding, prefix and packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.masks.base import Mask
from regard.scores import RowMask
from regard.shapes import as_tensor, integer, lengths_tensor, offset_of, readable
from regard.values import value


@value
@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """``j ≤ i + offset``: no query sees what comes after it.

    ``offset=None`` is m − n: the last query sees the last key (decoding with a cache). ``offset=0`` is top-left: query
    0 sees key 0 alone, whatever n and m are. Where ``i + offset < 0`` the query sees nothing and its output is 0.

        Causal(), n=2, m=4:  ■ ■ ■ ·        Causal(offset=0):  ■ · · ·
                             ■ ■ ■ ■                           ■ ■ · ·

    >>> x = torch.eye(3).unsqueeze(0)
    >>> regard.attention(x, x, x, mask=Causal(), scale=0)  # each row averages itself and what came before
    tensor([[[1.0000, 0.0000, 0.0000],
             [0.5000, 0.5000, 0.0000],
             [0.3333, 0.3333, 0.3333]]])
    """

    offset: int | None = None

    def __post_init__(self) -> None:
        if self.offset is not None:
            integer("Causal offset", self.offset, least=None)

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        return RowMask(hi=torch.arange(n, device=device) + (_offset(n, m, self.offset) + 1))

    def _name(self) -> str:
        return "Causal()" if self.offset is None else f"Causal(offset={self.offset})"


@value
@dataclass(frozen=True, repr=False)
class Window(Mask):
    """``i + offset − before ≤ j ≤ i + offset + after``: a band around the query; ``after=None`` is ``before`` again.

    ``Causal() & Window(255)`` is the sliding window of 256 tokens of decoders.

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
        integer("Window before", self.before)
        if self.after is not None:
            integer("Window after", self.after)
        if self.offset is not None:
            integer("Window offset", self.offset, least=None)

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        at = torch.arange(n, device=device) + _offset(n, m, self.offset)
        after = self.before if self.after is None else self.after
        return RowMask(at - min(self.before, n + m), at + (min(after, n + m) + 1))

    def _name(self) -> str:
        after = self.before if self.after is None else self.after
        return f"Window({self.before}, {after}" + (")" if self.offset is None else f", offset={self.offset})")


@value
@dataclass(frozen=True, repr=False, eq=False)
class Padding(Mask):
    """Only real keys: ``j < lengths[b]``, or ``keys[b, j]`` for a bool ``[B, m]``, True = real (left padding, holes).

    A length of 0 hides every key: the outputs of that entry are 0. In self-attention (n = m) the same tensor says which
    *queries* are real, so that observations do not count padding.

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
                raise ValueError(
                    "Padding takes lengths [B], or a bool tensor [B, m] where True = a real key; got one bool"
                )
        elif x.is_floating_point() or x.is_complex():
            raise TypeError(
                f"Padding takes lengths (whole numbers) or a bool tensor where True = a real key, got {x.dtype}; "
                "for a float mask of 0 and −inf use regard.masks.from_torch(key_padding_mask=…)"
            )
        else:
            x = lengths_tensor("Padding lengths", x)
        object.__setattr__(self, "keys", x)

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        keys = self.keys.to(device)
        if keys.dtype != torch.bool:
            _no_longer_than("Padding", keys, m)
            return RowMask(hi=keys.unsqueeze(-1))
        if keys.shape[-1] != m:
            raise ValueError(f"Padding was given {keys.shape[-1]} keys (True = a real key), but there are {m}")
        if m > 0 and readable(keys):
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
        longest = self.keys.shape[-1] if self.keys.dtype == torch.bool else _longest(self.keys)
        return longest, longest


@value
@dataclass(frozen=True, repr=False, eq=False)
class Prefix(Mask):
    """``j < lengths[b]``: every query sees the first keys; ``Causal() | Prefix(lengths)`` is a prefix model.

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
        object.__setattr__(self, "lengths", lengths_tensor("Prefix lengths", lengths))

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        lengths = self.lengths.to(device)
        _no_longer_than("Prefix", lengths, m)
        return RowMask(hi=lengths.unsqueeze(-1))

    def _name(self) -> str:
        return f"Prefix({_short(self.lengths)})"

    def _preview(self) -> tuple[int, int]:
        longest = max(6, _longest(self.lengths))
        return longest, longest


@value
@dataclass(frozen=True, repr=False, eq=False)
class Segments(Mask):
    """``ids[b, i] = key_ids[b, j]``: packed documents that do not see each other.

    ``ids [n]`` or ``[B, n]``; ``key_ids [m]`` or ``[B, m]``, by default ``ids`` again. With fewer queries than keys and
    ids for all m keys alone, the queries take the ids at their positions i + (m − n). Ids in any order; documents that
    lie in one piece each become runs of keys, scattered ones a dense mask.

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
        for name, x in (("ids", ids), ("key_ids", key_ids)):
            x = None if x is None else as_tensor(f"Segments {name}", x)
            if x is not None and (x.is_floating_point() or x.is_complex() or x.ndim == 0):
                raise TypeError(
                    f"Segments {name} must be whole numbers of shape [n] or [B, n], got {x.dtype} {list(x.shape)}"
                )
            object.__setattr__(self, name, None if x is None else x.long())

    def _ids(self, n: int, m: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        ids = self.ids.to(device)
        key_ids = ids if self.key_ids is None else self.key_ids.to(device)
        if self.key_ids is None and n < m and ids.shape[-1] == m:
            ids = ids[..., m - n :]
        if ids.shape[-1] != n or key_ids.shape[-1] != m:
            raise ValueError(
                f"Segments has ids for {ids.shape[-1]} queries and {key_ids.shape[-1]} keys, there are {n} and {m}; "
                "give key_ids as well where queries and keys are not the same tokens"
            )
        return ids, key_ids

    def lower(self, n: int, m: int, device: torch.device | str = "cpu") -> RowMask:
        ids, key_ids = self._ids(n, m, device)
        if m > 0 and n > 0 and readable(ids, key_ids):
            lead = torch.broadcast_shapes(ids.shape[:-1], key_ids.shape[:-1])
            ids_, keys_ = ids.expand(*lead, n).contiguous(), key_ids.expand(*lead, m).contiguous()
            in_order, order = keys_.sort(dim=-1, stable=True)
            left = torch.searchsorted(in_order, ids_)
            count = torch.searchsorted(in_order, ids_, right=True) - left
            lo = order.gather(-1, left.clamp(max=m - 1))
            last = order.gather(-1, (left + count - 1).clamp(0, m - 1))
            if bool(((last - lo + 1 == count) | (count == 0)).all()):
                return RowMask(lo, lo + count)
        see = ids.unsqueeze(-1) == key_ids.unsqueeze(-2)
        return RowMask(dense=see if see.ndim == 2 else see.unsqueeze(-3))

    def _name(self) -> str:
        return f"Segments({_short(self.ids)}" + (")" if self.key_ids is None else f", {_short(self.key_ids)})")

    def _preview(self) -> tuple[int, int]:
        return self.ids.shape[-1], (self.ids if self.key_ids is None else self.key_ids).shape[-1]


def _no_longer_than(name: str, lengths: Tensor, m: int) -> None:
    if readable(lengths) and bool((lengths > m).any()):
        raise ValueError(f"{name} lengths go up to {int(lengths.max())}, but there are {m} keys")


def _offset(n: int, m: int, offset: int | None) -> int:
    """The mask's offset, no farther than changes anything: sums with it cannot overflow, however large it is."""
    return max(-2 * (n + m), min(2 * (n + m), offset_of(n, m, offset)))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() and readable(lengths) else 0


def _short(x: Tensor) -> str:
    flat = x.tolist() if x.numel() <= 8 and readable(x) else None
    return f"{x.dtype} {list(x.shape)}".replace("torch.", "") if flat is None else str(flat)
