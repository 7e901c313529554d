"""The examples: short, run as they are, and say what they promise; the notebook prints what is stored in it."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.printed import decimals, same_print

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NOTEBOOK = EXAMPLES / "tour.ipynb"
pytestmark = pytest.mark.usefixtures("full_tiles")


def run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What an example prints, run in this process: importing torch takes longer than most of them."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_examples_are_short_and_listed():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for file in EXAMPLES.glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 40, file.name
        assert file.name in listed, f"{file.name} is not in examples/README.md"
    assert NOTEBOOK.name in listed


def test_a_hugging_face_model_is_watched(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.html"
    out = run("watch_huggingface.py", monkeypatch, capsys, "--tokens", "64", "--html", str(page))
    assert "72 heads of encoder.layer.*.attention.self, by entropy" in out
    assert "<html" in page.read_text(encoding="utf-8")


def test_induction_heads_are_found_and_needed(monkeypatch, capsys):
    out = run("induction_heads.py", monkeypatch, capsys)
    before, after, more = decimals(out.splitlines()[1])
    assert after > before + 1 and more == pytest.approx(after - before, abs=1e-3)
    assert abs(decimals(out.splitlines()[2])[2]) < 0.5  # heads that do something else do not matter for this


def test_a_model_is_planned(monkeypatch, capsys):
    out = run("plan_a_model.py", monkeypatch, capsys)
    assert "123,625,728 parameters, 7.0 TFLOP per step" in out
    shares = [int(x) for x in re.findall(r"(\d+)%   ", out)]
    assert shares == sorted(shares) and len(shares) == 4


def test_a_convolution_is_attention(monkeypatch, capsys):
    lines = run("convolution_to_attention.py", monkeypatch, capsys).splitlines()
    assert decimals(lines[0])[0] < 1e-12 and decimals(lines[-1])[0] < 1e-12
    errors = [decimals(line)[-1] for line in lines[1:-1]]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-5


def test_attention_goes_from_soft_to_hard(monkeypatch, capsys):
    rows = [line.split() for line in run("hard_and_soft.py", monkeypatch, capsys).splitlines()[1:8]]
    entropies = [float(row[1]) for row in rows]
    assert entropies == sorted(entropies, reverse=True) and entropies[-1] == 0
    assert entropies[0] == pytest.approx(math.log(64), abs=1e-3)
    assert float(rows[-1][3]) == 0


def test_masks_are_drawn(monkeypatch, capsys):
    out = run("masks.py", monkeypatch, capsys)
    assert out.count("(rows: 8 queries, columns: 8 keys") == 6
    assert out.endswith("packed documents equal those computed alone\n")


def test_a_run_is_trained_and_read(tmp_path, monkeypatch, capsys):
    out = run("train_and_evolve.py", monkeypatch, capsys, "--steps", "40", "--out", str(tmp_path / "run"))
    assert "accuracy on repeated tokens" in out and "step    40   strongest induction head" in out


def test_a_sequence_is_spread_over_processes():
    given = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*given, str(EXAMPLES / "context_parallel.py"), "--tokens", "1001"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: " in done.stdout and "rank 1 of 2: " in done.stdout
    assert decimals(done.stdout.splitlines()[-1])[0] < 1e-5


def test_the_notebook_prints_what_is_stored_in_it():
    stored = nbformat.read(NOTEBOOK, as_version=4)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(fresh, timeout=300, resources={"metadata": {"path": EXAMPLES}}).execute()
    for before, after in zip(stored.cells, fresh.cells, strict=True):
        # Weights in half precision: the last digits of a loss depend on the instruction set.
        same = same_print(text_of(before), text_of(after), relative=2e-3)
        assert same, f"{text_of(after)}\nrun again: jupyter execute --inplace {NOTEBOOK.name}"
    pictures = [one for cell in fresh.cells for one in cell.get("outputs", ()) if "image/png" in one.get("data", {})]
    assert len(pictures) == 3


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a cell prints. Not compared: how its output is cut into pieces, and sizes of figures, which fonts decide."""
    printed = "".join(output.get("text", "") or output.data.get("text/plain", "") for output in cell.get("outputs", ()))
    return re.sub(r"(Figure size )[\d.]+x[\d.]+", r"\1…", printed)
