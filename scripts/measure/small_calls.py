"""Times small calls on one and on two threads, on this machine as it is or with a busy process on every core.

    python scripts/measure/small_calls.py [--busy]

A call gets at most one thread per `MIN_WORK_PER_THREAD` multiply–adds (csrc/threads.h). The table shows where a second
thread pays. Beside the median it prints the mean, because a thread that waits for a core makes a few calls a hundred
times slower. To see the times of two threads below the limit, build the module with a lower one:
CMAKE_ARGS=-DCMAKE_CXX_FLAGS=-DREGARD_MIN_WORK_PER_THREAD=1.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time

import torch

from regard import attention

SIZES = (16, 32, 48, 64, 96, 128, 192, 256)


def spin() -> None:
    """Keep one core busy."""
    while True:
        pass


def median_and_mean(tokens: int, threads: int, seconds: float) -> tuple[float, float]:
    """Microseconds per call."""
    torch.set_num_threads(threads)
    x = torch.randn(1, 4, tokens, 64)
    for _ in range(20):
        attention(x, x, x)
    measured = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter_ns()
        attention(x, x, x)
        measured.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(measured), statistics.fmean(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", action="store_true", help="start a busy process on every core first")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each figure")
    options = parser.parse_args()
    others = []
    if options.busy:
        others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for other in others:
        other.start()
    print("4 heads × 64   multiply–adds   one thread: median, mean (µs)   two threads: median, mean   two / one")
    for tokens in SIZES:
        one, one_mean = median_and_mean(tokens, 1, options.seconds)
        two, two_mean = median_and_mean(tokens, 2, options.seconds)
        work = 4 * tokens * tokens * 128
        print(
            f"{tokens:5} tokens    2^{math.log2(work):<14.1f} {one:10.1f} {one_mean:10.1f}"
            f" {two:21.1f} {two_mean:10.1f} {two_mean / one_mean:13.2f}",
            flush=True,
        )
    for other in others:
        other.kill()


if __name__ == "__main__":
    main()
