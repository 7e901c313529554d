"""The job of the Claims page: it runs a claim's check with some of its parameters changed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from regard._errors import RegardError
from regard._files import json_safe
from regard.claims import Evidence, get_claim
from regard.claims._typeset import typeset_text
from regard.lab.worker import one_line

TIME_LIMIT = 120.0  # seconds that one check may take
KILL_AFTER = 20.0  # further seconds after which the process ends, if the check did not stop at the time limit


class TooSlow(RuntimeError):
    """A check took longer than its time limit."""


def check_claim(args: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """Return ``Result.to_dict()`` of a claim's check, with typeset texts. NaN and infinity become None."""
    claim = get_claim(args["id"])
    progress(0, None, "checking")
    with _time_limit(args.get("limit", TIME_LIMIT)), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # as ``regard.claims.run_claims`` does
        try:
            result = claim.run(**args["parameters"])
        except TooSlow:
            raise
        except (ValueError, LookupError, RuntimeError, ArithmeticError, TypeError, AssertionError) as error:
            # Most ValueErrors are messages of the library, which name the parameter that is wrong.
            if isinstance(error, ValueError) and str(error) != "math domain error":
                raise
            message = f"the check does not run with these parameters ({one_line(error)}); reset one of them"
            raise RegardError(message) from None
    response = result.to_dict()
    response["given"] = {**claim.parameters, **args["parameters"]}
    for entry, finding in zip(response["findings"], result.evidence.findings, strict=True):
        entry["typeset"] = {"asked": typeset_text(finding.question), "said": typeset_text(finding.description)}
    response["typeset"] = _typeset_labels(result.evidence)
    safe: dict[str, Any] = json_safe(response)
    return safe


def _typeset_labels(evidence: Evidence) -> dict[str, str]:
    """The names of numbers and the labels of figures as HTML, if they are not the same as their text."""
    texts = list(evidence.numbers)
    for series in evidence.series:
        texts += [series.title, series.x, series.y, *series.lines]
    typeset = {text: typeset_text(text) for text in texts}
    return {text: html for text, html in typeset.items() if html != text}


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow after ``seconds``. If a library blocks the error, end the process ``KILL_AFTER`` seconds later."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"the check takes longer than {seconds:g} s; choose smaller parameters")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    timer = threading.Timer(seconds + KILL_AFTER, os._exit, (1,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
