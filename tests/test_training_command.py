"""``regard train`` from the command line, and what looks at its runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import command

from regard.models import bundled
from regard.training import evolution
from regard.training.tasks.text import TextTask

QUICK = ("--set", "steps=12", "--set", "warmup=3", "--set", "batch=16", "--set", "data.checks=32")
Patch, Captured = pytest.MonkeyPatch, pytest.CaptureFixture[str]


def test_a_task_is_trained_told_and_looked_at(monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command(monkeypatch, capsys, "train", "agreement", "--out", str(run), *QUICK)
    assert code == 0
    assert err[0].startswith("agreement: subject–verb agreement") and err[0].endswith("12 steps")
    assert err[-1].startswith("step 12  loss ") and "accuracy" in err[-1]
    lines = out.splitlines()
    assert lines[0].startswith("agreement: accuracy ") and lines[0].endswith(" at step 12 of 12")
    assert "recording the heads took" in lines[1] and f"model: {run / 'model'}" in lines
    assert any(line.startswith("induction") for line in lines)
    assert all(len(line) <= 80 or str(tmp_path) in line for line in lines)
    figures = sorted(file.name for file in (run / "figures").iterdir())
    assert figures and all(str(run / "figures" / name) in out for name in figures)
    # Again: there is nothing left to do, and it says the same.
    code, again, _ = command(monkeypatch, capsys, "train", "agreement", "--out", str(run), *QUICK)
    assert code == 0 and again.splitlines()[0] == lines[0]
    text = tmp_path / "text.txt"
    text.write_text("the keys to the cabinet are old .")
    for place in (run, run / "model"):
        code, out, err = command(monkeypatch, capsys, "look", str(place), "--text", str(text))
        assert code == 0 and "decoder.blocks.0.attention" in out
    code, _, err = command(monkeypatch, capsys, "describe", str(run))
    assert code == 2 and f"its model is {run / 'model'}" in err[0]


def test_the_recipe_is_printed_and_taken_back(monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    code, out, _ = command(monkeypatch, capsys, "train", "dates", "--recipe", "--set", "steps=7", "--set", "warmup=2")
    assert code == 0 and 'task = "dates"' in out and "steps = 7" in out
    file = tmp_path / "dates.toml"
    file.write_text(out)
    code, again, _ = command(monkeypatch, capsys, "train", "dates", "--recipe", "--config", str(file))
    assert code == 0 and again == out
    code, again, _ = command(
        monkeypatch, capsys, "train", "dates", "--recipe", "--config", str(file), "--set", "steps=8"
    )
    assert code == 0 and again == out.replace("steps = 7", "steps = 8")
    code, _, err = command(monkeypatch, capsys, "train", "digits", "--recipe", "--config", str(file))
    assert code == 2 and "must be a recipe of the task digits" in err[0]


def test_a_shorter_run_has_a_shorter_warmup_and_says_so(monkeypatch: Patch, capsys: Captured) -> None:
    code, out, err = command(monkeypatch, capsys, "train", "repeats", "--recipe", "--set", "steps=60")
    assert code == 0 and "warmup = 15" in out and len(err) == 1 and err[0].startswith("warmup is 15")
    code, _, err = command(monkeypatch, capsys, "train", "repeats", "--recipe", "--set", "steps=600")
    assert code == 0 and err == []
    code, _, err = command(
        monkeypatch, capsys, "train", "repeats", "--recipe", "--set", "steps=60", "--set", "warmup=60"
    )
    assert code == 2 and "warmup is 60" in err[0]


def test_a_run_without_a_model_is_one_line(monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    """What a run leaves that was killed."""
    (tmp_path / "run.json").write_text("{}")
    for name in ("look", "describe"):
        code, _, err = command(monkeypatch, capsys, name, str(tmp_path), *(["--kinds"] if name == "look" else []))
        assert code == 2 and len(err) == 1 and "no model yet" in err[0] and "regard train" in err[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("chess",), "task is 'chess'"),
        (("dates", "--set", "stepz=3"), "a dates recipe has no stepz"),
        (("dates", "--set", "steps"), "it must be name=value"),
        (("dates", "--config", "nowhere.toml"), "nowhere.toml cannot be read"),
        (("dates", "--set", "rate=-1"), "rate is -1.0; it must be a number > 0"),
        (("text", "--set", "data.path=nowhere"), "nowhere"),
    ],
)
def test_what_is_wrong_is_one_line(
    monkeypatch: Patch, capsys: Captured, tmp_path: Path, given: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(monkeypatch, capsys, "train", *given)
    assert code == 2 and said in err[0] and len(err) == 1 and out == ""


def test_a_folder_of_something_else_is_left_alone(monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    code, _, err = command(monkeypatch, capsys, "train", "agreement", "--out", str(tmp_path), *QUICK)
    assert code == 2 and "is not a run" in err[0] and len(err) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]


def test_control_c_saves_says_so_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """A process of its own, as a person has it."""
    run = tmp_path / "run"
    line = [sys.executable, "-m", "regard", "train", "agreement", "--out", str(run), *QUICK, "--set", "steps=100000"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        until = time.monotonic() + 100
        while not list((run / "checkpoints").glob("step-*")):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err
    assert out.startswith("stopped at step ") and "the same command continues" in out
    step = int(out.split()[3])
    assert (run / "model" / "config.json").is_file() and f"model: {run / 'model'}" in out
    last = max((run / "checkpoints").glob("step-*"))
    assert json.loads((last / "state.json").read_text())["step"] == step


def test_the_bundled_model_is_looked_at_unless_another_is_given(
    monkeypatch: Patch, capsys: Captured, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Return the number of items in a container.")
    code, out, _ = command(monkeypatch, capsys, "look", "--text", str(text), "--most", "3")
    assert code == 0 and "decoder.blocks." in out
    assert (bundled() / "model.safetensors").stat().st_size <= 6_000_000


def test_the_bundled_model_was_trained_by_the_default_recipe() -> None:
    assert (bundled() / "recipe.toml").read_text() == TextTask.default_recipe.to_toml()
    kinds = {row["kind"]: row["step"] for row in reversed(evolution(bundled()).arrivals())}
    assert 0 < kinds["previous"] <= kinds["induction"] <= kinds["sink"]
    spread = evolution(bundled()).value("spread").mean(-1)
    assert spread[0] > 0.9 and spread[-1] < 0.5
