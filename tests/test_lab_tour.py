"""The tour of the bundled model in a browser: every number and every head that it names is measured here again."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

import torch
from playwright.sync_api import expect
from support.lab_pages import fits, send, until
from support.look_page import address_fields, expect_address
from torch.nn.functional import cross_entropy

from regard import Observe, interp, models, watch
from regard.interp import Recording
from regard.lab.workspace import Workspace

expect.set_options(timeout=60_000)  # a step runs jobs
pytestmark = pytest.mark.usefixtures("full_tiles")  # tiny tiles, which other tests use, make pages slow


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load(models.bundled())


def wait_for_step(tab: Any, step: int) -> Any:
    """Wait until the tour's card shows a step. Returns the card."""
    tab.locator(f"#tour-card[data-step='{step}'] .text[aria-busy=false]").wait_for()
    expect_address(tab, tour=str(step))
    return tab.get_by_role("dialog", name=tab.locator("#tour-title").inner_text())


def value(card: Any, name: str) -> float:
    """Return a measured number of a step."""
    return float(card.locator(f"[data-name='{name}']").first.get_attribute("data-value"))


def head_of(card: Any, role: str) -> tuple[int, int]:
    """Return the layer and the number of a head that a step names."""
    place, head = card.locator(f"[data-role='{role}']").first.get_attribute("data-head").split(".")
    return int(place), int(head)


def shown_recording(workspace: Workspace, tab: Any) -> Recording:
    return workspace.recording(address_fields(tab)["recording"])


def weights_of(recording: Recording, head: tuple[int, int]) -> torch.Tensor:
    observation = recording[head[0]]
    assert observation.n is not None
    return observation.weights(head[1], slice(0, observation.n), slice(0, observation.n)).reshape(observation.n, -1)


def induction_of(weights: torch.Tensor, ids: list[int]) -> float:
    """Return the mean weight on the tokens after earlier occurrences, over the tokens that have some."""
    totals = []
    for query, token in enumerate(ids):
        keys = [key + 1 for key in range(query) if ids[key] == token]
        if keys:
            totals.append(float(weights[query, keys].sum()))
    return sum(totals) / len(totals)


def is_in_view(tab: Any, label: str) -> bool:
    """Return whether a part of the page is at least partly in the window, and marked."""
    part = tab.locator(f"section[aria-label='{label}']")
    box = part.bounding_box()
    outline = part.evaluate("node => getComputedStyle(node).outlineStyle")
    return bool(box["y"] < 800 and box["y"] + box["height"] > 50 and outline == "solid")


# Whether the card leaves every visible element free that a selector names, and at least one of them is in the window.
LEAVES_FREE = """(() => {
    const card = document.querySelector("#tour-card").getBoundingClientRect();
    const head = document.querySelector("#top").getBoundingClientRect().bottom;
    const nodes = [...document.querySelectorAll("SELECTOR")].filter((node) => node.offsetParent);
    const boxes = nodes.map((node) => node.getBoundingClientRect());
    const meets = (box) => box.left < card.right && card.left < box.right
        && box.top < card.bottom && card.top < box.bottom;
    return boxes.some((box) => box.bottom > head && box.top < innerHeight) && !boxes.some(meets)
        && card.left >= 0 && card.right <= innerWidth && card.top >= head && card.bottom <= innerHeight;
})()"""
MAP_PARTS = ("canvas.map", ".map-part .readout")


def expect_free(tab: Any, *selectors: str) -> None:
    """Wait until the card covers none of these elements; it is placed again when the page changes."""
    for selector in selectors:
        until(tab, LEAVES_FREE.replace("SELECTOR", f"#page {selector}"), seconds=10)


def test_the_tour_says_what_the_model_does(lab_page: Any, workspace: Workspace, model: Any) -> None:
    labels = {}
    paths: list[str] = []
    for row in interp.atlas(model).rows:
        if row["path"] not in paths:
            paths.append(row["path"])
        labels[paths.index(row["path"]), row["head"]] = row["labels"]

    tab = lab_page("")
    tab.set_viewport_size({"width": 1280, "height": 800})
    tab.get_by_role("button", name="Tour", exact=True).click()
    card = wait_for_step(tab, 1)
    expect(card.get_by_role("button", name="Back")).to_be_disabled()
    once = shown_recording(workspace, tab)
    ids_once = once.metadata["ids"]
    assert value(card, "tokens") == once[0].n == len(ids_once)
    assert is_in_view(tab, "weights on the text")
    expect_free(tab, ".reading", *MAP_PARTS)

    # The keyboard goes on: the focus is on Next.
    expect(card.get_by_role("button", name="Next")).to_be_focused()
    tab.keyboard.press("Enter")
    card = wait_for_step(tab, 2)
    assert value(card, "heads") == len(labels)
    weights = weights_of(once, head_of(card, "other"))
    assert value(card, "weight") == pytest.approx(float(weights[-1].max()), rel=1e-4)
    assert is_in_view(tab, "map of weights")
    expect_free(tab, ".map-part", *MAP_PARTS)
    # The step names its row and its key, so it stays true when another row is locked.
    row, key = map(int, re.findall(r"” (\d+)", card.locator(".text").inner_text()))
    assert row == len(ids_once) - 1 and key == int(weights[row].argmax())
    tab.locator(".token[data-at='7']").click()
    expect_address(tab, row="7")
    assert "locked" not in card.locator(".text").inner_text()

    card.get_by_role("button", name="Next").click()
    card = wait_for_step(tab, 3)
    previous = head_of(card, "previous")
    assert "previous" in labels[previous]
    assert address_fields(tab)["place"] == str(previous[0]) and address_fields(tab)["head"] == str(previous[1])
    weights = weights_of(once, previous)
    assert value(card, "previous") == pytest.approx(float(weights.diagonal(-1).mean()), rel=1e-4)
    assert value(card, "previous") > 0.8

    tab.keyboard.press("Enter")
    card = wait_for_step(tab, 4)
    twice = shown_recording(workspace, tab)
    ids = twice.metadata["ids"]
    copy = len(ids_once)
    assert ids[:copy] == ids_once and ids[copy + 1 :] == ids_once[2:]  # " The" is another token than "The"
    # The tokens of the second copy are repeated, or the step says why not.
    repeated = [i for i in range(copy, len(ids)) if ids[i] in ids[:i]]
    assert value(card, "induction-rows") == len(repeated)
    named = re.findall(r"“\u00a0\S+” (\d+) with a space is another token than", card.locator(".text").inner_text())
    assert [int(index) for index in named] == [i for i in range(copy, len(ids)) if i not in repeated]
    induction = head_of(card, "induction")
    assert "induction" in labels[induction] and previous[0] < induction[0]
    weights = weights_of(twice, induction)
    assert value(card, "induction") == pytest.approx(induction_of(weights, ids), rel=1e-4)
    fields = address_fields(tab)
    row = int(fields["row"])
    key = int(fields["key"])
    assert key < copy <= row and ids[key - 1] == ids[row]
    assert value(card, "weight") == pytest.approx(float(weights[row, key]), rel=1e-4)

    expect_free(tab, ".map-part", *MAP_PARTS)

    # A reload shows the same step with the same numbers.
    text = card.locator(".text").inner_text()
    tab.reload()
    card = wait_for_step(tab, 4)
    assert card.locator(".text").inner_text() == text

    card.get_by_role("button", name="Next").click()
    card = wait_for_step(tab, 5)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        before = cross_entropy(model(tokens)[0, :-1].float(), tokens[0, 1:], reduction="none")
        with interp.ablate(model, [induction]):
            after = cross_entropy(model(tokens)[0, :-1].float(), tokens[0, 1:], reduction="none")
    assert value(card, "loss-before") == pytest.approx(float(before[copy - 1 :].mean()), rel=1e-3)
    assert value(card, "loss-after") == pytest.approx(float(after[copy - 1 :].mean()), rel=1e-3)
    assert value(card, "loss-after") > value(card, "loss-before") + 0.5
    expect(card).to_contain_text("loss of the second copy rises")
    locked = int(address_fields(tab)["row"])
    assert value(card, "probability-before") == pytest.approx(float((-before[locked]).exp()), rel=1e-3)
    assert value(card, "probability-after") == pytest.approx(float((-after[locked]).exp()), rel=1e-2)
    assert value(card, "probability-after") < value(card, "probability-before")
    assert is_in_view(tab, "ablation")
    expect(tab.locator(".ablate .result")).to_contain_text("Loss")  # the page has run it too
    expect_free(tab, ".ablate", ".loss .plot", *MAP_PARTS)

    card.get_by_role("button", name="Next").click()
    card = wait_for_step(tab, 6)
    assert head_of(card, "previous") == previous and head_of(card, "induction") == induction
    path = list(twice)[induction[0]]
    ablated = []
    for layer in range(induction[0]):
        for head in twice[layer].heads:
            with torch.no_grad(), interp.ablate(model, [(layer, head)]), watch(model, Observe(keep=True)) as recording:
                model(tokens)
            score = induction_of(recording[path].weights(induction[1], slice(0, len(ids)), slice(0, len(ids))), ids)
            if (layer, head) == previous:
                assert value(card, "circuit-after") == pytest.approx(score, rel=1e-2)
            else:
                ablated.append(score)
    assert value(card, "circuit-before") == pytest.approx(induction_of(weights, ids), rel=1e-3)
    assert value(card, "circuit-others") == pytest.approx(min(ablated), rel=1e-2)
    assert value(card, "earlier") == len(ablated)
    assert value(card, "circuit-after") < 0.2 * value(card, "circuit-others")
    for place, head in (previous, induction):
        button = tab.locator(f".head[data-place='{place}'][data-head='{head}']")
        assert button.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"

    expect_free(tab, ".overview", ".heads", *MAP_PARTS)

    # A map that is scrolled under the card moves the card away.
    tab.mouse.move(1000, 300)
    tab.mouse.wheel(0, -400)
    expect_free(tab, *MAP_PARTS)

    card.get_by_role("button", name="Finish").click()
    expect(card).to_have_count(0)
    expect_address(tab, tour="")


def test_the_tour_goes_back_and_ends(lab_page: Any, workspace: Workspace) -> None:
    tab = lab_page("?tour=2", width=390, dark=True)
    card = wait_for_step(tab, 2)
    assert fits(tab)
    box = card.bounding_box()
    assert box["x"] >= 0 and box["y"] + box["height"] <= 844
    expect_free(tab, *MAP_PARTS)
    card.get_by_role("button", name="Next").tap()
    wait_for_step(tab, 3)
    tab.go_back()
    wait_for_step(tab, 2)
    card.get_by_role("button", name="Back").tap()
    wait_for_step(tab, 1)
    expect_free(tab, ".texts")
    tab.keyboard.press("Escape")
    expect(card).to_have_count(0)
    expect_address(tab, tour="")

    tab.goto(tab.url + "&tour=5")
    wait_for_step(tab, 5)
    expect_free(tab, ".loss .plot", ".loss-readout", ".result > p")
    tab.get_by_role("button", name="End", exact=True).tap()

    # Another page has no tour, and the recordings of the tour are made once.
    tab.get_by_role("button", name="Tour", exact=True).tap()
    wait_for_step(tab, 1)
    tab.locator("#pages a[data-page=claims]").tap()
    expect(tab.locator("#tour-card")).to_have_count(0)
    expect(tab.get_by_role("button", name="Tour", exact=True)).to_be_hidden()
    titles = [item.title for item in workspace.items("recording")]
    assert len([title for title in titles if title.startswith("tour: ")]) == 1


def test_an_unknown_step_shows_no_tour(lab_page: Any, address: str) -> None:
    tab = lab_page("?tour=0")
    for step in ("7", "-1", "1.5", "x"):
        tab.goto(f"{address}?tour={step}")
        expect(tab.get_by_role("button", name="Tour", exact=True)).to_be_visible()
        expect(tab.locator("#tour-card")).to_have_count(0)


def test_the_bundled_model_is_opened_once(address: str, workspace: Workspace) -> None:
    models_before = len(workspace.items("model"))
    status, response = send(address, "api/look/bundled", {})
    assert status == 200 and response["title"] == "bundled model"
    assert len(workspace.items("model")) == models_before


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"place": 1, "head": 0, "sources": [[1, 0]]}, "sources"),  # the same layer
        ({"place": 1, "head": 0, "sources": [[0, 99]]}, "head"),
        ({"place": 99, "head": 0, "sources": [[0, 0]]}, "place"),
        ({"place": 1, "head": 0, "sources": []}, "sources"),
    ],
)
def test_sources_must_be_earlier_heads(address: str, workspace: Workspace, fields: dict[str, Any], name: str) -> None:
    recording = workspace.items("recording")[0].id
    status, response = send(address, "api/look/sources", {"recording": recording, **fields})
    assert status in (400, 404, 422)
    assert name in response["error"]
