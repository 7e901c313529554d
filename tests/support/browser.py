"""Fixtures that open pages in a real browser: Chromium, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running browser."""
    if CHROMIUM is None:
        pytest.skip("needs chromium, which is not installed on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def show_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """``show_page(html)`` opens a page from a file. At the end, it has reported no error and requested nothing else."""
    problems: list[str] = []
    schemes: list[str] = []
    contexts = []

    def open_page(html: str, width: int = 1280) -> Any:
        file = tmp_path / "page.html"
        file.write_text(html, encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 844}))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: schemes.append(request.url.split(":")[0]))
        tab.goto(file.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
    assert schemes.count("file") == len(contexts) and set(schemes) <= {"file", "data"}
