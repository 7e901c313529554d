"""What people try first on the command line: errors are one line, and Ctrl-C is one line and exit code 130."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regard.cli import main

# The words after "regard", and what the line must name. Folders and files are those of `try_folder`.
REFUSED = [
    (("nosuch",), "Commands are attribute, bench, budget"),
    (("budge",), "budget"),
    (("describe", ""), "folder must be"),
    (("describe", "nosuch"), "nosuch does not exist"),
    (("describe", "empty"), "config.json"),
    (("describe", "file.txt"), "file.txt is a file"),
    (("generate",), "folder"),
    (("generate", "", "x"), "folder must be"),
    (("generate", "nosuch", "x"), "nosuch does not exist"),
    (("claims", "--only", "nosuch"), "nosuch"),
    (("claims", "--only", ""), "--only must be"),
    (("claims", "--source", "nosuch"), "source must be one of"),
    (("claims", "--report", "no/such/folder/x.html"), "not a writable folder"),
    (("claims", "--markdown", "empty"), "empty is a folder"),
    (("convolve", "--kernel", "x"), "--kernel must be"),
    (("convolve", "nosuch"), "nosuch"),
    (("bench", "nosuch"), "nosuch"),
    (("bench", "--page", "no/such/page.md"), "not a writable folder"),
    (("train",), "task"),
    (("train", ""), "task"),
    (("train", "txt"), "txt"),
    (("doctor", "extra"), "extra"),
    (("lab", "nosuch"), "nosuch does not exist"),
    (("lab", ""), "folder must not be an empty text"),
    (("lab", "file.txt"), "file.txt"),
    (("lab", "--port", "x"), "--port"),
]


@pytest.fixture
def try_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with an empty folder and an empty file; the lab's state is in it too."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr("sys.argv", ["regard", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@pytest.mark.usefixtures("try_folder")
@pytest.mark.parametrize(("words", "mention"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], mention: str
) -> None:
    code = run(monkeypatch, *words)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1) and mention in err and err.startswith("regard: ")


@pytest.mark.parametrize(
    ("words", "slow_function"),
    [
        (("budget", "gpt2"), "regard.cli.budget_modes.plan"),
        (("claims", "--report", "claims.html"), "regard.cli.claims.run_claims"),
        (("describe",), "regard.models.load"),
        (("generate", "empty", "x"), "regard.models.load"),
        (("doctor",), "regard.doctor.run_checks"),
        (("convolve",), "regard.cli.convolve.to_attention"),
        (("bench", "--page", "page.md"), "regard.cli.bench.run"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_ctrl_c_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    try_folder: Path,
    words: tuple[str, ...],
    slow_function: str,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slow_function, interrupt)
    before = sorted(try_folder.rglob("*"))
    code = run(monkeypatch, *words)
    _, err = capsys.readouterr()
    assert code == 130 and err == "regard: interrupted\n"
    assert sorted(try_folder.rglob("*")) == before  # nothing was written
