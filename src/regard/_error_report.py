"""Turns any exception into one line, and writes the traceback of an unexpected one to a log file.

The command line, the lab's requests and its worker process use it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import platformdirs

from regard._errors import RegardError
from regard._terminal import printable
from regard._version import __version__

LONGEST_LINE = 1000  # characters of a message
LONGEST_ENTRY = 64 * 2**10  # characters of one traceback in the log
LARGEST_LOG = 2**20  # bytes; a full log becomes errors.log.1 and a new one begins

_STDERR_LOCK = threading.RLock()

# What a user can cause and mend: wrong arguments and files, a full disk, too little memory, a package that is not
# installed. Everything else is a defect, of regard or of a library.
EXPECTED = (RegardError, OSError, MemoryError, ImportError)


def is_report(error: BaseException) -> bool:
    """Whether an exception is an error to report, and not a request to stop, such as Ctrl-C.

    A panic of a library that is written in Rust is not an ``Exception``, but it is an error. Each library has its own
    class of panics.
    """
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def report_error(error: BaseException, *, longest: int = LONGEST_LINE) -> str:
    """Return one line for the user. For an unexpected error it names the log file, which has the traceback."""
    if isinstance(error, EXPECTED):
        return error_line(error, longest=longest)
    line = error_line(error, longest=longest)
    log = write_log(error)
    hint = "unexpected error"
    if log is not None:
        hint += f"; the traceback is in {printable(str(log))}"
    return f"{line} ({hint})"


def error_line(error: BaseException, *, longest: int = LONGEST_LINE) -> str:
    """The message of an error as one line without control characters; of several lines the first."""
    try:
        message = str(error)
    except Exception:  # an exception class may fail to format itself
        message = ""
    if isinstance(error, KeyError) and error.args:
        message = str(error.args[0])  # str() of a KeyError puts its key in quotes
    if isinstance(error, MemoryError) and not message:
        message = "not enough memory; try a smaller input"
    lines = message.strip().splitlines() or [type(error).__name__]
    line = printable(" ".join(lines[0].split()))
    # The message of a KeyError or a panic does not say what happened without the name of its class.
    speaks = (*EXPECTED, ValueError, TypeError, RuntimeError)
    if not isinstance(error, speaks) and type(error).__name__ not in ("Exception", line):
        line = f"{type(error).__name__}: {line}"
    if len(line) > longest:
        line = line[: longest - 1] + "…"
    return line


@contextmanager
def held_back_stderr() -> Iterator[Callable[[], None]]:
    """Hold back what is written to standard error, by native code too, until the end of the block.

    Yields a function that discards it. For short calls of libraries that print before they raise: what other threads
    write at the same time is only delayed.
    """
    with _STDERR_LOCK, ExitStack() as stack:
        try:
            terminal = os.dup(2)
            stack.callback(os.close, terminal)
            held = stack.enter_context(_memory_file())
        except OSError:  # there is no standard error, or no place for a temporary file
            yield lambda: None
            return
        os.dup2(held.fileno(), 2)

        def discard() -> None:
            held.seek(0)
            held.truncate(0)

        try:
            yield discard
        finally:
            os.dup2(terminal, 2)
            held.seek(0)
            text = held.read()
            if text:
                os.write(terminal, text)


def _memory_file() -> BinaryIO:
    # A file in memory is ten times faster than a temporary one; only Linux has it.
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stderr"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def log_file() -> Path:
    """The file with the tracebacks of unexpected errors."""
    return platformdirs.user_log_path("regard") / "errors.log"


def write_log(error: BaseException) -> Path | None:
    """Append the traceback of an error to the log. Returns the file, or None if it cannot be written."""
    # A message may contain text of the user, so the file and its folder are private.
    try:
        text = "".join(traceback.format_exception(error))
        if len(text) > LONGEST_ENTRY:
            text = text[: LONGEST_ENTRY // 2] + "\n…\n" + text[-LONGEST_ENTRY // 2 :]
        now = datetime.now(UTC).isoformat(timespec="seconds")
        entry = f"{now} regard {__version__} {sys.argv[:1]}\n{text}\n"
        file = log_file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if file.stat().st_size > LARGEST_LOG:
                os.replace(file, file.with_name(file.name + ".1"))
        # A link in the place of the log is not followed, and a pipe is not waited for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        handle = os.open(file, flags, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as opened:
            opened.write(entry)
    except Exception:  # a log that cannot be written must not hide the error itself
        return None
    return file
