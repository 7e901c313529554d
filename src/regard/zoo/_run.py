"""Check many architectures, each in a process of its own with a limit of time and memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from regard.zoo._architectures import Architecture
from regard.zoo._results import Result, append_result, current_versions, drop_partial_line

# A server process imports these once; the process of each architecture is a copy of it, which takes milliseconds.
PRELOADED = (
    "regard.zoo._check_architecture",
    "transformers.models.auto.modeling_auto",
    "transformers.models.clip.modeling_clip",
    "transformers.models.detr.modeling_detr",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.models.vit.modeling_vit",
)
PAUSE = 0.5  # seconds between two looks at the clock
MEBIBYTE = 2**20

Check = Callable[[Architecture], Result]


@dataclass(frozen=True)
class Limits:
    """What the process of one architecture may use.

    - ``seconds``: of time. ``mebibytes``: of memory.

    >>> Limits(seconds=5)
    Limits(seconds=5, mebibytes=6144)
    """

    seconds: float = 60.0
    mebibytes: int = 6144


@dataclass(eq=False)
class _Running:
    """The process of one architecture."""

    architecture: Architecture
    process: Any
    connection: Connection
    started: float


def run_checks(
    architectures: Iterable[Architecture],
    file: Path,
    *,
    limits: Limits | None = None,
    jobs: int = 1,
    check: Check | None = None,
) -> Iterator[Result]:
    """Check architectures, add each result to ``file``, and yield it.

    - ``limits``: what one architecture may use; beyond it, its process is ended and the result is an error.
    - ``jobs``: how many architectures are checked at the same time.
    - ``check``: the function that checks one architecture; it must be importable.

    If the caller stops early, the processes that run are ended, and their architectures have no result.

    >>> from pathlib import Path
    >>> [result.name for result in run_checks([], Path("results.jsonl"))]  # a list of architectures that is empty
    []
    """
    if limits is None:
        limits = Limits()
    if check is None:
        from regard.zoo._check_architecture import check_architecture

        check = check_architecture
    drop_partial_line(file)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    _start_server()
    versions = current_versions()
    waiting = list(architectures)
    running: list[_Running] = []
    with _one_thread_per_process():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_start(context, check, waiting.pop(0), limits))
                for entry, result in _finished(running, limits):
                    running.remove(entry)
                    result.versions = versions
                    result.seconds = round(time.monotonic() - entry.started, 1)
                    append_result(file, result)
                    yield result
        finally:
            for entry in running:
                _end(entry)


def _start_server() -> None:
    """Start the server process, which must not be interrupted: Ctrl-C goes to all processes of the terminal."""
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    # The new process inherits that the signal is ignored; a handler of Python would not be inherited.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def _start(context: Any, check: Check, architecture: Architecture, limits: Limits) -> _Running:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(check, architecture, limits, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Running(architecture, process, ours, time.monotonic())


def _finished(running: list[_Running], limits: Limits) -> list[tuple[_Running, Result]]:
    """The entries that have ended, or are ended because they exceed a limit, with their results."""
    ready = wait([entry.connection for entry in running], timeout=PAUSE)
    finished = []
    for entry in running:
        if entry.connection in ready:
            finished.append((entry, _received(entry)))
        elif time.monotonic() - entry.started > limits.seconds:
            reason = f"it needs more than {limits.seconds:g} seconds"
            finished.append((entry, _failed(entry, reason)))
        else:
            continue
        _end(entry)
    return finished


def _received(entry: _Running) -> Result:
    try:
        result: Result = entry.connection.recv()
    except EOFError:
        # It ended without a result: a crash, or no memory even for the error.
        entry.process.join()
        return _failed(entry, f"its process ended with code {entry.process.exitcode}")
    return result


def _failed(entry: _Running, reason: str) -> Result:
    return Result(entry.architecture.name, entry.architecture.class_name).finished("error", reason)


def _end(entry: _Running) -> None:
    # Not terminate(): a process inside a long call of C++ would not notice.
    entry.process.kill()
    entry.process.join()
    entry.connection.close()


def _work(check: Check, architecture: Architecture, limits: Limits, connection: Connection) -> None:
    """The process of one architecture."""
    # Ctrl-C goes to all processes of the terminal; the parent process ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Models and libraries print notes, which would mix with the list of results.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    # Beyond this, an allocation raises MemoryError instead of slowing down the whole machine.
    size = limits.mebibytes * MEBIBYTE
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    # A process whose parent was killed ends all the same.
    seconds = int(limits.seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    connection.send(check(architecture))


@contextmanager
def _one_thread_per_process() -> Iterator[None]:
    """Processes that start within the context compute with one thread: the models are tiny."""
    old = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if old is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = old
