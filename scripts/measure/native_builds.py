"""Compares builds of the native module on a few calls: the processor time per call, measured in turns.

    python scripts/measure/native_builds.py [--rounds 300] before.so after.so

Each build runs in a process of its own, on one thread. Only the processor time of the calls counts, and of all rounds
the fastest tenth is reported, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable

CASES = {
    "one query, one key, width 16": 30,
    "causal, 4 heads of 256 × 256": 1,
    "the same, observed": 1,
    "the same, backward": 1,
    "decoding, 8 heads, 2,048 keys": 4,
    "a tile of exact weights": 1,
    "dense, 4 heads of 256 × 256": 1,
    "with a dense bias": 1,
    "with a bool mask": 1,
    "24 heads of 16 × 16": 4,
}  # how many calls are timed at once


def calls() -> dict[str, Callable[[], object]]:
    import torch

    from regard import ALiBi, Causal, Observe, attention

    torch.set_num_threads(1)
    torch.manual_seed(0)
    one = torch.randn(1, 1, 1, 16)
    x = torch.randn(1, 4, 256, 64)
    learned = torch.randn(1, 4, 256, 64, requires_grad=True)
    query = torch.randn(1, 8, 1, 64)
    cache = torch.randn(1, 8, 2048, 64)
    bias = torch.randn(1, 4, 256, 256)
    mask = torch.rand(1, 4, 256, 256) > 0.5
    short = torch.randn(1, 24, 16, 64)
    everything = Observe(map=64, top=8, key_mass=True, profile=16)
    saved = attention(x, x, x, mask=Causal(), observe=Observe(keep=True))[1]
    functions: list[Callable[[], object]] = [
        lambda: attention(one, one, one),
        lambda: attention(x, x, x, mask=Causal()),
        lambda: attention(x, x, x, mask=Causal(), bias=ALiBi(), observe=everything),
        lambda: attention(learned, learned, learned, mask=Causal()).sum().backward(),
        lambda: attention(query, cache, cache),
        lambda: saved.tile(0, size=64),
        lambda: attention(x, x, x),
        lambda: attention(x, x, x, bias=bias),
        lambda: attention(x, x, x, mask=mask),
        lambda: attention(short, short, short),
    ]
    return dict(zip(CASES, functions, strict=True))


def run_worker(module: str) -> None:
    """Load a build as ``regard._native``; time the cases whose names are read, and print microseconds per call."""
    spec = importlib.util.spec_from_file_location("regard._native", module)
    assert spec is not None and spec.loader is not None
    sys.modules["regard._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["regard._native"])
    functions = calls()
    for function in functions.values():
        for _ in range(3):
            function()
    print("ready", flush=True)
    for line in sys.stdin:
        name = line.strip()
        start = time.thread_time_ns()
        for _ in range(CASES[name]):
            functions[name]()
        print((time.thread_time_ns() - start) / CASES[name] / 1000, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", nargs="+", help="files of the native module")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options.builds[0])
        return

    workers = {}
    for build in options.builds:
        command = [sys.executable, __file__, "--worker", build]
        workers[build] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert workers[build].stdout.readline() == "ready\n", f"{build} cannot be loaded"
    for name in CASES:
        times: dict[str, list[float]] = {build: [] for build in options.builds}
        for _ in range(options.rounds):
            for build in random.sample(options.builds, len(options.builds)):
                workers[build].stdin.write(f"{name}\n")
                times[build].append(float(workers[build].stdout.readline()))
        fastest = [sorted(values)[options.rounds // 10] for values in times.values()]
        ratios = ", ".join(f"{value / fastest[0]:.3f}" for value in fastest)
        print(f"{name}: {fastest[0]:,.1f} µs; ratios {ratios}")
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
