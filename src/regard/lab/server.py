"""Serves the lab on a port of this machine with uvicorn, and checks that it responds."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path

import uvicorn

from regard._errors import RegardError
from regard._files import write_text
from regard.lab.access_control import LOOPBACK, forwarding_page
from regard.lab.app import create
from regard.lab.connections import ACCEPTED_AT_ONCE, ConnectionLimits, limited_protocol
from regard.lab.workspace import ADDRESS_FILE, Workspace

DEFAULT_PORT = 8421
PORTS_TRIED = 20  # ports from DEFAULT_PORT on that are tried if no port is given
WAITING_CONNECTIONS = 1024  # connections that the system holds until they are accepted
OPEN_FILES = 2048  # files and connections that this process may open; the limits on connections stay below it


@dataclass(frozen=True)
class RunningLab:
    """A lab that responds at an address."""

    url: str  # its start page: http://127.0.0.1:8421/
    token: str | None  # what requests must carry; None for a lab without a token
    thread: threading.Thread  # the server's thread

    @property
    def address(self) -> str:
        """The address that a browser opens, with the token."""
        return f"{self.url}?token={self.token}" if self.token else self.url


def serve(
    workspace: Workspace,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    needs_token: bool = True,
    browser: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Serve a workspace until ``should_stop()`` is true, and print its address; ``browser`` also opens it.

    Requests need the token of the printed address. ``needs_token=False`` drops this; then every user of this machine
    can use the lab. If ``port`` is None, the server takes the first free port from ``DEFAULT_PORT`` on.

    Returns whether the server has ended; False if a request still computes.
    """
    server = running_server(workspace, host=host, port=port, needs_token=needs_token)
    with server as lab, _address_file(lab, workspace.state) as file:
        print(f"The lab is at {lab.address} (Ctrl-C ends it)", flush=True)
        if not needs_token:
            print("It needs no token: every user of this machine can read and change what is open in it", flush=True)
        if browser:
            threading.Thread(target=_open_browser, args=(file,), daemon=True).start()
        while lab.thread.is_alive():
            lab.thread.join(0.2)
            if should_stop():
                break
        if workspace.jobs.is_training():
            with suppress(OSError):  # the terminal may be gone
                print("\nA training saves its state (Ctrl-C again ends the lab without waiting for it)", flush=True)
    return not lab.thread.is_alive()


@contextmanager
def running_server(
    workspace: Workspace,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    needs_token: bool = True,
    limits: ConnectionLimits | None = None,
) -> Iterator[RunningLab]:
    """Serve a workspace from a thread until the block ends. Yields the running lab."""
    check_token_option(host, needs_token)
    token = secrets.token_urlsafe(24) if needs_token else None
    limits = limits or ConnectionLimits()
    _raise_file_limit()
    listener = _listen(host, port)
    # Warnings of uvicorn are about requests that any stranger can send, so only its errors are printed. Headers of
    # proxies are ignored: anybody can write them.
    config = uvicorn.Config(
        create(workspace, token=token, any_host=host not in LOOPBACK),
        http=limited_protocol(limits), ws="none", lifespan="on", backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=limits.idle_seconds, timeout_graceful_shutdown=3,
        log_level="error", access_log=False, server_header=False, proxy_headers=False,
    )  # fmt: skip
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="lab", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        # uvicorn has set the length of the queue to what it accepts at once. A burst of connections must find place.
        listener.listen(WAITING_CONNECTIONS)
        yield RunningLab(_address(host, listener.getsockname()[1]), token, thread)
    finally:
        workspace.begin_close()
        server.should_exit = True
        thread.join(10)
        listener.close()


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Log filter: a request that the end of the lab interrupts is not an error, and needs no traceback."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def check_token_option(host: str, needs_token: bool) -> None:
    """Refuse a lab without a token that other machines could reach."""
    if not needs_token and host not in LOOPBACK:
        raise RegardError(f"--no-token needs a --host of this machine alone ({', '.join(LOOPBACK)}), got {host}")


def check_server(lab: RunningLab) -> list[str]:
    """Send one request of each kind to a running lab. Returns one line per response; raises RuntimeError on failure."""
    headers = {"authorization": f"Bearer {lab.token}"} if lab.token else {}
    lines: list[str] = []

    def fetch(path: str) -> bytes:
        try:
            request = urllib.request.Request(lab.url + path, headers=headers)
            with urllib.request.urlopen(request, timeout=20) as response:
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the lab responded with status {error.code} to /{path}") from None
        lines.append(f"{response.status} /{path} ({len(body):,} bytes)")
        return body

    for path in ("", "static/app.js", "plotly.js", "openapi.json", "api/jobs"):
        fetch(path)

    # Compute one tile of one map, which is the main work of the lab.
    for recording in json.loads(fetch("api/workspace"))["recordings"][:1]:
        places = json.loads(fetch(f"api/look/recording?recording={recording['id']}"))["places"]
        for place in [place for place in places if place["kept"]][:1]:
            head = f"recording={recording['id']}&place={place['place']}&head={place['heads'][0]}"
            fetch(f"api/look/tile?{head}&level=0&x=0&y=0")
    return lines


def _address(host: str, port: int) -> str:
    name = host
    if ":" in host:
        name = f"[{host}]"  # IPv6
    elif host == "0.0.0.0":  # all interfaces
        name = _own_address()
    return f"http://{name}:{port}/"


def _own_address() -> str:
    """The address by which other machines reach this one; the host name if there is no network."""
    # Connecting a datagram socket sends nothing. The system only chooses the interface. The address is one that is
    # reserved for documentation. Phones often cannot resolve a host name, so it is only the second choice.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        address: str = probe.getsockname()[0]
        return address


def _listen(host: str, port: int | None) -> socket.socket:
    """Return a listening socket at the given port, or at the first free one from ``DEFAULT_PORT`` on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if port is None else (port,)
    for candidate in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if port is not None:
                raise RegardError(f"cannot listen on port {port} of {host}: {error.strerror}; omit --port") from None
    raise RegardError(f"ports {DEFAULT_PORT} to {DEFAULT_PORT + PORTS_TRIED - 1} are in use; give another with --port")


def _raise_file_limit() -> None:
    """Allow this process enough open files for all connections; some systems allow 256 by default."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # some systems have a further limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def _address_file(lab: RunningLab, state: Path) -> Iterator[Path]:
    """Keep a page in the state folder that leads to the lab, while the block runs. Yields its path.

    The browser is started with this file and not with the address, because all users of a machine can read the
    arguments of its processes. Only the owner can read the file.
    """
    file = state / ADDRESS_FILE
    write_text(forwarding_page(escape(lab.address)), file, mode=0o600)
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def _open_browser(file: Path) -> None:
    """Open the page that leads to the lab. If there is no browser, the printed address is enough."""
    with suppress(webbrowser.Error, OSError):
        webbrowser.open(file.resolve().as_uri())
