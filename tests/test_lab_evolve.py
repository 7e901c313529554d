"""The Evolve page of the lab: reading runs, training them, and the page in a browser."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.lab_pages import fits, send, until

from regard import models
from regard.interp import _records as records
from regard.interp._atlas_store import stored_atlas
from regard.lab.endpoint import NotFound
from regard.lab.evolve.run_reader import RunReader, training_curves
from regard.lab.evolve.task_options import recipe_changes
from regard.lab.workspace import MAX_CREATED, Workspace
from regard.training._arrivals import describe_arrival
from regard.training._evolution import evolution
from regard.training._loop import Listener
from regard.training._metrics_file import read_metrics
from regard.training._pixel_offsets import head_offsets
from regard.training._train import train
from regard.training.tasks import TASKS

RUN = "bundled-model-run"
SMALL = {
    "steps": 4,
    "batch": 8,
    "warmup": 1,
    "model.layers": 1,
    "model.heads": 2,
    "model.d": 8,
    "model.hidden": 8,
}
LINES = "[aria-label='Over time'] .lines path"


def ask(address: str, path: str, body: Any = None) -> tuple[int, Any]:
    status, data = send(address, f"api/evolve/{path}", body)
    return status, data if status == 200 else data["error"]


@pytest.fixture(scope="module")
def pictures(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of a run of an image model, with metrics."""
    folder = tmp_path_factory.mktemp("runs") / "small digits"
    train("digits", folder, {**SMALL, "evaluate": 2, "record": 1.0, "record_every": 1})
    return workspace.open(folder).id


def test_a_model_with_its_evolution_opens_a_run_too(workspace: Workspace) -> None:
    run = workspace.get(RUN, "run")
    assert run.title == "bundled model" and run.details == {"task": "text", "model": "bundled-model"}
    assert workspace.open(models.bundled()).kind == "model" and len(workspace.items("model")) == len(
        {x.folder for x in workspace.items("model")}
    )


def test_a_run_equals_the_librarys_evolution(address: str) -> None:
    expected = evolution(models.bundled())
    status, response = ask(address, f"run?run={RUN}")
    assert status == 200 and response["state"] == "ended" and response["task"] == "text" and response["recording"]
    assert (
        response["steps"] == expected.steps
        and response["count"] == len(expected.steps)
        and response["labels"] == expected.labels
    )
    assert [head["label"] for head in response["heads"]] == [
        expected.head_label(at) for at in range(len(expected.heads))
    ]
    assert [(row["kind"], row["step"], row["path"], row["head"]) for row in response["arrivals"]] == [
        (row["kind"], row["step"], row["path"], row["head"]) for row in expected.arrivals()
    ]
    assert [row["text"] for row in response["arrivals"]] == [describe_arrival(row) for row in expected.arrivals()]
    assert response["records"] == expected.describe_records() and response["gaps"] == [] and response["unknown"] == ""
    shown = {}
    for group in response["measures"]:
        for measure in group["measures"]:
            shown[measure["name"]] = (group["title"], measure["label"], measure["meaning"])
    described = {x.name: (x.group, x.label, x.meaning) for x in expected.measures()}
    assert shown.items() <= described.items()
    for name in expected.names():  # those that no head has are not offered
        assert (name in shown) == bool(expected.value(name).isfinite().any())
    later = ask(address, f"run?run={RUN}&after={expected.steps[-3]}&metrics=0")[1]
    assert (
        later["steps"] == expected.steps[-2:] and later["labels"] == expected.labels[-2:] and later["metrics"] is None
    )


def finished(workspace: Workspace, address: str, job_id: str) -> Any:
    """The job of this id, once it has ended."""
    seq = -1
    while (job := workspace.jobs.get(job_id)).state in ("queued", "running"):
        seq = send(address, f"api/jobs/{job.id}?after={seq}&wait=10")[1]["seq"]
    return job


def test_records_of_ones_own_training_open_as_a_run(tmp_path: Path, workspace: Workspace, address: str) -> None:
    """In the recorder's folder itself, or in "evolution" beside the checkpoints of another library."""
    source = models.bundled() / "evolution"
    shutil.copytree(source, tmp_path / "own")
    shutil.copytree(source, tmp_path / "trainer" / "evolution")
    expected = evolution(models.bundled())
    for folder in (tmp_path / "own", tmp_path / "trainer"):
        run = workspace.open(folder)
        status, response = ask(address, f"run?run={run.id}")
        assert status == 200 and response["steps"] == expected.steps and response["labels"] == expected.labels
        assert response["state"] in ("recorded", "growing") and not response["can_continue"]
        assert response["recording"] is None and "model" not in response
        assert ask(address, "continue", {"run": run.id})[0] == 400
    assert workspace.open(tmp_path / "trainer" / "evolution") is workspace.open(tmp_path / "trainer")
    (tmp_path / "empty" / "evolution").mkdir(parents=True)
    with pytest.raises(ValueError, match="records of heads"):
        workspace.open(tmp_path / "empty")


def test_a_run_stopped_elsewhere_has_a_model_and_continues(tmp_path: Path, workspace: Workspace, address: str) -> None:
    class Stop(Listener):
        def on_step(self, step: int, numbers: dict[str, float]) -> None:
            if step == 1:
                signal.raise_signal(signal.SIGINT)

    folder = tmp_path / "stopped"
    train("digits", folder, {**SMALL, "evaluate": 3, "save": 3}, listener=Stop())
    run = workspace.open(folder)
    response = ask(address, f"run?run={run.id}")[1]
    assert (response["state"], response["done"], response["of"]) == ("stopped", 2, 4) and response["can_continue"]
    assert response["model_step"] == 2 and response["recording"] is None
    # Every page has the types of the model from the record of its step.
    atlas = stored_atlas(folder / "model")
    labels = response["labels"][response["steps"].index(2)]
    assert atlas is not None and [row["labels"] for row in atlas.rows] == labels and "step 2;" in atlas.source

    status, started = ask(address, "continue", {"run": run.id})
    assert status == 200 and finished(workspace, address, started["job"]["id"]).state == "done"
    response = ask(address, f"run?run={run.id}")[1]
    assert response["state"] == "ended" and response["steps"][-1] == 4 and not response["can_continue"]
    workspace.close_run(run.id)


@pytest.fixture(scope="module")
def sparse(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of a run whose recorder made three records."""
    folder = tmp_path_factory.mktemp("runs") / "sparse"
    shutil.copytree(models.bundled(), folder)
    for step, file in records.list_records(folder / "evolution").items():
        if step not in (0, 2, 6000):
            file.unlink()
    return workspace.open(folder).id + "-run"


def test_sparse_records_are_said_to_be_sparse(address: str, sparse: str) -> None:
    response = ask(address, f"run?run={sparse}")[1]
    assert response["gaps"] == [[2, 6000]] and "3 records" in response["records"]
    assert "between steps 2 and 6,000" in response["unknown"]
    arrivals = [row for row in response["arrivals"] if row["after"] is not None]
    assert {(row["after"], row["step"], row["confirmed"]) for row in arrivals} == {(2, 6000, False)}
    assert "induction" in {row["kind"] for row in arrivals}
    assert all("between step 2 and 6,000" in row["text"] for row in arrivals)


def test_gaps_are_marked_on_the_page(lab_page: Any, sparse: str) -> None:
    tab = lab_page(f"?page=evolve&run={sparse}")
    tab.wait_for_selector(".evolve .frame")
    assert "3 records" in tab.locator(".evolve .facts").inner_text()
    assert "%" in tab.locator(".evolve .facts").inner_text()
    assert "between steps 2 and 6,000" in tab.locator(".evolve .unknown").inner_text()
    assert tab.locator(".evolve .came", has_text="2–6,000?").count() > 3
    until(tab, "document.querySelectorAll('.evolve .types .gaps rect, .evolve .lines .gaps rect').length === 2")
    assert "No head took" not in tab.locator(".evolve").inner_text()


@pytest.mark.parametrize("name", ["entropy", "induction confidence", "repeated raw copied"])
def test_values_equal_the_librarys(address: str, name: str) -> None:
    expected = evolution(models.bundled())
    response = ask(address, f"value?run={RUN}&name={name.replace(' ', '%20')}&after=512")[1]
    wanted_values = expected.value(name)[expected.steps.index(512) + 1 :]
    assert response["steps"] == expected.steps[expected.steps.index(512) + 1 :]
    assert torch.allclose(torch.tensor(response["values"], dtype=wanted_values.dtype), wanted_values, equal_nan=True)


def test_maps_and_films_equal_the_librarys(address: str) -> None:
    expected = evolution(models.bundled())
    _, data = ask(address, f"maps?run={RUN}&step=724")
    wanted_values = torch.cat([expected.map(724, *head).flatten() for head in expected.heads]).numpy()
    assert np.array_equal(np.frombuffer(data, "<f4"), wanted_values)
    _, data = ask(address, f"film?run={RUN}&head=7&after=4096")
    wanted_values = torch.stack(
        [expected.map(step, *expected.heads[7]) for step in expected.steps if step > 4096]
    ).numpy()
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(wanted_values.shape), wanted_values)


def test_offsets_and_curves_of_an_image_model(workspace: Workspace, address: str, pictures: str) -> None:
    folder = workspace.get(pictures, "run").folder
    expected, lines = evolution(folder), read_metrics(folder / "metrics.jsonl")
    response = ask(address, f"run?run={pictures}")[1]
    assert (
        response["on_grid"]
        and response["profile"] == [7, 7]
        and response["model"] == workspace.get(pictures, "run").details["model"]
    )
    assert response["metrics"]["loss"]["steps"] == [1, 2, 3, 4]
    assert response["metrics"]["loss"]["values"] == [line["loss"] for line in lines if "held_out" not in line]
    assert response["metrics"]["held_out"]["steps"] == [2, 4]
    code, wanted_values = ask(address, f"offsets?run={pictures}&after=2")[1], head_offsets(expected)
    assert code["steps"] == [3, 4] and torch.allclose(torch.tensor(code["centre"]).double(), wanted_values.centre[3:])
    assert code["peak"] == wanted_values.peak[3:].tolist() and code["covered"] == wanted_values.count_covered()[3:]
    _, data = ask(address, f"maps?run={pictures}&step=4&of=profile")
    profile = expected.profile(4, *expected.heads[1])
    middle = profile.shape[0] // 2
    whole = profile[middle - 3 : middle + 4, middle - 3 : middle + 4].numpy()
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(-1, 7, 7)[1], whole)


@pytest.mark.parametrize(
    ("path", "body", "status", "mention"),
    [
        ("run?run=nothing", None, 404, "no run"),
        ("run?run=bundled-model", None, 404, "no run"),
        ("run?run=../etc", None, 422, ""),
        (f"run?run={RUN}&after=x", None, 422, ""),
        (f"value?run={RUN}&name=beauty", None, 400, "name is 'beauty'"),
        (f"maps?run={RUN}&step=5", None, 400, "step is 5"),
        (f"maps?run={RUN}&step=6000&of=profile", None, 400, "profile"),
        (f"film?run={RUN}&head=12", None, 400, "head must"),
        (f"offsets?run={RUN}", None, 400, "on a line"),
        ("train", {"task": "chess"}, 400, "task"),
        ("train", {"task": "repeats", "heads": 5}, 400, "must divide"),
        ("train", {"task": "digits", "kind": "resnet"}, 400, "model.kind"),
        ("train", {"task": "repeats", "kind": "vit"}, 400, "no model.kind"),
        ("train", {"task": "repeats", "steps": 10**6}, 422, ""),
        ("train", {"task": "repeats", "data.path": "/etc"}, 422, ""),
        ("train", {"task": "repeats", "seed": -1}, 422, ""),
        ("continue", {"run": RUN}, 400, "run"),
    ],
)
def test_what_is_refused(workspace: Workspace, address: str, path: str, body: Any, status: int, mention: str) -> None:
    before = len(workspace.items("run"))
    code, error = ask(address, path, body)
    assert code == status and mention in error and "\n" not in error
    assert len(workspace.items("run")) == before


def test_every_offered_option_is_accepted(address: str) -> None:
    """Each value, with the defaults of all other options, makes a recipe that its task accepts."""
    response = ask(address, "tasks")[1]["tasks"]
    assert [task["name"] for task in response] == list(TASKS)
    for task in response:
        kind = TASKS[task["name"]]
        for option, offers in task["options"].items():
            assert offers["value"] in offers["values"]
            for value in offers["values"]:
                kind(kind.default_recipe.with_changes(recipe_changes(kind.default_recipe, 1, {option: value})))


def test_a_growing_run_is_read_incrementally(tmp_path: Path) -> None:
    expected = evolution(models.bundled())
    reader = RunReader(tmp_path)
    assert reader.evolution() is None and reader.metrics() == (0, []) and reader.result() is None
    for many in (1, 3):
        for record in expected.records[:many]:
            records.write_record(tmp_path / "evolution", record)
        current = reader.evolution()
        assert current is not None and current.steps == expected.steps[:many] and reader.evolution() is current
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert reader.metrics()[1] == [{"step": 1, "loss": 2.0}]
    with file.open("a") as opened:
        opened.write('ss": 1.5}\nnonsense\n{"step": 2, "held_out": true, "loss": 1.7}\n')
    assert [line["step"] for line in reader.metrics()[1]] == [1, 2, 2]
    file.write_text('{"step": 1, "loss": 3.0}\n')  # a run that went back
    assert reader.metrics() == (25, [{"step": 1, "loss": 3.0}]) and reader.is_fresh()
    (tmp_path / "evolution" / f"step-{expected.steps[2]:08d}.safetensors").unlink()
    current = reader.evolution()
    assert current is not None and current.steps == expected.steps[:2]


def test_long_curves_are_thinned_by_means() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 1 / step} for step in range(1, 5001)]
    response = training_curves([*lines, {"step": 5000, "held_out": True, "loss": 0.5, "accuracy": None}])
    steps, values = response["loss"]["steps"], response["loss"]["values"]
    assert (
        len(steps) <= 301 and steps == sorted(set(steps)) and steps[0] == 1 and values == sorted(values, reverse=True)
    )
    assert response["held_out"] == {"steps": [5000], "values": {"loss": [0.5], "accuracy": [None]}} and response[
        "last"
    ] == (
        5000,
        1 / 5000,
    )


def test_created_runs_are_bounded_and_restored(tmp_path: Path, pictures: str, workspace: Workspace) -> None:
    first = Workspace(tmp_path)
    created = first.new_run("a small one", "digits")
    source = workspace.get(pictures, "run").folder
    for _ in range(2):  # what a job leaves
        created.folder.mkdir(exist_ok=True)
    for name in ("run.json", "model", "evolution"):
        (created.folder / name).symlink_to(source / name)
    first.run_started(created, "")
    first.open_model_of(created)
    assert first.get(created.details["model"], "model").title == "a small one"
    not_started = first.new_run("never begun", "digits")
    first.close()
    again = Workspace(tmp_path)
    assert [(x.id, x.title, x.created_here) for x in again.items("run")] == [(created.id, "a small one", True)]
    assert again.get(created.details["model"], "model").title == "a small one"
    with pytest.raises(NotFound):
        again.get(not_started.id, "run")
    for k in range(MAX_CREATED["run"]):
        again.run_started(again.new_run(f"run {k}", "digits"), "")
    assert len(again.items("run")) == MAX_CREATED["run"] and not created.folder.exists() and again.items("model") == []
    assert (source / "run.json").is_file()
    again.close()


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_step_slider_updates_everything(lab_page: Any, width: int, dark: bool) -> None:
    tab = lab_page("?page=evolve&step=724&head=4", width=width, dark=dark)
    expected = evolution(models.bundled())
    tab.wait_for_selector(".evolve .frame")
    assert tab.locator(".evolve .head").count() == 12 and tab.locator(".evolve .frame").count() == len(expected.steps)
    step = tab.get_by_label("step", exact=True)
    assert step.input_value() == str(expected.steps.index(724))
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
def test_heads_numbers_and_types_can_be_selected(lab_page: Any, width: int) -> None:
    tab = lab_page("?page=evolve", width=width)
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
    tab.get_by_label("measure", exact=True).select_option("induction score")
    until(tab, f"document.querySelector(`{LINES}`).getAttribute('d') !== '{drawn}'")
    tab.get_by_label("log steps").uncheck()
    assert "value=induction+score" in tab.url and "which=one" in tab.url and "time=even" in tab.url
    tab.locator(".evolve .came", has_text="512–724 1.0 previous").click()
    until(tab, "document.querySelector('.evolve .about-head').textContent.startsWith('1.0 previous')")
    until(tab, "location.search.includes('step=724')")
    tab.reload()
    tab.wait_for_selector(".evolve .frame")
    assert tab.locator(".evolve .scrubber output").inner_text() == "724"
    until(tab, f"document.querySelectorAll(`{LINES}`).length === 1")
    assert fits(tab)


def test_charts_can_be_clicked(lab_page: Any) -> None:
    tab = lab_page("?page=evolve")
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
    expected = evolution(models.bundled())
    wanted_values = f"{float(expected.value('entropy')[-1, 5]):.2f} at step 6,000"
    assert wanted_values in tab.locator(".evolve .tip:visible").inner_text()


def test_playing_goes_to_the_end(lab_page: Any) -> None:
    tab = lab_page("?page=evolve&step=2048")
    tab.wait_for_selector(".evolve .frame")
    tab.get_by_role("button", name="play").click()
    tab.get_by_role("button", name="pause").wait_for()
    until(tab, "document.querySelector('.evolve .scrubber output').textContent === '6,000'")
    tab.get_by_role("button", name="play").wait_for()


def test_the_model_of_a_run_can_be_inspected(lab_page: Any, workspace: Workspace, pictures: str) -> None:
    tab = lab_page("?page=evolve")
    tab.wait_for_selector(".evolve .frame")
    tab.get_by_role("link", name="inspect this model").click()
    until(tab, "document.querySelector('main').classList.contains('look')")
    assert f"recording={workspace.items('recording')[0].id}" in tab.url
    tab.wait_for_selector(".look .overview canvas")
    assert tab.locator(".look .about").first.inner_text().startswith("bundled model · ")
    # A model without a recording gets the form for its input, not the recording of another model.
    tab = lab_page(f"?page=evolve&run={pictures}")
    tab.get_by_role("link", name="inspect this model").click()
    tab.wait_for_selector(".look .drop")
    assert "recording=" not in tab.url and not tab.locator(".look .overview").is_visible()


def test_the_loss_is_marked_at_the_step_of_the_record(tmp_path: Path, lab_page: Any, workspace: Workspace) -> None:
    """The training is further than its last record."""
    shutil.copytree(models.bundled() / "evolution", tmp_path / "behind" / "evolution")
    for step, file in records.list_records(tmp_path / "behind" / "evolution").items():
        if step > 32:
            file.unlink()
    lines = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 1001)]
    (tmp_path / "behind" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    tab = lab_page(f"?page=evolve&run={workspace.open(tmp_path / 'behind').id}")
    until(tab, "document.querySelector(`[aria-label='How it learned'] .marker`)")
    x = "document.querySelector(`[aria-label='How it learned'] .marker`).getAttribute('x1')"
    ends = "[...document.querySelectorAll(`[aria-label='How it learned'] .lines path`)].map((path) => path.getBBox())"
    assert float(tab.evaluate(x)) < 0.7 * tab.evaluate(f"{ends}.map((box) => box.x + box.width)[0]")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_run_of_an_image_model_shows_offsets(lab_page: Any, pictures: str, width: int) -> None:
    tab = lab_page(f"?page=evolve&run={pictures}", width=width)
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
def no_job_left(workspace: Workspace) -> Iterator[None]:
    """Stops the jobs that a failed test leaves in the queue."""
    yield
    for job in workspace.jobs.all():
        workspace.jobs.cancel(job.id)


def check_waiting_run(address: str) -> None:
    """A run that waits for another says so; stopped, it never started; closed, it comes back."""
    run = ask(address, "train", {"task": "digits", "steps": 20})[1]
    shown = ask(address, f"run?run={run['run']}")[1]
    assert shown["state"] == "waiting" and shown["steps"] == [] and not shown["can_continue"]
    send(address, "api/jobs/cancel", {"job": run["job"]["id"]})
    shown = ask(address, f"run?run={run['run']}")[1]
    assert shown["state"] == "unstarted" and shown["can_continue"]
    assert ask(address, "close", {"run": run["run"]}) == (200, {"undo": run["run"]})
    assert send(address, "api/workspace/undo", {"item": run["run"]})[0] == 200
    shown = ask(address, f"run?run={run['run']}")[1]
    assert shown["state"] == "unstarted" and shown["can_continue"] and shown["of"] == 20
    assert ask(address, "close", {"run": run["run"]})[0] == 200


@pytest.mark.usefixtures("no_job_left")
def test_training_is_watched_and_stopped(lab_page: Any, workspace: Workspace, address: str) -> None:
    tab = lab_page("?page=evolve")
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
    run = next(item for item in workspace.items("run") if item.created_here)
    assert run.title == "digits, 6,000 steps, seed 0, attention" and workspace.is_training(run)
    assert ask(address, "continue", {"run": run.id})[0] == 400
    check_waiting_run(address)
    tab.wait_for_selector("[aria-label='How it learned'] .lines path")
    assert tab.locator(".evolve .frame[aria-pressed=true]").get_attribute("aria-label") == tab.locator(
        ".evolve .frame"
    ).last.get_attribute("aria-label")
    tab.get_by_role("button", name="stop").click()
    tab.get_by_role("button", name="continue").wait_for()
    tab.get_by_role("link", name="inspect this model").wait_for()
    assert not workspace.is_training(run) and workspace.get(run.details["model"], "model").title == run.title
    # The page names the step of everything: where the run stopped, of which step the model is, and the last record.
    response = ask(address, f"run?run={run.id}")[1]
    assert tab.locator(".evolve .live .said").inner_text() == f"stopped at step {response['done']:,} of 6,000"
    assert f"the model has the weights of step {response['model_step']:,}" in tab.locator(".evolve .facts").inner_text()
    atlas = stored_atlas(run.folder / "model")
    assert atlas is not None and response["model_step"] in response["steps"]
    labels = response["labels"][response["steps"].index(response["model_step"])]
    assert [row["labels"] for row in atlas.rows] == labels
    stopped = evolution(run.folder).steps[-1]
    tab.get_by_role("button", name="continue").click()
    until(tab, f"document.querySelector('.evolve .live progress').value > {stopped}", 60)
    tab.get_by_role("button", name="stop").click()
    tab.get_by_role("button", name="continue").wait_for()
    assert fits(tab)


def test_a_short_run_ends(workspace: Workspace, address: str) -> None:
    status, response = ask(address, "train", {"task": "digits", "steps": 3, "layers": 1, "seed": 7})
    assert status == 200 and response["job"]["state"] in ("queued", "running")
    job = finished(workspace, address, response["job"]["id"])
    assert job.state == "done" and job.result["ended"] == "steps" and job.result["steps"] == 3
    response = ask(address, f"run?run={response['run']}")[1]
    assert (
        response["state"] == "ended"
        and response["steps"][-1] == 3
        and response["model"]
        and response["result"]["ended"] == "steps"
    )
    assert ask(address, "continue", {"run": response["id"]})[0] == 400
    # It is closed, and brought back with its model.
    closed = ask(address, "close", {"run": response["id"]})
    assert closed == (200, {"undo": response["id"]}) and ask(address, f"run?run={response['id']}")[0] == 404
    assert send(address, "api/workspace/undo", {"item": response["id"]})[1]["title"] == response["title"]
    again = ask(address, f"run?run={response['id']}")[1]
    assert again["steps"] == response["steps"] and again["model"] and again["state"] == "ended"
    assert send(address, "api/workspace/undo", {"item": response["id"]})[0] == 404
