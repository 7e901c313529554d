"""Signals at any moment of a command: one line, never a traceback; and files that survive a power cut."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import write_run

from regard import models
from regard._files import atomic_folder, make_folder
from regard.cli import end_signals
from regard.cli.end_signals import EndSignals, exit_at_interrupt, raise_at_interrupt
from regard.cli.train_progress import ProgressOutput
from regard.lab.first_recording import ensure_recording
from regard.lab.workspace import Workspace
from regard.training._metrics_file import Metrics


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that would have ended the process."""
    numbers: list[int] = []
    monkeypatch.setattr(end_signals, "exit_now", lambda number, frame=None: numbers.append(number))
    return numbers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_lab_ends_at_the_first_signal_and_at_once_at_the_second(number: signal.Signals, exits: list[int]) -> None:
    before = signal.getsignal(number)
    with EndSignals() as signals:
        signal.raise_signal(number)
        assert exits == [number] and not signals.requested  # nothing is served yet
        signals.is_serving = True
        signal.raise_signal(number)
        assert exits == [number] and signals.requested
        signal.raise_signal(number)
        assert exits == [number, number]
    assert signal.getsignal(number) is before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with EndSignals() as signals:
            signals.is_serving = True
            signal.raise_signal(signal.SIGHUP)
            assert not signals.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_raises_in_a_command_and_ends_an_import(exits: list[int]) -> None:
    with raise_at_interrupt():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with exit_at_interrupt():
            signal.raise_signal(signal.SIGINT)
        assert exits == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_in_a_destructor_is_not_printed_but_raised_later(capsys: Any) -> None:
    class Slow:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), raise_at_interrupt():
        item = Slow()
        del item
        for _ in range(600):
            time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_control_c_when_python_ends_is_one_line() -> None:
    """The command is done, and Python waits for a thread."""
    script = (
        "import sys, threading, time; from regard.cli import main; sys.argv = ['regard', '--version']; "
        "threading.Thread(target=time.sleep, args=(100,)).start(); main()"
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-u", "-c", script], **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("regard ")
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "regard: interrupted\n"


def test_a_training_goes_on_when_its_terminal_is_gone() -> None:
    class Gone:
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    with ProgressOutput() as output:
        output.console.file = Gone()  # type: ignore[assignment]
        output.averages = {"loss": 1.0, "predictions": 1.0}
        output.on_evaluation(1, {"loss": 1.0}, True)
        output.on_stop()


class Synced:
    """The files and folders that were written to the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inodes: set[int] = set()
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)

    def _note(self, handle: int) -> None:
        self.inodes.add(os.fstat(handle).st_ino)
        self._fsync(handle)

    def __contains__(self, path: Path) -> bool:
        return path.stat().st_ino in self.inodes


def test_what_a_user_would_miss_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(monkeypatch)
    state = tmp_path / "state"
    workspace = Workspace(state)
    workspace.open(models.bundled())
    ensure_recording(workspace)
    [recording] = workspace.items("recording")
    assert all(file in synced for file in (*recording.folder.iterdir(), recording.folder, state / "recordings"))
    assert state / "lab.json" in synced and state in synced
    synced.inodes.clear()
    workspace.close_recording(recording.id)
    workspace.close()
    trash = state / "trash"
    assert trash / f"{recording.id}.json" in synced and trash in synced and state / "recordings" in synced

    run = tmp_path / "runs" / "first"
    write_run(run)
    assert run / "run.json" in synced and run in synced and run.parent in synced and tmp_path in synced
    metrics = Metrics(run, 0)
    metrics.write(1, {"loss": 1.0})
    synced.inodes.clear()
    metrics.flush()
    assert run / "metrics.jsonl" in synced
    metrics.close()


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(monkeypatch)
    with atomic_folder(tmp_path / "a" / "b") as temporary:
        (temporary / "file").write_text("x")
        assert not (tmp_path / "a" / "b").exists()
    assert tmp_path / "a" / "b" / "file" in synced and tmp_path / "a" in synced and tmp_path in synced
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "a" / "c") as temporary:
        (temporary / "file").write_text("x")
        raise KeyboardInterrupt
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    make_folder(tmp_path / "a")  # it exists
