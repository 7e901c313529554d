"""A lab that is served, and pages of it in a real browser: fixtures for every room's tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from regard import models
from regard.lab.first import first_look
from regard.lab.lab import Lab
from regard.lab.serve import serving


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab with the bundled model, its run, and one recording of a sample text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # not the user's
        opened = Lab(tmp_path_factory.mktemp("lab"))
        opened.open(models.bundled())
        first_look(opened)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(lab: Lab) -> Iterator[str]:
    with serving(lab, port=0) as (where, _):
        yield where


@pytest.fixture
def lab_page(browser: Any, address: str) -> Iterator[Any]:
    """``lab_page("?room=budget", width=390)``: a page; at the end no error was reported, no other host asked."""
    problems: list[str] = []
    hosts: set[str] = set()
    contexts = []

    def opened(where: str = "", width: int = 1280, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        contexts.append(
            browser.new_context(
                viewport={"width": width, "height": 844},
                color_scheme=scheme,
                has_touch=width < 600,
                accept_downloads=True,
            )
        )
        tab = contexts[-1].new_page()
        tab.set_default_timeout(60_000)  # for machines that are busy; nothing waits that long otherwise
        tab.on(
            "console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None
        )
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: hosts.add(request.url.split("?")[0].rsplit("/", 1)[0]))
        tab.goto(address + where)
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
    assert all(host.startswith((address, "data:", "blob:")) or host + "/" == address for host in hosts), hosts


def fits(tab: Any) -> bool:
    """Nothing of the page is wider than the window."""
    return bool(tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


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
