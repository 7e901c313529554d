"""Key tables: which tensor of a checkpoint is which parameter of our model, for loading and for saving."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from regard._errors import RegardError

TensorLookup = Callable[[str], Tensor | None]  # a key of the checkpoint → its tensor; None if the files have none


@dataclass(frozen=True)
class Key:
    """One line of a key table. The name of a module stands for its weight and its bias.

    - ``ours``: name of our parameter or module. With several names, the checkpoint stores
      their tensors as one, concatenated along the output features.
    - ``theirs``: name in the checkpoint. ``{i}`` is the layer's number in both names.
    - ``transposed``: the checkpoint stores weights as ``[in, out]``, as GPT-2 does (default False).
    - ``leading``: number of dimensions of size 1 that the checkpoint puts before ours (default 0).
    """

    ours: str | tuple[str, ...]
    theirs: str
    transposed: bool = False
    leading: int = 0


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint and the names of the parameters that it contains."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool
    leading: int

    def read(self, stored: Tensor, params: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, view of the stored tensor) for each parameter; raises if the shape is wrong."""
        expected = self.stored_shape(params)
        if list(stored.shape) != expected:
            raise RegardError(f"{self.theirs} has shape {list(stored.shape)}, but the config makes it {expected}")
        # Views only: a loaded parameter stays in the mapped file.
        x = self._transpose(stored.view(expected[self.leading :]))
        parts = [x]
        if len(self.ours) > 1:
            parts = list(x.split([params[name].shape[0] for name in self.ours]))
        yield from zip(self.ours, parts, strict=True)

    def write(self, params: Mapping[str, Tensor]) -> Tensor:
        """The contiguous tensor to store; several parameters are concatenated."""
        parts = [params[name].detach() for name in self.ours]
        x = torch.cat(parts) if len(parts) > 1 else parts[0]
        x = self._transpose(x).contiguous()
        return x.view([1] * self.leading + list(x.shape))

    def stored_shape(self, params: Mapping[str, Tensor]) -> list[int]:
        """The shape in the checkpoint."""
        shape = list(params[self.ours[0]].shape)
        if len(self.ours) > 1:
            shape[0] = sum(params[name].shape[0] for name in self.ours)
        if self.transposed and len(shape) == 2:
            shape.reverse()
        return [1] * self.leading + shape

    def _transpose(self, x: Tensor) -> Tensor:
        if self.transposed and x.ndim == 2:  # biases are not transposed
            return x.T
        return x


@dataclass(frozen=True)
class KeyTable:
    """The keys of a model family, and how its files may differ from them.

    - ``keys``: one ``Key`` per tensor, or per module.
    - ``prefix``: what comes before the keys of the base model if there is a head, e.g. ``"bert."``. Files with and
      without it are read.
    - ``unprefixed``: architectures that are saved without the prefix.
    - ``renames``: older or newer names as (pattern, replacement), replaced before anything else.
    - ``ignored``: patterns of tensors that are not parameters: position counters, masks.
    - ``tied``: a tensor that some files store twice → the one that it must be equal to.
    """

    keys: Sequence[Key]
    prefix: str = ""
    unprefixed: Sequence[str] = ()
    renames: Sequence[tuple[str, str]] = ()
    ignored: Sequence[str] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    def stored_tensors(self, model: nn.Module) -> list[StoredTensor]:
        """Every tensor of a checkpoint of this model."""
        params = dict(model.named_parameters(remove_duplicate=False))
        tensors: list[StoredTensor] = []
        for key in self.keys:
            names = (key.ours,) if isinstance(key.ours, str) else key.ours
            for i in _layer_numbers(names[0], params):
                ours = [name.format(i=i) for name in names]
                theirs = key.theirs.format(i=i)
                # A name is a parameter itself, or a module with a weight and perhaps a bias.
                for suffix in ("", ".weight", ".bias"):
                    full = tuple(name + suffix for name in ours)
                    if all(name in params for name in full):
                        tensors.append(StoredTensor(theirs + suffix, full, key.transposed, key.leading))
        return tensors

    def canonical(self, name: str) -> str | None:
        """A file's tensor name in the spelling of this table; None if it is not a parameter."""
        # Renames come first, so that ignored patterns need only one spelling.
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        if any(re.search(pattern, name) for pattern in self.ignored):
            return None
        return name

    def find(self, key: str, file_names: Mapping[str, str]) -> str | None:
        """The file's own name of a key, with or without the prefix; ``file_names`` is by canonical name."""
        return file_names.get(key) or file_names.get(key.removeprefix(self.prefix))


def _layer_numbers(name: str, params: Iterable[str]) -> list[int]:
    """The layers that exist for a name with ``{i}``; [0] for a name without."""
    if "{i}" not in name:
        return [0]
    before = name[: name.index("{i}")]  # e.g. "decoder.blocks."
    return sorted({int(param[len(before) :].split(".")[0]) for param in params if param.startswith(before)})
