"""Labs that end while jobs run, by a signal or by kill -9 of the lab or a worker: no traceback, no process left, and
everything that was complete is there and readable afterwards; a training goes on with the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.lab_process import LabProcess, LabServer, children_of, lab_server, wait_until_ended
from support.small_runs import SMALL_RUN, write_run
from support.tiny_task import digest

from regard import models
from regard.interp import load_recording
from regard.lab.first_recording import ensure_recording
from regard.lab.workspace import Workspace
from regard.training._checkpoints import Checkpoints
from regard.training._loop import Listener
from regard.training._stop_signals import StopSignals
from regard.training._train import train

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads /proc to find worker processes")

RUN = "t00000001"
CHANGES = SMALL_RUN | {"steps": 100_000}  # more than all labs together can train
SECONDS = 100.0  # within which everything must have ended; a hang limit for busy machines
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
KILLS = ("kill lab", "kill worker", "kill training")


@pytest.fixture(scope="module")
def server() -> Iterator[LabServer]:
    with lab_server() as started:
        yield started


class Scene:
    """A lab's folder with a recording and a run, and what must still be there after each end of a lab."""

    def __init__(self, server: LabServer, folder: Path) -> None:
        self.server = server
        self.state = folder / "state"
        self.folder = folder
        workspace = Workspace(self.state)
        workspace.open(models.bundled())
        ensure_recording(workspace)
        workspace.close()
        self.recordings = {item.id for item in workspace.items("recording")}  # those that were open after the last end
        write_run(self.state / "runs" / RUN, CHANGES)
        self.checkpoints = Checkpoints(self.state / "runs" / RUN / "checkpoints")
        self.slowest = 0.0  # seconds from a signal to the end of all processes
        self.ends: Counter[str] = Counter()

    def end(self, how: str, draw: random.Random) -> None:
        """Start a lab and two jobs, end it at a random moment, and check what is left."""
        lab = self.server.start(self.state, self.folder / f"log-{sum(self.ends.values())}.txt")
        step = max(self.checkpoints.steps(), default=0)
        started = time.monotonic()
        lab.wait_for_address()
        text = "a cat sat on a mat " * draw.choice((1, 200))
        lab.request("api/look", {"model": "bundled-model", "text": text})
        training = lab.request("api/evolve/continue", {"run": RUN})["job"]["id"]
        self._wait_for_moment(lab, training, draw, time.monotonic() - started)
        # From here on nothing that is complete may be lost.
        step = max(step, *self.checkpoints.steps(), 0)
        recordings = {path.parent.name for path in (self.state / "recordings").glob("r*/recording.json")}
        workers = lab.workers()

        if how.startswith("kill"):
            self._kill(how, lab, workers)
        else:
            os.kill(lab.pid, getattr(signal, how))
        start = time.monotonic()
        code = lab.wait(SECONDS)
        assert code is not None, f"the lab still runs after {how}: {lab.output()[-3000:]}"
        wait_until_ended(workers, SECONDS)
        self.slowest = max(self.slowest, time.monotonic() - start)
        self.ends[how] += 1
        assert code == (-9 if how.startswith("kill") else 0), (how, code, lab.output()[-3000:])
        assert "Traceback" not in lab.output() and "Exception ignored" not in lab.output(), lab.output()[-3000:]
        self._check(step, recordings)

    def _wait_for_moment(self, lab: LabProcess, training: str, draw: random.Random, start_seconds: float) -> None:
        """Wait at random: for part of the time that workers need to start, or until the training has done steps."""
        if draw.random() < 0.4:
            time.sleep(draw.uniform(0, 2 * start_seconds))
            return
        wanted = draw.randrange(1, 40)
        first = None
        while True:
            job = lab.request(f"api/jobs/{training}")
            first = job["done"] if first is None and job["said"].startswith("loss") else first
            if job["state"] not in ("queued", "running") or (first is not None and job["done"] >= first + wanted):
                break
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.05))

    def _kill(self, how: str, lab: LabProcess, workers: list[int]) -> None:
        """Kill the lab, or a worker and then the lab, with -9."""
        for worker in workers:
            is_training = self._trains(worker)
            if how == ("kill training" if is_training else "kill worker"):
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
                # The lab lives on, and tells how the job ended.
                with suppress(urllib.error.HTTPError):
                    assert lab.request("api/jobs")["jobs"]
        os.kill(lab.pid, signal.SIGKILL)

    def _trains(self, pid: int) -> bool:
        """Return whether a process holds the lock of the run."""
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if f"/{RUN}/" in os.readlink(file):
                        return True
        return False

    def _check(self, step: int, recordings: set[str]) -> None:
        workspace = Workspace(self.state)
        try:
            assert [item.id for item in workspace.items("run")] == [RUN]
            found = {item.id for item in workspace.items("recording")} | {
                file.stem for file in (self.state / "trash").glob("r*.json")
            }
            # A lab keeps a limited number, and at most one was added: what was open is open or in the trash.
            assert self.recordings | recordings <= found
            self.recordings = {item.id for item in workspace.items("recording")}
            for item in workspace.items("recording"):
                assert load_recording(item.folder).calls
            damaged = [notice for notice in workspace.notices if "cannot be read" in notice or "missing" in notice]
            assert damaged == [] and not list(self.state.glob("*.bad*"))
        finally:
            workspace.close()
        newest = self.checkpoints.read_newest()
        assert (newest is None and step == 0) or (newest is not None and newest.state["step"] >= step)


class StopAt(Listener):
    """Stops a training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, step: int, values: dict[str, float]) -> None:
        if step == self.step - 1:
            assert StopSignals.request_stop()


def end_labs(server: LabServer, folder: Path, ways: list[str], seed: int) -> Scene:
    """End one lab in each way, and compare the weights of the run with those of one that nobody has disturbed."""
    draw = random.Random(seed)
    scene = Scene(server, folder)
    for how in ways:
        scene.end(how, draw)
        print(how, "at step", max(scene.checkpoints.steps(), default=0), f"slowest end {scene.slowest:.1f} s")
    step = scene.checkpoints.steps()[-1]
    train("repeats", folder / "whole", CHANGES, listener=StopAt(step))
    assert digest(scene.state / "runs" / RUN) == digest(folder / "whole")
    return scene


def test_labs_end_cleanly_and_lose_nothing(server: LabServer, tmp_path: Path) -> None:
    end_labs(server, tmp_path, ["SIGINT", "kill lab"], 3)


@pytest.mark.full
def test_a_hundred_labs_end_by_a_signal(server: LabServer, tmp_path: Path) -> None:
    scene = end_labs(server, tmp_path, [SIGNALS[k % 3] for k in range(100)], 1)
    assert set(scene.ends) == set(SIGNALS)


@pytest.mark.full
def test_a_hundred_labs_workers_and_trainings_are_killed(server: LabServer, tmp_path: Path) -> None:
    scene = end_labs(server, tmp_path, [KILLS[k % 3] for k in range(100)], 2)
    assert set(scene.ends) == set(KILLS)


def interrupt_start(folder: Path, seconds: float) -> None:
    """Press Ctrl-C some seconds after a lab has begun to import its libraries: it ends with at most one line."""
    command = [sys.executable, "-m", "regard", "lab", "--no-browser", "--state", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as lab:
        maps = Path(f"/proc/{lab.pid}/maps")
        while "libtorch" not in maps.read_text():
            assert lab.poll() is None
            time.sleep(0.01)
        time.sleep(seconds)
        workers = children_of(lab.pid)
        lab.send_signal(signal.SIGINT)
        _, errors = lab.communicate(timeout=SECONDS)
    assert lab.returncode in (0, 130) and errors in ("", "regard: interrupted\n"), (seconds, lab.returncode, errors)
    wait_until_ended(workers, SECONDS)


def test_control_c_while_a_lab_starts_is_one_line(tmp_path: Path) -> None:
    interrupt_start(tmp_path, 0.3)


@pytest.mark.full
def test_control_c_at_many_moments_of_a_start(tmp_path: Path) -> None:
    draw = random.Random(5)
    for _ in range(20):
        interrupt_start(tmp_path, draw.uniform(0, 8))
