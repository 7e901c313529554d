"""Fixtures of the lab's tests: a workspace, a server, and pages in a real browser; and helpers for requests."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from regard import models
from regard.lab.first_recording import ensure_recording
from regard.lab.server import running_server
from regard.lab.workspace import Workspace

_TOKENS: dict[str, str] = {}  # host and port of a running lab → its token


@contextmanager
def serve_lab(workspace: Workspace, **options: Any) -> Iterator[str]:
    """Serve a workspace at a free port. Yields the address without the token, which the helpers here add."""
    with running_server(workspace, port=0, **options) as lab:
        yield note_token(lab.address)


def note_token(printed_address: str) -> str:
    """Remember the token of a lab's printed address, and return the address without it."""
    address, _, token = printed_address.partition("?token=")
    if token:
        _TOKENS[urlsplit(address).netloc] = token
    return address


def token_of(address: str) -> str:
    """Return the token of a lab; an empty string if it has none."""
    return _TOKENS.get(urlsplit(address).netloc, "")


def lab_request(url: str, data: bytes | None = None, **headers: str) -> urllib.request.Request:
    """Return a request to a lab with its token. With ``data`` it is a POST request with JSON."""
    fields = {"authorization": f"Bearer {token_of(url)}", **headers}
    if data is not None:
        fields.setdefault("content-type", "application/json")
    return urllib.request.Request(url, data, fields)


def page_address(address: str, query: str = "") -> str:
    """Return the address that opens a page in a browser that does not have the token yet."""
    return f"{address}?token={token_of(address)}" + query.replace("?", "&", 1)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace with the bundled model, its run, and one recording of a sample text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # not the user's
        opened = Workspace(tmp_path_factory.mktemp("lab"))
        opened.open(models.bundled())
        ensure_recording(opened)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(workspace: Workspace) -> Iterator[str]:
    """The address of a server of the workspace."""
    with serve_lab(workspace) as server_address:
        yield server_address


@pytest.fixture
def lab_page(browser: Any, address: str) -> Iterator[Any]:
    """``lab_page("?page=budget", width=390)`` opens a page. At the end, no page has reported an error.

    A test that provokes an error adds a part of its message to ``lab_page.expected``.
    """
    problems: list[str] = []
    hosts: set[str] = set()
    contexts = []

    def note_console(message: Any) -> None:
        is_expected = any(text in message.text for text in open_page.expected)
        if message.type in ("error", "warning") and not is_expected:
            problems.append(message.text)

    def open_page(query: str = "", width: int = 1280, dark: bool = False) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 844},
            color_scheme="dark" if dark else "light",
            has_touch=width < 600,
            accept_downloads=True,
        )
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(60_000)  # for busy machines; nothing waits that long otherwise
        tab.on("console", note_console)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: hosts.add(request.url.split("?")[0].rsplit("/", 1)[0]))
        tab.goto(page_address(address, query))
        return tab

    open_page.expected = []
    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    # Pages request nothing from other hosts.
    assert all(host.startswith((address, "data:", "blob:")) or host + "/" == address for host in hosts), hosts


def send(address: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a GET request, or a POST request with ``body`` as JSON. Returns the status and the data (JSON or bytes)."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(lab_request(address + path, data), timeout=60) as response:
            content = response.read()
            if response.headers["content-type"] == "application/json":
                return response.status, json.loads(content)
            return response.status, content
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# The elements that reach beyond the right edge of the window, for the message of a failed test.
WIDE_ELEMENTS = """() => [...document.querySelectorAll("body *")]
    .filter((node) => node.getBoundingClientRect().right > document.documentElement.clientWidth)
    .map((node) => [node.tagName, node.className?.baseVal ?? node.className,
                     node.getBoundingClientRect().right].join(" "))"""


def fits(tab: Any) -> bool:
    """Wait until nothing on the page is wider than the window, and return True.

    A page that is being redrawn can be wider for one frame, so one measurement would say too little.
    """
    try:
        until(tab, "document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    except Exception as error:
        raise AssertionError(f"wider than the window: {tab.evaluate(WIDE_ELEMENTS)}") from error
    return True


def until(tab: Any, condition: str, seconds: float = 60) -> None:
    """Wait until a JavaScript expression is true; the page's policy forbids playwright's ``wait_for_function``."""
    tab.evaluate(
        f"""() => new Promise((resolve, reject) => {{
            const end = performance.now() + {1000 * seconds};
            const look = () => {{
                if ({condition}) resolve();
                else if (performance.now() > end) reject(new Error("never came true: " + {json.dumps(condition)}));
                else setTimeout(look, 20);
            }};
            look();
        }})"""
    )
