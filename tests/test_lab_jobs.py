"""Jobs of the lab: one after another, cancelled, crashed, refused."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regard import models
from regard.lab import jobs, worker
from regard.lab.endpoints import Gone, TooMany
from regard.lab.jobs import ENDED, Job, Jobs


@pytest.fixture(scope="module")
def there() -> Iterator[Jobs]:
    made = Jobs({"OMP_NUM_THREADS": "1"})
    yield made
    made.close()


def look(folder: Path, text: str = "the cat sat on the mat") -> dict[str, Any]:
    told = {"model": str(models.bundled()), "recording": "r00000000", "folder": str(folder), "text": text}
    return told | {"target": "", "image": "", "tokens": None, "layers": ""}


def ended(job: Job, seconds: float = 120) -> Job:
    until = time.monotonic() + seconds
    while job.state not in ENDED:
        assert time.monotonic() < until, f"{job.kind} is still {job.state}"
        time.sleep(0.01)
    return job


def running(job: Job) -> None:
    while not job.said and job.state not in ENDED:
        time.sleep(0.005)


def test_a_job_is_done_and_tells_how_far_it_is(there, tmp_path):
    kept = []
    job = ended(there.start("look", look(tmp_path / "a"), kept.append))
    assert job.state == "done" and job.result == {"recording": "r00000000"} and kept == [job.result]
    assert job.said == "saving" and job.seq > 3 and (tmp_path / "a" / "recording.json").is_file()
    assert there.get(job.id) is job and there.cancel(job.id).state == "done" and not job.args


def test_what_goes_wrong_is_one_line(there, tmp_path):
    job = ended(there.start("look", look(tmp_path / "a") | {"tokens": -3}))
    assert job.state == "failed" and "tokens" in job.error and "\n" not in job.error
    job = ended(there.start("look", look(tmp_path / "a") | {"model": str(tmp_path)}))
    assert job.state == "failed" and "config.json" in job.error


def test_what_comes_after_may_fail_too(there, tmp_path):
    def after(result: Any) -> None:
        raise AssertionError("no room for it")

    gone = []
    job = ended(there.start("look", look(tmp_path / "a"), after, lambda: gone.append(True)))
    assert job.state == "failed" and job.error == "no room for it" and gone == [True]


def test_a_running_job_is_cancelled_and_the_next_runs(there, tmp_path):
    long = there.start("look", look(tmp_path / "long", "word " * 30_000))
    waiting = there.start("look", look(tmp_path / "waiting"))
    last = there.start("look", look(tmp_path / "last"))
    running(long)
    there.cancel(waiting.id)
    there.cancel(long.id)
    assert ended(waiting).state == "cancelled" and ended(long).state == "cancelled"
    assert ended(last).state == "done"
    assert not (tmp_path / "long" / "recording.json").exists() and not (tmp_path / "waiting").exists()


def test_a_worker_that_dies_fails_its_job_alone(there, tmp_path):
    long = there.start("look", look(tmp_path / "long", "word " * 30_000))
    running(long)
    process = there._lanes["look"]._process
    assert process is not None
    process.kill()
    assert ended(long).state == "failed" and "signal 9" in long.error
    assert ended(there.start("look", look(tmp_path / "a"))).state == "done"


def test_lanes_are_bounded_and_old_jobs_forgotten(monkeypatch):
    monkeypatch.setattr(jobs._Lane, "_begin", lambda self: None)  # nothing runs
    there = Jobs()
    made = [there.start("look", {}) for _ in range(jobs.QUEUED)]
    with pytest.raises(TooMany, match="wait"):
        there.start("look", {})
    assert there.start("train", {}).state == "queued"  # another lane
    for job in made:
        there.cancel(job.id)
    for _ in range(jobs.REMEMBERED + 20):
        there.cancel(there.start("look", {}).id)
    assert len(there.all()) <= jobs.REMEMBERED + 1
    with pytest.raises(Gone):
        there.get(made[0].id)
    with pytest.raises(ValueError, match="no job"):
        there.start("os.system", {})


def test_a_worker_answers_line_by_line():
    out = io.StringIO()
    asked = [{"kind": "look", "args": {}}, {"kind": "nothing", "args": {}}]
    worker.serve(io.StringIO("".join(json.dumps(x) + "\n" for x in asked)), out)
    ready, begun, first, second = map(json.loads, out.getvalue().splitlines())
    assert ready == {"ready": True} and begun["said"] == "loading the model"
    assert first == {"error": "model"} and second == {"error": "nothing"}


def test_every_job_is_there():
    for kind in worker.JOBS:
        assert callable(worker._named(kind))
