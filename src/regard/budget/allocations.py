"""What a call really allocates, by torch's own record: what a plan's peak can be held against."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

__all__ = ["Allocated", "allocated"]


class Allocated(NamedTuple):
    """Bytes of CPU tensors above the start: the most at once, and what is left while the call's result is held.

    >>> found = allocated(lambda: torch.zeros(100) + torch.zeros(100))  # two, and then their sum
    >>> found.most, found.left
    (1200, 400)
    """

    most: int
    left: int


def allocated(call: Callable[[], object]) -> Allocated:
    """``most = max_t Σ_{events ≤ t} bytes``: run a call, and add up its allocations and releases in their order.

    What native code takes for itself is not in torch's record; regard's own kernels take little.

    >>> allocated(lambda: torch.zeros(3, 5))
    Allocated(most=60, left=60)
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of its own start and end otherwise
    # Cycles that were left before must not be released in the middle of the record, whenever collection comes.
    collects = gc.isenabled()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            held = call()
    finally:
        if collects:
            gc.enable()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    del held
    return Allocated(most, live)
