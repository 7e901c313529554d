"""Measure how many bytes of CPU tensors a call allocates, to compare with a plan's peak."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocations(NamedTuple):
    """Bytes of CPU tensors that a call allocates, in addition to what was allocated before it.

    - `peak`: the largest number of bytes allocated at one time.
    - `remaining`: the bytes that are still allocated while the result of the call is alive.

    >>> allocations = measure_allocations(lambda: torch.zeros(100) + torch.zeros(100))  # two tensors and their sum
    >>> allocations.peak, allocations.remaining
    (1200, 400)
    """

    peak: int
    remaining: int


def measure_allocations(call: Callable[[], object]) -> Allocations:
    """Run `call` and add up its allocations and releases in order: ``peak = max_t Σ_{events ≤ t} bytes``.

    Torch's profiler records the events. It does not see memory that native code allocates directly; the kernels of
    regard allocate little in this way.

    >>> measure_allocations(lambda: torch.zeros(3, 5))
    Allocations(peak=60, remaining=60)
    """
    # Otherwise the profiler logs its own start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    # A garbage collection during the call would release older objects, and so record bytes that the call did not use.
    collects = gc.isenabled()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = call()
    finally:
        if collects:
            gc.enable()

    current = 0
    peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            current += event.nbytes()  # negative for a release
            peak = max(peak, current)
    del result
    return Allocations(peak, current)
