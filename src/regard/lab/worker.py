"""A process that works for the lab: it reads one JSON line a job, and writes one a step of progress and one at the end.

A job that crashes, or is cancelled, takes this process with it and not the server. Jobs are functions
``job(args, progress) -> plain data``, named in ``JOBS``; what they load stays loaded for the next.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from importlib import import_module
from typing import Any, TextIO

__all__ = ["JOBS", "main"]

# Name → where it is. Nothing else can be asked for.
JOBS = {
    "look": "regard.lab.look_jobs:look",
    "kinds": "regard.lab.look_jobs:kinds",
    "ablate": "regard.lab.look_jobs:ablate",
    "train": "regard.lab.evolve_jobs:train",
    "claim": "regard.lab.claims_jobs:claim",
    "machine": "regard.lab.budget_jobs:machine",
}


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not stand between our lines
    try:
        serve(sys.stdin, out)
    except BrokenPipeError:  # the lab has ended
        os._exit(0)  # without a last attempt to write


def serve(lines: TextIO, out: TextIO) -> None:
    """Answer each line until there are no more."""

    def say(**what: Any) -> None:
        out.write(json.dumps(what, allow_nan=False) + "\n")
        out.flush()

    # A wish to stop is for a job; one that comes when it has just ended must not end the process.
    by_itself = threading.current_thread() is threading.main_thread()
    say(ready=True)
    for line in lines:
        asked = json.loads(line)
        if by_itself:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            result = _named(asked["kind"])(
                asked["args"], lambda done, of=None, said="": say(done=done, of=of, said=said)
            )
            say(result=result)
        except (ValueError, TypeError, LookupError, OSError, RuntimeError, ArithmeticError, ImportError) as error:
            say(error=one_line(error))
        except MemoryError:
            say(error="there is not enough memory for this; try a shorter input")
        except KeyboardInterrupt:
            say(error="stopped")
        finally:
            if by_itself:
                signal.signal(signal.SIGINT, signal.SIG_IGN)


def one_line(error: BaseException) -> str:
    """An error as a person reads it: its first line."""
    said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return (said.strip().split("\n")[0] or type(error).__name__)[:500]


def _named(kind: str) -> Any:
    module, name = JOBS[kind].split(":")
    return getattr(import_module(module), name)
