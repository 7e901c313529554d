"""The worker process of a job queue: it reads one job per line (JSON) and writes lines with progress and the result.

A crash, or the kill that cancels a job, ends this process and not the server. Jobs are functions
``job(args, progress) -> plain data`` that are listed in ``JOBS``. Models that a job loads stay loaded for the next job.

How a worker ends: if the lab ends in any way, standard input ends, and so does the worker. SIGTERM and SIGHUP end it
too. A training finishes its step and saves its state, both then and when SIGINT cancels it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pkgutil import resolve_name
from types import FrameType
from typing import Any, TextIO

from regard._error_report import error_line, is_report, report_error
from regard.training._stop_signals import StopSignals

# Kind of job → its function. No other function can be called.
JOBS = {
    "look": "regard.lab.look.jobs:look",
    "kinds": "regard.lab.look.jobs:score_heads",
    "ablate": "regard.lab.look.jobs:ablate",
    "sources": "regard.lab.look.head_sources:find_sources",
    "pairs": "regard.lab.look.score_pairs:split",
    "attribute": "regard.lab.attribution.jobs:attribute",
    "patch": "regard.lab.attribution.jobs:patch",
    "train": "regard.lab.evolve.jobs:train",
    "claim": "regard.lab.claims.jobs:check_claim",
    "machine": "regard.lab.budget.responses:measure_machine",
}
SAVE_SECONDS = 30.0  # time that a training gets to save its state when the worker must end
LONGEST_ERROR = 500  # characters of an error message
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


def main(background: bool = False) -> None:
    """Run jobs from standard input until it ends. In the background, other processes go first."""
    os.umask(0o077)  # what jobs write contains texts of the user, so only the user can read it
    if background and hasattr(os, "nice"):  # Windows has no such function
        os.nice(10)
    # Libraries may print to standard output. Redirect this to standard error, so that it does not mix with our lines.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    stop = StopRequests()
    with stop.handlers():
        run_jobs(_read_ahead(sys.stdin, stop), output, stop)
    # Everything is written. A normal exit would wait for threads of libraries, and flush a pipe that may be broken.
    os._exit(0)


def run_jobs(lines: Iterable[str], output: TextIO, stop: StopRequests | None = None) -> None:
    """Run the job of each line, until there are no more lines or the process is told to end."""
    if stop is None:
        stop = StopRequests()

    def write(line: str) -> None:
        # A signal in the middle of a line would spoil the line. Nobody reads the lines of a lab that has ended; a
        # training that then writes them must nevertheless save its state.
        with stop.deferred(), suppress(BrokenPipeError):
            output.write(line + "\n")
            output.flush()

    write(json.dumps({"ready": True}))
    for line in lines:
        if not stop.must_end:
            write(_run_job(json.loads(line), write, stop))


def _run_job(job: dict[str, Any], write: Callable[[str], None], stop: StopRequests) -> str:
    """Run a job and return the line about its end. Any error, panics of libraries too, is one line."""

    def progress(done: float, of: float | None = None, said: str = "") -> None:
        write(json.dumps({"done": done, "of": of, "said": said}, allow_nan=False))

    try:
        # Imports modules, which a signal must not leave half imported.
        function = job_function(job["kind"])
        with stop.running(job["kind"]):
            # Only now can the job be stopped, and the lab may send a signal as soon as it reads this line.
            write(json.dumps({"started": True}))
            result = function(job["args"], progress)
        return json.dumps({"result": result}, allow_nan=False)
    except KeyboardInterrupt:
        return json.dumps({"error": "stopped"})
    except BaseException as error:
        if not is_report(error):
            raise
        return json.dumps({"error": report_error(error, longest=LONGEST_ERROR)})


class StopRequests:
    """Decides what a signal or the end of the lab does: stop a training, end the process, or nothing.

    A handler raises ``KeyboardInterrupt`` at most once per job, and only while the function of the job runs and writes
    no line. At all other moments it only sets an attribute, so no traceback can appear.
    """

    def __init__(self) -> None:
        self.must_end = False  # whether the process ends after this job
        self._job_kind: str | None = None  # of the job that runs
        self._is_interruptible = False
        self._is_deferred = False
        self._is_pending = False

    @contextmanager
    def handlers(self) -> Iterator[None]:
        """Handle the signals while the block runs. Only the main thread may do this; in others nothing changes."""
        previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                if hasattr(signal, name):
                    number = getattr(signal, name)
                    previous[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def running(self, kind: str) -> Iterator[None]:
        """A signal interrupts the job in this block."""
        self._is_pending = False
        self._job_kind = kind
        try:
            self._is_interruptible = True
            # The other thread first sets this and then reads the kind of job, so one of both notices the other.
            if self.must_end:
                raise KeyboardInterrupt
            yield
        finally:
            self._is_interruptible = False
            self._job_kind = None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A signal in this block takes effect at its end."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._is_pending:
            self._interrupt()

    def on_end_of_lab(self) -> None:
        """End this process: at once, or when the training that runs has saved its state."""
        self.must_end = True
        if self._job_kind == "train":
            # The lab may have sent a signal before, and a second one would stop the training without a checkpoint.
            if not StopSignals.request_stop():
                os.kill(os.getpid(), signal.SIGINT)  # Python runs the handler in the main thread
            timer = threading.Timer(SAVE_SECONDS, os._exit, (1,))
            timer.daemon = True
            timer.start()
        elif self._job_kind is not None:
            os._exit(0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            self.must_end = True
            if self._job_kind != "train":
                os._exit(0)
        self._interrupt()

    def _interrupt(self) -> None:
        if self._is_deferred:
            self._is_pending = True
        elif self._is_interruptible:
            self._is_interruptible = False
            self._is_pending = False
            raise KeyboardInterrupt


def _read_ahead(lines: TextIO, stop: StopRequests) -> Iterator[str]:
    """Yield lines. A thread reads them, so that the end of the lab is noticed while a job runs."""
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        with suppress(OSError, ValueError):  # closed while it is read
            for line in lines:
                arrived.put(line)
        arrived.put(None)
        stop.on_end_of_lab()

    threading.Thread(target=read, name="lines", daemon=True).start()
    while True:
        line = arrived.get()
        if line is None:
            return
        yield line


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 500 characters long."""
    return error_line(error, longest=LONGEST_ERROR)


def job_function(kind: str) -> Any:
    """Return the function that runs jobs of a kind."""
    return resolve_name(JOBS[kind])
