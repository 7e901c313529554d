"""Handle SIGINT (Ctrl-C), SIGTERM and SIGHUP during training: finish the current step, then stop."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

# Windows has no SIGHUP, which a terminal sends when it is closed.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
STDERR = 2
ANSWER = b"\nstop requested: waiting for the end of this step\n"


class StopSignals:
    """Context manager: the first stop signal sets ``requested`` to True; a second signal stops at once."""

    _active: ClassVar[StopSignals | None] = None  # the block that runs in the main thread

    def __init__(self) -> None:
        self.requested = False
        self.previous_handlers: dict[signal.Signals, Any] = {}

    @classmethod
    def request_stop(cls) -> bool:
        """Request a stop from another thread, as the first signal does. Return False if no block runs.

        Unlike a second signal, a second request changes nothing.
        """
        active = cls._active
        if active is None:
            return False
        active.requested = True
        return True

    def __enter__(self) -> StopSignals:
        # Python lets only the main thread handle signals.
        if threading.current_thread() is threading.main_thread():
            StopSignals._active = self
            for number in SIGNALS:
                # An ignored signal stays ignored: Ctrl-C is not meant for a run that a script put into the background,
                # and the end of the terminal is not meant for a run that was started with nohup.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self.previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if StopSignals._active is self:
            StopSignals._active = None
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # A step can take long, so a person at a terminal gets an answer at once. Only os.write is safe in a handler.
        if os.environ.get("RANK", "0") == "0" and os.isatty(STDERR):
            with suppress(OSError):  # the terminal may be gone
                os.write(STDERR, ANSWER)
