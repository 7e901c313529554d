"""The job queues of the lab: jobs wait in a bounded queue, report progress, and can be cancelled.

Each queue has one worker process, which runs one job at a time. Queues run independently of each other: what a person
asked for never waits for the naming of heads, which has a queue of its own with a low priority.
"""

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
from pathlib import Path
from typing import Any

from regard._errors import RegardError
from regard.lab.endpoint import NotFound, TooManyRequests
from regard.lab.worker import JOBS, one_line

# The queue of each kind of job. Kinds that are not listed share DEFAULT_QUEUE.
QUEUES = {
    "look": "look",
    "ablate": "look",
    "sources": "look",
    "pairs": "look",
    "attribute": "look",
    "patch": "look",
    "train": "train",
    "kinds": "background",
}
DEFAULT_QUEUE = "prove"
BACKGROUND = "background"  # the queue whose process gives way to all others
MAX_WAITING = 8  # jobs that may wait in a queue
MAX_REMEMBERED = 100  # jobs whose state can be requested, finished ones included
STOP_SECONDS = 30.0  # time that a cancelled training gets to save its state before its process is killed
FINISHED = ("done", "failed", "cancelled")
# Kind → what a job does, for those who wait for it; the name of its model or task is appended.
ACTIVITIES = {
    "look": "recording a text with",
    "kinds": "scoring the heads of",
    "ablate": "ablating heads of",
    "sources": "finding the sources of a head of",
    "pairs": "splitting a score of",
    "attribute": "attributing a prediction of",
    "patch": "patching a head of",
    "train": "training",
    "claim": "checking",
    "machine": "measuring this machine",
}


@dataclass
class Job:
    """A job: its state, its progress, and its result."""

    id: str
    kind: str  # which function of ``worker.JOBS`` it runs
    args: Mapping[str, Any]  # the arguments of that function, as plain data
    state: str = "queued"  # then "running", then "done", "failed" or "cancelled"
    seq: int = 0  # grows with every change, so that a page can wait for the next one
    done: float = 0
    total: float | None = None  # None if it is not known
    message: str = ""  # what the job does at the moment
    result: Any = None
    error: str = ""
    cancelled: bool = False  # whether cancellation was requested; the job may still be running
    handed_over: bool = False  # whether a process ended before it began with the job, and another one got it
    waits_for: Callable[[Job], str] | None = None  # tells what a queued job waits for
    on_success: Callable[[Any], Any] | None = None  # called with the result before the state becomes "done"
    on_failure: Callable[[], Any] | None = None  # called if the job fails or is cancelled

    def update(self, **changes: Any) -> None:
        """Change attributes, and increase ``seq``."""
        for name, value in changes.items():
            setattr(self, name, value)
        self.seq += 1

    def finish(self, state: str, **changes: Any) -> None:
        """Make the last change of this job."""
        if state != "done" and self.on_failure is not None:
            self.on_failure()
        # Arguments may be large (a text, an image), and finished jobs stay in memory.
        self.args = {}
        self.on_success = None
        self.on_failure = None
        self.update(state=state, **changes)

    def activity(self) -> str:
        """Return what the job does, in a few words: "scoring the heads of smollm2"."""
        subject = str(self.args.get("task") or self.args.get("id") or "")
        if "model" in self.args:
            folder = Path(str(self.args["model"]))
            subject = folder.name
            if subject == "model":  # the model of a run, which has the name of the run
                subject = folder.parent.name
        return f"{ACTIVITIES.get(self.kind, self.kind)} {subject}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Return the job as plain data for a page."""
        return {
            "id": self.id,
            "kind": self.kind,
            "state": self.state,
            "seq": self.seq,
            "done": self.done,
            "of": self.total,
            "said": self.message,
            "result": self.result,
            "error": self.error,
            "waits_for": self.waits_for(self) if self.waits_for is not None and self.state == "queued" else "",
        }


class Jobs:
    """All job queues of a lab. ``environment`` has further environment variables for the worker processes."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._lock = threading.RLock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._environment = dict(environment or {})
        self._queues: dict[str, _Queue] = {}

    def start(
        self,
        kind: str,
        args: Mapping[str, Any],
        on_success: Callable[[Any], Any] | None = None,
        on_failure: Callable[[], Any] | None = None,
    ) -> Job:
        """Put a new job into its queue and return it. Raises TooManyRequests if the queue is full."""
        if kind not in JOBS:
            raise RegardError(f"no job of kind {kind!r}; known kinds are {', '.join(JOBS)}")
        with self._lock:
            queue = self._queue_of(kind)
            if len(queue.waiting) >= MAX_WAITING:
                raise TooManyRequests(f"{MAX_WAITING} jobs are waiting already; wait for one to end, or cancel one")
            job = Job(secrets.token_hex(8), kind, dict(args), on_success=on_success, on_failure=on_failure)
            job.waits_for = queue.waits_for
            self._jobs[job.id] = job

            # Forget the oldest finished jobs, so that memory stays bounded.
            finished = [job_id for job_id, old in self._jobs.items() if old.state in FINISHED]
            for job_id in finished[: max(0, len(self._jobs) - MAX_REMEMBERED)]:
                del self._jobs[job_id]
        queue.put(job)
        return job

    def warm_up(self, kind: str) -> None:
        """Start the worker process for a kind of job before there is work."""
        self._queue_of(kind).start()

    def get(self, job_id: str) -> Job:
        """Return a job. Raises NotFound if it is not known any more."""
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None:
            raise NotFound("no such job; it may have ended long ago")
        return job

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: a waiting job is dropped at once, a running job's process is stopped."""
        job = self.get(job_id)
        self._queue_of(job.kind).cancel(job)
        return job

    def all(self) -> list[Job]:
        """Return all jobs that are remembered, the oldest first."""
        with self._lock:
            return list(self._jobs.values())

    def is_training(self) -> bool:
        """Return whether a training runs."""
        return any(job.kind == "train" and job.state == "running" for job in self.all())

    def begin_close(self) -> None:
        """Tell all worker processes to stop, and start no other job."""
        with self._lock:
            queues = list(self._queues.values())
        for queue in queues:
            queue.begin_close()

    def close(self) -> None:
        """Stop all worker processes. A training saves its state first, for at most ``STOP_SECONDS``."""
        self.begin_close()  # all are told before the first one is waited for
        for queue in list(self._queues.values()):
            queue.close()

    def _queue_of(self, kind: str) -> _Queue:
        with self._lock:
            name = QUEUES.get(kind, DEFAULT_QUEUE)
            return self._queues.setdefault(name, _Queue(self._environment, is_background=name == BACKGROUND))


@dataclass
class _Queue:
    """Jobs that wait, the thread that hands them out, and the worker process that runs them."""

    environment: Mapping[str, str]
    is_background: bool = False  # whether its process gives way to all others
    waiting: deque[Job] = field(default_factory=deque)
    _condition: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _process: subprocess.Popen[str] | None = None
    _running: Job | None = None
    _is_stopping: bool = False  # whether the process was told to stop this job
    _has_started: bool = False  # whether the process has told that it runs this job
    _closed: bool = False

    def put(self, job: Job) -> None:
        with self._condition:
            self.waiting.append(job)
        self.start()

    def waits_for(self, job: Job) -> str:
        """Return what runs now and how many jobs come before this one; an empty text if it is the next one."""
        with self._condition:
            running = self._running
            before = 0
            if job in self.waiting:
                before = self.waiting.index(job)
        text = running.activity() if running is not None else ""
        if before:
            noun = "job" if before == 1 else "jobs"
            text += f" and {before} more {noun}" if text else f"{before} {noun}"
        return text

    def start(self) -> None:
        """Start the thread, which starts the worker process, and notify it that there may be jobs."""
        with self._condition:
            self._start_thread()
            self._condition.notify()

    def _start_thread(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="lab-jobs", daemon=True)
            self._thread.start()

    def cancel(self, job: Job) -> None:
        # While the lock is held and this job is running, the process cannot start another job, so it can be killed.
        with self._condition:
            if job.state in FINISHED or job.cancelled:
                return
            job.cancelled = True
            if job in self.waiting:
                self.waiting.remove(job)
                job.finish("cancelled")
            elif self._running is job and self._process is not None:
                self._stop(job, self._process)

    def _stop(self, job: Job, process: subprocess.Popen[str]) -> None:
        # A process that has not told that it runs the job has nothing to save, and cannot handle a signal yet.
        if job.kind != "train" or not self._has_started:
            process.kill()
            process.wait()
            return
        if self._is_stopping:  # a second signal would stop it without saving
            return
        self._is_stopping = True
        # Training saves its state and ends by itself; it is killed only if that takes too long.
        process.send_signal(signal.SIGINT)
        timer = threading.Timer(STOP_SECONDS, self._kill, (job, process))
        timer.daemon = True  # the lab does not wait for the timer when it ends
        timer.start()

    def _kill(self, job: Job, process: subprocess.Popen[str]) -> None:
        with self._condition:
            if self._running is job:
                process.kill()

    def begin_close(self) -> None:
        """Stop the running job and start no other one."""
        with self._condition:
            self._closed = True
            self.waiting.clear()
            if self._process is not None and self._running is not None:
                self._stop(self._running, self._process)
            self._condition.notify()

    def close(self) -> None:
        """Wait for the end of the running job, and end the process."""
        self.begin_close()
        # The thread ends when the job does; the timer of a training that does not end kills its process.
        if self._thread is not None:
            self._thread.join(STOP_SECONDS + 5)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._close_pipes()

    def _run(self) -> None:
        """Run jobs one after the other until the queue is closed."""
        while True:
            problem = ""
            if self._process is None or self._process.poll() is not None:
                try:
                    self._start_process()
                except OSError as error:  # no memory, or too many processes
                    problem = f"the worker process cannot be started: {error.strerror}"
            with self._condition:
                while not self.waiting and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                # The process may have ended while there was nothing to do.
                has_ended = self._process is None or self._process.poll() is not None
                if has_ended and not problem:
                    continue
                job = self.waiting.popleft()
                if not problem:
                    self._running = job
                    self._has_started = False
                    self._is_stopping = False
                    job.update(state="running")
            if problem:
                _finish(job, "failed", problem)
                continue
            state, outcome = self._run_job(job)
            with self._condition:
                self._running = None
                # A process that was killed before it began can have done nothing, so another one gets the job, once.
                if state == "lost" and not job.handed_over and not job.cancelled and not self._closed:
                    job.handed_over = True
                    job.update(state="queued")
                    self.waiting.appendleft(job)
                    continue
            _finish(job, state, outcome)

    def _start_process(self) -> None:
        with self._condition:
            if self._closed:
                return
            self._close_pipes()
            call = "main(background=True)" if self.is_background else "main()"
            # A new session, so that Ctrl-C in the terminal reaches only the server, which then stops its workers.
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from regard.lab.worker import main; {call}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def _close_pipes(self) -> None:
        """Close the pipes of a process that has ended."""
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # closing tries to send a line that the dead process never read
                    pipe.close()
        self._process.wait()

    def _run_job(self, job: Job) -> tuple[str, Any]:
        """Send a job to the worker process. Returns ("done", result) or ("failed", error message).

        The state is "lost" instead of "failed" if the process has ended before it began with the job.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"kind": job.kind, "args": job.args}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                if "started" in message:
                    self._has_started = True
                if "result" in message:
                    return "done", message["result"]
                if "error" in message:
                    return "failed", message["error"]
                if "done" in message:
                    job.update(done=message["done"], total=message["of"], message=message["said"])
        except (OSError, ValueError):
            # The process ended in the middle of a line. If it did not end, nobody can understand it any more.
            process.kill()
        code = process.wait()
        reason = f"signal {-code}" if code < 0 else f"exit code {code}"
        state = "failed" if self._has_started else "lost"
        return state, f"the worker process ended with {reason}; perhaps memory ran out"


def _finish(job: Job, state: str, outcome: Any) -> None:
    """Record how a job ended. ``outcome`` is its result if it is done, else the error message."""
    if state == "done" and job.on_success is not None:
        try:
            job.on_success(outcome)
        except Exception as error:  # after any error, the thread must continue with the next job
            state = "failed"
            outcome = one_line(error)
    if job.cancelled:
        job.finish("cancelled", result=outcome if state == "done" else None)
    elif state == "done":
        job.finish("done", result=outcome)
    else:
        job.finish("failed", error=outcome)
