"""What a damaged file may cause, and what is a finding of the fuzzer."""

from __future__ import annotations

import hashlib
import io
import resource
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from regard import RegardError
from regard.lab.endpoint import NotFound

# Errors that the command line prints in one line and the lab answers with: the reader looked at what it was given.
ACCEPTED = (RegardError, OSError, MemoryError, NotFound)
CPU_SECONDS = 10  # of one use of a file; more is a hang
# torch has no class for this error.
OUT_OF_MEMORY = ("can't allocate memory", "Tried to allocate", "not enough memory")


class Attempts:
    """Carries out one use of a file after the other, and notes every error that is not accepted.

    - ``number``: the number of the case. What takes long is tried only for some numbers.
    - ``findings``: one text per error: the use, the error, and where it was raised.
    - ``refused``: the uses that raised an accepted error.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.findings: list[str] = []
        self.refused: list[str] = []

    def __call__(self, use: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function. Returns its result, or None if it raised an error."""
        limit_computation()
        try:
            return function(*args, **options)
        except ACCEPTED:
            self.refused.append(use)
            return None
        except KeyboardInterrupt:
            raise
        # Panics of libraries in Rust are no Exception.
        except BaseException as error:
            if isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY):
                return None
            self.findings.append(f"{use}: {describe_error(error)}")
            return None

    def expect(self, use: str, condition: bool, problem: str) -> None:
        """Note a finding unless the condition holds."""
        if not condition:
            self.findings.append(f"{use}: {problem}")


def limit_computation() -> None:
    """Allow ``CPU_SECONDS`` from now on; then the system ends the process. Time that it waits does not count."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(usage.ru_utime + usage.ru_stime) + CPU_SECONDS + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def describe_error(error: BaseException) -> str:
    """Return an error in one line, with the last place of our own code."""
    place = "?"
    for frame in traceback.extract_tb(error.__traceback__):
        if "/regard/" in frame.filename:
            place = f"{frame.filename.partition('/regard/')[2]}:{frame.lineno} {frame.name}"
    message = " ".join(str(error).split())[:200]
    return f"{type(error).__name__} at {place}: {message!r}"


def control_characters(text: str) -> str:
    """Return the control characters of a text that a terminal would obey."""
    return "".join(sorted({c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t\r"}))


@contextmanager
def printed() -> Iterator[io.StringIO]:
    """Collect what is printed. Control characters in it are an error, because they come from the file."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        yield output
    found = control_characters(output.getvalue())
    assert not found, f"control characters reach the terminal: {found!r}"


def run_command(*arguments: str) -> None:
    """Run a command in this process; its errors are raised and not printed."""
    # Here, not at the top: a command imports only what it needs.
    from regard.cli.commands import app

    with printed():
        app(list(arguments), standalone_mode=False)


def snapshot(folder: Path) -> dict[str, str]:
    """Return a hash of each regular file of a folder, by name."""
    hashes = {}
    for file in sorted(folder.rglob("*")):
        # A sparse file of terabytes is compared by its size.
        if file.is_file() and file.stat().st_size < 10**8:
            hashes[file.relative_to(folder).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return hashes
