"""``Groups``: named groups of keys, such as the roles of a chat or the patches of an image.

``Observe(groups=…)`` measures how much weight each row has on each group:

    groups    [B, H, n, C]  Σ_{j in group c} A_ij. The sum over groups, the weight on keys in no group, and the weight
                            of a learned sink are 1 in a row that sees a key
    group_map [H, C, C]     the mean of ``groups`` over the rows that count whose query is in a group
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._checks import as_tensor, can_read_values, check_integer, describe_value, is_integer_dtype
from regard._devices import widest, widest_dtype
from regard._errors import RegardError, RegardTypeError
from regard._register_pytree import register_pytree

MOST_GROUPS = 256
NO_GROUP = -1  # the label of a key in no group

# Selects the keys of one group: one index, several, or a bool mask over all keys.
Selection = int | slice | range | Sequence[int] | Tensor


@register_pytree
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Groups:
    """Named groups of keys. A key is in one group or in none; there are at most 256 groups.

    - ``groups``: name → its keys, each as an index, a list of indices, a slice, a range, or a bool mask ``[m]`` or
      ``[B, m]``. Or the labels of all keys, integers ``[m]`` or ``[B, m]``: the number of the group of each key, −1 for
      none.
    - ``names``: with labels, the names of the groups 0, 1, 2 …; by default their numbers.
    - ``length``: the number of keys; indices from the end and slices without an end need it.

    A call may have another number of keys: further keys are in no group, and further labels are ignored. So the labels
    of a whole text serve all steps of a generation. The attributes are ``labels``, int64, and ``names``, a tuple.

    Raises ``RegardError`` if a key is in two groups, or if a label has no name.

    >>> groups = Groups({"system": slice(0, 3), "image": [4, 5]})
    >>> groups, groups.labels
    (Groups(system: 3 keys, image: 2 keys), tensor([ 0,  0,  0, -1,  1,  1]))
    >>> x = torch.zeros(1, 1, 8, 2)
    >>> _, observation = regard.attention(x, x, x, observe=regard.Observe(groups=groups))
    >>> observation.groups[0, 0, 0]  # all weights are 1/8
    tensor([0.3750, 0.2500])
    >>> Groups([0, 0, 1, -1], names=("question", "answer"))
    Groups(question: 2 keys, answer: 1 keys)
    """

    labels: Tensor
    names: tuple[str, ...]

    def __init__(
        self,
        groups: Mapping[str, Selection] | Tensor | Sequence[int] | Sequence[Sequence[int]],
        names: Sequence[str] | None = None,
        *,
        length: int | None = None,
    ) -> None:
        if isinstance(groups, Mapping):
            if names is not None:
                raise RegardError("Groups takes names with labels only; a mapping has the names already")
            if length is not None:
                check_integer("Groups length", length)
            names = _checked_names(list(groups))
            labels = _labels_of_selections(groups, length)
        else:
            if length is not None:
                raise RegardError("Groups takes length with a mapping only; labels have a length of their own")
            labels = _checked_labels(groups)
            if names is None:
                names = _numbers_as_names(labels)
            names = _checked_names(names)
            if can_read_values(labels) and labels.numel() and int(labels.max()) >= len(names):
                raise RegardError(
                    f"Groups labels must be less than {len(names)}, the number of names, got {int(labels.max())}"
                )
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "names", names)

    @classmethod
    def _unchecked(cls, labels: Tensor, names: tuple[str, ...]) -> Groups:
        """Groups with labels that were checked before, or whose values cannot be read."""
        groups = object.__new__(cls)
        object.__setattr__(groups, "labels", labels)
        object.__setattr__(groups, "names", names)
        return groups

    def __len__(self) -> int:
        """The number of groups."""
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        """Whether names and labels are equal."""
        if not isinstance(other, Groups):
            return NotImplemented
        if self.names != other.names or self.labels.shape != other.labels.shape:
            return False
        return self.labels is other.labels or torch.equal(self.labels.cpu(), other.labels.cpu())

    def __hash__(self) -> int:
        return hash((self.names, tuple(self.labels.shape)))

    def __repr__(self) -> str:
        if not can_read_values(self.labels):
            return f"Groups({', '.join(self.names)})"
        sizes = self.sizes().reshape(-1, len(self)).sum(0).tolist()
        return f"Groups({', '.join(f'{name}: {size} keys' for name, size in zip(self.names, sizes, strict=True))})"

    def index(self, name: str) -> int:
        """Return the number of a group.

        >>> Groups({"system": [0, 1], "user": [2]}).index("user")
        1
        """
        if name not in self.names:
            raise RegardError(f"there is no group {name!r}; the groups are {', '.join(self.names)}")
        return self.names.index(name)

    def sizes(self) -> Tensor:
        """Return how many keys each group has, ``[C]``, or ``[B, C]`` if the labels differ within a batch.

        >>> Groups({"system": [0, 1], "user": [2]}).sizes()
        tensor([2, 1])
        """
        return (self.labels.unsqueeze(-1) == torch.arange(len(self), device=self.labels.device)).sum(-2)

    def for_keys(self, m: int) -> Tensor:
        """Return the labels of ``m`` keys, ``[m]`` or ``[B, m]``: cut, or continued with −1.

        >>> Groups({"system": [0, 1]}).for_keys(4)
        tensor([ 0,  0, -1, -1])
        """
        labels = self.labels[..., :m]
        missing = m - labels.shape[-1]
        if missing > 0:
            labels = torch.nn.functional.pad(labels, (0, missing), value=NO_GROUP)
        return labels

    def for_call(self, batch: int, m: int, device: torch.device) -> Groups:
        """Return the groups of one call: labels ``[batch or 1, m]`` on a device, contiguous."""
        labels = self.for_keys(m)
        if labels.ndim == 1:
            labels = labels.unsqueeze(0)
        if labels.shape[0] != 1 and labels.shape[0] != batch:
            raise RegardError(
                f"Groups has labels of {labels.shape[0]} batch entries; the call has {batch} (labels [m] are for all)"
            )
        return Groups._unchecked(labels.to(device).contiguous(), self.names)


def group_map(values: Tensor, counted: Tensor, groups: Groups, m: int, offset: int, queries: Groups | None) -> Tensor:
    """The mean of ``values [B, H, n, C]`` over the counted rows of each group of queries, ``[H, query groups, C]``.

    - ``counted [B, H, n]``: which rows count. ``m``, ``offset``: query i has the group of key i + offset of m keys …
    - ``queries``: … or its group here.
    """
    B, H, n, C = values.shape
    if queries is not None:
        count = len(queries)
        labels = _for_entries(queries.for_keys(n), B).to(values.device)
    else:
        count = len(groups)
        key_labels = _for_entries(groups.labels, B).to(values.device)
        positions = torch.arange(n, device=values.device) + offset
        # Nothing of size m is needed, which may be any number in a file.
        has_label = (positions >= 0) & (positions < min(m, key_labels.shape[1]))
        labels = torch.full((B, n), NO_GROUP, device=values.device)
        labels[:, has_label] = key_labels[:, positions[has_label]]

    # One more place takes the rows that are in no group or do not count.
    labels = torch.where(labels == NO_GROUP, count, labels)
    means = []
    # Head by head, because the sums are wider than the values, and there may be many groups.
    for head in range(H):
        rows = torch.where(counted[:, head], labels, count).flatten()
        sums = torch.zeros(count + 1, C, dtype=widest_dtype(values.device), device=values.device)
        sums.index_add_(0, rows, widest(values[:, head]).reshape(B * n, C))
        means.append(sums[:count] / rows.bincount(minlength=count + 1)[:count].unsqueeze(-1))
    return torch.stack(means)


def merged_groups(a: Groups, b: Groups, entries: tuple[int, int], m: int) -> Groups:
    """The groups of two merged calls with these numbers of batch entries: each entry keeps its own labels."""
    length = min(m, max(a.labels.shape[-1], b.labels.shape[-1]))
    labels = [_for_entries(a.for_keys(length), entries[0]).cpu(), _for_entries(b.for_keys(length), entries[1]).cpu()]
    return Groups._unchecked(torch.cat(labels), a.names)


def _for_entries(labels: Tensor, entries: int) -> Tensor:
    """Labels ``[m]`` or ``[B, m]`` for all entries of merged calls, ``[entries, m]``: each call had the same labels."""
    if labels.ndim == 1:
        labels = labels.unsqueeze(0)
    if entries % labels.shape[0]:
        raise RegardError(f"Groups has labels of {labels.shape[0]} batch entries, which do not divide {entries}")
    return labels.repeat(entries // labels.shape[0], 1)


# --- checks ----------------------------------------------------------------------------------------------------------


def _checked_names(names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise RegardTypeError(f"Groups names must be several texts, got {describe_value(names)}")
    for name in names:
        if not isinstance(name, str) or not name:
            raise RegardTypeError(f"Groups names must be texts of at least one character, got {describe_value(name)}")
    if not 1 <= len(names) <= MOST_GROUPS:
        raise RegardError(f"Groups must have between 1 and {MOST_GROUPS} groups, got {len(names)}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise RegardError(f"Groups names must be different, got {twice!r} twice")
    return tuple(names)


def _checked_labels(labels: Any) -> Tensor:
    """Labels as int64 ``[m]`` or ``[B, m]``, in memory of their own: the caller's tensor may change later."""
    x = as_tensor("Groups labels", labels)
    if not is_integer_dtype(x.dtype):
        raise RegardTypeError(f"Groups labels must be integers, got {x.dtype}; for masks give a mapping name → mask")
    if x.ndim not in (1, 2):
        raise RegardError(f"Groups labels must have shape [m] or [B, m], got {list(x.shape)}")
    if x.ndim == 2 and x.shape[0] == 0:
        raise RegardError("Groups labels [B, m] must have at least one batch entry, got 0")
    if can_read_values(x) and x.numel() and int(x.min()) < NO_GROUP:
        raise RegardError(f"Groups labels must be at least −1, which stands for no group, got {int(x.min())}")
    return x.detach().to(torch.int64, copy=True)


def _numbers_as_names(labels: Tensor) -> tuple[str, ...]:
    if not can_read_values(labels):
        raise RegardError("Groups needs names where the values of its labels cannot be read")
    largest = int(labels.max()) if labels.numel() else NO_GROUP
    # Not one name per number: a label of 10^12 would make as many.
    if not 0 <= largest < MOST_GROUPS:
        raise RegardError(f"Groups labels must have a largest number from 0 to {MOST_GROUPS - 1}, got {largest}")
    return tuple(map(str, range(largest + 1)))


def _labels_of_selections(groups: Mapping[str, Selection], length: int | None) -> Tensor:
    """The labels of named selections: ``[m]``, or ``[B, m]`` if a mask has a batch dimension."""
    masks = {name: keys for name, keys in groups.items() if isinstance(keys, Tensor) and keys.dtype == torch.bool}
    for name, mask in masks.items():
        if mask.ndim not in (1, 2) or (length is not None and mask.shape[-1] != length):
            sizes = "[m] or [B, m]" if length is None else f"[{length}] or [B, {length}]"
            raise RegardError(f"the mask of group {name!r} must have shape {sizes}, got {list(mask.shape)}")
        length = mask.shape[-1]
    indices = {name: _key_indices(name, groups[name], length) for name in groups if name not in masks}
    if length is None:
        length = max((int(keys.max()) + 1 for keys in indices.values() if keys.numel()), default=0)

    batch = {mask.shape[0] for mask in masks.values() if mask.ndim == 2}
    if len(batch - {1}) > 1:
        raise RegardError(f"the masks of Groups have different batch sizes: {sorted(batch)}")
    labels = torch.full((max(batch, default=1), length), NO_GROUP)
    for number, name in enumerate(groups):
        if name in masks:
            chosen = masks[name].cpu().expand(labels.shape)
        else:
            chosen = torch.zeros(length, dtype=torch.bool).index_fill_(0, indices[name], True).expand(labels.shape)
        taken = labels[chosen]
        if bool((taken >= 0).any()):
            other = list(groups)[int(taken.max())]
            raise RegardError(f"a key can be in one group only, but {other!r} and {name!r} have keys in common")
        labels[chosen] = number
    return labels if batch else labels[0]


def _key_indices(name: str, keys: Any, length: int | None) -> Tensor:
    """The keys of one selection as int64 indices ≥ 0."""
    if isinstance(keys, slice):
        bounds = (keys.start, keys.stop)
        from_end = keys.stop is None or any(isinstance(bound, int) and bound < 0 for bound in bounds)
        if from_end and length is None:
            raise RegardError(f"group {name!r} is {keys}, which needs length=, the number of keys")
        end = keys.stop if length is None else length
        return torch.tensor(range(end)[keys], dtype=torch.int64)
    if isinstance(keys, range):
        keys = list(keys)
    indices = as_tensor(f"the keys of group {name!r}", keys)
    # An empty tensor has torch's default dtype, which is a float.
    empty = indices.numel() == 0 and indices.dtype != torch.bool
    if indices.ndim > 1 or not (empty or is_integer_dtype(indices.dtype)):
        raise RegardTypeError(
            f"the keys of group {name!r} must be indices, a slice, a range or a bool mask, got {describe_value(keys)}"
        )
    indices = indices.reshape(-1).long().cpu()
    if bool((indices < 0).any()):
        if length is None:
            raise RegardError(f"group {name!r} has keys that count from the end, which needs length=")
        indices = torch.where(indices < 0, indices + length, indices)
    beyond = indices[(indices < 0) | (indices >= (length if length is not None else 2**31))]
    if beyond.numel():
        raise RegardError(f"group {name!r} has the key {int(beyond[0])}; the keys are 0 … {(length or 2**31) - 1}")
    return indices
