"""How Ctrl-C and other signals end a command: never with a traceback, whenever they arrive."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STDERR = 2
MESSAGE = b"regard: interrupted\n"
REPEAT_SECONDS = 0.05  # after this time an interrupt is repeated that Python could not deliver


def exit_now(number: int, frame: FrameType | None = None) -> None:
    """Signal handler: print a line and end the process at once."""
    with suppress(OSError):  # the terminal may be gone
        os.write(STDERR, MESSAGE)
    os._exit(128 + number)


@contextmanager
def exit_at_interrupt() -> Iterator[None]:
    """While the block runs, Ctrl-C ends the process at once. For imports, which may turn an exception into another."""
    with _interrupt_handler(exit_now):
        yield


@contextmanager
def raise_at_interrupt() -> Iterator[None]:
    """While the block runs, Ctrl-C raises ``KeyboardInterrupt``, so that unfinished files are removed."""
    previous = sys.unraisablehook

    def repeat(unraisable: Any) -> None:
        # The interrupt hit the destructor of an object, where Python can only print it. Raise it again a little later.
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # A signal of the process, not of this thread: it also ends a call of the main thread that waits.
            timer = threading.Timer(REPEAT_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()
        else:
            previous(unraisable)

    sys.unraisablehook = repeat
    try:
        with _interrupt_handler(signal.default_int_handler):
            yield
    finally:
        sys.unraisablehook = previous


@contextmanager
def _interrupt_handler(handler: Any) -> Iterator[None]:
    previous = signal.getsignal(signal.SIGINT)
    # Only the main thread may set handlers. An ignored Ctrl-C stays ignored: a script runs the command.
    if threading.current_thread() is not threading.main_thread() or previous in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class EndSignals:
    """Context manager for the lab: Ctrl-C, SIGTERM and SIGHUP end it.

    Before the lab serves, a signal ends the process at once: there is nothing to save. Then the first signal sets
    ``requested``, and a second one ends the process at once; workers notice that, and a training saves its state.
    """

    def __init__(self) -> None:
        self.is_serving = False  # set by the lab when there is something to save
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> EndSignals:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            # A signal that is ignored stays ignored, for example SIGHUP under nohup.
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only an attribute is set: an exception or a lock in a handler could interrupt any line of the main thread.
        if self.is_serving and not self.requested:
            self.requested = True
        else:
            exit_now(number)
