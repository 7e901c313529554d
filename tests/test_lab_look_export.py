"""The exported map of the Look page: every label is inside the file, the scale is labelled, PNG and SVG agree."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import expect
from support.look_page import LOADED_MAP, wait_until_ready

# Every text of the figure: its content, and its box in units of the view box.
TEXT_BOXES = """text => {
    const svg = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    document.body.append(svg);
    const frame = svg.getBoundingClientRect();
    const boxes = Array.from(svg.querySelectorAll("text")).map((node) => {
        const box = node.getBoundingClientRect();
        const corners = [box.left - frame.left, box.top - frame.top, box.right - frame.left, box.bottom - frame.top];
        return [node.textContent, ...corners];
    });
    svg.remove();
    return boxes;
}"""


def saved(tab: Any, name: str, folder: Path) -> bytes:
    tab.locator(".menu summary").click()
    with tab.expect_download() as download:
        tab.locator(".menu .items").get_by_text(name).click()
    file = folder / download.value.suggested_filename
    download.value.save_as(file)
    return file.read_bytes()


@pytest.mark.parametrize("zoomed", [0, 2])
def test_every_label_is_inside(lab_page: Any, tmp_path: Path, zoomed: int) -> None:
    tab = lab_page(f"?place=2&head=2&hide={int(zoomed > 0)}")
    wait_until_ready(tab)
    if zoomed:
        tab.locator("figure[data-map=B] canvas.map").focus()
        for _ in range(zoomed):
            tab.keyboard.press("+")
        expect(tab).to_have_url(re.compile("at="))
        tab.locator(LOADED_MAP).wait_for()
    text = saved(tab, "map as SVG", tmp_path).decode()
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', text)[0])
    boxes = tab.evaluate(TEXT_BOXES, text)
    for content, left, top, right, bottom in boxes:
        assert -0.5 <= left <= right <= width + 0.5 and -0.5 <= top <= bottom <= height + 0.5, content
    contents = [content for content, *_ in boxes]
    what = "weight, sinks hidden" if zoomed else "weight (a row sums to 1)"
    assert f"{what}, square-root scale" in contents
    assert {"keys →", "← queries", "0"} <= set(contents) and "layer 2 · head 2" in contents[0]
    # The labels are tokens if there are not too many: with a little zoom the figure is larger than the screen for that.
    assert text.count('class="query"') > 3 and text.count('class="key"') > 3
    for side in ("query", "key"):
        labels = re.findall(rf'class="{side}"[^>]*>([^<]*)', text)
        assert any(not content.isdecimal() for content in labels) == bool(zoomed)
    if zoomed:
        screen = tab.locator("figure[data-map=B] canvas.map").bounding_box()
        assert width > screen["width"] and len(labels) > 40
        tops = sorted(top for content, left, top, *_ in boxes if content in labels and left < 70)
        assert len(tops) > 20 and min(b - a for a, b in pairwise(tops)) > 9  # no label on another

    image = Image.open(io.BytesIO(saved(tab, "map as PNG", tmp_path)))
    assert image.size == (3 * width, 3 * height)


def test_a_file_has_a_name_in_every_script(lab_page: Any) -> None:
    tab = lab_page()
    name_of = "async title => (await import('/static/look/export.js')).mapFileName(title, 2, 1)"
    for title, name in (("吾輩は 猫である", "吾輩は-猫である"), ("--out ../x", "out-..-x"), ("…!", "map")):
        assert tab.evaluate(name_of, title) == f"{name}-2.1"
