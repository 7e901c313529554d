"""Jobs of the lab: order, cancellation, crashes, limits."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import SMALL_RUN, write_run

from regard import models
from regard.lab import jobs, worker
from regard.lab.endpoint import NotFound, TooManyRequests
from regard.lab.jobs import FINISHED, Job, Jobs
from regard.training._checkpoints import Checkpoints


@pytest.fixture(scope="module")
def job_queues() -> Iterator[Jobs]:
    started = Jobs({"OMP_NUM_THREADS": "1"})
    yield started
    started.close()


def look_args(folder: Path, text: str = "the cat sat on the mat") -> dict[str, Any]:
    args = {"model": str(models.bundled()), "recording": "r00000000", "folder": str(folder), "text": text}
    return args | {"target": "", "image": "", "tokens": None, "layers": ""}


def wait_until_finished(job: Job, seconds: float = 120) -> Job:
    until = time.monotonic() + seconds
    while job.state not in FINISHED:
        assert time.monotonic() < until, f"{job.kind} is still {job.state}"
        time.sleep(0.01)
    return job


def wait_until_running(job: Job) -> None:
    while not job.message and job.state not in FINISHED:
        time.sleep(0.005)


def test_a_job_reports_progress_and_its_result(job_queues, tmp_path):
    results = []
    job = wait_until_finished(job_queues.start("look", look_args(tmp_path / "a"), results.append))
    assert job.state == "done" and job.result == {"recording": "r00000000"} and results == [job.result]
    assert job.message == "saving" and job.seq > 3 and (tmp_path / "a" / "recording.json").is_file()
    assert job_queues.get(job.id) is job and job_queues.cancel(job.id).state == "done" and not job.args


def test_errors_of_a_job_are_one_line(job_queues, tmp_path):
    job = wait_until_finished(job_queues.start("look", look_args(tmp_path / "a") | {"tokens": -3}))
    assert job.state == "failed" and "tokens" in job.error and "\n" not in job.error
    job = wait_until_finished(job_queues.start("look", look_args(tmp_path / "a") | {"model": str(tmp_path)}))
    assert job.state == "failed" and "config.json" in job.error


def test_an_error_in_on_success_fails_the_job(job_queues, tmp_path):
    def after(result: Any) -> None:
        raise AssertionError("no room for it")

    failures = []
    job = wait_until_finished(job_queues.start("look", look_args(tmp_path / "a"), after, lambda: failures.append(True)))
    assert job.state == "failed" and "no room for it" in job.error and failures == [True]


def test_a_running_job_is_cancelled_and_the_next_runs(job_queues, tmp_path):
    long_job = job_queues.start("look", look_args(tmp_path / "long", "word " * 30_000))
    waiting_job = job_queues.start("look", look_args(tmp_path / "waiting"))
    last_job = job_queues.start("look", look_args(tmp_path / "last"))
    wait_until_running(long_job)
    job_queues.cancel(waiting_job.id)
    job_queues.cancel(long_job.id)
    assert wait_until_finished(waiting_job).state == "cancelled" and wait_until_finished(long_job).state == "cancelled"
    assert wait_until_finished(last_job).state == "done"
    assert not (tmp_path / "long" / "recording.json").exists() and not (tmp_path / "waiting").exists()


def test_a_worker_that_dies_fails_its_job_alone(job_queues, tmp_path):
    long_job = job_queues.start("look", look_args(tmp_path / "long", "word " * 30_000))
    wait_until_running(long_job)
    process = job_queues._queues["look"]._process
    assert process is not None
    process.kill()
    assert wait_until_finished(long_job).state == "failed" and "signal 9" in long_job.error
    assert wait_until_finished(job_queues.start("look", look_args(tmp_path / "a"))).state == "done"


def test_an_idle_worker_that_was_killed_is_replaced(job_queues, tmp_path):
    assert wait_until_finished(job_queues.start("look", look_args(tmp_path / "a"))).state == "done"
    process = job_queues._queues["look"]._process
    assert process is not None
    process.kill()
    process.wait()
    assert wait_until_finished(job_queues.start("look", look_args(tmp_path / "b"))).state == "done"


def test_a_job_that_was_not_begun_is_handed_over_once(monkeypatch):
    """The first process dies before it says that it runs the job; a process that always dies fails the job."""
    start = jobs._Queue._start_process
    begun = []

    def start_process(self):
        begun.append(self)
        if len(begun) == 1 or always_dies:
            monkeypatch.setattr(sys, "executable", "/bin/false")
        start(self)
        monkeypatch.undo()
        monkeypatch.setattr(jobs._Queue, "_start_process", start_process)

    for always_dies, state in ((False, "failed"), (True, "failed")):
        begun.clear()
        monkeypatch.setattr(jobs._Queue, "_start_process", start_process)
        queues = Jobs()
        job = wait_until_finished(queues.start("look", {}))
        # With a process that lives, the job runs, and its own error is told.
        assert job.state == state and ("worker process ended" in job.error) == always_dies
        queues.close()


def test_closing_lets_a_training_save_its_state(job_queues, tmp_path):
    write_run(tmp_path / "run", {"save": 1000})
    queues = Jobs({"OMP_NUM_THREADS": "1"})
    # An evaluation that is better than the last one is saved too, and a fast machine reaches one before the end.
    changes = SMALL_RUN | {"save": 1000, "evaluate": SMALL_RUN["steps"]}
    args = {"task": "repeats", "folder": str(tmp_path / "run"), "changes": changes}
    training = queues.start("train", args)
    waiting = queues.start("train", args)
    while training.done < 3:
        assert training.state not in FINISHED, training.error
        time.sleep(0.01)
    process = queues._queues["train"]._process
    assert process is not None
    queues.close()
    assert training.state == "done" and training.result["ended"] == "stopped" and waiting.state == "queued"
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [training.result["steps"]]
    assert process.poll() is not None


def test_queues_are_bounded_and_old_jobs_forgotten(monkeypatch):
    monkeypatch.setattr(jobs._Queue, "_start_thread", lambda self: None)  # nothing runs
    job_queues = Jobs()
    started = [job_queues.start("look", {}) for _ in range(jobs.MAX_WAITING)]
    with pytest.raises(TooManyRequests, match="wait"):
        job_queues.start("look", {})
    assert job_queues.start("train", {}).state == "queued"  # another queue
    for job in started:
        job_queues.cancel(job.id)
    for _ in range(jobs.MAX_REMEMBERED + 20):
        job_queues.cancel(job_queues.start("look", {}).id)
    assert len(job_queues.all()) <= jobs.MAX_REMEMBERED + 1
    with pytest.raises(NotFound):
        job_queues.get(started[0].id)
    with pytest.raises(ValueError, match="system"):
        job_queues.start("os.system", {})


def test_what_a_job_waits_for_is_told(monkeypatch):
    monkeypatch.setattr(jobs._Queue, "_start_thread", lambda self: None)  # nothing runs
    job_queues = Jobs()
    first = job_queues.start("ablate", {"model": "/models/smollm2"})
    second = job_queues.start("look", {"model": "/runs/text/model"})
    third = job_queues.start("look", {})
    assert first.to_dict()["waits_for"] == ""  # it is the next one
    assert second.to_dict()["waits_for"] == "1 job"
    queue = job_queues._queue_of("look")
    queue.waiting.remove(first)
    queue._running = first
    first.update(state="running")
    assert second.to_dict()["waits_for"] == "ablating heads of smollm2"
    assert third.to_dict()["waits_for"] == "ablating heads of smollm2 and 1 more job"
    assert first.to_dict()["waits_for"] == "" and second.activity() == "recording a text with text"
    assert set(jobs.ACTIVITIES) == set(worker.JOBS)


def test_naming_heads_delays_nobody(monkeypatch):
    """Head types are scored in the background: no job of a person is in the same queue."""
    monkeypatch.setattr(jobs._Queue, "_start_thread", lambda self: None)
    job_queues = Jobs()
    job_queues.start("kinds", {"model": "smollm2"})
    background = job_queues._queue_of("kinds")
    assert background.is_background
    for kind in set(worker.JOBS) - {"kinds"}:
        assert job_queues._queue_of(kind) is not background and not job_queues._queue_of(kind).is_background
        # Only the jobs that this loop has put into the same queue come first.
        before = len(job_queues._queue_of(kind).waiting)
        expected = {0: "", 1: "1 job"}.get(before, f"{before} jobs")
        assert job_queues.start(kind, {}).to_dict()["waits_for"] == expected


def test_a_worker_responds_line_by_line():
    out = io.StringIO()
    requests = [{"kind": "look", "args": {}}, {"kind": "nothing", "args": {}}]
    worker.run_jobs(io.StringIO("".join(json.dumps(x) + "\n" for x in requests)), out)
    ready, started, progress, first, second = map(json.loads, out.getvalue().splitlines())
    assert ready == {"ready": True} and started == {"started": True} and progress["said"] == "loading the model"
    assert "model" in first["error"] and "nothing" in second["error"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_never_spoils_a_line_of_a_worker(number, monkeypatch):
    """It arrives while a line is written, twice; the job is interrupted once, after the line."""
    stop = worker.StopRequests()

    class Output(io.StringIO):
        def write(self, text):
            for _ in range(2 * ("busy" in text)):
                os.kill(os.getpid(), number)
            return super().write(text)

    def endless(args, progress):
        while True:
            progress(1, None, "busy")

    monkeypatch.setattr(worker, "job_function", lambda kind: endless)
    out = Output()
    with stop.handlers():
        worker.run_jobs(['{"kind": "train", "args": {}}\n'], out, stop)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[-1] == {"error": "stopped"} and stop.must_end == (number != signal.SIGINT)


@pytest.mark.parametrize("kind", ["train", pytest.param("look", marks=pytest.mark.full)])
def test_a_worker_ends_when_the_lab_has_ended(kind, tmp_path):
    """Standard input ends while a job runs, as after kill -9 of the lab: a training first saves its state."""
    write_run(tmp_path / "run", {"save": 1000})
    args = look_args(tmp_path / "recording", "word " * 20_000)
    if kind == "train":
        args = {"task": "repeats", "folder": str(tmp_path / "run"), "changes": SMALL_RUN | {"save": 1000}}
    command = [sys.executable, "-c", "from regard.lab.worker import main; main()"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(json.dumps({"kind": kind, "args": args}) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if json.loads(line).get("done", 0) >= 3 or (kind == "look" and "said" in line):
                break
        process.stdout.close()
        process.stdin.close()
        assert process.wait(100) == 0 and process.stderr.read() == ""
    assert bool(Checkpoints(tmp_path / "run" / "checkpoints").steps()) == (kind == "train")
    assert not (tmp_path / "recording").exists()


def test_every_job_has_a_function():
    for kind in worker.JOBS:
        assert callable(worker.job_function(kind))
