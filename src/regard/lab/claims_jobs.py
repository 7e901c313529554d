"""A claim's check, run for the lab with some of its numbers changed."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from regard.claims import claim as claim_of
from regard.claims.typeset import text
from regard.lab.worker import one_line

__all__ = ["LIMIT", "claim"]

LIMIT = 120.0  # seconds that one check may take
GRACE = 20.0  # seconds more, after which the process ends whatever holds it


class TooLong(RuntimeError):
    """A check has had its time."""


def claim(args: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """``Result.to_dict()`` of a claim with some numbers changed, findings typeset; what is no number is None."""
    one = claim_of(args["id"])
    progress(0, None, "checking")
    with _limited(args.get("limit", LIMIT)), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # as ``regard.claims.run`` does
        try:
            result = one.run(**args["parameters"])
        except TooLong:
            raise
        except (ValueError, LookupError, RuntimeError, ArithmeticError, TypeError, AssertionError) as error:
            if isinstance(error, ValueError) and str(error) != "math domain error":
                raise  # which says what is wrong
            raise ValueError(
                f"the check cannot be made with these numbers ({one_line(error)}); turn one back"
            ) from None
    told = result.to_dict()
    told["given"] = {**one.parameters, **args["parameters"]}
    typeset = [{"asked": text(x.asked), "said": text(x.said)} for x in result.evidence.findings]
    told["findings"] = [{**x, "typeset": y} for x, y in zip(told["findings"], typeset, strict=True)]
    found: dict[str, Any] = _plain(told)
    return found


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """An error after so many seconds; and an end to the process where something does not let the error through."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"this takes longer than {seconds:g} s, which is all that a check gets here; turn it down")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    last = threading.Timer(seconds + GRACE, os._exit, (1,))
    last.daemon = True
    last.start()
    try:
        yield
    finally:
        last.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _plain(x: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(x, dict):
        return {str(name): _plain(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
