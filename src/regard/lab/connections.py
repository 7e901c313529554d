"""Limits on the connections of the lab, so that slow and silent clients cannot keep others out.

uvicorn waits without a limit for the head of a request, for its body, and for a client that does not read its response;
and its own limit counts connections, so a few hundred that send nothing would block everyone. Here each of these waits
has a limit. If there are too many connections, those are closed first that never showed the token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

# The key in the scope of a request under which access control notes that the request showed the token.
ADMITTED = "regard.admitted"
# Connections that the event loop accepts before it serves the open ones again. It is not above ``from_one_client``, so
# that a connection with a request is never closed in favour of others that arrived with it.
ACCEPTED_AT_ONCE = 128
EXCESS_SECONDS = 0.05  # how long a new connection may send its request before there can be too many


@dataclass(frozen=True)
class ConnectionLimits:
    """What the lab waits for, in seconds, and how many connections it keeps open."""

    head_seconds: float = 10.0  # for the head of a request, from its first byte or from the start of the connection
    body_seconds: float = 60.0  # for the body of a request
    read_seconds: float = 60.0  # for a client that does not read its response
    idle_seconds: int = 30  # between two requests of one connection
    strangers: int = 256  # connections without a request that showed the token
    from_one_client: int = 128  # of these, connections from one address
    admitted: int = 256  # other connections, between two requests


def limited_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return the class of the connections of one server, which keep these limits together."""

    class Connection(LimitedConnection):
        pass

    Connection.limits = limits
    Connection.table = ConnectionTable(limits)
    return Connection


class LimitedConnection(H11Protocol):
    """A connection of uvicorn that is closed if its client is too slow."""

    limits: ConnectionLimits
    table: ConnectionTable

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._awaited: str | None = None  # "head" or "body" of a request, while a deadline runs for it
        self._deadline: asyncio.TimerHandle | None = None
        self._reading_check: asyncio.TimerHandle | None = None
        self._has_read = False  # whether the client has read since the last check
        self._was_admitted = False  # whether an earlier request showed the token

    @property
    def is_serving(self) -> bool:
        """Whether a request has arrived and its response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_idle(self) -> bool:
        """Whether there is no request to serve, and the client has the last response."""
        return not self.is_serving and self.transport.get_write_buffer_size() == 0

    @property
    def is_admitted(self) -> bool:
        """Whether a request of this connection showed the token."""
        return self._was_admitted or (self.scope is not None and ADMITTED in self.scope)

    # Events of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.table.add(self)
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.table.remove(self)
        for timer in (self._deadline, self._reading_check):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        self._was_admitted = self.is_admitted
        self.table.move_to_end(self)
        super().on_response_complete()
        self._update_deadline()
        self._check_reading_later()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reading_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._has_read = True

    # Slow requests

    def _update_deadline(self) -> None:
        """Start a deadline if the connection begins to wait for the head or the body of a request.

        More bytes do not extend a deadline, so a client cannot stay by sending one byte now and then.
        """
        awaited = None
        if self.is_serving:
            if self.cycle.more_body:
                awaited = "body"
        elif self.timeout_keep_alive_task is None:  # else no byte of the next request has arrived, and uvicorn waits
            awaited = "head"
        if awaited == self._awaited:
            return

        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._awaited = awaited
        if awaited is not None:
            seconds = self.limits.head_seconds if awaited == "head" else self.limits.body_seconds
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

    # Slow readers

    def _check_reading_later(self) -> None:
        """While a response is not read, check from time to time whether its client reads at all."""
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes > 0 and self._reading_check is None:
            self._has_read = False
            self._reading_check = self.loop.call_later(self.limits.read_seconds, self._check_reading, unread_bytes)

    def _check_reading(self, unread_bytes: int) -> None:
        self._reading_check = None
        if self.transport.get_write_buffer_size() >= unread_bytes and not self._has_read:
            self.transport.abort()
        else:
            self._check_reading_later()


class ConnectionTable:
    """The open connections of a server, in the order of their last response; new ones are at the end."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: dict[LimitedConnection, None] = {}  # a dict, because a set has no order
        self._pass: asyncio.TimerHandle | None = None

    def add(self, connection: LimitedConnection) -> None:
        """Add a new connection, and close others if there are too many."""
        self._open[connection] = None
        most = self.limits.strangers + self.limits.admitted
        if len(self._open) > most + ACCEPTED_AT_ONCE:
            self.close_excess()
        elif self._pass is None and len(self._open) > self.limits.from_one_client:
            # Not at once: the request of a new connection is read only after the connection was made.
            self._pass = connection.loop.call_later(EXCESS_SECONDS, self.close_excess)

    def remove(self, connection: LimitedConnection) -> None:
        """Remove a connection that is closed."""
        self._open.pop(connection, None)

    def move_to_end(self, connection: LimitedConnection) -> None:
        """Note that a connection has got a response, so that others are closed before it."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def close_excess(self) -> None:
        """Close the oldest connections beyond the limits. Requests that showed the token are never interrupted."""
        if self._pass is not None:
            self._pass.cancel()
            self._pass = None
        admitted = []
        from_client: dict[str, list[LimitedConnection]] = {}
        for connection in self._open:
            if not connection.is_admitted:
                address = connection.client[0] if connection.client is not None else ""
                from_client.setdefault(address, []).append(connection)
            elif connection.is_idle:
                admitted.append(connection)

        self._close_oldest(admitted, self.limits.admitted)
        for connections in from_client.values():
            self._close_oldest(connections, self.limits.from_one_client)
        strangers = [connection for connection in self._open if not connection.is_admitted]
        self._close_oldest(strangers, self.limits.strangers)

    def _close_oldest(self, connections: list[LimitedConnection], most: int) -> None:
        """Close the first connections of a list, so that at most ``most`` are left."""
        excess = max(0, len(connections) - most)
        for connection in connections[:excess]:
            self.remove(connection)
            connection.transport.abort()


class RequestLimit:
    """ASGI middleware that serves at most ``most`` requests at once, and refuses further ones with status 503."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.most = most
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._running >= self.most:
            message = f"the lab serves {self.most} requests already; wait a moment and try again"
            await JSONResponse({"error": message}, 503)(scope, receive, send)
            return
        self._running += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running -= 1
