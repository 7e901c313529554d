"""What can be measured of attention weights A_ij = exp(s_ij − lse_i), and how two measurements merge.

Row values, ``[B, H, n]`` each (δ = j − i − offset, the place of a key relative to its query):

    lse      log Σ_j exp s_ij, sinks included            entropy   lse − Σ_j A s − A_sink·sink   (nats)
    peak     max_j A_ij                                  peak_at   the lowest j that has it, −1 in an empty row
    offset   Σ_j A·δ                                     distance  Σ_j A·|δ|   (on a grid: Euclidean, in cells)
    sink     Σ_{j < S} A                                 local     Σ_{|δ| ≤ r} A   (on a grid: within r cells)
    visible  how many keys the row may attend to

Per head, over the rows that count:

    key_mass [H, m]     the mean row of A: (1/rows) Σ_i A_ij
    map      [H, g, g]  rows pooled by mean, keys by sum; row bin ⌊i·g/n⌋, key bin ⌊j·g/m⌋. A row of a map sums to 1,
                        less what learned sinks took; a bin without counted rows (n < g, padding) is 0
    profile  [H, 2r+1]  mean A at each offset −r … r over the rows that see a key there; 2-D on a grid
    top      [B, H, n, k] the k largest weights of a row, ``top_at`` their keys; lower keys first among equals,
                        −1 and 0 beyond the visible ones

Keys whose products differ by rounding alone tie or not as the arithmetic falls. With learned sinks the entropy is that
of the whole distribution, the sink being one more outcome. Empty rows have lse −inf, peak_at −1 and 0 elsewhere; they
never count. With ``scale=inf`` s is the bias of the tied keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.shapes import as_tensor, integer, lengths_tensor, offset_of, readable
from regard.values import value

__all__ = ["ROW_VALUES", "Observation", "Observe"]

ROW_VALUES = ("lse", "entropy", "peak", "peak_at", "offset", "distance", "sink", "local", "visible")

LARGEST = 2**31  # no length, bin or offset is larger

Where = int | slice | range | Sequence[int] | Tensor | None


@value
@dataclass(frozen=True)
class Observe:
    """What to measure while attention is computed. Row values always; the rest as asked.

    ``map=g`` a g × g pooled map, ``profile=r`` (or ``(ry, rx)`` on a grid) the mean weight at each offset,
    ``key_mass``, ``top=k``; ``sink=S`` first keys and ``local=r`` set two row masses. ``grid=(height, width)`` reads
    positions as cells of an image, the last height·width keys; tokens before it (a class token) stand nowhere.
    ``offset`` as in masks. ``queries``: the real query rows, lengths ``[B]`` or bool ``[B, n]``; without it a
    ``Padding`` in the mask serves where n = m. ``keep=True`` holds q and k (as they are, not copied: do not change them
    in place) and each row's sums, for exact weights later. ``heads``: only these are measured, the others run at full
    speed; results have them in this order.

    >>> q = torch.randn(1, 4, 100, 8)  # 4 heads
    >>> out, seen = regard.attention(q, q, q, observe=Observe(map=10, top=3, heads=(2,)))
    >>> out.shape, seen.map.shape, seen.top.shape
    (torch.Size([1, 4, 100, 8]), torch.Size([1, 10, 10]), torch.Size([1, 1, 100, 3]))
    """

    map: int = 0
    profile: int | tuple[int, int] | None = None
    key_mass: bool = False
    top: int = 0
    sink: int = 1
    local: int = 1
    grid: tuple[int, int] | None = None
    offset: int | None = None
    queries: Tensor | Sequence[int] | None = None
    keep: bool = False
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.heads is not None:
            for head in self.heads if isinstance(self.heads, tuple) else ():
                integer("Observe heads", head, most=LARGEST)
            if not isinstance(self.heads, tuple) or not self.heads or len(set(self.heads)) != len(self.heads):
                raise ValueError(f"Observe heads must be a tuple of different numbers, e.g. (0, 3), got {self.heads!r}")
        for name in ("map", "top", "sink", "local"):
            integer(f"Observe {name}", getattr(self, name), most=LARGEST)
        if self.offset is not None:
            integer("Observe offset", self.offset, least=-LARGEST, most=LARGEST)
        if self.grid is not None:
            if not isinstance(self.grid, tuple) or len(self.grid) != 2:
                raise ValueError(f"Observe grid must be (height, width), got {self.grid}")
            for side in self.grid:
                integer("Observe grid sides", side, least=1)
        if isinstance(self.profile, tuple) and (self.grid is None or len(self.profile) != 2):
            raise ValueError(f"Observe profile={self.profile} needs grid=(height, width); on a line give one radius")
        for radius in self.radii():
            integer("Observe profile", radius)

    def radii(self) -> tuple[int, ...]:
        """() without a profile, (r,) on a line, (ry, rx) on a grid."""
        if self.profile is None:
            return ()
        if isinstance(self.profile, tuple):
            return self.profile
        return (self.profile,) if self.grid is None else (self.profile, self.profile)

    def real_queries(self, n: int) -> Tensor | None:
        """``queries`` as bool ``[*batch or 1, n]``."""
        if self.queries is None:
            return None
        x = as_tensor("Observe queries", self.queries)
        if x.dtype != torch.bool:
            lengths = lengths_tensor("Observe queries", x)
            if readable(lengths) and bool((lengths > n).any()):
                raise ValueError(f"Observe queries go up to {int(lengths.max())}, but there are {n} queries")
            return torch.arange(n, device=lengths.device) < lengths.unsqueeze(-1)
        if x.shape[-1:] != (n,):
            raise ValueError(
                f"Observe queries has shape {list(x.shape)}; it must be lengths [B] or bool [B, {n}], True = real"
            )
        return x


class Kept(Protocol):
    """What ``keep=True`` holds of one call; made by the operator, which knows how to compute scores."""

    @property
    def batches(self) -> int: ...

    def weights(self, batch: int, head: int, rows: Where, keys: Where) -> Tensor: ...

    def tile(self, batch: int, head: int, rows: Where, keys: Where, size: int, counted: Tensor) -> Tensor: ...

    def visible(self, batch: int, head: int, rows: Where, keys: Where) -> Tensor: ...


@value
@dataclass(frozen=True, repr=False, eq=False)
class Observation:
    """What was measured of one or more calls; the names and shapes are in the module's docstring.

    ``counted [B, H, n]``: the rows that count; ``rows [H]`` how many; ``map_rows [H, g]`` and ``profile_rows`` how many
    went into each bin. After merging calls of unequal n or m the row values, n and m are None. ``value_norm [B, H, m]``
    is ‖v_j W_O‖, how much of key j's value a head can move: ``regard.watch`` fills it in, the operator knows no W_O.

    >>> x = torch.eye(4).reshape(1, 1, 4, 4)
    >>> _, seen = regard.attention(x, x, x, mask=regard.Causal(), scale=0, observe=Observe(map=2))
    >>> seen
    Observation of 4 queries and 4 keys: rows [1], lse [1, 1, 4], entropy [1, 1, 4], ... map [1, 2, 2], map_rows [1, 2]
    >>> seen.map[0]  # the first two rows see the first two keys alone
    tensor([[1.0000, 0.0000],
            [0.5833, 0.4167]])
    """

    observe: Observe
    n: int | None
    m: int | None
    rows: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    peak: Tensor | None = None
    peak_at: Tensor | None = None
    offset: Tensor | None = None
    distance: Tensor | None = None
    sink: Tensor | None = None
    local: Tensor | None = None
    visible: Tensor | None = None
    counted: Tensor | None = None
    key_mass: Tensor | None = None
    map: Tensor | None = None
    map_rows: Tensor | None = None
    profile: Tensor | None = None
    profile_rows: Tensor | None = None
    top: Tensor | None = None
    top_at: Tensor | None = None
    value_norm: Tensor | None = None
    kept: tuple[Kept, ...] = ()

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers of the heads that were measured, in the order of all values."""
        return tuple(range(self.rows.shape[0])) if self.observe.heads is None else self.observe.heads

    def at(self, head: int) -> int:
        """Where the values of a head stand.

        >>> x = torch.randn(1, 4, 5, 3)
        >>> _, seen = regard.attention(x, x, x, observe=Observe(heads=(3, 1)))
        >>> seen.at(1), seen.entropy[0, seen.at(1)].shape
        (1, torch.Size([5]))
        """
        integer("head", head)
        if head not in self.heads:
            known = ", ".join(map(str, self.heads)) if self.observe.heads else f"0 … {len(self.heads) - 1}"
            raise ValueError(f"head is {head}; this observation has heads {known}")
        return self.heads.index(head)

    def __repr__(self) -> str:
        """Names and shapes, not the numbers: there may be millions."""
        shapes = {f.name: getattr(self, f.name) for f in fields(self)}
        parts = [f"{name} {list(x.shape)}" for name, x in shapes.items() if isinstance(x, Tensor)]
        kept = ", keeps q and k" if self.kept else ""
        return f"Observation of {self.n} queries and {self.m} keys: {', '.join(parts)}{kept}"

    def mean(self, name: str) -> Tensor:
        """The mean ``[H]`` of a row value over the rows that count (NaN for a head with none).

        >>> x = torch.randn(1, 2, 5, 3)
        >>> _, seen = regard.attention(x, x, x, mask=regard.Causal(), observe=Observe())
        >>> seen.mean("visible")  # 1 + 2 + 3 + 4 + 5 keys, over 5 rows
        tensor([3., 3.], dtype=torch.float64)
        """
        values = getattr(self, name) if name in ROW_VALUES else None
        if values is None or self.counted is None:
            known = (
                ", ".join(x for x in ROW_VALUES if getattr(self, x) is not None)
                or "none: calls of unequal n were merged"
            )
            raise ValueError(f"there is no row value {name!r} here; there are: {known}")
        counted = self.counted
        if name == "distance" and self.observe.grid is not None:
            counted = counted & self._on_grid()  # a class token's row has no distance
        total = torch.where(counted, values.double(), 0).sum((0, 2))
        return total / counted.sum((0, 2))

    def _on_grid(self) -> Tensor:
        assert self.n is not None and self.m is not None and self.observe.grid is not None
        at = torch.arange(self.n, device=self.rows.device) + offset_of(self.n, self.m, self.observe.offset)
        return (at >= self.m - self.observe.grid[0] * self.observe.grid[1]) & (at < self.m)

    def merge(self, *others: Observation) -> Observation:
        """One observation of all calls: row values concatenate along the batch, per-head ones average by counted rows.

        The calls must have observed the same things with the same heads. Where n or m differ only maps and profiles
        merge; the rest becomes None.

        >>> short, long = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 11, 3)
        >>> seen = [regard.attention(x, x, x, observe=Observe(map=4))[1] for x in (short, long)]
        >>> both = seen[0].merge(seen[1])
        >>> both.rows, both.map.shape, both.entropy
        (tensor([16, 16]), torch.Size([2, 4, 4]), None)
        """
        merged = self
        for other in others:
            if not isinstance(other, Observation):
                raise TypeError(f"an observation merges with observations, got {type(other).__name__}")
            merged = _merge(merged, other)
        return merged

    def weights(self, head: int, rows: Where = None, keys: Where = None, *, batch: int = 0) -> Tensor:
        """The exact weights ``A[rows, keys]`` of one head, computed now: observe with ``Observe(keep=True)``.

        ``rows`` and ``keys``: a number (negative ones count from the end), a slice, a range, a list, or None for all of
        them; ``batch``: which entry of the batch.

        >>> x = torch.eye(3).reshape(1, 1, 3, 3)
        >>> _, seen = regard.attention(x, x, x, mask=regard.Causal(), scale=0, observe=Observe(keep=True))
        >>> seen.weights(head=0, rows=-1, keys=slice(0, 2))
        tensor([[0.3333, 0.3333]])
        """
        call, entry = self._call(batch)
        return call.weights(entry, self.at(head), rows, keys)

    def tile(self, head: int, rows: Where = None, keys: Where = None, size: int = 64, *, batch: int = 0) -> Tensor:
        """A region pooled to at most ``size × size`` as in ``map``: rows by mean, keys by sum.

        A region that is no larger than that is not pooled: its cells are exact weights. Rows that do not count
        (padding) are left out, as in ``map``; a row of cells made of such rows alone is 0.

        >>> x = torch.eye(4).reshape(1, 1, 4, 4)
        >>> _, seen = regard.attention(x, x, x, mask=regard.Causal(), scale=0, observe=Observe(keep=True))
        >>> seen.tile(head=0, rows=slice(2, 4), size=2)  # two rows as they are, keys in two bins
        tensor([[0.6667, 0.3333],
                [0.5000, 0.5000]])
        """
        integer("size", size, least=1)
        call, entry = self._call(batch)
        if self.counted is None:
            raise ValueError("calls of unequal n were merged: ask the separate observations for tiles")
        return call.tile(entry, self.at(head), rows, keys, size, self.counted[batch, self.at(head)])

    def sees(self, head: int, rows: Where = None, keys: Where = None, *, batch: int = 0) -> Tensor:
        """Which keys a row may attend to, bool; a weight of 0 does not tell, for it may be a very small one.

        >>> x = torch.eye(2).reshape(1, 1, 2, 2)
        >>> _, seen = regard.attention(x, x, x, mask=regard.Causal(), observe=Observe(keep=True))
        >>> seen.sees(head=0)
        tensor([[ True, False],
                [ True,  True]])
        """
        call, entry = self._call(batch)
        return call.visible(entry, self.at(head), rows, keys)

    def moved(self, head: int, rows: Where = None, keys: Where = None, *, batch: int = 0) -> Tensor:
        """``A_ij ‖v_j W_O‖``: weights times how much there is to move, which weights alone do not tell.

        The norms are ``value_norm``, which ``regard.watch(model, Observe(keep=True), values=True)`` takes.

        >>> model, x = regard.nn.MultiHeadAttention(6, heads=3), torch.randn(1, 5, 6)
        >>> x[0, 2] = 0  # this token has no value: looked at or not, it moves nothing
        >>> with regard.watch(model, Observe(keep=True), values=True) as seen:
        ...     y = model(x)
        >>> seen[0].moved(head=1)[:, 2]
        tensor([0., 0., 0., 0., 0.])
        """
        if self.value_norm is None:
            raise ValueError("the values' norms were not taken; watch with regard.watch(model, observe, values=True)")
        weights = self.weights(head, rows, keys, batch=batch)
        norms = self.value_norm[batch, self.at(head)]
        return weights * (norms if keys is None else norms[_places(keys)]).to(weights.dtype)

    def _call(self, batch: int) -> tuple[Kept, int]:
        if not self.kept:
            raise ValueError("weights need q and k, which were not kept; observe with Observe(keep=True)")
        total = sum(call.batches for call in self.kept)
        if not 0 <= integer("batch", batch) < total:
            raise ValueError(f"batch is {batch}; this observation has batch entries 0 … {total - 1}")
        for call in self.kept:
            if batch < call.batches:
                return call, batch
            batch -= call.batches
        raise AssertionError("unreachable: batch was checked against the total")


def _places(keys: Where) -> slice | Tensor:
    """Keys as a tensor's index that keeps their dimension."""
    if isinstance(keys, slice):
        return keys
    return torch.as_tensor(list(keys) if isinstance(keys, range) else keys).reshape(-1).long()


def _merge(a: Observation, b: Observation) -> Observation:
    if a.observe != b.observe:
        raise ValueError(f"only equal measurements merge; these observed {a.observe} and {b.observe}")
    if a.rows.shape != b.rows.shape:
        raise ValueError(f"only observations of as many heads merge, got {a.rows.shape[0]} and {b.rows.shape[0]}")
    same = a.n is not None and (a.n, a.m) == (b.n, b.m)

    def join(name: str) -> Tensor | None:
        x, y = getattr(a, name), getattr(b, name)
        return torch.cat([x, y]) if same and x is not None and y is not None else None

    def average(name: str, counts: str) -> Tensor | None:
        x, y = getattr(a, name), getattr(b, name)
        if x is None or y is None:
            return None
        weights = [getattr(part, counts).to(x.dtype) for part in (a, b)]
        w, u = (c.reshape(*c.shape, *[1] * (x.ndim - c.ndim)) for c in weights)
        return (w * x + u * y) / (w + u).clamp(min=1)

    def add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        return None if x is None or y is None else x + y

    joined: dict[str, Any] = {name: join(name) for name in (*ROW_VALUES, "counted", "top", "top_at", "value_norm")}

    return replace(
        a,
        n=a.n if same else None,
        m=a.m if same else None,
        rows=a.rows + b.rows,
        **joined,
        key_mass=average("key_mass", "rows") if same else None,
        map=average("map", "map_rows"),
        map_rows=add(a.map_rows, b.map_rows),
        profile=average("profile", "profile_rows"),
        profile_rows=add(a.profile_rows, b.profile_rows),
        kept=a.kept + b.kept,
    )
