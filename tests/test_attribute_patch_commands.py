"""``regard attribute`` and ``regard patch``: their numbers are those of ``regard.interp``, and what they refuse."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import command

from regard import models
from regard.interp import Logit, LogitDifference, attribute, attribution_patch, patch_sweep

TEXT = "Return the mean of xs.\n\nReturn the mean of"
OTHER = "Return the sum of ys.\n\nReturn the mean of"


@pytest.fixture(autouse=True)
def _texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    Path("other.txt").write_text(OTHER)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``run("attribute", …)`` returns the exit code, the output in one line, and the lines of errors."""

    def run_command(*arguments: str) -> tuple[int, str, list[str]]:
        code, out, errors = command(monkeypatch, capsys, *arguments)
        return code, " ".join(out.split()), errors

    return run_command


def rows(file: str) -> list[dict[str, str]]:
    with open(file, encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def load() -> tuple[models.TextDecoder, torch.Tensor, torch.Tensor]:
    model = models.load(models.bundled()).float()
    assert isinstance(model, models.TextDecoder)
    return model, torch.tensor([model.tokenizer.encode(TEXT)]), torch.tensor([model.tokenizer.encode(OTHER)])


def test_attribute_prints_and_writes_the_contributions(run: Any) -> None:
    code, printed, _ = run("attribute", "--text", "text.txt", "--direct", "--csv", "heads.csv", "--most", "3")
    assert code == 0
    model, ids, _ = load()
    with torch.no_grad():
        target = int(model(ids)[0, -1].argmax())
    expected = attribute(model, ids, target)
    written = rows("heads.csv")
    assert len(written) == 12
    for row, known in zip(written, expected.heads(), strict=True):
        assert (row["path"], int(row["head"])) == (known["path"], known["head"])
        assert float(row["contribution"]) == pytest.approx(known["contribution"], rel=1e-3, abs=1e-4)
    for words in ("is the most likely token", "tokens that contribute most", "3 of 12 heads", "parts"):
        assert words in printed


def test_attribute_takes_a_target_a_position_and_steps(run: Any) -> None:
    options = ("--target", " x", "--against", " item", "--position", "-2", "--steps", "2", "--csv", "heads.csv")
    code, printed, _ = run("attribute", "--text", "text.txt", *options)
    assert code == 0 and "minus that of ' item'" in printed
    model, ids, _ = load()
    right, wrong = (model.tokenizer.encode(token)[-1] for token in (" x", " item"))
    expected = attribute(model, ids, (-2, right, wrong), steps=2)
    for row, known in zip(rows("heads.csv"), expected.heads(), strict=True):
        assert float(row["contribution"]) == pytest.approx(known["contribution"], rel=1e-3, abs=1e-4)


def test_patch_writes_what_the_library_measures(run: Any) -> None:
    options = ("--source", "other.txt", "--target", " x", "--against", " y", "--parts", "output,v")
    files = ("--save", "sweep.jsonl", "--csv", "patches.csv")
    code, printed, _ = run("patch", "--text", "text.txt", *options, *files)
    assert code == 0
    model, base, source = load()
    right, wrong = (model.tokenizer.encode(token)[-1] for token in (" x", " y"))
    metric = LogitDifference(base.shape[1] - 1, right, wrong)
    expected = patch_sweep(model, base, source, metric, parts=("output", "v"))
    written = rows("patches.csv")
    assert len(written) == len(expected.rows) == 24
    for row, known in zip(written, expected.rows, strict=True):
        assert (row["path"], int(row["head"]), row["part"]) == (known["path"], known["head"], known["part"])
        assert float(row["change"]) == pytest.approx(known["change"], rel=1e-3, abs=1e-4)
    assert "20 of 24 patches" in printed

    # The file has all runs, so nothing is computed again; another text is another sweep.
    lines = Path("sweep.jsonl").read_text()
    assert run("patch", "--text", "text.txt", *options, "--save", "sweep.jsonl")[0] == 0
    assert Path("sweep.jsonl").read_text() == lines
    assert run("patch", "--text", "other.txt", *options, "--save", "sweep.jsonl")[0] == 2


def test_patch_estimates_from_one_backward_pass(run: Any) -> None:
    options = ("--source", "other.txt", "--target", " x", "--estimate", "--csv", "patches.csv")
    assert run("patch", "--text", "text.txt", *options)[0] == 0
    model, base, source = load()
    metric = Logit(base.shape[1] - 1, model.tokenizer.encode(" x")[-1])
    expected = attribution_patch(model, base, source, metric).over_positions()
    changes = {(row["path"], int(row["head"])): float(row["change"]) for row in rows("patches.csv")}
    assert len(changes) == 12
    for row in expected.rows:
        assert changes[row["path"], row["head"]] == pytest.approx(row["change"], rel=1e-3, abs=1e-4)


def test_patch_draws_one_part(run: Any) -> None:
    pytest.importorskip("matplotlib", reason="figures need it")
    options = ("--source", "other.txt", "--layers", "*.2.*", "--figure", "patches.svg")
    assert run("patch", "--text", "text.txt", *options)[0] == 0
    assert Path("patches.svg").read_text().startswith("<?xml")
    code, _, errors = run("patch", "--text", "text.txt", *options, "--parts", "q,k")
    assert code == 2 and "--figure" in errors[0]


def test_patch_without_a_source_sets_heads_to_zero(run: Any) -> None:
    assert run("patch", "--text", "text.txt", "--layers", "*.1.*", "--csv", "patches.csv")[0] == 0
    model, base, _ = load()
    expected = patch_sweep(model, base, torch.zeros_like, layers="*.1.*")
    for row, known in zip(rows("patches.csv"), expected.rows, strict=True):
        assert float(row["after"]) == pytest.approx(known["after"], rel=1e-3)
        assert row["effect"] == ""


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("attribute",), "input"),
        (("attribute", "--text", "text.txt", "--sort", "size"), "--sort"),
        (("attribute", "--text", "text.txt", "--steps", "0"), "--steps"),
        (("attribute", "--text", "text.txt", "--target", "zzzz"), "--target"),
        (("attribute", "--text", "text.txt", "--target", "#999999"), "target"),
        (("attribute", "--text", "text.txt", "--target", "#5", "--against", "#5"), "--against"),
        (("attribute", "--text", "text.txt", "--position", "99"), "--position"),
        (("patch",), "--text"),
        (("patch", "--text", "text.txt", "--against", "a"), "--target"),
        (("patch", "--text", "text.txt", "--position", "1"), "--target"),
        (("patch", "--text", "text.txt", "--parts", "mlp"), "--parts"),
        (("patch", "--text", "text.txt", "--positions", "first"), "--positions"),
        (("patch", "--text", "text.txt", "--estimate"), "--source"),
        (("patch", "--text", "text.txt", "--source", "other.txt", "--estimate", "--parts", "q"), "--parts"),
        (("patch", "--text", "text.txt", "--source", "other.txt", "--tokens", "0"), "--tokens"),
        (("patch", "--text", "text.txt", "--layers", "nosuch"), "nosuch"),
    ],
)
def test_refusals_are_one_line(run: Any, arguments: tuple[str, ...], named: str) -> None:
    code, _, errors = run(*arguments)
    assert code == 2 and len(errors) == 1 and named in errors[0]


def test_texts_of_two_lengths_are_refused(run: Any) -> None:
    Path("short.txt").write_text("Return")
    code, _, errors = run("patch", "--text", "text.txt", "--source", "short.txt")
    assert code == 2 and "same number of tokens" in errors[0]
    assert run("patch", "--text", "text.txt", "--source", "short.txt", "--tokens", "2")[0] == 0
