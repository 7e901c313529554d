"""Hundreds of bad command lines, made from the commands' own options: each is one line, exit code 2, and ends."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.bad_commands import bad_command_lines, make_bad_files

from regard import models
from regard.cli import main

HANG_SECONDS = 120  # far above the time that any refusal takes
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Hanging(BaseException):
    """A command line that does not end."""


@contextmanager
def hang_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hanging

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def problems_of(line: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run a command line. Returns what is wrong with the way it was refused; nothing if all is well."""
    monkeypatch.setattr(sys, "argv", ["regard", *line])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    code: Any = 0
    try:
        with hang_limit():
            main()
    except SystemExit as end:
        code = end.code
    except Hanging:
        code = "it does not end"
    except BaseException as error:
        code = f"traceback of {type(error).__name__}: {error}"
    out, err = capfd.readouterr()
    problems = []
    if code != 2:
        problems.append(f"exit code {code}")
    if err.count("\n") != 1 or not err.startswith("regard: "):
        problems.append(f"standard error is {err[:300]!r}")
    if "Traceback" in out + err or "unexpected error" in err:
        problems.append(f"unexpected: {err[:300]!r}")
    if CONTROL.search(out + err):
        problems.append(f"control characters: {(out + err)[:300]!r}")
    return problems


def run_all(
    count: int, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[str]]:
    make_bad_files(folder)
    monkeypatch.chdir(folder)
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(folder / "state"))
    wrong = {}
    for line in bad_command_lines(models.bundled(), count):
        before = sorted(os.listdir(folder))
        problems = problems_of(line, capfd, monkeypatch)
        left = sorted(set(os.listdir(folder)) - set(before) - {"state"})
        if left:
            problems.append(f"it leaves {left}")
        if problems:
            wrong[" ".join(word[:60] for word in line)] = problems
    return wrong


def test_bad_command_lines_are_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_all(60, tmp_path, capfd, monkeypatch) == {}


@pytest.mark.full
def test_five_hundred_bad_command_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_all(500, tmp_path, capfd, monkeypatch) == {}
