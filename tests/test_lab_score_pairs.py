"""The parts of the model behind a score, on the Look page: in a browser at both widths, and as a request."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import expect
from support.lab_pages import fits, send
from support.look_page import address_fields, expect_address, wait_until_ready

from regard import models
from regard.interp import score_attribution
from regard.lab.workspace import Workspace

expect.set_options(timeout=60_000)
pytestmark = pytest.mark.usefixtures("full_tiles")  # tiny tiles, which other tests use, make pages slow


@pytest.mark.parametrize("width", [1280, 390])
def test_the_score_of_the_locked_cell_is_split(lab_page: Any, workspace: Workspace, width: int) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20", width=width)
    wait_until_ready(tab)
    tab.get_by_role("button", name="Split the score into parts").click()
    table = tab.locator(".pair-table")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(9)  # eight pairs, and the sum of all others
    ids = torch.tensor(workspace.recording(address_fields(tab)["recording"]).metadata["ids"])
    parts = score_attribution(models.load(models.bundled()), ids, 2, 2, 60, 20)
    assert float(table.get_attribute("data-score")) == pytest.approx(parts.score, rel=1e-4)
    shown = [float(text.replace("−", "-").replace("+", "")) for text in table.locator("td.number").all_inner_texts()]
    assert sum(shown) == pytest.approx(parts.score, abs=0.05)
    sizes = [abs(value) for value in shown[:8]]
    assert sizes == sorted(sizes, reverse=True)
    assert fits(tab)

    # Sorted by a part, and all pairs.
    table.get_by_label("sort by").select_option("query")
    table.get_by_role("button", name=re.compile(r"show \d+ pairs")).click()
    names = table.locator("tbody tr td:first-child").all_inner_texts()
    assert len(names) > 50 and names[0] == "token embedding" and names[-2] == "biases"
    heads = [name for name in names if "head" in name]
    assert heads == sorted(heads)

    # Another cell has another score.
    tab.locator("figure[data-map=B] canvas.map").focus()
    tab.keyboard.press("Shift+ArrowRight")
    expect_address(tab, key="21")
    expect(rows).to_have_count(0)


def test_a_part_that_is_a_head_leads_to_it(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2&row=60&key=20")
    wait_until_ready(tab)
    tab.get_by_role("button", name="Split the score into parts").click()
    part = tab.locator(".pair-table button.part").first
    layer, head = re.findall(r"\d+", part.inner_text())
    part.click()
    expect_address(tab, place=layer, head=head)


def test_it_says_why_there_is_nothing_to_split(lab_page: Any) -> None:
    tab = lab_page("?place=2&head=2&row=20&key=60")
    wait_until_ready(tab)
    expect(tab.locator(".pairs")).to_contain_text("the mask hides this key")
    expect(tab.get_by_role("button", name="Split the score into parts")).to_be_disabled()


def test_requests_that_cannot_be_answered(address: str, workspace: Workspace) -> None:
    recording = workspace.items("recording")[0].id
    fields = {"recording": recording, "place": 2, "head": 2, "row": 60, "key": 20}
    for name in ("place", "head", "row", "key"):
        status, answer = send(address, "api/look/pairs", fields | {name: 5000})
        assert status in (400, 404) and name in answer["error"]
