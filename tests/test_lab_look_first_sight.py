"""The Look page in a browser: text beside the map, pointing, zooming, and numbers that follow the switches."""

from __future__ import annotations

import io
import json
import math
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import expect
from support.lab_pages import fits, lab_request, until
from support.look_page import address_fields, cell_position, expect_address, shown_weight, wait_until_ready

from regard import Causal, Observe, attention
from regard.interp import Recording
from regard.lab.workspace import Workspace

expect.set_options(timeout=20_000)
pytestmark = pytest.mark.usefixtures("full_tiles")  # tiny tiles, which other tests use, make pages slow


def length_of(workspace: Workspace, tab: Any) -> int:
    """The number of tokens of the recording in the page's address."""
    n = workspace.recording(address_fields(tab)["recording"])[0].n
    assert n is not None
    return n


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_text_map_and_weight_are_visible_at_once(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2")
    tab.set_viewport_size({"width": 1280, "height": 800})
    canvas = wait_until_ready(tab)
    expect(tab.locator("#look-input textarea").first).to_be_visible()  # where to type is visible at first
    text = tab.locator(".texts").bounding_box()
    picture = canvas.bounding_box()
    weight = tab.locator(".readout b").bounding_box()
    for box in (text, picture, weight):
        assert box["y"] >= 0 and box["y"] + box["height"] <= 800
    assert text["x"] + text["width"] <= picture["x"]  # side by side
    assert tab.locator(".head").first.bounding_box()["y"] < 800
    assert fits(tab)


def test_on_a_phone_the_text_is_above_the_map(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2", width=390)
    canvas = wait_until_ready(tab)
    text = tab.locator(".texts").bounding_box()
    picture = canvas.bounding_box()
    assert text["y"] + text["height"] <= picture["y"]
    assert text["y"] < tab.locator(".head").first.bounding_box()["y"]  # no need to scroll past the heads
    for box in (text, picture):
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert fits(tab)


def test_pointing_lights_tokens_rows_and_columns(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2")
    canvas = wait_until_ready(tab)
    n = length_of(workspace, tab)
    tab.locator(".token[data-at='50']").hover()
    expect(canvas).to_have_attribute("data-hover", "50,50")
    tab.mouse.move(*cell_position(canvas, 100, 30, n, n))
    expect(canvas).to_have_attribute("data-hover", "100,30")
    pointed = tab.locator(".token.pointed")
    expect(pointed).to_have_count(2)
    assert sorted(int(token.get_attribute("data-at")) for token in pointed.all()) == [30, 100]
    tab.mouse.move(5, 5)
    expect(pointed).to_have_count(0)


def test_the_wheel_scrolls_and_control_zooms(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20")
    canvas = wait_until_ready(tab)
    n = length_of(workspace, tab)
    tab.mouse.move(*cell_position(canvas, 60, 60, n, n))
    for step in (-120, 120):
        tab.mouse.wheel(0, step)
    until(tab, "scrollY > 0")
    assert "at" not in address_fields(tab)
    tab.evaluate("scrollTo(0, 0)")
    # The buttons zoom to the locked cell.
    for _ in range(3):
        tab.get_by_role("button", name="zoom in").click()
    expect(tab).to_have_url(re.compile(r"at=[^&]*%2C4\.\d+(&|$)"))  # 1.6 cubed; the address follows a moment later
    u, v, z = map(float, address_fields(tab)["at"].split(","))
    assert z > 2 and abs(u * n - 20.5) < n / (2 * z) and abs(v * n - 60.5) < 1


def test_pinch(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20", width=390)
    canvas = wait_until_ready(tab)
    canvas.scroll_into_view_if_needed()
    n = length_of(workspace, tab)
    x, y = cell_position(canvas, 70, 70, n, n)
    fingers = tab.context.new_cdp_session(tab)

    def touch(kind: str, apart: float) -> None:
        points = [{"x": x - apart, "y": y, "id": 1}, {"x": x + apart, "y": y, "id": 2}]
        fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [] if kind == "touchEnd" else points})

    touch("touchStart", 20)
    for apart in range(25, 61, 5):
        touch("touchMove", apart)
    touch("touchEnd", 0)
    expect(tab).to_have_url(re.compile("at="))
    assert float(address_fields(tab)["at"].split(",")[2]) == pytest.approx(3, rel=0.1)  # 60 / 20
    assert address_fields(tab)["row"] == "60"  # two fingers lock nothing
    touch("touchStart", 60)
    for apart in range(55, 9, -5):
        touch("touchMove", apart)
    touch("touchEnd", 0)
    expect_address(tab, at="")


def test_numbers_follow_the_switches(lab_page: Any, workspace: Workspace, address: str) -> None:
    tab = lab_page("?place=2&head=1&row=60&key=20")
    wait_until_ready(tab)
    entropy = tab.locator(".details .numbers dt:has-text('entropy') + dd")
    trained = entropy.inner_text()
    beta = tab.get_by_label("β", exact=True)
    beta.focus()
    tab.keyboard.press("Home")
    expect_address(tab, beta="0")
    expect(entropy).not_to_have_text(trained)
    n = length_of(workspace, tab)
    uniform = sum(math.log(visible) for visible in range(1, n + 1)) / n
    assert number(entropy.inner_text()) == pytest.approx(uniform, abs=0.01)
    expect(tab.locator(".on-text")).to_contain_text("β 0")
    expect(tab.locator(".details figcaption .note").first).to_contain_text("β 0")
    # Type and text are told apart.
    expect(tab.locator(".chips")).to_contain_text("from probes", timeout=60_000)
    fields = address_fields(tab)
    query = f"recording={fields['recording']}&place=2&head=1&beta=0"
    with urllib.request.urlopen(lab_request(f"{address}api/look/head?{query}")) as answer:
        on_text = json.load(answer)["on_text"]
    shown = tab.locator(".on-text .score", has_text="previous").inner_text()
    assert number(shown.split()[-1]) == pytest.approx(on_text["previous"]["value"], abs=0.0006)
    tab.get_by_role("button", name="as trained", exact=True).click()
    expect(entropy).to_have_text(trained)


@pytest.mark.parametrize("switches", ["", "&beta=2.83", "&position=0", "&beta=0.0743"])
def test_the_shown_steps_reproduce_the_shown_weight(lab_page: Any, switches: str) -> None:
    """Recomputed from the text on the page alone."""
    tab = lab_page(f"?place=2&head=2&row=60&key=20{switches}")
    wait_until_ready(tab)
    for row, key in ((60, 20), (100, 0), (30, 29)):
        canvas = tab.locator("figure[data-map=B] canvas.map")
        n = 143
        tab.mouse.click(*cell_position(canvas, row, key, n, n))
        expect(tab.locator(".steps .who")).to_contain_text(f" {row} attends to")
        expect(tab.locator(".steps .who")).to_contain_text(f" {key}:")
        steps = {}
        for line in tab.locator(".chain li").all():
            name, formula, value = (line.locator(f".{part}").inner_text() for part in ("name", "sum", "value"))
            steps[name] = (formula, value)
        product, scale = map(number, steps["× β"][0].split(" × "))
        # β is the same number at the slider.
        assert number(tab.locator(".scores output").inner_text().split()[0]) == pytest.approx(scale, abs=0.00051)
        assert product == number(steps["q · k"][1])
        score_text = steps["× β"][1]
        decimals = len(score_text.split(".")[1])
        assert number(score_text) == pytest.approx(product * scale, abs=0.51 * 10.0**-decimals)
        score, log_sum = re.fullmatch(r"exp\((−?[\d.]+) − (−?[\d.]+)\)", steps["softmax"][0]).groups()
        assert score == score_text
        weight_text = steps["softmax"][1]
        weight = math.exp(number(score) - number(log_sum))
        unit = 1e-6 if weight >= 1e-4 else 10.0 ** (math.floor(math.log10(weight)) - 3)
        assert number(weight_text) == pytest.approx(weight, abs=0.51 * unit)
        assert tab.locator(".steps .who b").inner_text() == weight_text


def test_a_pooled_map_is_numbered_by_tokens(lab_page: Any, workspace: Workspace, tmp_path: Path) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 1, 512, 4)
    _, observation = attention(q, q, q, mask=Causal(), observe=Observe(map=64))
    Recording({"layer": [observation]}, tokens=[f" w{i}" for i in range(512)]).save(tmp_path / "pooled")
    item = workspace.open(tmp_path / "pooled")
    try:
        tab = lab_page(f"?recording={item.id}")
        canvas = tab.locator('figure[data-map=B] canvas.map[data-loading="0"]')
        canvas.wait_for()
        tab.evaluate(
            """() => {
                globalThis.written = new Set();
                const write = CanvasRenderingContext2D.prototype.fillText;
                CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
                    globalThis.written.add(text);
                    return write.call(this, text, ...rest);
                };
            }"""
        )
        tab.mouse.move(*cell_position(canvas, 40, 10, 64, 64))  # draws the map again
        expect(tab.locator(".readout")).to_contain_text("queries 320 … 327 → keys 80 … 87")
        until(tab, "globalThis.written.size > 4")
        numbers = [int(text) for text in tab.evaluate("[...globalThis.written]") if text.isdigit()]
        assert 400 < max(numbers) < 512 and min(numbers) == 0
        pointed = [int(token.get_attribute("data-at")) for token in tab.locator(".token.pointed").all()]
        assert sorted(pointed) == [*range(80, 88), *range(320, 328)]
    finally:
        workspace.close_recording(item.id)


def test_hidden_sinks_are_hidden_in_the_difference(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2&row=100&key=0")
    wait_until_ready(tab)
    tab.get_by_role("button", name="compare: pin as A").click()
    tab.locator(".head[data-place='1'][data-head='0']").click()
    canvas = tab.locator('figure[data-map="Δ"] canvas[data-loading="0"]')
    canvas.wait_for()
    n = length_of(workspace, tab)

    def pixel() -> tuple[int, ...]:
        x, y = cell_position(canvas, 70, 0, n, n)  # the numbers of both heads move the map when they arrive
        left, top = tab.evaluate("[scrollX, scrollY]")  # ticking a box may scroll, and the picture is of the whole page
        clip = {"x": x + left, "y": y + top, "width": 1, "height": 1}
        return Image.open(io.BytesIO(tab.screenshot(clip=clip, full_page=True))).convert("RGB").getpixel((0, 0))

    tab.mouse.move(5, 5)
    nothing = (244, 246, 250)  # the colour of no difference
    assert pixel() != nothing
    weight = shown_weight(tab, 100, 0)
    # The weights on the sinks arrive one head after the other: B's are drawn when A's arrive.
    held: list[Any] = []
    tab.route("**/api/look/row?**head=2&**direction=to**", lambda route: held.append(route))
    with tab.expect_response("**/api/look/row?**head=0&**direction=to**"):
        tab.get_by_label("hide sinks").check()
    pixel()
    assert held
    for route in held:
        route.continue_()
    deadline = time.monotonic() + 120
    while pixel() != nothing:
        assert time.monotonic() < deadline
    expect(tab.locator(".readout")).to_contain_text("not drawn")
    assert shown_weight(tab, 100, 0) == weight  # the weight itself does not change


# The contrast of text with what is behind it, of every token with a part of a character; and whether its character and
# its number are on one line.
PARTS = """() => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    function luminance(colours) {
        context.clearRect(0, 0, 1, 1);
        for (const colour of colours) {
            context.fillStyle = colour;
            context.fillRect(0, 0, 1, 1);
        }
        const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((byte) => {
            const share = byte / 255;
            return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    }
    return [...document.querySelectorAll(".token:has(.part)")].map((token) => {
        const mark = token.querySelector(".part");
        const panel = getComputedStyle(token.closest(".panel")).backgroundColor;
        const ground = luminance([panel, getComputedStyle(token).backgroundColor]);
        const ink = luminance([getComputedStyle(mark).color]);
        const contrast = (Math.max(ground, ink) + 0.05) / (Math.min(ground, ink) + 0.05);
        const opacity = getComputedStyle(mark).opacity;
        const group = token.closest(".character");
        const parts = [...(group ?? token).children];
        const lines = new Set(parts.map((part) => Math.round(part.getBoundingClientRect().top)));
        return { contrast, opacity, boxes: token.getClientRects().length, lines: lines.size };
    });
}"""
# Notes where each text ends that is written on a canvas, in pixels of the canvas.
SPY_ON_TEXT = """() => {
    globalThis.ends = [];
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most = Infinity) {
        const length = Math.min(most, this.measureText(text).width);
        const end = this.textAlign === "left" ? x + length : x;
        const point = this.getTransform().transformPoint({ x: end, y });
        globalThis.ends.push([text, point.x, this.canvas.width]);
        return write.call(this, text, x, y, most);
    };
}"""


def open_split_text(workspace: Workspace, folder: Path, characters: int) -> Any:
    """Open a recording of Japanese characters of three tokens each, with exact weights and a short profile."""
    torch.manual_seed(0)
    n = 3 * characters
    tokens = [f"{'日本語'[i // 3 % 3]}·{i % 3 + 1}/3" for i in range(n)]
    q = torch.randn(1, 1, n, 4)
    observe = Observe(map=64, profile=4, key_mass=True, keep=True)
    _, observation = attention(q, q, q, mask=Causal(), observe=observe)
    Recording({"layer": [observation]}, tokens=tokens).save(folder / f"split {characters}")
    return workspace.open(folder / f"split {characters}")


@pytest.mark.parametrize("dark", [False, True])
def test_parts_of_characters_are_readable(lab_page: Any, workspace: Workspace, tmp_path: Path, dark: bool) -> None:
    item = open_split_text(workspace, tmp_path, 25)
    try:
        tab = lab_page(f"?recording={item.id}&beta=0.25", dark=dark)
        wait_until_ready(tab)
        shades = "[...document.querySelectorAll('.token')].filter((token) => token.style.cssText.includes('weight'))"
        until(tab, f"{shades}.length === 75")
        for part in tab.evaluate(PARTS):
            assert part["contrast"] >= 4.5 and part["opacity"] == "1"
            assert part["boxes"] == 1 and part["lines"] == 1
    finally:
        workspace.close_recording(item.id)


def test_charts_say_what_they_leave_out(lab_page: Any, workspace: Workspace, tmp_path: Path) -> None:
    item = open_split_text(workspace, tmp_path, 5)
    try:
        tab = lab_page(f"?recording={item.id}&beta=0")
        wait_until_ready(tab)
        beyond = tab.locator(".details .beyond")
        expect(beyond).to_contain_text("beyond ±4")
        # With uniform weights, row i has a weight of 1 / (i + 1) on each of its keys.
        share = sum((i - 4) / (i + 1) for i in range(5, 15)) / 15
        assert float(beyond.get_attribute("data-share")) == pytest.approx(share, abs=1e-5)
        expect(tab.locator(".numbers")).to_contain_text("1 of 15 rows see only one key and count as 0")

        tab.evaluate(SPY_ON_TEXT)
        tab.get_by_label("β", exact=True).focus()
        tab.keyboard.press("End")
        expect_address(tab, beta="inf")
        expect(tab.locator(".details figcaption .note").first).to_contain_text("β ∞")
        assert re.findall(r"e−\d", tab.locator(".details figure").nth(1).inner_text()) == []
        # The label of the last key is not cut off.
        until(tab, "globalThis.ends.length > 30")
        ends = tab.evaluate("globalThis.ends")
        assert any("·3/3" in text for text, _, _ in ends)
        for text, end, width in ends:
            assert end <= width, text
    finally:
        workspace.close_recording(item.id)


def test_maps_of_different_sizes_have_no_difference(lab_page: Any, workspace: Workspace, tmp_path: Path) -> None:
    items = [open_split_text(workspace, tmp_path, characters) for characters in (5, 7)]
    try:
        # The locked cell of the larger map B is outside of A.
        tab = lab_page(f"?recording={items[1].id}&row=20&key=19&pinned={items[0].id}~0~0~0~1~1~1")
        wait_until_ready(tab)
        expect(tab.locator(".unlike")).to_contain_text("A has 15 queries and 15 keys, B has 21 and 21")
        expect(tab.locator('figure[data-map="Δ"]')).to_be_hidden()
        expect(tab.locator("figure[data-map=A] canvas.map[data-loading='0']")).to_be_visible()
        shown_weight(tab, 20, 19)
        assert "A" not in tab.locator(".readout b").inner_text()
        expect(tab.locator(".on-text-of-a")).to_contain_text("on its own text")
    finally:
        for item in items:
            workspace.close_recording(item.id)


def test_a_comparison_names_the_tokens_of_both_texts(lab_page: Any, workspace: Workspace, tmp_path: Path) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 1, 5, 4)
    _, observation = attention(q, q, q, observe=Observe(map=8, keep=True))
    items = []
    for name, words in (("first", "abcde"), ("second", "vwxyz")):
        Recording({"layer": [observation]}, tokens=list(words)).save(tmp_path / name)
        items.append(workspace.open(tmp_path / name))
    try:
        tab = lab_page(f"?recording={items[1].id}&row=4&key=3&pinned={items[0].id}~0~0~0~1~1~1")
        wait_until_ready(tab)
        expect(tab.locator(".readout")).to_contain_text("“z” 4 → key “y” 3")
        expect(tab.locator(".readout")).to_contain_text("A, “e” 4 → “d” 3,")
    finally:
        for item in items:
            workspace.close_recording(item.id)
