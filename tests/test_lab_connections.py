"""Slow, silent and many connections do not keep others out of the lab."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.lab_pages import send, serve_lab, token_of

from regard.lab import app
from regard.lab.connections import ConnectionLimits
from regard.lab.workspace import Workspace

# What is not tested waits long, so that a slow machine does not end it.
LONG = {"head_seconds": 600.0, "body_seconds": 600.0, "read_seconds": 600.0, "idle_seconds": 600}
HANG = 60.0  # seconds after which a test fails
LARGE = "plotly.js"  # a response that no buffer of the system can hold


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """``lab(head_seconds=1)`` starts a lab with these limits and returns its address."""
    with ExitStack() as stack:

        def start(**limits: Any) -> str:
            workspace = Workspace(tmp_path)
            return stack.enter_context(serve_lab(workspace, limits=ConnectionLimits(**{**LONG, **limits})))

        yield start


@contextmanager
def connected(address: str, data: bytes = b"") -> Iterator[socket.socket]:
    """A connection on which only these bytes were sent."""
    where = urlsplit(address)
    with socket.create_connection((where.hostname, where.port or 80), timeout=HANG) as connection:
        connection.sendall(data)
        yield connection


def head(address: str, path: str = "api/jobs", *fields: str, token: bool = True) -> bytes:
    """The head of a request."""
    lines = [f"{'POST' if fields else 'GET'} /{path} HTTP/1.1", f"host: {urlsplit(address).netloc}", *fields]
    if token:
        lines.append(f"authorization: Bearer {token_of(address)}")
    return "\r\n".join([*lines, "", ""]).encode()


def is_closed(connection: socket.socket) -> bool:
    """Read until the lab closes the connection; false if it sends something and then keeps it open."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def is_open(connection: socket.socket) -> bool:
    """Return whether the lab has not closed a connection on which it sends nothing."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_a_connection_without_a_request_is_closed(lab: Callable[..., str]) -> None:
    address = lab(head_seconds=0.5)
    half = head(address)[:-4]
    with connected(address) as silent, connected(address, half) as half_open, connected(address, head(address)) as idle:
        assert is_closed(silent) and is_closed(half_open)
        # Between two requests the other limit applies. A second request that never ends is closed too.
        assert b"200 OK" in idle.recv(65536) and is_open(idle)
        idle.settimeout(HANG)
        idle.sendall(half)
        assert is_closed(idle)


def test_single_bytes_do_not_extend_the_time(lab: Callable[..., str]) -> None:
    address = lab(head_seconds=0.5)
    with connected(address) as connection:
        end = time.monotonic() + HANG
        with pytest.raises(ConnectionError):
            while time.monotonic() < end:
                connection.sendall(b"G")
                time.sleep(0.05)


@pytest.mark.parametrize("length", ["content-length: 1000", "transfer-encoding: chunked"])
def test_a_request_without_its_body_is_closed(lab: Callable[..., str], length: str) -> None:
    address = lab(body_seconds=0.5)
    unfinished = head(address, "api/look", "content-type: application/json", length)
    with connected(address, unfinished) as connection:
        assert is_closed(connection)
    assert send(address, "api/jobs")[0] == 200


def test_a_refused_request_does_not_wait_for_its_body(lab: Callable[..., str]) -> None:
    address = lab(head_seconds=0.5)
    with connected(address, head(address, "api/look", "content-length: 1000000", token=False)) as connection:
        assert b" 401 " in connection.recv(65536)
        end = time.monotonic() + HANG
        with pytest.raises(ConnectionError):  # what is left of the body is not waited for either
            while time.monotonic() < end:
                connection.sendall(b" ")
                time.sleep(0.05)


def test_a_response_that_nobody_reads_is_dropped(lab: Callable[..., str]) -> None:
    address = lab(read_seconds=0.5)
    with connected(address) as connection:
        # Several responses, because the system itself holds some megabytes. None is compressed.
        connection.sendall(head(address, LARGE) * 8)
        end = time.monotonic() + HANG
        with pytest.raises(ConnectionError):
            while time.monotonic() < end:
                connection.sendall(b"G")
                time.sleep(0.05)
    assert send(address, "api/jobs")[0] == 200


def test_a_slow_reader_gets_the_whole_response(lab: Callable[..., str]) -> None:
    address = lab(read_seconds=2.0)
    received = 0
    with connected(address) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sendall(head(address, LARGE).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        while data := connection.recv(200_000):
            received += len(data)
            if received < 2_000_000:
                time.sleep(0.25)  # slower than the limit as a whole, but it reads
    assert received > 3_000_000


def test_strangers_beyond_the_limit_are_closed_and_others_stay(lab: Callable[..., str]) -> None:
    address = lab(from_one_client=7, strangers=11, admitted=3)
    with ExitStack() as stack:
        mine = stack.enter_context(connected(address, head(address)))
        assert b"200 OK" in mine.recv(65536)
        silent = [stack.enter_context(connected(address)) for _ in range(200)]
        end = time.monotonic() + HANG
        while sum(is_open(connection) for connection in silent) > 7 and time.monotonic() < end:
            assert send(address, "api/jobs")[0] == 200
        # The oldest are closed first, and the connection whose request showed the token stays.
        states = [is_open(connection) for connection in silent]
        assert sum(states) <= 7 and states == sorted(states)
        assert is_open(mine)


def test_responses_are_not_cut_off(lab: Callable[..., str]) -> None:
    address = lab(from_one_client=2, strangers=2, admitted=0)
    with ExitStack() as stack:
        reading = stack.enter_context(connected(address, head(address, LARGE)))
        received = len(reading.recv(65536))
        silent = [stack.enter_context(connected(address)) for _ in range(50)]
        assert is_closed(silent[0])
        while received < 3_000_000:
            count = len(reading.recv(65536))
            assert count, "the response was cut off"
            received += count


def test_too_many_requests_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_REQUESTS", 0)
    with serve_lab(Workspace(tmp_path)) as address:
        status, response = send(address, "api/jobs")
    assert status == 503 and "requests" in response["error"]


def crowd(address: str, count: int, seconds: float) -> list[float]:
    """Open connections that send nothing, and return how long other requests take meanwhile, in seconds."""
    times = []
    with ExitStack() as stack:
        for index in range(count):
            # Half of them stop in the middle of a request, as a browser on a train may.
            data = head(address)[:-4] if index % 2 else b""
            stack.enter_context(connected(address, data))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            start = time.monotonic()
            assert send(address, "api/workspace")[0] == 200
            times.append(time.monotonic() - start)
            time.sleep(0.02)
    return times


def test_silent_connections_do_not_block_requests(lab: Callable[..., str]) -> None:
    assert len(crowd(lab(), 300, 1.0)) > 3


@pytest.mark.full
def test_a_thousand_silent_connections_for_a_minute(lab: Callable[..., str]) -> None:
    times = crowd(lab(head_seconds=ConnectionLimits().head_seconds), 1000, 60.0)
    print(f"{len(times)} requests, the slowest took {max(times):.3f} s")
    assert statistics.quantiles(times, n=100)[-1] < 1.0  # all but 1%, because other tests may run at the same time
