"""Peak memory and time of one causal + ALiBi call above its inputs: forward and backward, with or without observables.

    python benchmarks/memory.py 32768 --observe
    python benchmarks/memory.py 16384 --heads 8 --backend native --forward

The gradient of the output counts as an input.

Peak resident memory belongs to a process, so each measurement is a run of its own. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch

import regard


def inputs(heads: int, n: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    return [torch.randn(1, heads, n, 64) for _ in range(4)]


def call(tensors: list[torch.Tensor], observe: regard.Observe | None, backend: str, backward: bool) -> None:
    *leaves, grad = tensors
    leaves = [x.requires_grad_(backward) for x in leaves]
    result = regard.attention(*leaves, mask=regard.Causal(), bias=regard.ALiBi(), observe=observe, backend=backend)
    out = result if isinstance(result, torch.Tensor) else result[0]
    if backward:
        torch.autograd.grad(out, leaves, grad)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("n", type=int)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--observe", action="store_true")
    parser.add_argument("--forward", action="store_true", help="without backward")
    parser.add_argument("--backend", default="reference")
    given = parser.parse_args()
    observe = regard.Observe(map=64, key_mass=True, profile=64, top=4) if given.observe else None
    call(inputs(given.heads, 256), observe, given.backend, not given.forward)  # what loads once is not the call's
    tensors = inputs(given.heads, given.n)
    before, start = peak(), time.perf_counter()
    call(tensors, observe, given.backend, not given.forward)
    seconds = time.perf_counter() - start
    conditions: dict[str, object] = {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "d": 64,
        "dtype": "float32",
    }
    conditions["output_bytes"] = tensors[3].numel() * 4
    print(json.dumps(vars(given) | {"extra_bytes": peak() - before, "seconds": round(seconds, 2)} | conditions))


if __name__ == "__main__":
    main()
