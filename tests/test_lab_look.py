"""The room «Look» in a browser: every view and control, at both widths; numbers on the page are the operator's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy
import pytest
import torch
from lab_pages import fits
from PIL import Image

from regard import Causal, Observe, attention, models
from regard.lab.lab import Lab
from regard.watching import Seen

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
expect.set_options(timeout=20_000)
pytestmark = pytest.mark.usefixtures("full_tiles")  # small ones are there to cross borders, and slow
LEFT, TOP = 70, 50  # pixels of a map's axes
SHOWN = 'figure[data-map=B] canvas.map[data-loading="0"]'


def ready(tab: Any) -> Any:
    """The picked head is shown, down to why its locked weight is what it is. Gives the map."""
    tab.locator(SHOWN).wait_for()
    tab.locator(".chain li").first.wait_for()
    expect(tab).to_have_url(re.compile("(?=.*recording=)(?=.*place=)(?=.*head=)"))
    return tab.locator("figure[data-map=B] canvas.map")


def fields(tab: Any) -> dict[str, str]:
    return {name: value[0] for name, value in parse_qs(urlsplit(tab.url).query).items()}


def says(tab: Any, **expected: str) -> None:
    """Wait until the address says so; an empty word: that it does not name the field."""
    for name, value in expected.items():
        found = rf"[?&]{name}={re.escape(value)}(&|$)" if value else rf"^(?!.*[?&]{name}=)"
        expect(tab).to_have_url(re.compile(found))


def exact(lab: Lab, tab: Any, row: int, key: int) -> float:
    at = fields(tab)
    seen = lab.seen(at["recording"])
    return float(seen[list(seen)[int(at["place"])]].weights(int(at["head"]), row, key))


def point(canvas: Any, row: int, key: int, n: int, m: int) -> tuple[float, float]:
    """Where a cell of the whole map is on the screen."""
    box = canvas.bounding_box()
    width, height = box["width"] - LEFT, box["height"] - TOP
    size = min(width / m, height / n)
    x = box["x"] + LEFT + width / 2 + (key + 0.5 - m / 2) * size
    return x, box["y"] + TOP + height / 2 + (row + 0.5 - n / 2) * size


def read_out(tab: Any, row: int, key: int) -> float:
    """What the page says of a cell, once it says so exactly."""
    line = tab.locator(f'.readout[data-row="{row}"][data-key="{key}"][data-level="0"]')
    line.wait_for()
    return float(line.get_attribute("data-value"))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_all_heads_are_shown_and_named(lab_page: Any, width: int, dark: bool) -> None:
    tab = lab_page("", width=width, dark=dark)
    ready(tab)
    assert tab.locator(".head").count() == 12
    expect(tab.locator(".legend button:enabled").first).to_be_visible(timeout=60_000)
    assert tab.locator(".legend").inner_text().count("induction") == 1
    expect(tab.locator(".naming")).to_be_hidden()
    expect(tab.locator(".details .sureness dt")).to_have_count(8)
    assert tab.locator(".details .numbers dt").all_inner_texts()[:2] == ["entropy", "spread"]
    assert tab.locator(".details rect").count() > 8 and tab.locator(".details path.curve").count() == 1
    assert tab.locator(".texts .token").count() > 100
    assert fits(tab)


def test_the_cell_under_the_pointer_is_the_operators(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?place=2&head=1")
    canvas = ready(tab)
    seen = lab.seen(fields(tab)["recording"])
    n = seen[2].n
    assert n is not None
    for row, key in ((n - 3, 5), (70, 64), (40, 0)):
        tab.mouse.move(*point(canvas, row, key, n, n))
        assert read_out(tab, row, key) == pytest.approx(exact(lab, tab, row, key), rel=2e-5, abs=1e-9)
        assert f"key “{seen.about['tokens'][key].strip()}” {key}" in tab.locator(".readout").inner_text()


def test_zoomed_in_it_is_still_the_operators(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?place=1&head=2")
    canvas = ready(tab)
    n = lab.seen(fields(tab)["recording"])[1].n
    assert n is not None
    x, y = point(canvas, 90, 33, n, n)
    tab.mouse.move(x, y)
    for _ in range(14):
        tab.mouse.wheel(0, -240)
    expect(tab).to_have_url(re.compile("at="))
    tab.mouse.click(x, y)  # the point under the pointer stays where it is
    says(tab, row="90", key="33")
    assert read_out(tab, 90, 33) == pytest.approx(exact(lab, tab, 90, 33), rel=2e-5, abs=1e-9)
    steps = tab.locator(".steps")
    expect(steps.locator(".who")).to_contain_text("90 looks at")
    assert float(steps.get_attribute("data-weight")) == pytest.approx(exact(lab, tab, 90, 33), rel=1e-5)
    tab.mouse.move(x, y)
    tab.mouse.down()
    tab.mouse.move(x + 64, y, steps=4)  # a drag moves the map and locks nothing
    tab.mouse.up()
    assert fields(tab)["key"] == "33"
    tab.get_by_role("button", name="show the whole map").click()
    says(tab, at="")


def test_the_map_by_keys(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20")
    canvas = ready(tab)
    canvas.focus()
    tab.keyboard.press("Shift+ArrowDown")
    tab.keyboard.press("Shift+ArrowRight")
    says(tab, row="61", key="21")
    expect(tab.locator(".steps .who")).to_contain_text("61 looks at")
    for _ in range(5):
        tab.keyboard.press("+")
    expect(tab).to_have_url(re.compile("at="))
    before = fields(tab)["at"].split(",")
    tab.keyboard.press("ArrowDown")
    expect(tab).not_to_have_url(re.compile(re.escape("%2C".join(before))))
    after = fields(tab)["at"].split(",")
    assert before[0] == after[0] and float(after[1]) > float(before[1])
    tab.keyboard.press("-")
    tab.keyboard.press("0")
    says(tab, at="")
    tab.keyboard.press("Escape")
    says(tab, row="off", key="off")
    expect(tab.locator(".steps")).to_contain_text("Lock a cell")


def test_heads_by_keys(lab_page: Any) -> None:
    tab = lab_page("?place=0&head=0")
    ready(tab)
    tab.locator(".head[aria-pressed=true]").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("x")
    says(tab, ablated="1.1")
    tab.keyboard.press("Enter")
    says(tab, place="1", head="1")
    expect(tab.locator(".head-line h2")).to_have_text("layer 1 · head 1")
    tab.go_back()
    expect(tab.locator(".head-line h2")).to_have_text("layer 0 · head 0")


def test_tokens_are_asked_and_locked(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?place=2&head=2")
    ready(tab)
    n = lab.seen(fields(tab)["recording"])[2].n
    assert n is not None
    says(tab, row=str(n - 1))  # the last token is asked at first
    token = tab.locator(".token[data-at='50']")
    token.hover()
    expect(tab.locator(".strongest h4")).to_contain_text(" 50 looks at")
    token.click()
    says(tab, row="50")
    expect(token).to_have_attribute("aria-pressed", "true")
    first = tab.locator(".strongest li").first
    key = int(first.locator("button").inner_text().split()[-1])
    weight = float(first.locator("span").inner_text())
    assert weight == pytest.approx(exact(lab, tab, 50, key), abs=1e-6)
    shaded = tab.locator(f".token[data-at='{key}']")
    assert float(shaded.evaluate("x => x.style.getPropertyValue('--weight')")) == 1
    second = tab.locator(".strongest li button").nth(1)
    second.click()
    says(tab, row="50", key=second.inner_text().split()[-1])
    tab.get_by_role("button", name="is looked at by").click()
    says(tab, direction="to")
    expect(tab.locator(".strongest h4")).to_contain_text("is looked at by")
    at, asker = int(fields(tab)["key"]), tab.locator(".strongest li").first
    query = int(asker.locator("button").inner_text().split()[-1])
    assert float(asker.locator("span").inner_text()) == pytest.approx(exact(lab, tab, query, at), abs=1e-6)


def test_tokens_by_keys_and_lines(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2&row=30")
    ready(tab)
    tab.locator(".token[data-at='30']").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    says(tab, row="31")
    tab.get_by_role("button", name="lines", exact=True).click()
    says(tab, reading="lines")
    expect(tab.locator(".lines path.line").first).to_be_visible()
    asks = tab.locator(".lines text.asks")
    assert 2 < asks.count() <= 60
    tab.locator(".lines text.asks[data-at='28']").click()
    says(tab, row="28")
    expect(tab.locator(".lines text.locked[data-side=row]")).to_have_attribute("data-at", "28")
    tab.keyboard.press("Escape")
    expect(tab.locator(".reading")).to_contain_text("Lock a token")


def test_sliders_recompute(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?place=2&head=1&row=60&key=20")
    ready(tab)
    trained = read_out(tab, 60, 20)
    beta = tab.get_by_label("β", exact=True)
    beta.focus()
    tab.keyboard.press("Home")
    says(tab, beta="0")
    tab.locator('.steps[data-weight^="0.01639"]').wait_for()  # 1 / 61: all alike
    expect(tab.locator(".readout")).to_contain_text("0.016393")
    tab.get_by_label("mask", exact=True).uncheck()
    n = lab.seen(fields(tab)["recording"])[2].n
    expect(tab.locator(".readout")).to_contain_text(f"{1 / (n or 1):.6f}")
    beta.focus()
    tab.keyboard.press("End")
    says(tab, beta="inf")
    expect(tab.locator(".chain")).to_contain_text("∞")
    tab.get_by_label("position", exact=True).uncheck()
    says(tab, position="0", mask="0")
    tab.get_by_role("button", name="as trained").click()
    says(tab, beta="", position="", mask="")
    expect(tab.locator(".readout")).to_contain_text(f"{trained:.6f}")
    expect(tab.get_by_role("button", name="as trained")).to_be_disabled()


def test_sorted_filtered_and_without_sinks(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?place=2&head=2")
    ready(tab)
    tab.get_by_label("sort", exact=True).select_option("entropy")
    says(tab, sort="entropy")
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
    says(tab, hide="1")
    expect(tab.locator(".strongest")).not_to_contain_text("endoftext")


def test_compare_and_difference(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20")
    ready(tab)
    a = read_out(tab, 60, 20)
    tab.get_by_role("button", name="compare: pin as A").click()
    tab.locator(".head[data-place='1'][data-head='0']").click()
    says(tab, place="1", head="0")
    for name in "ABΔ":
        tab.locator(f'figure[data-map="{name}"] canvas[data-loading="0"]').wait_for()
    expect(tab.locator(".readout")).to_contain_text("B − A")
    b = exact(lab, tab, 60, 20)
    numbers = re.findall(r"(−?\d\.\d+(?:e−?\d+)?)", tab.locator(".readout b").inner_text())
    shown = [float(x.replace("−", "-")) for x in numbers]
    assert shown == pytest.approx([b, a, b - a], abs=2e-6)
    assert fits(tab)
    canvas = tab.locator("figure[data-map=A] canvas")
    canvas.focus()
    tab.keyboard.press("+")
    expect(tab).to_have_url(re.compile("at="))
    tab.get_by_role("button", name="end comparison").click()
    expect(tab.locator("figure[data-map=A]")).to_be_hidden()
    says(tab, pinned="")


def test_heads_taken_out(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2&ablated=1.0")
    ready(tab)
    tab.get_by_role("button", name="take out").click()
    says(tab, ablated="1.0,2.2".replace(",", "%2C"))
    part = tab.locator(".ablate")
    assert part.locator(".chosen li").count() == 2
    for by in ("zero", "mean"):
        part.get_by_label("replace their output by").select_option(by)
        part.get_by_role("button", name="Ablate").click()
        expect(part.get_by_role("button", name="Ablate")).to_be_enabled(timeout=60_000)
        expect(part.locator(".result tbody tr").first).to_be_visible()
        before = [float(x) for x in part.locator("tbody td:nth-child(3)").all_inner_texts()]
        after = [float(x) for x in part.locator("tbody td:nth-child(4)").all_inner_texts()]
        assert 0 < sum(before) <= 1.01 and before != after
    part.get_by_label("keep layer 1 · head 0").click()
    says(tab, ablated="2.2")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_text_of_ones_own(lab_page: Any, lab: Lab, width: int) -> None:
    tab = lab_page("", width=width)
    ready(tab)
    known = fields(tab)["recording"]
    tab.get_by_role("button", name="new text").click()
    tab.get_by_label("text", exact=True).fill("An iterator returns items. An iterator returns items.")
    tab.get_by_label("read at most so many tokens").fill("12")
    tab.keyboard.press("Control+Enter")
    expect(tab).not_to_have_url(re.compile(known), timeout=60_000)
    ready(tab)
    expect(tab.locator("#look-input")).to_be_hidden()
    made = fields(tab)["recording"]
    assert lab.seen(made)[0].n == 12
    expect(tab.locator(".texts .token")).to_have_count(12)
    assert fits(tab)
    tab.get_by_label("recording", exact=True).select_option(known)
    says(tab, recording=known)
    expect(tab.locator(".texts .token[data-at='100']")).to_be_attached()
    tab.get_by_label("recording", exact=True).select_option(made)
    says(tab, recording=made)
    expect(tab.locator(".texts .token")).to_have_count(12)
    tab.get_by_role("button", name="close", exact=True).click()
    expect(tab).not_to_have_url(re.compile(made))
    assert made not in [one.id for one in lab.all("recording")]


def test_a_run_is_cancelled(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?input=1")
    ready(tab)
    count = len(lab.all("recording"))
    model = next(one for one in lab.all("model") if one.about["reads"] == "text")
    first = lab.jobs.start("kinds", {"model": str(model.folder), "reads": "text"})  # so that the run has to wait
    tab.get_by_label("text", exact=True).fill("some words")
    tab.get_by_role("button", name="Run").click()
    expect(tab.locator(".job progress")).to_be_visible()
    tab.locator(".job").get_by_role("button", name="Cancel").click()
    expect(tab.locator("#notes")).to_contain_text("cancelled")
    expect(tab.locator(".job")).to_be_hidden()
    expect(tab.get_by_role("button", name="Run")).to_be_enabled()
    lab.jobs.cancel(first.id)
    assert len(lab.all("recording")) == count


def test_files(lab_page: Any, lab: Lab, tmp_path: Path) -> None:
    tab = lab_page("?place=2&head=2")
    ready(tab)

    def saved(name: str) -> bytes:
        tab.locator(".menu summary").click()
        with tab.expect_download() as found:
            tab.locator(".menu .items").get_by_text(name).click()
        file = tmp_path / found.value.suggested_filename
        found.value.save_as(file)
        return file.read_bytes()

    assert saved("map as PNG").startswith(b"\x89PNG")
    assert b"<image" in saved("map as SVG")
    canvas = tab.locator("figure[data-map=B] canvas.map")
    canvas.focus()
    for _ in range(6):
        tab.keyboard.press("+")
    expect(tab).to_have_url(re.compile("at="))
    tab.locator(SHOWN).wait_for()
    drawn = saved("map as SVG").decode()
    assert "<image" not in drawn
    row, key, value = re.findall(r"<title>(\d+) → (\d+): ([^<]+)</title>", drawn)[100]
    assert float(value) == pytest.approx(exact(lab, tab, int(row), int(key)), rel=2e-5, abs=1e-9)
    assert saved("heads as CSV").decode().count("\n") == 13
    assert len(json.loads(saved("heads as JSON"))["heads"]) == 12
    assert saved("offline page").startswith(b"<!doctype html>")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_reload_brings_all_back(lab_page: Any, width: int) -> None:
    where = "?place=1&head=3&row=40&key=11&beta=2&mask=0&reading=lines&sort=peak&hide=1&ablated=0.1"
    where += "&at=0.40000,0.30000,2.0000"
    tab = lab_page(where, width=width)
    ready(tab)
    expect(tab).to_have_url(re.compile("recording="))
    before = fields(tab)
    expect(tab.locator(".lines path.line").first).to_be_visible()
    said = tab.locator(".readout").inner_text()
    tab.reload()
    ready(tab)
    assert fields(tab) == before
    expect(tab.locator(".readout")).to_have_text(said)
    expect(tab.locator(".head-line h2")).to_have_text("layer 1 · head 3")
    expect(tab.locator(".scores output")).to_have_text("× 2")
    expect(tab.get_by_label("mask", exact=True)).not_to_be_checked()
    expect(tab.get_by_label("hide sinks")).to_be_checked()
    assert tab.locator(".cell input:checked").count() == 1
    assert fits(tab)


def test_by_finger(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?place=2&head=2", width=390)
    canvas = ready(tab)
    n = lab.seen(fields(tab)["recording"])[2].n
    assert n is not None
    canvas.scroll_into_view_if_needed()
    tab.touchscreen.tap(*point(canvas, 100, 30, n, n))
    says(tab, row="100", key="30")
    assert read_out(tab, 100, 30) == pytest.approx(exact(lab, tab, 100, 30), rel=2e-5, abs=1e-9)


@pytest.fixture
def others(lab: Lab, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A model of pictures, one of text pairs, a long recording, and one without q and k."""
    tokenizer = {"tokenizer.json": (models.bundled() / "tokenizer.json").read_bytes()}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    models.create({"model_type": "vit", "image_size": 16, "patch_size": 4, "num_channels": 3, **sizes}, std=0.3).save(
        tmp_path / "pictures"
    )
    pair = {"num_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16, "d_model": 16}
    start = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 0, "vocab_size": 1024}
    models.create({"model_type": "t5", **pair, **start}, beside=tokenizer, std=0.3).save(tmp_path / "pairs")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 1500, 4) for _ in range(3))
    for name, keep in (("long", True), ("slight", False)):
        _, seen = attention(q, k, v, mask=Causal(), observe=Observe(map=16, profile=4, keep=keep))
        Seen({"layer": [seen]}, tokens=[f" w{i}" for i in range(1500)]).save(tmp_path / name)
    known = [one.id for one in lab.all("recording")]
    yield {name: lab.open(tmp_path / name).id for name in ("pictures", "pairs", "long", "slight")}
    for one in lab.all("recording"):
        if one.id not in known:
            lab.close_recording(one.id)


def test_other_models_and_recordings(lab_page: Any, lab: Lab, others: dict[str, str], tmp_path: Path) -> None:
    tab = lab_page(f"?recording={others['long']}&input=1")
    canvas = ready(tab)
    # A text of 1500 tokens: pooled at first, and in pages.
    assert canvas.get_attribute("data-level") != "0"
    expect(tab.locator(".texts .token")).to_have_count(600)
    assert int(tab.locator(".texts .token").first.get_attribute("data-at")) == 900
    tab.mouse.move(*point(canvas, 1000, 400, 1500, 1500))
    expect(tab.locator(".readout")).to_contain_text("on average")
    seen = lab.seen(others["long"])["layer"]
    level = int(tab.locator(".readout").get_attribute("data-level"))
    span = [int(tab.locator(".readout").get_attribute(f"data-{name}")) >> level << level for name in ("row", "key")]
    rows, keys = (slice(x, x + (1 << level)) for x in span)
    pooled = float(torch.as_tensor(seen.weights(0, rows, keys)).sum(-1).mean())
    assert float(tab.locator(".readout").get_attribute("data-value")) == pytest.approx(pooled, rel=1e-4)
    tab.get_by_role("button", name="earlier").click()
    expect(tab.locator(".texts .token").first).to_have_attribute("data-at", "300")
    # Without q and k: the small map, and a word on what is missing.
    tab.get_by_label("recording", exact=True).select_option(others["slight"])
    expect(tab.locator(".reading")).to_contain_text("were not kept")
    expect(canvas).to_have_attribute("data-level", "0")
    tab.evaluate("scrollTo(0, 0)")
    tab.mouse.move(*point(canvas, 10, 5, 16, 16))
    expect(tab.locator(".readout")).to_contain_text("this is all there is")
    # A picture.
    y, x = numpy.mgrid[0:32, 0:32]
    Image.fromarray((numpy.stack([x, y, x + y], -1) * 4).astype("uint8")).save(tmp_path / "picture.png")
    form = tab.locator("#look-input")
    form.get_by_label("model").select_option(others["pictures"])
    form.locator("input[type=file]").set_input_files(tmp_path / "picture.png")
    expect(form.locator("img")).to_be_visible()
    form.get_by_role("button", name="Run").click()
    expect(tab.locator(".patches .token")).to_have_count(16, timeout=60_000)
    ready(tab)
    tab.locator(".patches .token").nth(5).click()
    says(tab, row="6")
    expect(tab.locator(".steps .who")).to_contain_text("patch 1,1 looks at")
    expect(tab).to_have_url(re.compile("key="))
    at = int(fields(tab)["key"])
    assert math.isclose(read_out(tab, 6, at), exact(lab, tab, 6, at), rel_tol=2e-5, abs_tol=1e-9)
    # A source and a target.
    tab.get_by_role("button", name="new picture").click()
    form.get_by_label("model").select_option(others["pairs"])
    form.get_by_label("source").fill("The items of a container.")
    form.get_by_label("target").fill("items")
    form.get_by_role("button", name="Run").click()
    cross = tab.locator(".heads .place", has_text="cross")
    cross.wait_for(timeout=60_000)
    names = tab.locator(".heads .place").all_inner_texts()
    number = next(i for i, name in enumerate(names[1:]) if "cross" in name)
    tab.locator(f".head[data-place='{number}'][data-head='1']").click()
    expect(tab.locator(".block[data-side=keys] .token").first).to_be_visible()
    tab.locator(".block[data-side=keys] .token").nth(2).click()
    says(tab, key="2")
    assert fits(tab)


def test_a_recording_that_is_gone(lab_page: Any) -> None:
    tab = lab_page("?recording=nothing&place=9&head=9")
    ready(tab)
    expect(tab.locator("#notes")).to_contain_text("not open")
    assert fields(tab)["recording"] != "nothing"
    # To another room and back: each has its own address.
    tab.locator(".asks .token").nth(2).click()
    says(tab, row="2")
    tab.locator("#rooms a[data-room=budget]").click()
    says(tab, room="budget", row="", recording="")
    tab.go_back()
    ready(tab)
    says(tab, row="2")
