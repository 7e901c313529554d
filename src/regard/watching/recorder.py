"""Who is watched and where it stands: the part that all kinds of watching share."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.observables import Observation, Observe
from regard.watching.seen import Seen

__all__ = ["Layers", "Recorder"]

Layers = str | Sequence[str] | Callable[[str], bool] | None
CROSS = ("cross", "encdec", "encoder_attn")  # how models name attention over another sequence


class Recorder:
    """What to observe, at which module paths, and what was seen there."""

    def __init__(self, model: nn.Module, observe: Observe, layers: Layers) -> None:
        self.observe, self.seen = observe, Seen(model=type(model).__name__)
        self.paths = {module: path for path, module in model.named_modules()}
        self._layers = layers
        self._reached: set[str] = set()

    def wants(self, path: str) -> bool:
        """Whether a module's calls are observed."""
        self._reached.add(path)
        if self._layers is None:
            return True
        if callable(self._layers):
            return bool(self._layers(path))
        patterns = [self._layers] if isinstance(self._layers, str) else self._layers
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

    def spec(self, path: str, n: int) -> Observe:
        """What to observe there: in cross-attention the padding of the keys says nothing of the queries."""
        if self.observe.queries is None and any(word in path.lower() for word in CROSS):
            return replace(self.observe, queries=(n,))
        return self.observe

    def add(self, path: str, observation: Observation) -> None:
        """Keep an observation, as what was asked for: calls of one module merge only if they observed alike.

        Gradient checkpointing runs a layer again while gradients are computed; it must do the same as before, but has
        been seen already.
        """
        if torch._C._current_graph_task_id() == -1:
            self.seen.add(path, replace(observation, observe=replace(self.observe, queries=None)))

    def check(self) -> None:
        """Layers were chosen, and none of that name was reached: say so, with the names there are."""
        if self._layers is not None and self._reached and not self.seen.calls:
            some = ", ".join(sorted(self._reached)[:6])
            raise ValueError(f"no layer matches {self._layers!r}; attention was computed at {some}")


def first(result: Tensor | tuple[Tensor, Observation]) -> tuple[Tensor, Observation]:
    """An observed result, which is always a pair."""
    assert not isinstance(result, Tensor)
    return result
