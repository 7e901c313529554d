"""Ctrl-C, and what a system sends to end a program, as a wish that is granted after the step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Stopping"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """``with Stopping() as stopping``: ``stopping.asked`` once somebody pressed Ctrl-C; a second time ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # no other can listen to signals
            # What is ignored stays so: a run that a script put into the background is not meant by its Ctrl-C.
            heard = [name for name in SIGNALS if signal.getsignal(name) not in (signal.SIG_IGN, None)]
            self.before = {name: signal.signal(name, self._hear) for name in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self.before.items():
            signal.signal(name, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
