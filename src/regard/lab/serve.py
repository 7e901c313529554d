"""Serving the lab: a port on this machine, uvicorn, and a check that it answers."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from regard.lab.app import create
from regard.lab.guard import LOOPBACK
from regard.lab.lab import Lab

__all__ = ["PORT", "check", "serve", "serving"]

PORT = 8421
TRIED = 20  # ports from PORT on, where none is asked for


def serve(lab: Lab, *, host: str = "127.0.0.1", port: int | None = None, browser: bool = True) -> None:
    """Serve until Ctrl-C. Another host than loopback asks for a token, which the printed address has."""
    with serving(lab, host=host, port=port) as (address, thread):
        print(f"The lab is at {address} (Ctrl-C ends it)", flush=True)
        if browser:
            threading.Thread(target=_opened, args=(address,), daemon=True).start()
        while thread.is_alive():
            thread.join(0.2)


@contextmanager
def serving(lab: Lab, *, host: str = "127.0.0.1", port: int | None = None) -> Iterator[tuple[str, threading.Thread]]:
    """The lab served by a thread: its address, and the thread. It ends with the block."""
    token = None if host in LOOPBACK else secrets.token_urlsafe(24)
    listening = _listening(host, port)
    config = uvicorn.Config(
        create(lab, token=token), log_level="warning", access_log=False, limit_concurrency=200, timeout_keep_alive=30,
        server_header=False, timeout_graceful_shutdown=3, lifespan="on",
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="lab", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        name = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
        address = f"http://{name}:{listening.getsockname()[1]}/"
        yield address + (f"?token={token}" if token else ""), thread
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


def check(address: str) -> list[str]:
    """Ask a lab for one thing of each kind; what it answered, a line each."""
    base, _, token = address.partition("?token=")

    def asked(path: str) -> bytes:
        request = urllib.request.Request(base + path, headers={"authorization": f"Bearer {token}"} if token else {})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                body: bytes = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"the lab answered {error.code} for /{path}") from None
        told.append(f"{answer.status} /{path} ({len(body):,} bytes)")
        return body

    told: list[str] = []
    for path in ("", "static/app.js", "plotly.js", "openapi.json", "api/jobs"):
        asked(path)
    for one in json.loads(asked("api/workspace"))["recordings"][:1]:
        places = json.loads(asked(f"api/look/recording?recording={one['id']}"))["places"]
        for place in [x for x in places if x["kept"]][:1]:  # one map, computed: the lab's main work
            where = f"recording={one['id']}&place={place['place']}&head={place['heads'][0]}"
            asked(f"api/look/tile?{where}&level=0&x=0&y=0")
    return told


def _listening(host: str, port: int | None) -> socket.socket:
    """A socket that listens, at the port asked for or at the first free one from ``PORT`` on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for tried in range(PORT, PORT + TRIED) if port is None else (port,):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, tried))
            listening.listen(128)
            return listening
        except OSError as error:
            listening.close()
            if port is not None:
                raise ValueError(f"port {port} of {host} cannot be had: {error.strerror}; leave --port out") from None
    raise ValueError(f"the ports {PORT} … {PORT + TRIED - 1} are taken; give --port")


def _opened(address: str) -> None:
    """In a browser, where there is one; a terminal without one has the address."""
    try:
        webbrowser.open(address)
    except (webbrowser.Error, OSError):
        return
