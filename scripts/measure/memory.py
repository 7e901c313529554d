"""Measure the peak memory and the time of one attention call, causal with ALiBi, above the memory of its inputs.

    python scripts/measure/memory.py 32768 --observe
    python scripts/measure/memory.py 16384 --heads 8 --backend native --forward

The gradient of the output counts as an input. Peak resident memory belongs to a process, so each measurement needs its
own run. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from common import peak_memory

import regard

WIDTH = 64


def random_inputs(heads: int, n: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    return [torch.randn(1, heads, n, WIDTH) for _ in range(4)]


def call_attention(tensors: list[torch.Tensor], observe: regard.Observe | None, backend: str, backward: bool) -> None:
    """One call of the operator, followed by its backward pass if ``backward``."""
    *leaves, grad = tensors
    for leaf in leaves:
        leaf.requires_grad_(backward)
    result = regard.attention(*leaves, mask=regard.Causal(), bias=regard.ALiBi(), observe=observe, backend=backend)
    out = result if isinstance(result, torch.Tensor) else result[0]
    if backward:
        torch.autograd.grad(out, leaves, grad)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("n", type=int, help="number of queries and of keys")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--observe", action="store_true", help="measure every kind of observable")
    parser.add_argument("--forward", action="store_true", help="run the forward pass only")
    parser.add_argument("--backend", default="reference")
    options = parser.parse_args()
    observe = None
    if options.observe:
        observe = regard.Observe(map=64, key_mass=True, profile=64, top=4)

    # The first call loads libraries and starts threads; their memory does not belong to the measured call.
    call_attention(random_inputs(options.heads, 256), observe, options.backend, not options.forward)

    tensors = random_inputs(options.heads, options.n)
    before = peak_memory()
    start = time.perf_counter()
    call_attention(tensors, observe, options.backend, not options.forward)
    seconds = time.perf_counter() - start

    figures: dict[str, object] = vars(options) | {
        "extra_bytes": peak_memory() - before,
        "seconds": round(seconds, 2),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "d": WIDTH,
        "dtype": "float32",
        "output_bytes": tensors[3].numel() * 4,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
