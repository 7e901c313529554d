"""The visitor that records: what to observe, at which module paths, and what was seen there."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from regard.observables import Observation, Observe
from regard.watching.chosen import ChosenHeads, Head
from regard.watching.moved import Norms
from regard.watching.seen import Seen
from regard.watching.visitor import Visitor, again

__all__ = ["Layers", "Recorder"]

Layers = str | Sequence[str] | Callable[[str], bool] | None


class Recorder(Visitor):
    """Puts what is observed at the wanted places into ``seen``."""

    def __init__(
        self, model: nn.Module, observe: Observe, layers: Layers, heads: Iterable[Head] | None, values: bool
    ) -> None:
        super().__init__(model)
        if not (layers is None or isinstance(layers, str | Sequence) or callable(layers)):
            raise TypeError(f"layers must be a pattern such as '*.layers.3.*', several, or a function, got {layers!r}")
        if heads is not None and observe.heads is not None:
            raise ValueError("heads were given twice, in observe and as heads=; give them once")
        self.observe, self.seen = observe, Seen(model=type(model).__name__)
        self.norms = Norms(model, self.paths, self.seen) if values else None
        self._layers, self._heads = layers, None if heads is None else ChosenHeads(heads)
        self.reached: dict[str, None] = {}  # in order
        self._sources: dict[str, Tensor] = {}

    def wants(self, path: str) -> bool:
        self.reached[path] = None
        if self._heads is not None and not self._heads.of(path):
            return False
        if self._layers is None:
            return True
        if callable(self._layers):
            return bool(self._layers(path))
        patterns = [self._layers] if isinstance(self._layers, str) else self._layers
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

    def may_want(self, path: str) -> bool:
        # Places are numbered as they are called, so that with chosen heads all calls must be met.
        return self._heads is not None or self.wants(path)

    def spec(self, path: str, q: Tensor, k: Tensor, cross: bool, queries: Tensor | None) -> Observe:
        asked = self._asked(path)
        if cross:
            self._note_cross(path, k)
        return asked if queries is None or asked.queries is not None else replace(asked, queries=queries)

    def leave(self, path: str, out: Tensor, v: Tensor) -> Tensor:
        return out if self.norms is None or again() else self.norms.take(path, out, v)

    def add(self, path: str, observation: Observation) -> None:
        """Keep an observation, as what was asked for: calls of one module merge only if they observed alike."""
        if not again():
            self.seen.add(path, replace(observation, observe=replace(self._asked(path), queries=None)))

    def check(self) -> None:
        """Layers or heads were chosen, and none of that name was reached: say so, with the names there are."""
        if self._layers is not None and self.reached and not self.seen.calls:
            some = ", ".join(list(self.reached)[:6]) + (" …" if len(self.reached) > 6 else "")
            raise ValueError(
                f"no layer matches {self._layers!r}; attention was computed at {some} ({len(self.reached)} places)"
            )
        if self._heads is not None:
            self._heads.check()

    def _note_cross(self, path: str, k: Tensor) -> None:
        """``about["cross"]``: whether all calls of a place looked at one source, whose keys then stay in one place."""
        known: dict[str, bool] = self.seen.about.setdefault("cross", {})
        last = self._sources.get(path)
        known[path] = last is None or (known[path] and last.data_ptr() == k.data_ptr() and last.shape == k.shape)
        self._sources[path] = k

    def _asked(self, path: str) -> Observe:
        return self.observe if self._heads is None else replace(self.observe, heads=self._heads.of(path))
