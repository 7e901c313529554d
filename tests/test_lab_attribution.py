"""The Attribution page of the lab: its numbers are those of ``regard.interp``, and the page in a browser."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.lab_pages import fits, send

from regard import models
from regard.interp import ablate, attribute, logit_attribution
from regard.lab.attribution import jobs

TEXT = "Return the mean of xs.\n\nReturn the mean of"
FOLDER = str(models.bundled())


def nothing(*_: Any) -> None:
    """Progress that nobody reads."""


def ask(**changes: Any) -> dict[str, Any]:
    request = {"model": FOLDER, "text": TEXT, "position": None, "target": None, "against": None}
    return jobs.attribute(request | changes, nothing)


def patch(answer: dict[str, Any], path: str, head: int, **changes: Any) -> dict[str, Any]:
    request = {
        "model": FOLDER,
        "ids": answer["ids"],
        "path": path,
        "head": head,
        "key": None,
        "by": "zero",
        "position": answer["position"],
        "target": answer["target"]["id"],
        "against": None,
    }
    return jobs.patch(request | changes, nothing)


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return ask()


def test_the_numbers_are_those_of_the_library(answer: dict[str, Any]) -> None:
    model = models.load(FOLDER).float()
    ids = torch.tensor([answer["ids"]])
    with torch.no_grad():
        logits = model(ids)[0, -1]
    target = int(logits.argmax())
    assert answer["target"]["id"] == target and answer["position"] == len(answer["tokens"]) - 1
    assert answer["value"] == pytest.approx(float(logits[target]), rel=1e-4)
    assert answer["next"][0]["before"] == pytest.approx(float(logits.softmax(-1)[target]), rel=1e-4)

    expected = attribute(model, ids, target)
    torch.testing.assert_close(torch.tensor(answer["contributions"]), expected.tokens[0], rtol=1e-3, atol=1e-3)
    for row in answer["heads"]:
        keys = expected[row["path"]].keys[0, row["head"]]
        torch.testing.assert_close(torch.tensor(row["keys"]), keys, rtol=1e-3, atol=1e-3)
        assert row["contribution"] == pytest.approx(sum(row["keys"]), abs=1e-3)


def test_parts_add_up_to_the_logit(answer: dict[str, Any]) -> None:
    total = sum(part["value"] for part in answer["parts"]) + sum(row["direct"] for row in answer["heads"])
    assert answer["no_parts"] == ""
    assert total == pytest.approx(answer["value"], rel=1e-3)


def test_a_difference_is_the_difference_of_two_logits(answer: dict[str, Any]) -> None:
    first, second = (row["id"] for row in answer["next"][:2])
    difference = ask(target=first, against=second)
    assert difference["value"] == pytest.approx(ask(target=first)["value"] - ask(target=second)["value"], abs=1e-3)
    parts = logit_attribution(models.load(FOLDER).float(), torch.tensor([answer["ids"]]), (first, second))
    assert difference["value"] == pytest.approx(parts.sum(), abs=1e-3)


def test_a_patch_by_zero_is_an_ablation(answer: dict[str, Any]) -> None:
    row = max(answer["heads"], key=lambda row: abs(row["contribution"]))
    patched = patch(answer, row["path"], row["head"])
    model = models.load(FOLDER).float()
    with torch.no_grad(), ablate(model, [(row["path"], row["head"])]):
        expected = float(model(torch.tensor([answer["ids"]]))[0, -1, answer["target"]["id"]])
    assert patched["before"] == pytest.approx(answer["value"], rel=1e-4)
    assert patched["after"] == pytest.approx(expected, rel=1e-4)


def test_a_value_at_one_key_is_patched_alone(answer: dict[str, Any]) -> None:
    row = max(answer["heads"], key=lambda row: abs(row["contribution"]))
    order = sorted(range(len(row["keys"])), key=lambda key: abs(row["keys"][key]))
    unread, strongest = order[0], order[-1]
    change = {}
    for key in (unread, strongest):
        patched = patch(answer, row["path"], row["head"], key=key)
        change[key] = abs(patched["after"] - patched["before"])
    assert change[strongest] > 10 * change[unread]
    assert (
        patch(answer, row["path"], row["head"], by="mean")["after"] != patch(answer, row["path"], row["head"])["after"]
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text": "word " * 3000}, "1024 tokens"),
        ({"position": 900}, "position"),
        ({"target": 10**6}, "target"),
        ({"target": 5, "against": 5}, "against"),
    ],
)
def test_bad_questions_are_one_line(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        ask(**changes)
    assert "\n" not in str(error.value)


def test_requests_are_checked(address: str, workspace: Any) -> None:
    model = workspace.items("model")[0].id
    good = {"model": model, "ids": [1, 2, 3], "path": "x", "head": 0, "position": 2, "target": 1}
    for path, request in (
        ("api/attribution", {"model": model, "text": " "}),
        ("api/attribution", {"model": model, "text": "a", "position": -1}),
        ("api/attribution", {"model": model, "text": "a" * 70_000}),
        ("api/attribution/patch", good | {"position": 3}),
        ("api/attribution/patch", good | {"key": 7}),
        ("api/attribution/patch", good | {"ids": []}),
        ("api/attribution/patch", good | {"by": "code"}),
    ):
        status, response = send(address, path, request)
        assert status in (400, 422) and "\n" not in response["error"], request


pytest.importorskip("playwright.sync_api")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page(lab_page: Any, width: int, answer: dict[str, Any]) -> None:
    from playwright.sync_api import expect

    tab = lab_page("?page=attribution", width=width)
    tab.wait_for_selector("main[data-shown]")
    assert tab.locator(".strip .token").count() == len(answer["tokens"])
    assert tab.locator(".heads li").count() == len(answer["heads"])
    expect(tab.locator(".summary")).to_contain_text(answer["target"]["token"].strip())
    assert fits(tab)

    # The head with the largest contribution is the first one. Its patch is measured, and can be compared.
    row = max(answer["heads"], key=lambda row: abs(row["contribution"]))
    tab.locator(".heads .name").first.click()
    expect(tab.locator(".patching h2")).to_have_text(f"Layer {row['layer']} · head {row['head']}")
    tab.get_by_role("button", name="by zero").click()
    measured = tab.locator(".patching [data-after]")
    measured.wait_for()
    after = patch(answer, row["path"], row["head"])["after"]
    assert float(measured.get_attribute("data-after")) == pytest.approx(after, rel=1e-4)

    # Another target is another question; a reload restores it.
    tab.locator(".choices [aria-label='predicted token'] button").nth(1).click()
    second = answer["next"][1]["id"]
    expect(tab.locator("main")).to_have_attribute("data-shown", re.compile(f'"target":{second}}}'))
    tab.reload()
    expect(tab.locator("main")).to_have_attribute("data-shown", re.compile(f'"target":{second}}}'))
    expect(tab.locator(".patching h2")).to_have_text(f"Layer {row['layer']} · head {row['head']}")
    assert fits(tab)


def test_an_empty_text_is_refused_on_the_page(lab_page: Any) -> None:
    from playwright.sync_api import expect

    tab = lab_page("?page=attribution")
    tab.wait_for_selector("main[data-shown]")
    tab.locator("textarea").fill("  ")
    tab.get_by_role("button", name="Attribute", exact=True).click()
    expect(tab.locator(".asking .error")).to_contain_text("Write a text first")
