"""The lab's introductions and its glossary, in a browser; and that every term a page explains is in the glossary."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import expect
from support.lab_pages import fits, page_address, send
from support.look_page import expect_address, wait_until_ready

from regard.lab.glossary import parse_glossary, read_glossary

expect.set_options(timeout=20_000)
pytestmark = pytest.mark.usefixtures("full_tiles")  # tiny tiles, which other tests use, make pages slow

ROOT = Path(__file__).parent.parent
STATIC = ROOT / "src/regard/lab/static"
PAGES = ["look", "attribution", "evolve", "budget", "convolution", "claims"]
MOST_PIXELS = 130  # by which an introduction may move the page down


def term_ids() -> list[str]:
    """The names of all terms, with their notes."""
    ids = []
    for group in read_glossary():
        for term in group["terms"]:
            ids.append(f"{term['name']} ({term['note']})" if term["note"] else term["name"])
    return ids


def meaning_of(term_id: str) -> str:
    """The meaning of a term, as a page shows it: without the backticks of code."""
    meanings = [term["meaning"] for group in read_glossary() for term in group["terms"]]
    return str(meanings[term_ids().index(term_id)]).replace("`", "")


def test_the_package_has_the_glossary_of_the_docs() -> None:
    docs = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    package = (ROOT / "src/regard/lab/glossary.md").read_text(encoding="utf-8")
    assert package == docs, "they differ; run: make format"
    # No row of the tables is lost.
    rows = [line for line in docs.splitlines() if line.startswith("| ") and not line.startswith("| term ")]
    assert len(term_ids()) == len(rows) > 90
    assert len(set(term_ids())) == len(rows), "a term is there twice"


def test_a_glossary_is_parsed() -> None:
    text = (
        "# Title\n\n## One\n\n| term | meaning |\n|---|---|\n| **a, b** (n\\*) | x \\| `y` |\n\n## Two\n| **c** | z |\n"
    )
    assert parse_glossary(text) == [
        {"title": "One", "terms": [{"name": "a, b", "note": "n*", "meaning": "x | `y`"}]},
        {"title": "Two", "terms": [{"name": "c", "note": "", "meaning": "z"}]},
    ]


def test_every_term_that_a_page_explains_is_in_the_glossary() -> None:
    explained = set(re.findall(r': "(.+?)",', (STATIC / "glossary/page_terms.js").read_text(encoding="utf-8")))
    for name in ("introduction.js", "tour/steps.js"):
        for term in re.findall(r"\[\[(.+?)\]\]", (STATIC / name).read_text(encoding="utf-8")):
            explained.add(term.split("|")[0])
    explained.discard("double brackets")  # of the comment
    assert len(explained) > 40
    assert explained <= set(term_ids())


def test_the_lab_serves_the_glossary(address: str) -> None:
    status, response = send(address, "api/glossary")
    assert status == 200
    assert response["groups"] == read_glossary()


def test_a_page_that_was_left_while_it_loads_shows_nothing_later(lab_page: Any) -> None:
    tab = lab_page("?page=claims")
    held: list[Any] = []
    for request in ("**/api/budget", "**/api/convolution", "**/api/workspace"):
        tab.route(request, lambda route: held.append(route))
    # Each of these pages waits for its first response when it is left, and Budget is opened twice.
    requests = {"look": "workspace", "budget": "budget", "convolution": "convolution"}
    for page in ("look", "budget", "convolution", "budget"):
        with tab.expect_request(f"**/api/{requests[page]}"):
            tab.locator(f"#pages a[data-page={page}]").click()
    tab.locator("#pages a[data-page=claims]").click()
    expect(tab.locator("main.claims > *")).to_have_count(2)  # the list of claims and the claim
    assert len(held) == 4
    address = tab.url
    for route in held:
        route.continue_()
    tab.wait_for_load_state("networkidle")
    tab.wait_for_timeout(500)  # longer than a page waits before it writes its state into the address
    expect(tab.locator("main")).to_have_count(1)
    expect(tab.locator("main > *")).to_have_count(2)
    assert tab.url == address
    tab.unroute_all()
    tab.locator("#pages a[data-page=budget]").click()
    expect(tab.locator("main.budget > .controls")).to_have_count(1)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_every_page_has_an_introduction_that_can_be_hidden(lab_page: Any, width: int, dark: bool) -> None:
    tab = lab_page("?page=claims", width=width, dark=dark)
    introduction = tab.get_by_role("region", name="about this page")
    about = tab.get_by_role("button", name="About this page")
    for page in PAGES:
        tab.locator(f"#pages a[data-page={page}]").click()
        expect(tab.locator(f"main.{page}")).to_be_visible()
        expect(introduction).to_be_visible()
        assert fits(tab)
        heights = "() => document.querySelector('#page').offsetTop - document.querySelector('#top').offsetHeight"
        assert tab.evaluate(heights) <= MOST_PIXELS, page

        # On a narrow screen the steps are folded.
        if width < 600:
            expect(introduction.locator("li").first).to_be_hidden()
            introduction.get_by_role("button", name="What to try").click()
        expect(introduction.locator("li:visible")).to_have_count(3)
        assert fits(tab)

    # The page that is open is the last one: hide it there, and only there.
    introduction.get_by_role("button", name="Hide").click()
    expect(introduction).to_be_hidden()
    expect(about).to_be_focused()
    tab.reload()
    expect(about).to_have_attribute("aria-expanded", "false")
    expect(introduction).to_be_hidden()
    tab.locator("#pages a[data-page=budget]").click()
    expect(introduction).to_be_visible()
    tab.locator("#pages a[data-page=claims]").click()
    expect(introduction).to_be_hidden()
    about.click()
    expect(introduction).to_be_visible()
    tab.reload()
    expect(introduction).to_be_visible()


def test_an_introduction_can_be_hidden_without_storage(browser: Any, address: str) -> None:
    context = browser.new_context()
    refuse = "() => { throw new DOMException('storage is off'); }"
    context.add_init_script(f"Storage.prototype.setItem = Storage.prototype.removeItem = {refuse};")
    tab = context.new_page()
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(page_address(address, "?page=claims"))
    introduction = tab.get_by_role("region", name="about this page")
    introduction.get_by_role("button", name="Hide").click()
    expect(introduction).to_be_hidden()
    tab.get_by_role("button", name="About this page").click()
    expect(introduction).to_be_visible()
    context.close()
    assert errors == []


def test_terms_are_explained_by_keyboard(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20")
    wait_until_ready(tab)
    term = tab.locator("main dt .term[data-term=entropy]")
    popover = tab.get_by_role("dialog", name="meaning of entropy")
    term.focus()
    expect(term).to_have_attribute("aria-expanded", "false")
    tab.keyboard.press("Enter")
    expect(popover).to_contain_text(meaning_of("entropy"))
    expect(term).to_have_attribute("aria-expanded", "true")
    described_by = term.get_attribute("aria-describedby")
    assert meaning_of("entropy") in tab.locator(f"#{described_by}").inner_text()

    # Escape closes the popover and nothing else: the locked cell stays.
    tab.keyboard.press("Escape")
    expect(popover).to_have_count(0)
    expect(term).to_be_focused()
    expect(term).to_have_attribute("aria-expanded", "false")
    expect_address(tab, row="60", key="20")

    # Tab reaches the button in the popover, which opens the whole glossary at this term.
    tab.keyboard.press("Enter")
    expect(popover).to_be_visible()
    tab.keyboard.press("Tab")
    expect(popover.get_by_role("button")).to_be_focused()
    tab.keyboard.press("Enter")
    expect(tab.locator("#glossary dt[data-term=entropy]")).to_be_focused()
    tab.keyboard.press("Escape")
    expect(tab.locator("#glossary")).to_be_hidden()
    expect_address(tab, row="60", key="20")


def test_terms_are_explained_by_tap(lab_page: Any) -> None:
    tab = lab_page("?page=budget", width=390)
    term = tab.locator("main .term", has_text="Crossover")
    term.tap()
    popover = tab.get_by_role("dialog", name="meaning of crossover")
    expect(popover).to_contain_text(meaning_of("crossover (n*)"))
    box = popover.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert fits(tab)
    term.tap()
    expect(popover).to_have_count(0)
    term.tap()
    tab.locator("#brand").dispatch_event("pointerdown")  # beside it
    expect(popover).to_have_count(0)


def test_a_term_has_the_meaning_of_its_place(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2")
    wait_until_ready(tab)
    expect(tab.locator("main .numbers .term", has_text="sink")).to_have_attribute("data-term", "sink (observable)")
    expect(tab.locator("main .sureness .term", has_text="sink")).to_have_attribute("data-term", "sink head")
    for term in tab.locator("main .term").all():
        assert term.get_attribute("data-term") in term_ids()
    # A term in the label of a control leaves the control alone.
    control = tab.get_by_label("mask", exact=True)
    is_checked = control.is_checked()
    tab.locator("label .term", has_text="mask").click()
    expect(tab.get_by_role("dialog", name="meaning of mask")).to_be_visible()
    assert control.is_checked() == is_checked


@pytest.mark.parametrize("width", [1280, 390])
def test_the_glossary_can_be_searched(lab_page: Any, width: int) -> None:
    tab = lab_page("?page=claims", width=width)
    tab.get_by_role("button", name="glossary").click()
    glossary_box = tab.get_by_role("dialog", name="Glossary")
    expect(glossary_box.locator("dt")).to_have_count(len(term_ids()))
    assert glossary_box.locator("h3").all_inner_texts() == [group["title"] for group in read_glossary()]
    search = glossary_box.get_by_role("searchbox", name="find a term")
    expect(search).to_be_focused()
    search.fill("SINK head")
    expect(glossary_box.locator("dt", has_text="sink head")).to_be_visible()
    assert glossary_box.locator("dt").count() < 10
    search.fill("no such words")
    expect(glossary_box).to_contain_text("No term has these words.")
    assert fits(tab)
    glossary_box.get_by_role("button", name="Close").click()
    expect(glossary_box).to_be_hidden()
