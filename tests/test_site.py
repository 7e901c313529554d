"""The documents as a site: built without a warning, whole, and at home on a disk without a network."""

from __future__ import annotations

import posixpath
import re
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support.browser import browser  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parent.parent
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@dataclass
class Site:
    folder: Path
    said: str  # what the build printed
    pages: dict[str, Reader] = field(default_factory=dict)


class Reader(HTMLParser):
    """What a page links to, what it loads, and what in it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.ids: list[str] = []
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if (loaded := given.get(LOADED.get(tag, ""))) is not None:
            self.loads.add(loaded)
        if given.get("id"):
            self.ids.append(given["id"])
        self.classes |= set(given.get("class", "").split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run([ROOT / "scripts" / "docs", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = Site(folder, done.stdout + done.stderr)
    for file in sorted(folder.rglob("*.html")):
        found.pages[file.relative_to(folder).as_posix()] = Reader(file.read_text(encoding="utf-8"))
    return found


def test_no_warning_is_printed(site: Site) -> None:
    assert [line for line in site.said.splitlines() if line.strip() and not line.startswith("INFO ")] == []


def test_every_document_is_a_page_in_the_navigation(site: Site) -> None:
    texts = {file.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for file in ROOT.glob("docs/**/*.md")}
    beside = {"index.html", "examples.html", "architecture.html", "contributing.html", "changelog.html"}
    assert set(site.pages) == texts | beside
    assert set(site.pages) - {link.partition("#")[0] for link in site.pages["index.html"].links} == set()


def test_links_and_anchors_lead_somewhere(site: Site) -> None:
    def found(name: str, link: str) -> bool:
        parts = urlsplit(link)
        if parts.scheme:
            return True  # the network's; a link may lead there, nothing may be loaded from there
        other = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
        if not (site.folder / other).is_file():
            return False
        return not parts.fragment or unquote(parts.fragment) in site.pages[other].ids

    every = [(name, link) for name, page in site.pages.items() for link in page.links | page.loads]
    assert [at for at in every if not found(*at)] == []


def test_no_id_stands_twice_on_a_page(site: Site) -> None:
    twice = {name: {x for x in page.ids if page.ids.count(x) > 1} for name, page in site.pages.items()}
    assert {name: ids for name, ids in twice.items() if ids} == {}


def test_nothing_is_loaded_from_elsewhere(site: Site) -> None:
    for name, page in site.pages.items():
        assert [x for x in page.loads if re.match(r"(https?:)?//", x)] == [], name
        # For these two the theme's script would fetch a library, or a count of stars.
        assert not page.classes & {"mermaid", "md-source"}, name
    for file in site.folder.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", file.read_text(encoding="utf-8")), file.name


def test_pages_open_from_disk(site: Site, browser: Any) -> None:  # noqa: F811
    problems: list[str] = []
    asked: set[str] = set()
    for width in (390, 1280):
        context = browser.new_context(viewport={"width": width, "height": 844})
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: asked.add(request.url.split(":")[0]))
        for name in ("index.html", "operator.html", "symbols.html", "api/nn.html"):
            tab.goto((site.folder / name).as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} at {width}"
        tab.keyboard.press("/")  # opens the search
        tab.locator(".md-search__input").press_sequentially("softcap")
        tab.locator(".md-search-result__item").first.wait_for()
        context.close()
    assert problems == [] and asked <= {"file", "data"}
