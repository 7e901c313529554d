"""Killed, out of disk, read-only, bereft: whatever ends a run, the last good checkpoint is there and it goes on."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tiny_task
from support.tiny_task import QUICK, Tiny, digest

from regard.training._checkpoints import Checkpoints
from regard.training._metrics_file import read_metrics
from regard.training._train import train

WORKER = Path(tiny_task.__file__)
SHORT = QUICK | {"steps": 60}
Run = Callable[[Path, tuple[int, float] | None], int]


@pytest.fixture(scope="module")
def forked() -> Iterator[Run]:
    """Runs in children of one process that has torch already; killed with −9 at some moment, or let be."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, WORKER, "fork"]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(folder: Path, moment: tuple[int, float] | None) -> int:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([str(folder), SHORT, moment]) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield run
        process.stdin.close()


def killed_and_resumed(forked: Run, tmp_path: Path, times: int) -> list[str]:
    """Kill a run at random moments, each time a new one, and go on with it; says where each was."""
    assert forked(tmp_path / "whole", None) == 0
    draw, wanted = random.Random(times), digest(tmp_path / "whole")
    places = []
    for k in range(times):
        folder = tmp_path / str(k)
        # Within the next two steps or so after a step: while it learns, evaluates, records or saves.
        code = forked(folder, (draw.randrange(60), draw.uniform(0, 0.04)))
        steps = Checkpoints(folder / "checkpoints").steps()
        places.append(f"{code} after {steps[-1] if steps else None}")
        assert forked(folder, None) == 0
        assert digest(folder) == wanted, places
        assert [x["step"] for x in read_metrics(folder / "metrics.jsonl") if "held_out" not in x] == list(range(1, 61))
        assert not list(folder.rglob(".writing*"))
    # The last steps may be over before.
    assert sum(place.startswith("-9") for place in places) >= times * 0.9 - 2, places
    return places


def test_killed_with_nine_at_random_moments_it_ends_with_the_same_bits(forked: Run, tmp_path: Path) -> None:
    killed_and_resumed(forked, tmp_path, 4)


@pytest.mark.full
def test_killed_with_nine_at_a_hundred_random_moments(forked: Run, tmp_path: Path) -> None:
    places = killed_and_resumed(forked, tmp_path, 100)
    assert len(set(places)) > 5, places


class Spoiled(Tiny):
    """A task that changes the world at step 6."""

    def __init__(self, *given: Any, spoil: Callable[[], None], **named: Any) -> None:
        super().__init__(*given, **named)
        self.spoil = spoil

    def batch(self, step: int) -> Any:
        if step == 6:
            self.spoil()
        return super().batch(step)


def spoiled(what: Callable[[], None]) -> type[Tiny]:
    """The task, with what it does at step 6."""

    class Now(Spoiled):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, spoil=what, **named)

    return Now


def check_it_goes_on(folder: Path, whole: Path) -> None:
    """The last good checkpoint is that of step 6, nothing is half-written, and the run ends as if nothing had been."""
    assert Checkpoints(folder / "checkpoints").steps()[-1] == 6
    assert not list(folder.rglob(".writing*"))
    train(Tiny, folder, QUICK)  # saving more or less often, and recording, are free to change
    train(Tiny, whole, QUICK)
    assert digest(folder) == digest(whole)


def test_a_full_disk_is_said_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    """No file may be longer than 600 bytes from step 6 on: as a disk that is full, for this process alone."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = spoiled(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1])))
    try:
        with pytest.raises(OSError, match=r"cannot be written: File too large; the last checkpoint is .*6$") as caught:
            train(full, tmp_path / "run", QUICK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    check_it_goes_on(tmp_path / "run", tmp_path / "whole")


def test_a_disk_that_is_full_when_heads_are_recorded_is_said(tmp_path: Path) -> None:
    """After step 6 nothing but a record is written for a while."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = spoiled(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1])))
    try:
        with pytest.raises(
            OSError, match=r"step-\d+.safetensors.* cannot be written: File too large; the last checkpoint"
        ):
            train(full, tmp_path / "run", QUICK | {"record": 1.0, "save": 6})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_it_goes_on(tmp_path / "run", tmp_path / "whole")


def test_a_checkpoint_that_does_not_fit_says_so(tmp_path: Path) -> None:
    """The metrics still fit, the weights do not."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = spoiled(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1])))
    try:
        with pytest.raises(OSError, match=r"the checkpoint of step \d+ cannot be written: File too large; the last"):
            train(full, tmp_path / "run", QUICK | {"record": 0.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_it_goes_on(tmp_path / "run", tmp_path / "whole")


def test_a_folder_that_became_read_only_is_said_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # not below tmp_path, which other users cannot enter
        Path(name).chmod(0o755)
        folder = Path(name) / "run"

        def read_only() -> None:
            (folder / "checkpoints").chmod(0o555)
            if os.geteuid() == 0:
                os.seteuid(65534)  # root may write everywhere

        try:
            with pytest.raises(OSError, match=r"checkpoint of step \d+ cannot be written: Permission denied; the last"):
                train(spoiled(read_only), folder, QUICK | {"record": 0.0})
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            (folder / "checkpoints").chmod(0o755)
        check_it_goes_on(folder, tmp_path / "whole")
