"""Labs in processes of their own, which start in a second because they are forked from one that has torch already.

python lab_process.py    reads lines of JSON: ["start", arguments of regard, file for its output and errors] prints the
                         id of the process; ["end", id, seconds] waits for its end and prints its exit code or null
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

START_SECONDS = 200.0  # for busy machines


class LabProcess:
    """A running lab: its process, its output, and requests to it."""

    def __init__(self, server: LabServer, pid: int, log: Path) -> None:
        self.server = server
        self.pid = pid
        self.log = log

    def wait_for_address(self) -> str:
        """Return the address of the lab, once it is served."""
        until = time.monotonic() + START_SECONDS
        while "The lab is at " not in self.output():
            assert time.monotonic() < until and is_running(self.pid), self.output()
            time.sleep(0.02)
        time.sleep(0.02)
        return self.output().partition("The lab is at ")[2].split()[0]

    def request(self, path: str, body: Any = None) -> Any:
        """Send a GET request, or a POST request with ``body``."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.wait_for_address() + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=100) as response:
            return json.loads(response.read())

    def output(self) -> str:
        """Return what the lab and its workers have printed."""
        return self.log.read_text(errors="replace")

    def workers(self) -> list[int]:
        """Return the ids of its worker processes."""
        return children_of(self.pid)

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the lab. Returns its exit code, negative for a signal; None if it does not end."""
        return self.server.call("end", self.pid, seconds)


class LabServer:
    """The process from which labs are forked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def start(self, state: Path, log: Path) -> LabProcess:
        """Start a lab without a token at any free port."""
        log.touch()
        arguments = ["lab", "--no-browser", "--no-token", "--state", str(state)]
        return LabProcess(self, self.call("start", arguments, str(log)), log)

    def call(self, *request: Any) -> Any:
        """Send a line to the process and return its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def lab_server() -> Iterator[LabServer]:
    """Start the process from which labs are forked."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            yield LabServer(process)
        finally:
            process.stdin.close()


def children_of(pid: int) -> list[int]:
    """Return the ids of the children of a process; an empty list if it has ended."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += map(int, task.read_text().split())
        except OSError:  # the thread has ended
            continue
    return children


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pids: list[int], seconds: float) -> float:
    """Wait until processes have ended, and return how many seconds that took."""
    start = time.monotonic()
    while any(map(is_running, pids)):
        assert time.monotonic() < start + seconds, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)
    return time.monotonic() - start


def _fork_lab(arguments: list[str], log: str) -> int:
    child = os.fork()
    if child:
        return child
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(handle, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["regard", *arguments]
    try:
        from regard.cli import main

        main()
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    finally:
        os._exit(99)
    return 0


def _wait(pid: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


if __name__ == "__main__":
    import regard.cli.lab
    import regard.lab.first_recording
    import regard.lab.server  # noqa: F401 (once, not in every child)

    # Whoever runs the tests may ignore signals, for example with nohup. A lab would ignore them too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    started = []
    for line in sys.stdin:
        verb, *given = json.loads(line)
        if verb == "start":
            started.append(_fork_lab(*given))
            print(started[-1], flush=True)
        else:
            print(json.dumps(_wait(*given)), flush=True)
    # A test that failed may have left its lab.
    for pid in started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
