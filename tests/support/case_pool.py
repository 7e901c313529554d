"""Run cases in forked processes with limits of time and memory; a crash or a hang ends one case, not the others."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.attempts import CPU_SECONDS, limit_computation

WALL_SECONDS = 60  # for a case that waits, for example for the other end of a pipe
MEMORY_BYTES = 3 * 2**30  # that a case may take in addition to what is loaded before


@dataclass
class Worker:
    """A process that runs one case after the other."""

    process: Any
    connection: Connection
    log: Path
    case: Any = None
    started: float = 0.0


class CasePool:
    """Runs ``run(case)`` for many cases. ``run`` returns a list of findings.

    - ``size``: the number of processes.
    - ``folder``: for what the processes print; the end of it becomes part of a finding.
    """

    def __init__(self, run: Callable[[Any], list[str]], size: int, folder: Path) -> None:
        self.run = run
        self.size = size
        self.folder = folder
        self.context = multiprocessing.get_context("fork")
        self.count = 0

    def results(self, cases: Iterable[Any]) -> Iterator[tuple[Any, list[str]]]:
        """Yield each case with its findings, in the order in which cases end."""
        remaining = iter(cases)
        workers = [self._start() for _ in range(self.size)]
        try:
            for worker in workers:
                self._give(worker, remaining)
            while any(worker.case is not None for worker in workers):
                busy = [worker for worker in workers if worker.case is not None]
                wait([*(worker.connection for worker in busy), *(worker.process.sentinel for worker in busy)], 0.5)
                for worker in busy:
                    findings = self._findings(worker)
                    if findings is None:
                        continue
                    case = worker.case
                    worker.case = None
                    yield case, findings
                    if not worker.process.is_alive():
                        workers[workers.index(worker)] = worker = self._start()
                    self._give(worker, remaining)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.join()

    def _start(self) -> Worker:
        ours, theirs = self.context.Pipe()
        self.count += 1
        log = self.folder / f"process-{self.count}.log"
        process = self.context.Process(target=_work, args=(self.run, theirs, log), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, log)

    def _give(self, worker: Worker, cases: Iterator[Any]) -> None:
        worker.case = next(cases, None)
        if worker.case is not None:
            worker.started = time.monotonic()
            worker.connection.send(worker.case)

    def _findings(self, worker: Worker) -> list[str] | None:
        """Return the findings of a worker's case; None while it runs."""
        with contextlib.suppress(EOFError, ConnectionError):
            if worker.connection.poll():
                findings: list[str] = worker.connection.recv()
                return findings
        if time.monotonic() - worker.started > WALL_SECONDS and _is_waiting(worker.process.pid):
            # The handler writes the stack of the process to its log.
            os.kill(worker.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            worker.process.kill()
            worker.process.join()
            return [f"hang: more than {WALL_SECONDS} s; {_last_lines(worker.log)}"]
        if worker.process.is_alive():
            return None
        worker.process.join()
        code = worker.process.exitcode
        if code == -signal.SIGXCPU:
            return [f"hang: more than {CPU_SECONDS} s of computation; {_last_lines(worker.log)}"]
        return [f"crash: exit code {code}; {_last_lines(worker.log)}"]


def _work(run: Callable[[Any], list[str]], connection: Connection, log: Path) -> None:
    stream = log.open("w")
    os.dup2(stream.fileno(), sys.stdout.fileno())
    os.dup2(stream.fileno(), sys.stderr.fileno())
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream)
    faulthandler.register(signal.SIGXCPU, stream, chain=True)
    # The shadow memory of AddressSanitizer takes terabytes of addresses; it has a limit of its own.
    if "ASAN_OPTIONS" not in os.environ:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    while True:
        try:
            case = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        limit_computation()
        connection.send(run(case))


def _is_waiting(pid: int) -> bool:
    """Whether a process sleeps. One that computes, slowly on a busy machine, has a limit of computation instead."""
    for _ in range(5):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):  # it has ended
            return False
        if state != "S":
            return False
        time.sleep(0.1)
    return True


def _last_lines(log: Path) -> str:
    """Return the end of a process's output, in one line: the stack of a crash or the report of a sanitizer."""
    lines = log.read_text(errors="replace").splitlines()
    for mark in ("ERROR: AddressSanitizer", "runtime error", "Fatal Python error", "Current thread"):
        for i, line in enumerate(lines):
            if mark in line:
                return " | ".join(part.strip() for part in lines[i : i + 12])
    return " | ".join(part.strip() for part in lines[-8:])
