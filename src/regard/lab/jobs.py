"""Jobs: queued, bounded, told of as they go on, and cancelled; each runs in a process of its lane."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from regard.lab.endpoints import Gone, TooMany
from regard.lab.worker import JOBS, one_line

__all__ = ["LANES", "Job", "Jobs"]

# Which jobs share a process: one of a lane runs at a time, lanes run beside each other.
LANES = {"look": "look", "kinds": "look", "ablate": "look", "train": "train"}
QUEUED = 8  # jobs of a lane that may wait
REMEMBERED = 100  # jobs that have ended and can still be asked about
PATIENCE = 30.0  # seconds that a job which is asked to stop gets before its process is killed
ENDED = ("done", "failed", "cancelled")


@dataclass
class Job:
    """``state`` goes queued → running → done, failed or cancelled; ``seq`` grows with every change."""

    id: str
    kind: str
    args: Mapping[str, Any]
    state: str = "queued"
    seq: int = 0
    done: float = 0
    of: float | None = None
    said: str = ""
    result: Any = None
    error: str = ""
    cancelled: bool = False
    then: Callable[[Any], Any] | None = None  # called with the result before the job counts as done
    otherwise: Callable[[], Any] | None = None  # called where it ends in another way

    def change(self, **what: Any) -> None:
        for name, value in what.items():
            setattr(self, name, value)
        self.seq += 1

    def end(self, state: str, **what: Any) -> None:
        """The last change. What was asked may be large, and is let go."""
        if state != "done" and self.otherwise is not None:
            self.otherwise()
        self.args, self.then, self.otherwise = {}, None, None
        self.change(state=state, **what)

    def to_dict(self) -> dict[str, Any]:
        told = ("id", "kind", "state", "seq", "done", "of", "said", "result", "error")
        return {name: getattr(self, name) for name in told}


class Jobs:
    """All lanes of one lab. ``environment``: variables that workers get beside their own."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._environment = dict(environment or {})
        self._lanes: dict[str, _Lane] = {}

    def start(
        self,
        kind: str,
        args: Mapping[str, Any],
        then: Callable[[Any], Any] | None = None,
        otherwise: Callable[[], Any] | None = None,
    ) -> Job:
        """A new job, queued; ``then(result)`` is called before it counts as done. ``TooMany``: its lane is full."""
        if kind not in JOBS:
            raise ValueError(f"there is no job {kind!r}")
        lane = LANES.get(kind, "prove")
        with self._lock:
            here = self._lanes.setdefault(lane, _Lane(self._environment))
            if len(here.waiting) >= QUEUED:
                raise TooMany(f"{QUEUED} jobs are waiting already; wait for one to end, or cancel one")
            job = Job(secrets.token_hex(8), kind, dict(args), then=then, otherwise=otherwise)
            self._jobs[job.id] = job
            ended = [name for name, old in self._jobs.items() if old.state in ENDED]
            for name in ended[: max(0, len(self._jobs) - REMEMBERED)]:
                del self._jobs[name]
        here.put(job)
        return job

    def warm(self, kind: str) -> None:
        """Start the process of a kind's lane before there is work."""
        with self._lock:
            here = self._lanes.setdefault(LANES.get(kind, "prove"), _Lane(self._environment))
        here.warm()

    def get(self, name: str) -> Job:
        with self._lock:
            job = self._jobs.get(name)
        if job is None:
            raise Gone("there is no such job; it may have ended long ago")
        return job

    def cancel(self, name: str) -> Job:
        """Ask a job to stop. One that waits is gone at once; one that runs has its process ended if it goes on."""
        job = self.get(name)
        self._lanes[LANES.get(job.kind, "prove")].cancel(job)
        return job

    def all(self) -> list[Job]:
        with self._lock:
            return list(self._jobs.values())

    def close(self) -> None:
        for lane in list(self._lanes.values()):
            lane.close()


@dataclass
class _Lane:
    """A queue, the thread that empties it, and the process that does the work."""

    environment: Mapping[str, str]
    waiting: deque[Job] = field(default_factory=deque)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _process: subprocess.Popen[str] | None = None
    _running: Job | None = None
    _closed: bool = False

    def put(self, job: Job) -> None:
        with self._wake:
            self.waiting.append(job)
            self._begin()
            self._wake.notify()

    def warm(self) -> None:
        with self._wake:
            self._begin()
            self._wake.notify()

    def _begin(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="lab-jobs", daemon=True)
            self._thread.start()

    def cancel(self, job: Job) -> None:
        with self._wake:  # as long as the job is the running one, its process works on nothing else
            if job.state in ENDED or job.cancelled:
                return
            job.cancelled = True
            if job in self.waiting:
                self.waiting.remove(job)
                job.end("cancelled")
            elif self._running is job and self._process is not None:
                self._stop(job, self._process)

    def _stop(self, job: Job, process: subprocess.Popen[str]) -> None:
        if job.kind == "train":  # which saves what it has, and ends by itself
            process.send_signal(signal.SIGINT)
            last = threading.Timer(PATIENCE, self._kill, (job, process))
            last.daemon = True  # a lab that ends does not wait for it
            last.start()
        else:
            process.kill()
            process.wait()

    def _kill(self, job: Job, process: subprocess.Popen[str]) -> None:
        with self._wake:
            if self._running is job:
                process.kill()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self.waiting.clear()
            process = self._process
            self._wake.notify()
        if process is not None:
            process.kill()
            process.wait()
        if self._thread is not None:
            self._thread.join(5)
        self._forget()

    def _run(self) -> None:
        while True:
            if self._process is None or self._process.poll() is not None:
                self._spawn()
            with self._wake:
                while not self.waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                job = self._running = self.waiting.popleft()
                job.change(state="running")
            state, told = self._work(job)
            with self._wake:
                self._running = None
            _end(job, state, told)

    def _spawn(self) -> None:
        with self._wake:
            if self._closed:
                return
            self._forget()
            # Own session: a Ctrl-C in the terminal is for the server, which ends its workers in order.
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from regard.lab.worker import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def _forget(self) -> None:
        """Let go of a process that has ended."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # a line that was never read is still to be flushed
                        pipe.close()
            self._process.wait()

    def _work(self, job: Job) -> tuple[str, Any]:
        """Have a job done: "done" and its result, or "failed" and why."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"kind": job.kind, "args": job.args}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                said = json.loads(line)
                if "result" in said:
                    return "done", said["result"]
                if "error" in said:
                    return "failed", said["error"]
                if "done" in said:
                    job.change(done=said["done"], of=said["of"], said=said["said"])
        except (OSError, ValueError):
            pass  # the process is gone in the middle of a line
        code = process.wait()
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        return "failed", f"the process that worked on this ended ({why}); perhaps memory ran out"


def _end(job: Job, state: str, told: Any) -> None:
    if state == "done" and job.then is not None:
        try:
            job.then(told)
        except Exception as error:  # whatever it is: the next job must not wait for this one
            state, told = "failed", one_line(error)
    if job.cancelled:
        job.end("cancelled", result=told if state == "done" else None)
    elif state == "done":
        job.end("done", result=told)
    else:
        job.end("failed", error=told)
