"""The Look page in a browser: heads, map, tokens and sliders, at both widths; the page's numbers are the operator's."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import expect
from support.lab_pages import fits
from support.look_page import (
    address_fields,
    cell_position,
    exact_weight,
    expect_address,
    shown_weight,
    wait_until_ready,
)

from regard.lab.workspace import Workspace

expect.set_options(timeout=20_000)
pytestmark = pytest.mark.usefixtures("full_tiles")  # tiny tiles, which other tests use, make pages slow


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_all_heads_are_shown_with_their_types(lab_page: Any, width: int, dark: bool) -> None:
    tab = lab_page("", width=width, dark=dark)
    wait_until_ready(tab)
    assert tab.locator(".head").count() == 12
    expect(tab.locator(".legend button:enabled").first).to_be_visible(timeout=60_000)
    assert tab.locator(".legend").inner_text().count("induction") == 1
    expect(tab.locator(".naming")).to_be_hidden()
    expect(tab.locator(".details .sureness dt")).to_have_count(8)
    # The types of the head come first, and every other one says what it lacks.
    chips = [text.rsplit(" ", 2)[0] for text in tab.locator(".chips .chip").all_inner_texts()]
    assert tab.locator(".details .sureness dt").all_inner_texts()[: len(chips)] == chips
    expect(tab.locator(".details .sureness small")).to_have_count(8 - len(chips))
    assert tab.locator(".details .numbers dt").all_inner_texts()[:2] == ["entropy", "spread"]
    assert tab.locator(".details rect").count() > 8 and tab.locator(".details path.curve").count() == 1
    assert tab.locator(".texts .token").count() > 100
    assert fits(tab)


def test_the_cell_under_the_pointer_shows_the_exact_weight(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=1")
    canvas = wait_until_ready(tab)
    recording = workspace.recording(address_fields(tab)["recording"])
    n = recording[2].n
    assert n is not None
    for row, key in ((n - 3, 5), (70, 64), (40, 0)):
        tab.mouse.move(*cell_position(canvas, row, key, n, n))
        assert shown_weight(tab, row, key) == pytest.approx(exact_weight(workspace, tab, row, key), rel=2e-5, abs=1e-9)
        token = recording.metadata["tokens"][key]
        space = "\u00a0" if token.startswith(" ") else ""  # a space is part of the token
        assert f"key “{space}{token.strip()}” {key}" in tab.locator(".readout").inner_text()


def test_zoomed_in_it_shows_the_exact_weight(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=1&head=2")
    canvas = wait_until_ready(tab)
    n = workspace.recording(address_fields(tab)["recording"])[1].n
    assert n is not None
    x, y = cell_position(canvas, 90, 33, n, n)
    tab.mouse.move(x, y)
    tab.keyboard.down("Control")
    for _ in range(14):
        tab.mouse.wheel(0, -240)
    tab.keyboard.up("Control")
    expect(tab).to_have_url(re.compile("at="))
    tab.mouse.click(x, y)  # the point under the pointer stays where it is
    expect_address(tab, row="90", key="33")
    assert shown_weight(tab, 90, 33) == pytest.approx(exact_weight(workspace, tab, 90, 33), rel=2e-5, abs=1e-9)
    steps = tab.locator(".steps")
    expect(steps.locator(".who")).to_contain_text("90 attends to")
    assert float(steps.get_attribute("data-weight")) == pytest.approx(exact_weight(workspace, tab, 90, 33), rel=1e-5)
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x + 64, y, steps=4)  # a drag moves the map and locks nothing
    tab.mouse.up()
    assert address_fields(tab)["key"] == "33"
    tab.get_by_role("button", name="show the whole map").click()
    expect_address(tab, at="")


def test_the_map_by_keyboard(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20")
    canvas = wait_until_ready(tab)
    canvas.focus()
    tab.keyboard.press("Shift+ArrowDown")
    tab.keyboard.press("Shift+ArrowRight")
    expect_address(tab, row="61", key="21")
    expect(tab.locator(".steps .who")).to_contain_text("61 attends to")
    for _ in range(5):
        tab.keyboard.press("+")
    expect(tab).to_have_url(re.compile(r"at=[^&]*%2C7\.59"))  # 1.5⁵: after the last press
    before = address_fields(tab)["at"].split(",")
    tab.keyboard.press("ArrowDown")
    expect(tab).not_to_have_url(re.compile(re.escape("%2C".join(before))))
    after = address_fields(tab)["at"].split(",")
    assert before[0] == after[0] and float(after[1]) > float(before[1])
    tab.keyboard.press("-")
    tab.keyboard.press("0")
    expect_address(tab, at="")
    tab.keyboard.press("Escape")
    expect_address(tab, row="off", key="off")
    expect(tab.locator(".steps")).to_contain_text("Lock a cell")


def test_heads_by_keyboard(lab_page: Any) -> None:
    tab = lab_page("?place=0&head=0")
    wait_until_ready(tab)
    tab.locator(".head[aria-pressed=true]").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("x")
    expect_address(tab, ablated="1.1")
    tab.keyboard.press("Enter")
    expect_address(tab, place="1", head="1")
    expect(tab.locator(".head-line h2")).to_have_text("layer 1 · head 1")
    tab.go_back()
    expect(tab.locator(".head-line h2")).to_have_text("layer 0 · head 0")


def test_tokens_can_be_selected_and_locked(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2")
    wait_until_ready(tab)
    n = workspace.recording(address_fields(tab)["recording"])[2].n
    assert n is not None
    expect_address(tab, row=str(n - 1))  # the last token is locked at first
    token = tab.locator(".token[data-at='50']")
    token.hover()
    expect(tab.locator(".strongest h4")).to_contain_text(" 50 attends to")
    token.click()
    expect_address(tab, row="50")
    expect(token).to_have_attribute("aria-pressed", "true")
    first = tab.locator(".strongest li").first
    key = int(first.locator("button").inner_text().split()[-1])
    weight = float(first.locator("span").inner_text())
    assert weight == pytest.approx(exact_weight(workspace, tab, 50, key), abs=1e-6)
    shaded = tab.locator(f".token[data-at='{key}']")
    assert float(shaded.evaluate("x => x.style.getPropertyValue('--weight')")) == 1
    # The legend names the weight of the darkest shade.
    darkest = float(tab.locator(".shades b").get_attribute("data-value"))
    assert darkest == pytest.approx(exact_weight(workspace, tab, 50, key), abs=1e-6)
    second = tab.locator(".strongest li button").nth(1)
    second.click()
    expect_address(tab, row="50", key=second.inner_text().split()[-1])
    tab.get_by_role("button", name="is attended to by").click()
    expect_address(tab, direction="to")
    expect(tab.locator(".strongest h4")).to_contain_text("is attended to by")
    key_index = int(address_fields(tab)["key"])
    first_query = tab.locator(".strongest li").first
    query = int(first_query.locator("button").inner_text().split()[-1])
    weight = exact_weight(workspace, tab, query, key_index)
    assert float(first_query.locator("span").inner_text()) == pytest.approx(weight, abs=1e-6)


def test_tokens_by_keyboard_and_lines(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2&row=30")
    wait_until_ready(tab)
    tab.locator(".token[data-at='30']").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    expect_address(tab, row="31")
    tab.get_by_role("button", name="lines", exact=True).click()
    expect_address(tab, reading="lines")
    expect(tab.locator(".lines path.line").first).to_be_visible()
    asks = tab.locator(".lines text.asks")
    assert 2 < asks.count() <= 60
    tab.locator(".lines text.asks[data-at='28']").click()
    expect_address(tab, row="28")
    expect(tab.locator(".lines text.locked[data-side=row]")).to_have_attribute("data-at", "28")
    tab.keyboard.press("Escape")
    expect(tab.locator(".reading")).to_contain_text("Lock a token")


def test_sliders_recompute(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=1&row=60&key=20")
    canvas = wait_until_ready(tab)
    expect(tab.locator(".scales")).to_contain_text("and more, square-root scale")
    trained = shown_weight(tab, 60, 20)
    beta = tab.get_by_label("β", exact=True)
    beta.focus()
    tab.keyboard.press("Home")
    expect_address(tab, beta="0")
    tab.locator('.steps[data-weight^="0.01639"]').wait_for()  # 1 / 61: all alike
    expect(tab.locator(".readout")).to_contain_text("0.016393")
    tab.get_by_label("mask", exact=True).uncheck()
    n = workspace.recording(address_fields(tab)["recording"])[2].n
    expect(tab.locator(".readout")).to_contain_text(f"{1 / (n or 1):.6f}")
    beta.focus()
    tab.keyboard.press("End")
    expect_address(tab, beta="inf")
    expect(tab.locator(".chain")).to_contain_text("∞")
    tab.get_by_label("position", exact=True).uncheck()
    expect_address(tab, position="0", mask="0")
    tab.get_by_role("button", name="as trained").click()
    expect_address(tab, beta="", position="", mask="")
    expect(tab.locator(".readout")).to_contain_text(f"{trained:.6f}")
    expect(tab.get_by_role("button", name="as trained")).to_be_disabled()

    # A key that the mask hides, with the mask and without it.
    assert n is not None
    tab.mouse.click(*cell_position(canvas, 20, 60, n, n))
    expect(tab.locator(".chain")).to_contain_text("masked: the weight is 0")
    tab.get_by_label("mask", exact=True).uncheck()
    expect(tab.locator(".chain")).to_contain_text("switched off; it would hide this key")
    expect(tab.locator(".chain")).not_to_contain_text("not masked")


def test_sorted_filtered_and_without_sinks(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2")
    wait_until_ready(tab)
    tab.get_by_label("sort", exact=True).select_option("entropy")
    expect_address(tab, sort="entropy")
    order = tab.locator(".flow .caption").all_inner_texts()
    numbers = [float(text.split()[-1]) for text in order]
    assert len(numbers) == 12 and numbers == sorted(numbers, reverse=True)
    tab.get_by_role("button", name="largest first").click()
    expect(tab.locator(".flow .caption").first).to_have_text(order[-1])
    named = tab.locator(".legend button:enabled").first
    expect(named).to_be_visible(timeout=60_000)
    count = int(named.locator("small").inner_text())
    named.click()
    assert count <= tab.locator(".flow .head").count() < 12
    named.click()
    tab.get_by_label("sort", exact=True).select_option("kind induction")
    tab.get_by_role("button", name="smallest first").click()
    expect(tab.locator(".flow .head").first).to_have_attribute("aria-label", re.compile("induction"))
    before = tab.locator(".strongest").inner_text()
    assert re.search(r"” 0\n", before)
    tab.get_by_label("hide sinks").check()
    expect_address(tab, hide="1")
    expect(tab.locator(".strongest")).not_to_contain_text("endoftext")


def test_compare_and_difference(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20")
    wait_until_ready(tab)
    a = shown_weight(tab, 60, 20)
    numbers_of_a = tab.locator(".on-text .score").all_inner_texts()
    entropy_of_a = tab.locator(".details .numbers dd").first.inner_text()
    tab.get_by_role("button", name="compare: pin as A").click()
    tab.locator(".head[data-place='1'][data-head='0']").click()
    expect_address(tab, place="1", head="0")
    for name in "ABΔ":
        tab.locator(f'figure[data-map="{name}"] canvas[data-loading="0"]').wait_for()
    expect(tab.locator(".readout")).to_contain_text("B − A")
    b = exact_weight(workspace, tab, 60, 20)
    numbers = re.findall(r"(−?\d\.\d+(?:e−?\d+)?)", tab.locator(".readout b").inner_text())
    shown = [float(x.replace("−", "-")) for x in numbers]
    assert shown == pytest.approx([b, a, b - a], abs=2e-6)
    assert fits(tab)
    # The numbers of A stand beside those of B, and the colours of the difference have a legend.
    assert tab.locator(".on-text-of-a .score").all_inner_texts() == numbers_of_a
    expect(tab.locator(".numbers dt:has-text('entropy') ~ dd.of-a").first).to_have_text(entropy_of_a)
    expect(tab.locator('figure[data-map="Δ"] .signed')).to_contain_text("orange: A is larger")
    canvas = tab.locator("figure[data-map=A] canvas")
    canvas.focus()
    tab.keyboard.press("+")
    expect(tab).to_have_url(re.compile("at="))
    tab.get_by_role("button", name="end comparison").click()
    expect(tab.locator("figure[data-map=A]")).to_be_hidden()
    expect_address(tab, pinned="")


def test_the_weight_of_the_last_head_is_not_shown_for_the_next_one(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20")
    wait_until_ready(tab)
    shown_weight(tab, 60, 20)
    held = []
    tab.route("**/api/look/levels*", lambda route: held.append(route))
    tab.locator(".head[data-place='1'][data-head='0']").click()
    expect_address(tab, place="1", head="0")
    expect(tab.locator(".readout")).to_have_text("")
    expect(tab.locator("figure[data-map=B]")).to_have_attribute("aria-busy", "true")
    for route in held:
        route.continue_()
    tab.unroute("**/api/look/levels*")
    shown_weight(tab, 60, 20)


def test_touch(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2", width=390)
    canvas = wait_until_ready(tab)
    n = workspace.recording(address_fields(tab)["recording"])[2].n
    assert n is not None
    canvas.scroll_into_view_if_needed()
    tab.touchscreen.tap(*cell_position(canvas, 100, 30, n, n))
    expect_address(tab, row="100", key="30")
    assert shown_weight(tab, 100, 30) == pytest.approx(exact_weight(workspace, tab, 100, 30), rel=2e-5, abs=1e-9)
