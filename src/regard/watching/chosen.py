"""Heads by name: ``[(layer, head), …]``, a layer being a module path or its number in the order of the calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from regard.shapes import integer

__all__ = ["ChosenHeads", "Head"]

Head = tuple[int | str, int]


class ChosenHeads:
    """Which heads of which places; places are numbered as they are reached, the first is 0."""

    def __init__(self, heads: Iterable[Head]) -> None:
        self.pairs: list[Head] = [_checked(pair) for pair in heads]
        if not self.pairs:
            raise ValueError("no heads were given; give pairs such as (3, 0): layer 3, head 0")
        self.places: list[str] = []
        self._found: set[int | str] = set()

    def of(self, path: str) -> tuple[int, ...]:
        """The chosen heads of a place, () if there are none."""
        if path not in self.places:
            self.places.append(path)
        names = (path, self.places.index(path))
        self._found |= {layer for layer, _ in self.pairs if layer in names}
        return tuple(dict.fromkeys(head for layer, head in self.pairs if layer in names))

    def check(self) -> None:
        """Every layer that was named has been reached; else say which there are."""
        missing = [layer for layer, _ in self.pairs if layer not in self._found]
        if missing and self.places:
            some = ", ".join(self.places[:6]) + (" …" if len(self.places) > 6 else "")
            raise ValueError(
                f"there is no layer {missing[0]!r}; attention was computed at {len(self.places)} places: {some}"
            )


def _checked(pair: Any) -> Head:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"a head is a pair (layer, head) such as (3, 0), got {pair!r}")
    layer, head = pair
    if not isinstance(layer, str):
        layer = integer("layer", layer, least=0)
    return layer, integer("head", head, least=0)
