"""What the lab answers: a path, the schema of what is asked, and the function that answers; all in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from regard.lab.lab import Lab

__all__ = ["Asked", "Bytes", "Endpoint", "Endpoints", "Gone", "TooMany"]


class Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A request: every field has a type and bounds, and no other field is taken."""


class Nothing(Asked, frozen=True):
    """A request without fields."""


class Gone(LookupError):
    """What is asked for is not open here, or is no more: 404."""


class TooMany(RuntimeError):
    """More is asked for than is taken on at once: 429."""


@dataclass(frozen=True)
class Bytes:
    """An answer that is no JSON: numbers, or a file to keep under a ``name``."""

    data: bytes
    media: str = "application/octet-stream"
    name: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """``GET`` takes its fields from the query, ``POST`` from a JSON body. ``call`` runs in a thread."""

    method: str
    path: str
    asks: type[Asked]
    call: Callable[[Lab, Any], Any]

    @property
    def about(self) -> str:
        """The first line of the function's docstring."""
        return (self.call.__doc__ or "").strip().split("\n")[0]


class Endpoints:
    """Decorators that fill a table.

    >>> table = Endpoints()
    >>> @table.get("/api/hello")
    ... def hello(lab, asked):
    ...     "Says hello."
    ...     return {"hello": True}
    >>> [(x.method, x.path, x.about) for x in table.all]
    [('GET', '/api/hello', 'Says hello.')]
    """

    def __init__(self) -> None:
        self.all: list[Endpoint] = []

    def get(self, path: str, asks: type[Asked] = Nothing) -> Callable[[Any], Any]:
        return self._take("GET", path, asks)

    def post(self, path: str, asks: type[Asked] = Nothing) -> Callable[[Any], Any]:
        return self._take("POST", path, asks)

    def _take(self, method: str, path: str, asks: type[Asked]) -> Callable[[Any], Any]:
        def take(call: Any) -> Any:
            self.all.append(Endpoint(method, path, asks, call))
            return call

        return take
