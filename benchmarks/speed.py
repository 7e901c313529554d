"""regard.attention against torch's SDPA: the same inputs, interleaved, best of several; correct before it is timed.

    python benchmarks/speed.py

Prints the conditions, then a table of ratios: how many times as fast as SDPA, and what observing adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

import regard
from regard import Causal, Observe
from regard.kernels import native

SHAPES = ((1, 8, 1024, 64), (1, 8, 4096, 64), (8, 12, 128, 64), (1, 16, 2048, 128))


def race(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best time of each call; every round runs all of them, so that noise meets all alike."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def gradients(call: Callable[..., torch.Tensor], tensors: list[torch.Tensor], grad: torch.Tensor) -> None:
    torch.autograd.grad(call(*tensors), tensors, grad)


def row(shape: tuple[int, int, int, int], causal: bool) -> str:
    B, H, n, d = shape
    leaves = [torch.randn(B, H, n, d, requires_grad=True) for _ in range(3)]
    plain, grad = [x.detach() for x in leaves], torch.randn(B, H, n, d)
    mask = Causal() if causal else None

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, k, v, mask=mask)

    torch.testing.assert_close(ours(*plain), sdpa(*plain), rtol=1e-4, atol=1e-5)
    times = race(
        {
            "sdpa": lambda: sdpa(*plain),
            "ours": lambda: ours(*plain),
            "rows": lambda: regard.attention(*plain, mask=mask, observe=Observe()),
            "map": lambda: regard.attention(*plain, mask=mask, observe=Observe(map=64)),
            "sdpa both": lambda: gradients(sdpa, leaves, grad),
            "ours both": lambda: gradients(ours, leaves, grad),
        },
        rounds=5 if n > 2000 else 15,
    )
    forward, both = times["sdpa"] / times["ours"], times["sdpa both"] / times["ours both"]
    rows, pooled = (100 * (times[x] / times["ours"] - 1) for x in ("rows", "map"))
    name = "×".join(map(str, shape)) + (" causal" if causal else " dense")
    return f"| {name} | {forward:.2f} | {both:.2f} | + {rows:.0f}% | + {pooled:.0f}% |"


def main() -> None:
    which = native.instruction_set() if native.built() else "no native module"
    print(f"{torch.get_num_threads()} threads, {which}, torch {torch.__version__}, float32\n")
    print("| B×H×n×d | forward | forward + backward | row values | and a 64 × 64 map |\n|---|---|---|---|---|")
    for shape in SHAPES:
        for causal in (False, True):
            print(row(shape, causal), flush=True)


if __name__ == "__main__":
    main()
