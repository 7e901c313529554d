"""The endpoint table of the lab: each entry has a path, the schema of its request, and its handler.

It is built on starlette and msgspec. Litestar 2.25 would replace this module and openapi.py, but it needs 12 more
packages (4.4 MB of wheels instead of 0.1 MB for starlette), and its import takes 340 ms instead of 60 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from regard.lab.workspace import Workspace


class Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base class of request schemas: every field has a type and bounds, and unknown fields are refused."""


class NoFields(Request, frozen=True):
    """A request without fields."""


class NotFound(LookupError):
    """The requested item is not open, or no longer exists. HTTP status 404.

    - ``reopen``: the id with which ``/api/workspace/undo`` opens it again; None if it cannot be opened again.
    """

    def __init__(self, message: str, reopen: str | None = None) -> None:
        super().__init__(message)
        self.reopen = reopen


class TooManyRequests(RuntimeError):
    """The queue is full. HTTP status 429."""


@dataclass(frozen=True)
class BinaryResponse:
    """A response that is not JSON: raw numbers, or a file to download."""

    data: bytes
    media_type: str = "application/octet-stream"
    headers: tuple[tuple[str, str], ...] = ()  # further headers, as (name, value) pairs


def float32_response(values: Tensor) -> BinaryResponse:
    """Return a tensor as little-endian float32 values, with its shape in the header ``x-shape``."""
    data = values.detach().float().contiguous().numpy().astype("<f4", copy=False).tobytes()
    shape = ",".join(map(str, values.shape))
    return BinaryResponse(data, headers=(("x-shape", shape),))


@dataclass(frozen=True)
class Endpoint:
    """One entry of the table. Its handler runs in a thread and returns plain data or a ``BinaryResponse``."""

    method: str  # "GET": fields come from the query string; "POST": fields come from a JSON body
    path: str
    request_type: type[Request]
    handler: Callable[[Workspace, Any], Any]  # handler(workspace, request)

    @property
    def summary(self) -> str:
        """The first line of the handler's docstring."""
        return (self.handler.__doc__ or "").strip().split("\n")[0]


class Endpoints:
    """A table of endpoints that is filled by decorators.

    >>> table = Endpoints()
    >>> @table.get("/api/hello")
    ... def hello(workspace, request):
    ...     "Say hello."
    ...     return {"hello": True}
    >>> [(endpoint.method, endpoint.path, endpoint.summary) for endpoint in table.all]
    [('GET', '/api/hello', 'Say hello.')]
    """

    def __init__(self) -> None:
        self.all: list[Endpoint] = []

    def get(self, path: str, request_type: type[Request] = NoFields) -> Callable[[Any], Any]:
        """Register the decorated function as the handler of GET requests to ``path``."""
        return self._register("GET", path, request_type)

    def post(self, path: str, request_type: type[Request] = NoFields) -> Callable[[Any], Any]:
        """Register the decorated function as the handler of POST requests to ``path``."""
        return self._register("POST", path, request_type)

    def _register(self, method: str, path: str, request_type: type[Request]) -> Callable[[Any], Any]:
        def register(handler: Any) -> Any:
            self.all.append(Endpoint(method, path, request_type, handler))
            return handler

        return register
