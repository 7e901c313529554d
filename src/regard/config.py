"""``config.json`` of a model, read with checks: every error names the entry, what it is and what it should be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["LARGEST_JSON", "Config", "read_json"]

_MISSING: Any = object()
MOST_LAYERS = 1024
LARGEST_JSON = 64 * 2**20


def read_json(file: Path) -> dict[str, Any]:
    """The entries of a JSON file; what is too large, no JSON or no table is refused by name."""
    if file.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{file} has {file.stat().st_size:,} bytes; that is no {file.name} of a model")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds {type(found).__name__}; it must be a table of entries")
    return found


class Config(dict[str, Any]):
    """The entries of a ``config.json``, or of another ``file``; ``None`` (JSON's null) counts as absent.

    >>> Config(hidden_size=12).whole("hidden_size")
    12
    """

    file = "config.json"

    @property
    def kind(self) -> str:
        """``model_type``, which names the family."""
        return self.name("model_type")

    @property
    def architecture(self) -> str:
        """The first of ``architectures``, the class that wrote the checkpoint; "" if none is named."""
        named = self.get("architectures") or [""]
        if not isinstance(named, list) or not isinstance(named[0], str):
            raise ValueError(f"{self.file}: architectures is {named!r}; it must be a list of names")
        return named[0]

    def whole(self, name: str, default: int = _MISSING, least: int = 1) -> int:
        """A whole number ≥ ``least``, and below 2³¹, as every size of a model is."""
        found = self._found(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 2**31:
            raise ValueError(f"{self.file}: {name} is {_shown(found)}; it must be a whole number ≥ {least}, below 2³¹")
        return found

    def layers(self, name: str, default: int = _MISSING) -> int:
        """How many layers there are: some, and not more than any model has, for each is built before it is read."""
        found = self.whole(name, default)
        if found > MOST_LAYERS:
            raise ValueError(f"{self.file}: {name} is {found:,}; at most {MOST_LAYERS:,} layers are read")
        return found

    def real(self, name: str, default: float = _MISSING, least: float = 0.0) -> float:
        """A finite number ≥ ``least``."""
        found = self._found(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found < 1e300:
            raise ValueError(f"{self.file}: {name} is {_shown(found)}; it must be a finite number ≥ {least:g}")
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        found = self._found(name, default)
        if not isinstance(found, bool):
            raise ValueError(f"{self.file}: {name} is {found!r}; it must be true or false")
        return found

    def name(self, name: str, default: str = _MISSING) -> str:
        """A text."""
        found = self._found(name, default)
        if not isinstance(found, str):
            raise ValueError(f"{self.file}: {name} is {found!r}; it must be a text")
        return found

    def part(self, name: str) -> Config:
        """A nested table; empty if there is none."""
        found = self._found(name, {})
        if not isinstance(found, Mapping):
            raise ValueError(f"{self.file}: {name} is {found!r}; it must be a table")
        part = Config(found)
        part.file = self.file
        return part

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; none if absent."""
        found = self._found(name, [])
        found = found if isinstance(found, list) else [found]
        if any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in found):
            raise ValueError(f"{self.file}: {name} is {found!r}; it must be a token id or a list of them")
        return tuple(found)

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """(height, width) from one number or two."""
        found = self._found(name, default)
        two = list(found) if isinstance(found, list | tuple) else [found, found]
        if len(two) != 2 or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in two):
            raise ValueError(f"{self.file}: {name} is {found!r}; it must be a whole number ≥ 1 or two of them")
        return two[0], two[1]

    def refuse(self, name: str, why: str) -> None:
        """Raise if an entry is on: this library does not do it, and must not ignore it."""
        if self.get(name):
            raise ValueError(f"{self.file}: {name} is {self[name]!r}; {why}")

    def _found(self, name: str, default: Any) -> Any:
        found = self.get(name)
        if found is None and default is _MISSING:
            raise ValueError(f"{self.file} has no {name}; a {self.get('model_type', 'model')} needs one")
        return default if found is None else found


def _shown(found: object) -> str:
    """A value in an error of one line: not all digits of a number of a thousand."""
    said = repr(found)
    return said if len(said) <= 40 else said[:37] + "…"
