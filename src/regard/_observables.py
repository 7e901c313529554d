"""The quantities that can be measured on attention weights A_ij = exp(s_ij − lse_i), and how measurements are merged.

Row values, ``[B, H, n]`` each (δ = j − (i + o), the position of a key relative to its query; o is the
option ``Observe.offset``):

    lse      log Σ_j exp s_ij, sinks included            entropy   lse − Σ_j A_ij s_ij − A_sink·sink   (nats)
    logit_max  the largest s_ij of a visible key, without sinks
    peak     max_j A_ij                                  peak_at   the lowest j with that weight; −1 in an empty row
    offset   Σ_j A·δ                                     distance  Σ_j A·|δ|   (on a grid: Euclidean, in cells)
    sink     Σ_{j < S} A                                 local     Σ_{|δ| ≤ r} A   (on a grid: within r cells)
    visible  the number of keys that the row may attend to

S, g and k are the options ``sink``, ``map`` and ``top`` of ``Observe``; r is ``local`` for the row values, ``profile``
for the profile. A row *counts* if it is a real query, not padding, and sees at least one key.
Values per head, over the rows that count, and the largest weights:

    key_mass [H, m]     the mean row of A: (1/rows) Σ_i A_ij
    map      [H, g, g]  rows pooled by mean, keys by sum; row bin ⌊i·g/n⌋, key bin ⌊j·g/m⌋. A row of a map sums to 1
                        minus the weight of learned sinks. A row bin in which no row counts (n < g, padding) is 0
    profile  [H, 2r+1]  for each δ from −r to r: the mean weight at this δ, over the rows with a visible key at it;
                        2-D on a grid
    top      [B, H, n, k] the k largest weights of a row, and ``top_at``, their keys. Among equal weights the lower key
                        is first. If a row sees fewer than k keys, the rest is 0 and −1
    groups   [B, H, n, C] the weight of a row on each group of keys (``Groups``): Σ_{j in group c} A_ij

Edge cases: if the scores of two keys differ only by rounding error, it is not specified whether they tie. With learned
sinks the entropy is that of the distribution over all keys and the sink together. An empty row (one that sees no key)
has lse and logit_max −inf and peak_at −1; its other values are 0. With ``scale=inf`` only the keys with the row's
largest q·k have weight. Their score s_ij is their bias alone, 0 without a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from regard._checks import as_lengths, as_tensor, can_read_values, check_integer, describe_value, is_integer_dtype
from regard._devices import widest
from regard._errors import RegardError, RegardTypeError
from regard._groups import Groups, group_map
from regard._merge_observations import merge_pair
from regard._register_pytree import register_pytree
from regard._shapes import resolve_offset

ROW_VALUES = (
    *("lse", "logit_max", "entropy", "peak", "peak_at"),
    *("offset", "distance", "sink", "local", "visible"),
)

# The row values that keep their graph with ``Observe(differentiable=True)``.
DIFFERENTIABLE = ("entropy", "logit_max")

LARGEST = 2**31  # the largest accepted number in Observe, and the largest number of a head

# Selects rows or keys: one index, several indices, or None for all of them.
Index = int | slice | range | Sequence[int] | Tensor | None


@register_pytree
@dataclass(frozen=True)
class Observe:
    """What to measure while attention is computed. Row values are always measured.

    - ``map``: g, for a pooled map of g × g cells; 0 disables it.
    - ``profile``: r, for the mean weight at each offset −r … r; ``(ry, rx)`` on a grid. None disables it.
    - ``key_mass``: True measures the mean weight of each key.
    - ``top``: k, for the k largest weights of each row; 0 disables it.
    - ``sink``: S, for the row value ``sink``: the weight on the first S keys.
    - ``local``: r, for the row value ``local``: the weight within r positions.
    - ``grid``: ``(height, width)``: the last height·width keys are the cells of an image in row-major order, and
      distances are measured in two dimensions. Tokens before them (a class token) have no position.
    - ``offset``: query i is at key position i + offset; None aligns the last query with the last key.
    - ``queries``: the real query rows, lengths ``[B]`` or bool ``[B, n]``. None: they are taken from a ``Padding`` in
      the mask if n = m; else all rows are real.
    - ``keep``: True stores q, k and the options, so that exact weights can be computed later. The tensors are not
      copied: do not change q and k in place.
    - ``heads``: measure only these heads; the others run at full speed. Results contain the heads in this order.
    - ``groups``: ``Groups`` of keys, for the weight of each row on each group; None disables it.
    - ``differentiable``: True: ``entropy`` and ``logit_max`` keep their graph, so that a loss may contain them. Their
      exact gradients reach q, k, biases, tables and sinks. Of equal largest logits the one at ``peak_at`` counts.

    >>> q = torch.randn(1, 4, 100, 8)  # 4 heads
    >>> out, observation = regard.attention(q, q, q, observe=Observe(map=10, top=3, heads=(2,)))
    >>> out.shape, observation.map.shape, observation.top.shape
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
    groups: Groups | None = None
    differentiable: bool = False

    def __post_init__(self) -> None:
        if self.groups is not None and not isinstance(self.groups, Groups):
            raise RegardTypeError(f"Observe groups must be a regard.Groups, got {describe_value(self.groups)}")
        if self.heads is not None:
            if not isinstance(self.heads, tuple) or not self.heads:
                raise RegardError(f"Observe heads must be a tuple of integers, e.g. (0, 3), got {self.heads!r}")
            for head in self.heads:
                check_integer("Observe heads", head, most=LARGEST)
            if len(set(self.heads)) != len(self.heads):
                raise RegardError(f"Observe heads must be different integers, e.g. (0, 3), got {self.heads!r}")
        # Larger numbers do not fit into the integers of the kernels.
        for name in ("map", "top", "sink", "local"):
            check_integer(f"Observe {name}", getattr(self, name), most=LARGEST)
        if self.offset is not None:
            check_integer("Observe offset", self.offset, least=-LARGEST, most=LARGEST)
        if self.grid is not None:
            if not isinstance(self.grid, tuple) or len(self.grid) != 2:
                raise RegardError(f"Observe grid must be (height, width), got {self.grid}")
            for side in self.grid:
                check_integer("Observe grid sides", side, least=1, most=LARGEST)
        if isinstance(self.profile, tuple) and (self.grid is None or len(self.profile) != 2):
            raise RegardError(f"Observe profile={self.profile} needs grid=(height, width); on a line give one radius")
        if not isinstance(self.differentiable, bool):
            raise RegardTypeError(f"Observe differentiable must be True or False, got {self.differentiable!r}")
        for radius in self.profile_radii():
            check_integer("Observe profile", radius, most=LARGEST)

    def profile_radii(self) -> tuple[int, ...]:
        """The radius of the profile along each axis: () without a profile, (r,) on a line, (ry, rx) on a grid."""
        if self.profile is None:
            return ()
        if isinstance(self.profile, tuple):
            return self.profile
        if self.grid is None:
            return (self.profile,)
        return self.profile, self.profile

    def real_queries(self, n: int) -> Tensor | None:
        """Return ``queries`` as bool ``[*batch or 1, n]``, True = real; None if it is None."""
        if self.queries is None:
            return None
        queries = as_tensor("Observe queries", self.queries)
        if queries.dtype != torch.bool:
            lengths = as_lengths("Observe queries", queries)
            if can_read_values(lengths) and bool((lengths > n).any()):
                raise RegardError(f"Observe queries must be at most n = {n}, got {int(lengths.max())}")
            return torch.arange(n, device=lengths.device) < lengths.unsqueeze(-1)
        if queries.shape[-1:] != (n,):
            shape = list(queries.shape)
            raise RegardError(f"Observe queries has shape {shape}; give lengths [B] or bool [B, {n}] with True = real")
        return queries


class SavedCallProtocol(Protocol):
    """What ``Observe(keep=True)`` stores of one call.

    ``regard._saved_call`` implements it. It is a protocol because the kernels import this module, so this module cannot
    import them.
    """

    @property
    def batch_size(self) -> int: ...

    def weights(self, batch: int, head: int, rows: Index, keys: Index) -> Tensor: ...

    def tile(self, batch: int, head: int, rows: Index, keys: Index, size: int, counted: Tensor) -> Tensor: ...

    def visible(self, batch: int, head: int, rows: Index, keys: Index) -> Tensor: ...


@register_pytree
@dataclass(frozen=True, repr=False, eq=False)
class Observation:
    """The measurements of one or more attention calls.

    The row values and the values per head are attributes with these names and shapes; None means not measured:

    - ``lse, logit_max, entropy, peak, peak_at, offset, distance, sink, local, visible``: row values,
      ``[B, H, n]``.
    - ``key_mass [H, m]``, ``map [H, g, g]``, ``profile [H, 2r + 1]``, ``top`` and ``top_at [B, H, n, k]``.
    - ``groups [B, H, n, C]``: the weight of each row on each group of ``observe.groups``.
    - ``counted [B, H, n]``: True for the rows that count (a real query that sees at least one key). ``rows [H]``: the
      number of these rows per head.
    - ``map_rows [H, g]``, ``profile_rows``: how many rows were averaged for each row bin of the map, and for
      each offset of the profile.
    - ``value_norm [B, H, m]``: ‖v_j W_O‖, the size of key j's value after the output projection. ``regard.watch``
      fills it in, because the operator does not know W_O.
    - ``n``, ``m``: the numbers of queries and keys. If calls of unequal n or m were merged, ``n``, ``m`` and the row
      values are None.
    - ``saved_calls``: q, k and options of each call, if ``Observe(keep=True)``.

    >>> x = torch.eye(4).reshape(1, 1, 4, 4)
    >>> _, observation = regard.attention(x, x, x, mask=regard.Causal(), scale=0, observe=Observe(map=2))
    >>> observation
    Observation of 4 queries and 4 keys: rows [1], lse [1, 1, 4], ... map [1, 2, 2], map_rows [1, 2]
    >>> observation.map[0]  # the first two rows see the first two keys alone
    tensor([[1.0000, 0.0000],
            [0.5833, 0.4167]])
    """

    observe: Observe
    n: int | None
    m: int | None
    rows: Tensor
    lse: Tensor | None = None
    logit_max: Tensor | None = None
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
    groups: Tensor | None = None
    value_norm: Tensor | None = None
    saved_calls: tuple[SavedCallProtocol, ...] = ()

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers of the measured heads, in the order of the head dimension of all values."""
        return tuple(range(self.rows.shape[0])) if self.observe.heads is None else self.observe.heads

    def head_index(self, head: int) -> int:
        """Return the index of a head in the head dimension of all values.

        >>> x = torch.randn(1, 4, 5, 3)
        >>> _, observation = regard.attention(x, x, x, observe=Observe(heads=(3, 1)))
        >>> observation.head_index(1), observation.entropy[0, observation.head_index(1)].shape
        (1, torch.Size([5]))
        """
        check_integer("head", head)
        if head not in self.heads:
            known = ", ".join(map(str, self.heads)) if self.observe.heads else f"0 … {len(self.heads) - 1}"
            raise RegardError(f"head is {head}; this observation has heads {known}")
        return self.heads.index(head)

    def __repr__(self) -> str:
        """Show names and shapes only: the tensors may have millions of elements."""
        parts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                parts.append(f"{field.name} {list(value.shape)}")
        if self.saved_calls:
            parts.append("keeps q and k")
        return f"Observation of {self.n} queries and {self.m} keys: {', '.join(parts)}"

    def mean(self, name: str) -> Tensor:
        """Return the mean of a row value over the rows that count, ``[H]`` (NaN for a head without such rows).

        ``"groups"`` gives the mean weight on each group, ``[H, C]``.

        >>> x = torch.randn(1, 2, 5, 3)
        >>> _, observation = regard.attention(x, x, x, mask=regard.Causal(), observe=Observe())
        >>> observation.mean("visible")  # 1 + 2 + 3 + 4 + 5 keys, over 5 rows
        tensor([3., 3.], dtype=torch.float64)
        """
        names = (*ROW_VALUES, "groups")
        values = getattr(self, name) if name in names else None
        if values is None or self.counted is None:
            known = [row_value for row_value in names if getattr(self, row_value) is not None]
            available = ", ".join(known) or "none, because calls of unequal n were merged"
            raise RegardError(f"there is no row value {name!r} here; available: {available}")
        counted = self.counted
        if name == "distance" and self.observe.grid is not None:
            counted = counted & self._on_grid()  # the row of a class token has no distance
        if name == "groups":
            counted = counted.unsqueeze(-1)
        total = torch.where(counted, widest(values), 0).sum((0, 2))
        return total / counted.sum((0, 2))

    def group_map(self, queries: Groups | None = None) -> Tensor:
        """Return the mean weight of the rows of each group on each group, ``[H, C, C]``, measured with ``groups``.

        Row a is the mean over the counted queries of group a; it is NaN if there is none.

        - ``queries``: the groups of the queries; by default query i is in the group of key i + offset (``Observe``).
          Cross-attention needs them, because its queries are of another sequence than its keys.

        >>> groups = regard.Groups({"first": slice(0, 2), "rest": slice(2, 4)})
        >>> x = torch.zeros(1, 1, 4, 2)
        >>> _, observation = regard.attention(x, x, x, mask=regard.Causal(), observe=Observe(groups=groups))
        >>> observation.group_map()[0]  # rows 0 and 1 see the group "first" alone
        tensor([[1.0000, 0.0000],
                [0.5833, 0.4167]], dtype=torch.float64)
        """
        groups = self.observe.groups
        values = self.groups
        counted = self.counted
        if groups is None or values is None or counted is None or self.n is None or self.m is None:
            raise RegardError(
                "group_map needs Observe(groups=…), and calls that can be joined: equal n, and known keys"
            )
        offset = resolve_offset(self.n, self.m, self.observe.offset)
        return group_map(values, counted, groups, self.m, offset, queries)

    def _on_grid(self) -> Tensor:
        """Return which query rows are cells of the grid, bool ``[n]``."""
        assert self.n is not None and self.m is not None and self.observe.grid is not None
        height, width = self.observe.grid
        positions = torch.arange(self.n, device=self.rows.device)
        positions = positions + resolve_offset(self.n, self.m, self.observe.offset)
        return (positions >= self.m - height * width) & (positions < self.m)

    def merge(self, *others: Observation) -> Observation:
        """Merge this observation with others into one observation of all calls.

        Row values are concatenated along the batch. Values per head are averaged, weighted by the number of rows that
        count. All calls must have the same ``Observe`` options and the same number of heads; groups may have other
        keys if their names are the same. If n or m differ, only maps and profiles are merged; the other values become
        None.

        >>> short, long = torch.randn(1, 2, 5, 3), torch.randn(1, 2, 11, 3)
        >>> first, second = (regard.attention(x, x, x, observe=Observe(map=4))[1] for x in (short, long))
        >>> both = first.merge(second)
        >>> both.rows, both.map.shape, both.entropy
        (tensor([16, 16]), torch.Size([2, 4, 4]), None)
        """
        merged = self
        for other in others:
            if not isinstance(other, Observation):
                raise RegardTypeError(f"an observation merges with observations, got {type(other).__name__}")
            merged = merge_pair(merged, other, ROW_VALUES)
        return merged

    def weights(self, head: int, rows: Index = None, keys: Index = None, *, batch: int = 0) -> Tensor:
        """Compute the exact weights ``A[rows, keys]`` of one head. Needs ``Observe(keep=True)``.

        - ``head``: the head's number.
        - ``rows``, ``keys``: an integer (negative ones count from the end), a slice, a range, a list, or None for all.
        - ``batch``: the batch entry.

        >>> x = torch.eye(3).reshape(1, 1, 3, 3)
        >>> _, observation = regard.attention(x, x, x, mask=regard.Causal(), scale=0, observe=Observe(keep=True))
        >>> observation.weights(head=0, rows=-1, keys=slice(0, 2))
        tensor([[0.3333, 0.3333]])
        """
        call, entry = self.find_saved_call(batch)
        return call.weights(entry, self.head_index(head), rows, keys)

    def tile(self, head: int, rows: Index = None, keys: Index = None, size: int = 64, *, batch: int = 0) -> Tensor:
        """Pool a region to at most ``size × size`` cells as in ``map``: rows by mean, keys by sum.

        A region of at most ``size × size`` weights is not pooled: its cells are exact weights. Rows that do not count
        (padding) are left out as in ``map``; cells that contain only such rows are 0.

        >>> x = torch.eye(4).reshape(1, 1, 4, 4)
        >>> _, observation = regard.attention(x, x, x, mask=regard.Causal(), scale=0, observe=Observe(keep=True))
        >>> observation.tile(head=0, rows=slice(2, 4), size=2)  # two rows, keys in two bins
        tensor([[0.6667, 0.3333],
                [0.5000, 0.5000]])
        """
        check_integer("size", size, least=1)
        call, entry = self.find_saved_call(batch)
        if self.counted is None:
            raise RegardError("tiles need equal n in all merged calls; use the separate observations instead")
        index = self.head_index(head)
        return call.tile(entry, index, rows, keys, size, self.counted[batch, index])

    def visible_keys(self, head: int, rows: Index = None, keys: Index = None, *, batch: int = 0) -> Tensor:
        """Return which keys each row may attend to, bool ``[rows, keys]``.

        A weight of 0 does not answer this: the weight of a visible key can underflow to 0.

        >>> x = torch.eye(2).reshape(1, 1, 2, 2)
        >>> _, observation = regard.attention(x, x, x, mask=regard.Causal(), observe=Observe(keep=True))
        >>> observation.visible_keys(head=0)
        tensor([[ True, False],
                [ True,  True]])
        """
        call, entry = self.find_saved_call(batch)
        return call.visible(entry, self.head_index(head), rows, keys)

    def value_weighted(self, head: int, rows: Index = None, keys: Index = None, *, batch: int = 0) -> Tensor:
        """Compute ``A_ij ‖v_j W_O‖``: each weight times the norm of the value that it multiplies, after W_O.

        The norms are ``value_norm``, which ``regard.watch(model, Observe(keep=True), values=True)`` measures.

        >>> model, x = regard.nn.MultiHeadAttention(6, heads=3), torch.randn(1, 5, 6)
        >>> x[0, 2] = 0  # this token has no value: its weights add nothing to the output
        >>> with regard.watch(model, Observe(keep=True), values=True) as recording:
        ...     y = model(x)
        >>> recording[0].value_weighted(head=1)[:, 2]
        tensor([0., 0., 0., 0., 0.])
        """
        if self.value_norm is None:
            raise RegardError(
                "value_norm is unknown: it needs regard.watch(model, observe, values=True), and one linear layer that "
                "reads the output of the heads (docs/interp.md)"
            )
        weights = self.weights(head, rows, keys, batch=batch)
        norms = self.value_norm[batch, self.head_index(head)]
        # Norms are per key, so they need the same selection of keys as the weights.
        norms = norms[index_tensor(keys, len(norms), "keys")]
        return weights * norms.to(weights.dtype)

    def find_saved_call(self, batch: int) -> tuple[SavedCallProtocol, int]:
        """Return the saved call that contains a batch entry, and the index of the entry within that call."""
        if not self.saved_calls:
            raise RegardError(
                "exact weights need q and k: observe with Observe(keep=True); if that was given, the calls of this "
                "layer cannot be joined, and recording.calls has each of them"
            )
        total = sum(call.batch_size for call in self.saved_calls)
        if check_integer("batch", batch) >= total:
            raise RegardError(f"batch is {batch}; this observation has batch entries 0 … {total - 1}")
        # Merged calls are numbered one after the other.
        for call in self.saved_calls:
            if batch < call.batch_size:
                return call, batch
            batch -= call.batch_size
        raise AssertionError("unreachable: batch was checked against the total")


def index_tensor(index: Index, size: int, name: str) -> Tensor:
    """Rows or keys as a vector of indices; None means all, negative numbers count from the end."""
    if index is None:
        return torch.arange(size)
    if isinstance(index, slice):
        return torch.tensor(range(size)[index], dtype=torch.int64)
    if isinstance(index, range):
        index = list(index)
    indices = as_tensor(name, index)
    if indices.ndim == 0:
        indices = indices.reshape(1)
    # An empty tensor has torch's default dtype, which is a float, but it is a valid selection.
    empty = indices.numel() == 0 and indices.is_floating_point()
    if indices.ndim != 1 or not (empty or is_integer_dtype(indices.dtype)):
        raise RegardTypeError(f"{name} must be an integer, a slice, a range or a list of integers, got {index!r}")
    indices = indices.long()
    if bool(((indices < -size) | (indices >= size)).any()):
        raise RegardError(f"{name} must be within 0 … {size - 1}, got {index!r}")
    return torch.where(indices < 0, indices + size, indices)
