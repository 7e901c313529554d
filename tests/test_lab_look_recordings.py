"""The Look page in a browser: ablation, new recordings, downloads, reloads and other kinds of models."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import expect
from support.lab_pages import fits
from support.look_page import (
    LOADED_MAP,
    address_fields,
    cell_position,
    exact_weight,
    expect_address,
    shown_weight,
    wait_until_ready,
)

from regard import Causal, Observe, attention, models
from regard.interp import Recording
from regard.lab import jobs
from regard.lab.workspace import Workspace

expect.set_options(timeout=20_000)
pytestmark = pytest.mark.usefixtures("full_tiles")  # tiny tiles, which other tests use, make pages slow


def test_ablation(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?place=2&head=2&ablated=1.0&row=60")
    wait_until_ready(tab)
    tab.get_by_role("button", name="select for ablation").click()
    expect_address(tab, ablated="1.0,2.2".replace(",", "%2C"))
    expect(tab.get_by_role("button", name="Ablate 2 heads")).to_be_in_viewport()
    part = tab.locator(".ablate")
    run = part.locator("button.main")
    assert part.locator(".chosen li").count() == 2
    n = workspace.recording(address_fields(tab)["recording"])[2].n
    assert n is not None
    for by in ("zero", "mean"):
        part.get_by_label("replace their output by").select_option(by)
        run.click()
        expect(part.locator(".result tbody tr").first).to_be_visible(timeout=60_000)
        expect(run).to_be_enabled()
        expect(part.locator(".at b")).to_contain_text(" 60")  # the locked position
        before = [float(x) for x in part.locator("tbody td:nth-child(3)").all_inner_texts()]
        after = [float(x) for x in part.locator("tbody td:nth-child(4)").all_inner_texts()]
        assert 0 < sum(before) <= 1.01 and before != after
        # The bars are the change of each token's loss, and add up to the change of the total.
        total = part.locator("p[data-before]")
        change = float(total.get_attribute("data-after")) - float(total.get_attribute("data-before"))
        bars = [float(x.get_attribute("data-change")) for x in part.locator(".losses rect[data-change]").all()]
        assert len(bars) == n - 1 and sum(bars) == pytest.approx(change, rel=1e-4, abs=1e-3)
    shown = part.locator("tbody").inner_text()
    tab.locator(".token[data-at='40']").click()
    expect(part.locator(".at b")).to_contain_text(" 40")
    expect(part.locator("tbody")).not_to_have_text(shown)
    part.get_by_label("keep layer 1 · head 0").click()
    expect_address(tab, ablated="2.2")
    expect(part.locator(".result")).to_be_empty()  # it was the result of other heads


def test_the_loss_of_each_token_can_be_read(lab_page: Any) -> None:
    """Pointing, tapping and the keyboard show the numbers of a token; the button to ablate is always in view."""
    tab = lab_page("?place=2&head=2&row=60", width=390)
    wait_until_ready(tab)
    bar = tab.locator(".ablate-now")
    expect(bar).to_be_hidden()
    tab.get_by_role("button", name="select for ablation").click()
    expect(bar.get_by_role("button", name="Ablate 1 head")).to_be_in_viewport()
    tab.locator(".details").scroll_into_view_if_needed()
    tab.evaluate("scrollTo(0, document.body.scrollHeight / 2)")
    expect(bar).to_have_class(re.compile("floating"))
    expect(bar.get_by_role("button", name="clear")).to_be_in_viewport()
    tab.locator(".ablate-now button.main").click()
    chart = tab.locator(".losses")
    expect(chart).to_be_in_viewport()
    expect(bar).not_to_have_class(re.compile("floating"))
    assert chart.bounding_box()["height"] >= 120
    assert {"0", "nats"} <= set(re.findall(r"\w+", tab.locator(".loss").inner_text()))

    # The token after the locked one is shown at first; its shade is relative to the largest change.
    readout = tab.locator(".loss-readout")
    expect(readout).to_have_attribute("data-token", "61")
    expect(readout).to_contain_text("nats")
    bars = tab.locator(".losses rect[data-change]")
    changes = [float(x.get_attribute("data-change")) for x in bars.all()]
    worst = max(range(len(changes)), key=lambda i: abs(changes[i]))
    shaded = tab.locator(f".loss-text [data-token='{worst + 1}']")
    assert float(shaded.evaluate("x => x.style.getPropertyValue('--change')")) == 1
    box = chart.bounding_box()
    place = {"x": (worst + 0.5) * box["width"] / len(changes), "y": 40}
    chart.hover(position=place)
    expect(readout).to_have_attribute("data-token", str(worst + 1))
    tab.locator(".loss figcaption").hover()
    expect(readout).to_have_attribute("data-token", "61")
    chart.tap(position=place)
    expect_address(tab, row=str(worst))
    expect(readout).to_have_attribute("data-token", str(worst + 1))
    assert float(readout.get_attribute("data-change")) == pytest.approx(changes[worst])
    expect(shaded).to_have_class(re.compile("pointed"))
    chart.focus()
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    expect(readout).to_have_attribute("data-token", "2")
    tab.keyboard.press("Enter")
    expect_address(tab, row="1")
    expect(tab.locator(".ablate .at b")).to_contain_text(" 1")
    assert fits(tab)
    bar.get_by_role("button", name="clear").click()
    expect_address(tab, ablated="")
    expect(bar).to_be_hidden()


def test_next_tokens_have_different_names(lab_page: Any) -> None:
    tab = lab_page("?page=claims")
    tokens = ["↵", "↵ ", "\n", "\r\n", "\n\n", " the", "the", " ", "\u00a0", "\u200bthe", "x", "x"]
    rows = [{"id": i, "token": token} for i, token in enumerate(tokens)]
    names = tab.evaluate("async rows => (await import('/static/look/next_tokens.js')).tokenNames(rows)", rows)
    assert len(set(names)) == len(names)
    assert names[3:7] == ["“␍↵”", "“↵↵”", "“␣the”", "“the”"] and names[0] == "“↵” (id 0)" and names[-1] == "“x” (id 11)"


@pytest.mark.parametrize("width", [1280, 390])
def test_a_new_text(lab_page: Any, workspace: Workspace, width: int) -> None:
    tab = lab_page("", width=width)
    wait_until_ready(tab)
    known = address_fields(tab)["recording"]
    tab.get_by_role("button", name="hide input").click()
    expect(tab.locator("#look-input")).to_be_hidden()
    tab.get_by_role("button", name="new text").click()
    tab.get_by_label("text", exact=True).fill("An iterator returns items. An iterator returns items.")
    tab.get_by_label("maximum number of tokens").fill("12")
    tab.keyboard.press("Control+Enter")
    expect(tab).not_to_have_url(re.compile(known), timeout=60_000)
    wait_until_ready(tab)
    expect(tab.get_by_label("text", exact=True)).to_be_visible()  # for the next text
    recording_id = address_fields(tab)["recording"]
    assert workspace.recording(recording_id)[0].n == 12
    expect(tab.locator(".texts .token")).to_have_count(12)
    assert fits(tab)
    tab.get_by_label("recording", exact=True).select_option(known)
    expect_address(tab, recording=known)
    expect(tab.locator(".texts .token[data-at='100']")).to_be_attached()
    tab.get_by_label("recording", exact=True).select_option(recording_id)
    expect_address(tab, recording=recording_id)
    expect(tab.locator(".texts .token")).to_have_count(12)
    # A request that is on its way when the recording is closed would be answered with 404.
    tab.wait_for_load_state("networkidle")
    tab.get_by_role("button", name="close", exact=True).click()
    expect(tab).not_to_have_url(re.compile(recording_id))
    assert recording_id not in [item.id for item in workspace.items("recording")]
    tab.locator("#notes").get_by_role("button", name="Undo").click()
    expect(tab).to_have_url(re.compile(recording_id))
    assert recording_id in [item.id for item in workspace.items("recording")]
    wait_until_ready(tab)

    # Another window closes it: this window says so and opens it again.
    lab_page.expected.append("404")
    workspace.close_recording(recording_id)
    tab.get_by_label("β", exact=True).press("ArrowLeft")
    tab.locator("#notes").get_by_role("button", name="Open it again").click()
    wait_until_ready(tab)
    expect(tab).to_have_url(re.compile(recording_id))
    assert recording_id in [item.id for item in workspace.items("recording")]
    tab.get_by_role("button", name="close", exact=True).click()
    expect(tab).not_to_have_url(re.compile(recording_id))


def pause(workspace: Workspace, job: jobs.Job) -> None:
    """Pause the worker process that runs a job. The job can only be cancelled afterwards, which kills the process."""
    deadline = time.monotonic() + 60
    while job.state == "queued" and time.monotonic() < deadline:
        time.sleep(0.01)
    process = workspace.jobs._queue_of(job.kind)._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    assert job.state == "running"


def test_a_run_is_cancelled(
    lab_page: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(jobs.QUEUES, "kinds", "look")  # the same queue, so that the run has to wait
    tab = lab_page("?input=1")
    wait_until_ready(tab)
    count = len(workspace.items("recording"))
    # A copy of the model has no stored head types, so they are scored. The process is paused, because on a fast machine
    # it would be done before this test has clicked.
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copy(models.bundled() / file, tmp_path / file)
    first = workspace.jobs.start("kinds", {"model": str(tmp_path), "reads": "text"})
    pause(workspace, first)
    tab.get_by_label("text", exact=True).fill("some words")
    tab.get_by_role("button", name="Run").click()
    expect(tab.locator(".job progress")).to_be_visible()
    expect(tab.locator(".job")).to_contain_text("waits for: scoring the heads of")
    tab.locator(".job").get_by_role("button", name="Cancel").click()
    expect(tab.locator("#notes")).to_contain_text("cancelled")
    expect(tab.locator(".job")).to_be_hidden()
    expect(tab.get_by_role("button", name="Run")).to_be_enabled()
    workspace.jobs.cancel(first.id)
    assert len(workspace.items("recording")) == count


def test_downloads(lab_page: Any, workspace: Workspace, tmp_path: Path) -> None:
    tab = lab_page("?place=2&head=2")
    wait_until_ready(tab)

    def saved(name: str) -> bytes:
        tab.locator(".menu summary").click()
        with tab.expect_download() as download:
            tab.locator(".menu .items").get_by_text(name).click()
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        return file.read_bytes()

    assert saved("map as PNG").startswith(b"\x89PNG")
    assert b"<image" in saved("map as SVG")
    canvas = tab.locator("figure[data-map=B] canvas.map")
    canvas.focus()
    for _ in range(6):
        tab.keyboard.press("+")
    expect(tab).to_have_url(re.compile("at="))
    tab.locator(LOADED_MAP).wait_for()
    drawn = saved("map as SVG").decode()
    assert "<image" not in drawn
    row, key, value = re.findall(r"<title>(\d+) → (\d+): ([^<]+)</title>", drawn)[100]
    assert float(value) == pytest.approx(exact_weight(workspace, tab, int(row), int(key)), rel=2e-5, abs=1e-9)
    assert saved("heads as CSV").decode().count("\n") == 13
    assert len(json.loads(saved("heads as JSON"))["heads"]) == 12
    assert saved("offline page").startswith(b"<!doctype html>")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_reload_restores_everything(lab_page: Any, width: int) -> None:
    where = "?place=1&head=3&row=40&key=11&beta=2&mask=0&reading=lines&sort=peak&hide=1&ablated=0.1"
    where += "&at=0.40000,0.30000,2.0000"
    tab = lab_page(where, width=width)
    wait_until_ready(tab)
    expect(tab).to_have_url(re.compile("recording="))
    before = address_fields(tab)
    expect(tab.locator(".lines path.line").first).to_be_visible()
    shown_text = tab.locator(".readout").inner_text()
    tab.reload()
    wait_until_ready(tab)
    assert address_fields(tab) == before
    expect(tab.locator(".readout")).to_have_text(shown_text)
    expect(tab.locator(".head-line h2")).to_have_text("layer 1 · head 3")
    expect(tab.locator(".scores output")).to_contain_text("(2 × trained)")
    expect(tab.get_by_label("mask", exact=True)).not_to_be_checked()
    expect(tab.get_by_label("hide sinks")).to_be_checked()
    assert tab.locator(".cell input:checked").count() == 1
    assert fits(tab)


@pytest.fixture
def other_items(workspace: Workspace, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The ids of an image model, a text-to-text model, a long recording, and one without q and k."""
    tokenizer = {"tokenizer.json": (models.bundled() / "tokenizer.json").read_bytes()}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    models.create({"model_type": "vit", "image_size": 16, "patch_size": 4, "num_channels": 3, **sizes}, std=0.3).save(
        tmp_path / "pictures"
    )
    pair = {"num_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16, "d_model": 16}
    start = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 0, "vocab_size": 1024}
    models.create({"model_type": "t5", **pair, **start}, extra_files=tokenizer, std=0.3).save(tmp_path / "pairs")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 1500, 4) for _ in range(3))
    for name, keep in (("long", True), ("slight", False)):
        _, observation = attention(q, k, v, mask=Causal(), observe=Observe(map=16, profile=4, keep=keep))
        Recording({"layer": [observation]}, tokens=[f" w{i}" for i in range(1500)]).save(tmp_path / name)
    known = [item.id for item in workspace.items("recording")]
    yield {name: workspace.open(tmp_path / name).id for name in ("pictures", "pairs", "long", "slight")}
    for item in workspace.items("recording"):
        if item.id not in known:
            workspace.close_recording(item.id)


def test_other_models_and_recordings(
    lab_page: Any, workspace: Workspace, other_items: dict[str, str], tmp_path: Path
) -> None:
    tab = lab_page(f"?recording={other_items['long']}&input=1")
    canvas = wait_until_ready(tab)
    # A text of 1500 tokens: pooled at first, and in pages.
    assert canvas.get_attribute("data-level") != "0"
    expect(tab.locator(".texts .token")).to_have_count(600)
    assert int(tab.locator(".texts .token").first.get_attribute("data-at")) == 900
    tab.mouse.move(*cell_position(canvas, 1000, 400, 1500, 1500))
    expect(tab.locator(".readout")).to_contain_text("on average")
    observation = workspace.recording(other_items["long"])["layer"]
    level = int(tab.locator(".readout").get_attribute("data-level"))
    span = [int(tab.locator(".readout").get_attribute(f"data-{name}")) >> level << level for name in ("row", "key")]
    rows, keys = (slice(x, x + (1 << level)) for x in span)
    pooled = float(torch.as_tensor(observation.weights(0, rows, keys)).sum(-1).mean())
    assert float(tab.locator(".readout").get_attribute("data-value")) == pytest.approx(pooled, rel=1e-4)
    tab.get_by_role("button", name="earlier").click()
    expect(tab.locator(".texts .token").first).to_have_attribute("data-at", "300")
    # Without q and k: the small map, and a sentence about what is missing.
    tab.get_by_label("recording", exact=True).select_option(other_items["slight"])
    expect(tab.locator(".reading")).to_contain_text("has no q and k")
    expect(canvas).to_have_attribute("data-level", "0")
    tab.evaluate("scrollTo(0, 0)")
    tab.mouse.move(*cell_position(canvas, 10, 5, 16, 16))
    expect(tab.locator(".readout")).to_contain_text("single weights are not available")
    # An image.
    y, x = numpy.mgrid[0:32, 0:32]
    Image.fromarray((numpy.stack([x, y, x + y], -1) * 4).astype("uint8")).save(tmp_path / "picture.png")
    form = tab.locator("#look-input")
    form.get_by_label("model").select_option(other_items["pictures"])
    form.locator("input[type=file]").set_input_files(tmp_path / "picture.png")
    expect(form.locator("img")).to_be_visible()
    form.get_by_role("button", name="Run").click()
    expect(tab.locator(".patches .token")).to_have_count(16, timeout=60_000)
    wait_until_ready(tab)
    tab.locator(".patches .token").nth(5).click()
    expect_address(tab, row="6")
    expect(tab.locator(".steps .who")).to_contain_text("patch 1,1 attends to")
    expect(tab).to_have_url(re.compile("key="))
    at = int(address_fields(tab)["key"])
    assert math.isclose(shown_weight(tab, 6, at), exact_weight(workspace, tab, 6, at), rel_tol=2e-5, abs_tol=1e-9)
    # A source and a target.
    form.get_by_label("model").select_option(other_items["pairs"])
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
    expect_address(tab, key="2")
    assert fits(tab)


def test_a_recording_that_does_not_exist(lab_page: Any) -> None:
    tab = lab_page("?recording=nothing&place=9&head=9")
    wait_until_ready(tab)
    expect(tab.locator("#notes")).to_contain_text("not open")
    assert address_fields(tab)["recording"] != "nothing"
    # To another page and back: each has its own address.
    tab.locator(".asks .token").nth(2).click()
    expect_address(tab, row="2")
    tab.locator("#pages a[data-page=budget]").click()
    expect_address(tab, page="budget", row="", recording="")
    tab.go_back()
    wait_until_ready(tab)
    expect_address(tab, row="2")
