"""Key tables: which tensor of a checkpoint is which parameter of ours, for reading and for writing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["Key", "Stored", "Table"]

Stored = Callable[[str], Tensor | None]  # a key → what the files hold under it


@dataclass(frozen=True)
class Key:
    """``theirs`` holds what ``ours`` holds; both may be modules, and stand for their weight and bias then.

    - ``{i}`` counts layers on both sides.
    - ``ours`` with several names: they lie side by side in ``theirs``, along the output features.
    - ``transposed``: weights are stored ``[in, out]``, as GPT-2's are.
    - ``leading``: so many dimensions of size 1 stand before ours in what is stored.
    """

    ours: str | tuple[str, ...]
    theirs: str
    transposed: bool = False
    leading: int = 0


@dataclass(frozen=True)
class Pair:
    """One tensor of a checkpoint and the parameters it is made of."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool
    leading: int

    def read(self, stored: Tensor, params: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Views of a stored tensor, one a parameter; a shape that disagrees raises."""
        expected = self.stored_shape(params)
        if list(stored.shape) != expected:
            raise ValueError(f"{self.theirs} has shape {list(stored.shape)}, but config.json makes it {expected}")
        x = stored.view(expected[self.leading :])
        x = x.T if self.transposed and x.ndim == 2 else x
        sizes = [params[name].shape[0] for name in self.ours]
        yield from zip(self.ours, [x] if len(sizes) == 1 else x.split(sizes), strict=True)

    def write(self, params: Mapping[str, Tensor]) -> Tensor:
        """The tensor to store: contiguous, memory of its own where it is put together."""
        parts = [params[name].detach() for name in self.ours]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        x = (x.T if self.transposed and x.ndim == 2 else x).contiguous()
        return x.view([1] * self.leading + list(x.shape))

    def stored_shape(self, params: Mapping[str, Tensor]) -> list[int]:
        shapes = [list(params[name].shape) for name in self.ours]
        shape = [sum(s[0] for s in shapes), *shapes[0][1:]] if len(shapes) > 1 else shapes[0]
        return [1] * self.leading + (shape[::-1] if self.transposed and len(shape) == 2 else shape)


@dataclass(frozen=True)
class Table:
    """A family's keys, and how its files may differ from them.

    - ``prefix``: what stands before the keys of the base model where a head is on top, ``"bert."``. Files have it or
      not; both are read. Architectures in ``bare`` are written without it.
    - ``spellings``: older or newer names, as (pattern, replacement), put right before anything else.
    - ``unused``: patterns of tensors that are no parameters: position counters, masks.
    - ``copies``: a tensor that some files hold twice → the one it must be equal to, because the two are tied.
    """

    keys: Sequence[Key]
    prefix: str = ""
    bare: Sequence[str] = ()
    spellings: Sequence[tuple[str, str]] = ()
    unused: Sequence[str] = ()
    copies: Mapping[str, str] = field(default_factory=dict)

    def pairs(self, model: nn.Module) -> list[Pair]:
        """Every tensor that a checkpoint of this very model holds."""
        params = dict(model.named_parameters(remove_duplicate=False))
        found: list[Pair] = []
        for key in self.keys:
            for number in _layers(key, params):
                ours = [name.format(i=number) for name in ([key.ours] if isinstance(key.ours, str) else key.ours)]
                theirs = key.theirs.format(i=number)
                if all(name in params for name in ours):
                    found.append(Pair(theirs, tuple(ours), key.transposed, key.leading))
                    continue
                for part in ("weight", "bias"):
                    names = tuple(f"{name}.{part}" for name in ours)
                    if all(name in params for name in names):
                        found.append(Pair(f"{theirs}.{part}", names, key.transposed, key.leading))
        return found

    def canonical(self, name: str) -> str | None:
        """A file's name as this table spells it; None for what is no parameter."""
        for pattern, replacement in self.spellings:
            name = re.sub(pattern, replacement, name)
        return None if any(re.search(pattern, name) for pattern in self.unused) else name

    def find(self, wanted: str, there: Mapping[str, str]) -> str | None:
        """The file's own name of a wanted key, with or without the prefix."""
        return there.get(wanted) or (there.get(wanted.removeprefix(self.prefix)) if self.prefix else None)


def _layers(key: Key, params: Iterable[str]) -> list[int]:
    """The layers that a key counts: [0] where it counts none."""
    first = key.ours if isinstance(key.ours, str) else key.ours[0]
    if "{i}" not in first:
        return [0]
    before = first[: first.index("{i}")]
    return sorted({int(name[len(before) :].split(".")[0]) for name in params if name.startswith(before)})
