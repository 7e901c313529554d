"""The lab's room Evolve: runs as they are read, trained and shown."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab_pages import fits, until

from regard import models
from regard.lab.endpoints import Gone
from regard.lab.evolve_runs import Growing, curves
from regard.lab.evolve_tasks import changed
from regard.lab.lab import MADE, Lab
from regard.training import records
from regard.training.evolution import evolution
from regard.training.metrics import read_metrics
from regard.training.offsets import offsets
from regard.training.tasks import TASKS
from regard.training.train import train

RUN = "bundled-model-run"
LINES = "[aria-label='Over time'] .lines path"


def ask(address: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}api/evolve/{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            read = answer.read()
            return answer.status, json.loads(read) if answer.headers["content-type"] == "application/json" else read
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


@pytest.fixture(scope="module")
def pictures(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of a model of pictures, with metrics; its id."""
    folder = tmp_path_factory.mktemp("runs") / "small digits"
    changes = {
        "steps": 4,
        "batch": 8,
        "warmup": 1,
        "model.layers": 1,
        "model.heads": 2,
        "model.d": 8,
        "model.hidden": 8,
    }
    train("digits", folder, {**changes, "evaluate": 2, "record": 1.0, "record_every": 1})
    return lab.open(folder).id


def test_a_model_with_its_evolution_opens_a_run_too(lab: Lab) -> None:
    run = lab.get(RUN, "run")
    assert run.title == "bundled model" and run.about == {"task": "text", "model": "bundled-model"}
    assert lab.open(models.bundled()).kind == "model" and len(lab.all("model")) == len(
        {x.folder for x in lab.all("model")}
    )


def test_the_table_is_the_librarys(address: str) -> None:
    there = evolution(models.bundled())
    status, told = ask(address, f"run?run={RUN}")
    assert status == 200 and told["state"] == "ended" and told["task"] == "text" and told["recording"]
    assert told["steps"] == there.steps and told["count"] == len(there.steps) and told["labels"] == there.labels
    assert [head["label"] for head in told["heads"]] == [there.label(at) for at in range(len(there.heads))]
    assert [(row["kind"], row["step"], row["path"], row["head"]) for row in told["arrivals"]] == [
        (row["kind"], row["step"], row["path"], row["head"]) for row in there.arrivals()
    ]
    assert sorted(name for group in told["names"] for name in group["names"]) == sorted(there.names())
    later = ask(address, f"run?run={RUN}&after={there.steps[-3]}&metrics=0")[1]
    assert later["steps"] == there.steps[-2:] and later["labels"] == there.labels[-2:] and later["metrics"] is None


@pytest.mark.parametrize("name", ["entropy", "induction confidence", "repeated raw copied"])
def test_numbers_are_the_librarys(address: str, name: str) -> None:
    there = evolution(models.bundled())
    told = ask(address, f"value?run={RUN}&name={name.replace(' ', '%20')}&after=512")[1]
    want = there.value(name)[there.steps.index(512) + 1 :]
    assert told["steps"] == there.steps[there.steps.index(512) + 1 :]
    assert torch.allclose(torch.tensor(told["values"], dtype=want.dtype), want, equal_nan=True)


def test_maps_and_films_are_the_librarys(address: str) -> None:
    there = evolution(models.bundled())
    _, data = ask(address, f"maps?run={RUN}&step=724")
    want = torch.cat([there.map(724, *head).flatten() for head in there.heads]).numpy()
    assert np.array_equal(np.frombuffer(data, "<f4"), want)
    _, data = ask(address, f"film?run={RUN}&head=7&after=4096")
    want = torch.stack([there.map(step, *there.heads[7]) for step in there.steps if step > 4096]).numpy()
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(want.shape), want)


def test_offsets_and_curves_of_a_model_of_pictures(lab: Lab, address: str, pictures: str) -> None:
    folder = lab.get(pictures, "run").folder
    there, lines = evolution(folder), read_metrics(folder / "metrics.jsonl")
    told = ask(address, f"run?run={pictures}")[1]
    assert told["on_grid"] and told["profile"] == [7, 7] and told["model"] == lab.get(pictures, "run").about["model"]
    assert told["metrics"]["loss"]["steps"] == [1, 2, 3, 4]
    assert told["metrics"]["loss"]["values"] == [line["loss"] for line in lines if "held_out" not in line]
    assert told["metrics"]["held_out"]["steps"] == [2, 4]
    got, want = ask(address, f"offsets?run={pictures}&after=2")[1], offsets(there)
    assert got["steps"] == [3, 4] and torch.allclose(torch.tensor(got["centre"]).double(), want.centre[3:])
    assert got["peak"] == want.peak[3:].tolist() and got["covered"] == want.covered()[3:]
    _, data = ask(address, f"maps?run={pictures}&step=4&of=profile")
    profile = there.profile(4, *there.heads[1])
    middle = profile.shape[0] // 2
    whole = profile[middle - 3 : middle + 4, middle - 3 : middle + 4].numpy()
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(-1, 7, 7)[1], whole)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("run?run=nothing", None, 404, "no run"),
        ("run?run=bundled-model", None, 404, "no run"),
        ("run?run=../etc", None, 422, ""),
        (f"run?run={RUN}&after=x", None, 422, ""),
        (f"value?run={RUN}&name=beauty", None, 400, "there is no 'beauty'"),
        (f"maps?run={RUN}&step=5", None, 400, "step 5 was not recorded"),
        (f"maps?run={RUN}&step=6000&of=profile", None, 400, "on a line"),
        (f"film?run={RUN}&head=12", None, 400, "no head 12"),
        (f"offsets?run={RUN}", None, 400, "on a line"),
        ("train", {"task": "chess"}, 400, "no task 'chess'"),
        ("train", {"task": "repeats", "heads": 5}, 400, "must divide"),
        ("train", {"task": "digits", "kind": "resnet"}, 400, "model.kind"),
        ("train", {"task": "repeats", "kind": "vit"}, 400, "no model.kind"),
        ("train", {"task": "repeats", "steps": 10**6}, 422, ""),
        ("train", {"task": "repeats", "data.path": "/etc"}, 422, ""),
        ("train", {"task": "repeats", "seed": -1}, 422, ""),
        ("continue", {"run": RUN}, 400, "not made in this lab"),
    ],
)
def test_what_is_refused(lab: Lab, address: str, path: str, body: Any, status: int, said: str) -> None:
    before = len(lab.all("run"))
    got, why = ask(address, path, body)
    assert got == status and said in why and "\n" not in why
    assert len(lab.all("run")) == before


def test_every_offered_option_is_accepted(address: str) -> None:
    """Each value alone, with the other defaults, makes a recipe that its task takes."""
    told = ask(address, "tasks")[1]["tasks"]
    assert [task["name"] for task in told] == list(TASKS)
    for task in told:
        kind = TASKS[task["name"]]
        for option, offers in task["options"].items():
            assert offers["value"] in offers["values"]
            for value in offers["values"]:
                kind(kind.recipe.changed(changed(kind.recipe, 1, {option: value})))


def test_a_run_that_grows_is_read_on(tmp_path: Path) -> None:
    there = evolution(models.bundled())
    growing = Growing(tmp_path)
    assert growing.evolution() is None and growing.metrics() == (0, []) and growing.result() is None
    for many in (1, 3):
        for record in there.records[:many]:
            records.write(tmp_path / "evolution", record)
        found = growing.evolution()
        assert found is not None and found.steps == there.steps[:many] and growing.evolution() is found
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert growing.metrics()[1] == [{"step": 1, "loss": 2.0}]
    with file.open("a") as opened:
        opened.write('ss": 1.5}\nnonsense\n{"step": 2, "held_out": true, "loss": 1.7}\n')
    assert [line["step"] for line in growing.metrics()[1]] == [1, 2, 2]
    file.write_text('{"step": 1, "loss": 3.0}\n')  # a run that went back
    assert growing.metrics() == (25, [{"step": 1, "loss": 3.0}]) and growing.is_fresh()
    (tmp_path / "evolution" / f"step-{there.steps[2]:08d}.safetensors").unlink()
    found = growing.evolution()
    assert found is not None and found.steps == there.steps[:2]


def test_long_curves_are_thinned_by_means() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 1 / step} for step in range(1, 5001)]
    told = curves([*lines, {"step": 5000, "held_out": True, "loss": 0.5, "accuracy": None}])
    steps, values = told["loss"]["steps"], told["loss"]["values"]
    assert (
        len(steps) <= 301 and steps == sorted(set(steps)) and steps[0] == 1 and values == sorted(values, reverse=True)
    )
    assert told["held_out"] == {"steps": [5000], "values": {"loss": [0.5], "accuracy": [None]}} and told["last"] == (
        5000,
        1 / 5000,
    )


def test_made_runs_are_bounded_and_restored(tmp_path: Path, pictures: str, lab: Lab) -> None:
    first = Lab(tmp_path)
    kept = first.new_run("a small one", "digits")
    source = lab.get(pictures, "run").folder
    for _ in range(2):  # what a job leaves
        kept.folder.mkdir(exist_ok=True)
    for name in ("run.json", "model", "evolution"):
        (kept.folder / name).symlink_to(source / name)
    first.open_model_of(kept)
    assert first.get(kept.about["model"], "model").title == "a small one"
    never = first.new_run("never begun", "digits")
    first.close()
    again = Lab(tmp_path)
    assert [(x.id, x.title, x.made) for x in again.all("run")] == [(kept.id, "a small one", True)]
    assert again.get(kept.about["model"], "model").title == "a small one"
    with pytest.raises(Gone):
        again.get(never.id, "run")
    for k in range(MADE["run"]):
        again.new_run(f"run {k}", "digits")
    assert len(again.all("run")) == MADE["run"] and not kept.folder.exists() and again.all("model") == []
    assert (source / "run.json").is_file()
    again.close()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_scrubbing_moves_everything(lab_page: Any, width: int, dark: bool) -> None:
    tab = lab_page("?room=evolve&step=724&head=4", width=width, dark=dark)
    there = evolution(models.bundled())
    tab.wait_for_selector(".evolve .frame")
    assert tab.locator(".evolve .head").count() == 12 and tab.locator(".evolve .frame").count() == len(there.steps)
    step = tab.get_by_label("step", exact=True)
    assert step.input_value() == str(there.steps.index(724))
    assert tab.locator(".evolve .about-head").text_content().startswith("1.0 previous")
    before = tab.locator(".evolve .marker").first.get_attribute("x1")
    shown = "document.querySelector('.evolve .large').toDataURL()"
    picture = tab.evaluate(shown)
    step.focus()
    tab.keyboard.press("Home")
    until(tab, "document.querySelector('.evolve .about-head').textContent.includes('averaging')")
    assert tab.locator(".evolve .scrubber output").inner_text() == "0"
    assert tab.locator(".evolve .marker").first.get_attribute("x1") != before
    until(tab, f"{shown} !== {json.dumps(picture)}")
    assert tab.locator(".evolve .frame[aria-pressed=true]").get_attribute("aria-label") == "step 0"
    until(tab, "location.search.includes('step=0')")
    tab.locator(".evolve .frame").nth(3).click()
    until(tab, "location.search.includes('step=4')")
    tab.keyboard.press("ArrowRight")
    until(tab, "location.search.includes('step=6')")
    assert fits(tab)


@pytest.mark.parametrize("width", [1280, 390])
def test_heads_numbers_and_types_are_picked(lab_page: Any, width: int) -> None:
    tab = lab_page("?room=evolve", width=width)
    tab.wait_for_selector(".evolve .frame")
    tab.locator(".evolve .head").nth(10).click()
    until(tab, "document.querySelector('.evolve .about-head').textContent.startsWith('2.2')")
    assert "induction" in tab.locator(".evolve .about-head").text_content()
    tab.keyboard.press("ArrowLeft")
    until(tab, "document.querySelector('.evolve .about-head').textContent.startsWith('2.1')")
    lines = tab.locator(LINES)
    until(tab, f"document.querySelectorAll(`{LINES}`).length === 12")
    tab.get_by_label("heads", exact=True).select_option("layer")
    until(tab, f"document.querySelectorAll(`{LINES}`).length === 4")
    tab.get_by_label("heads", exact=True).select_option("one")
    until(tab, f"document.querySelectorAll(`{LINES}`).length === 1")
    drawn = lines.get_attribute("d")
    tab.get_by_label("number", exact=True).select_option("induction score")
    until(tab, f"document.querySelector(`{LINES}`).getAttribute('d') !== '{drawn}'")
    tab.get_by_label("log steps").uncheck()
    assert "value=induction+score" in tab.url and "which=one" in tab.url and "time=even" in tab.url
    tab.locator(".evolve .came", has_text="724 1.0 previous").click()
    until(tab, "document.querySelector('.evolve .about-head').textContent.startsWith('1.0 previous')")
    until(tab, "location.search.includes('step=724')")
    tab.reload()
    tab.wait_for_selector(".evolve .frame")
    assert tab.locator(".evolve .scrubber output").inner_text() == "724"
    until(tab, f"document.querySelectorAll(`{LINES}`).length === 1")
    assert fits(tab)


def test_charts_are_clicked_and_read(lab_page: Any) -> None:
    tab = lab_page("?room=evolve")
    tab.wait_for_selector(".evolve .frame")
    tab.wait_for_selector("[aria-label='Over time'] .lines path.picked")
    tab.locator("[aria-label='Over time'] svg").click(position={"x": 60, "y": 40})
    assert tab.locator(".evolve .scrubber output").inner_text() == "0"
    rows = tab.locator(".evolve .types svg")
    rows.click(position={"x": rows.bounding_box()["width"] - 10, "y": 2 + 15 * 5 + 6})
    until(tab, "document.querySelector('.evolve .about-head').textContent.startsWith('1.1')")
    assert tab.locator(".evolve .scrubber output").inner_text() == "6,000"
    end = tab.evaluate(
        """() => { const path = document.querySelector("[aria-label='Over time'] .lines path.picked");
        const svg = path.ownerSVGElement.getBoundingClientRect(), at = path.getPointAtLength(path.getTotalLength());
        return [svg.left + at.x, svg.top + at.y]; }"""
    )
    tab.mouse.move(*end)
    there = evolution(models.bundled())
    want = f"{float(there.value('entropy')[-1, 5]):.2f} at step 6,000"
    assert want in tab.locator(".evolve .tip:visible").inner_text()


def test_playing_goes_to_the_end(lab_page: Any) -> None:
    tab = lab_page("?room=evolve&step=2048")
    tab.wait_for_selector(".evolve .frame")
    tab.get_by_role("button", name="play").click()
    tab.get_by_role("button", name="pause").wait_for()
    until(tab, "document.querySelector('.evolve .scrubber output').textContent === '6,000'")
    tab.get_by_role("button", name="play").wait_for()


def test_the_model_of_a_run_is_looked_at(lab_page: Any, lab: Lab) -> None:
    tab = lab_page("?room=evolve")
    tab.wait_for_selector(".evolve .frame")
    tab.get_by_role("link", name="look at this model").click()
    until(tab, "document.querySelector('main').classList.contains('look')")
    assert f"recording={lab.all('recording')[0].id}" in tab.url


@pytest.mark.parametrize("width", [1280, 390])
def test_a_run_of_pictures_shows_where_heads_look(lab_page: Any, pictures: str, width: int) -> None:
    tab = lab_page(f"?room=evolve&run={pictures}", width=width)
    tab.wait_for_selector(".evolve .frame")
    assert tab.locator(".evolve .planes figure").count() == 1 and tab.locator(".evolve .planes .centre").count() == 2
    size = "[document.querySelector('.evolve .large').width, document.querySelector('.evolve .large').height]"
    assert tab.evaluate(size) == [7, 7]
    tab.get_by_label("show").select_option("map")
    until(tab, f"{size}[0] === 17")
    tab.locator(".evolve .planes .centre").nth(1).click(force=True)
    until(tab, "document.querySelector('.evolve .about-head').textContent.startsWith('0.1')")
    assert tab.locator("[aria-label='How it learned'] .lines path").count() == 3
    assert fits(tab)


@pytest.fixture
def no_job_left(lab: Lab) -> Iterator[None]:
    """Whatever a test that fails leaves in the queue is stopped."""
    yield
    for job in lab.jobs.all():
        lab.jobs.cancel(job.id)


@pytest.mark.usefixtures("no_job_left")
def test_training_is_watched_and_stopped(lab_page: Any, lab: Lab, address: str) -> None:
    tab = lab_page("?room=evolve")
    tab.wait_for_selector(".evolve .frame")
    tab.get_by_role("button", name="train a model").click()
    tab.get_by_label("task").select_option("digits")
    steps = tab.get_by_label("steps", exact=True)
    steps.focus()
    tab.keyboard.press("End")
    layers = tab.get_by_label("layers", exact=True)
    layers.focus()
    tab.keyboard.press("Home")
    tab.get_by_label("model", exact=True).select_option("attention")
    tab.get_by_role("button", name="train", exact=True).click()
    tab.set_default_timeout(60_000)  # the process starts, and imports torch
    until(tab, "document.querySelector('.evolve .live .said').textContent.startsWith('step ')", 60)
    until(
        tab,
        "document.querySelector('.evolve .one').offsetParent && document.querySelectorAll('.evolve .frame').length > 2",
    )
    run = next(one for one in lab.all("run") if one.made)
    assert run.title == "digits, 6,000 steps, seed 0, attention" and lab.is_training(run)
    assert ask(address, "continue", {"run": run.id})[0] == 400
    tab.wait_for_selector("[aria-label='How it learned'] .lines path")
    assert tab.locator(".evolve .frame[aria-pressed=true]").get_attribute("aria-label") == tab.locator(
        ".evolve .frame"
    ).last.get_attribute("aria-label")
    tab.get_by_role("button", name="stop").click()
    tab.get_by_role("button", name="go on").wait_for()
    tab.get_by_role("link", name="look at this model").wait_for()
    assert not lab.is_training(run) and lab.get(run.about["model"], "model").title == run.title
    stopped = evolution(run.folder).steps[-1]
    tab.get_by_role("button", name="go on").click()
    until(tab, f"document.querySelector('.evolve .live progress').value > {stopped}", 60)
    tab.get_by_role("button", name="stop").click()
    tab.get_by_role("button", name="go on").wait_for()
    assert fits(tab)


def test_a_short_run_comes_to_its_end(lab: Lab, address: str) -> None:
    status, told = ask(address, "train", {"task": "digits", "steps": 3, "layers": 1, "seed": 7})
    assert status == 200 and told["job"]["state"] in ("queued", "running")
    seq = -1
    while (job := lab.jobs.get(told["job"]["id"])).state in ("queued", "running"):
        with urllib.request.urlopen(f"{address}api/jobs/{job.id}?after={seq}&wait=10", timeout=30) as answer:
            seq = json.load(answer)["seq"]
    assert job.state == "done" and job.result["ended"] == "steps" and job.result["steps"] == 3
    told = ask(address, f"run?run={told['run']}")[1]
    assert told["state"] == "ended" and told["steps"][-1] == 3 and told["model"] and told["result"]["ended"] == "steps"
    assert ask(address, "continue", {"run": told["id"]})[0] == 400
