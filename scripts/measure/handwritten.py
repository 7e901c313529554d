"""Attention written by hand, alone and within ``regard.watch``: time in turns, peak memory in processes of their own.

    python scripts/measure/handwritten.py [--length 4096]

The outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import subprocess
import sys
import time

import torch
from common import peak_memory, print_conditions, print_figures
from torch import Tensor, nn

import regard

HEADS = 8
WIDTH = 64
ROUNDS = 5


class Handwritten(nn.Module):
    """Causal attention as GPT-J and many others write it."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        n = x.shape[1]
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
        scores = torch.where(visible, scores, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


def run(model: nn.Module, x: Tensor, watched: bool) -> tuple[Tensor, float]:
    """The output of one pass, and its seconds."""
    context = regard.watch(model, regard.Observe(map=32)) if watched else contextlib.nullcontext()
    start = time.perf_counter()
    with torch.no_grad(), context:
        out = model(x)
    return out, time.perf_counter() - start


def print_peak(length: int, watched: bool) -> None:
    """Print how much the peak memory of this process grows by one pass. A small pass loads everything first."""
    model = Handwritten()
    run(model, torch.randn(1, 16, HEADS * WIDTH), watched)
    x = torch.randn(1, length, HEADS * WIDTH)
    before = peak_memory()
    run(model, x, watched)
    print(peak_memory() - before)


def measured_peak(length: int, watched: bool) -> int:
    """The same, in a process of its own."""
    command = [sys.executable, __file__, "--length", str(length), "--peak", "watched" if watched else "alone"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--peak", choices=["alone", "watched"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(options.length, options.peak == "watched")
        return
    print_conditions()
    # First, because a process inherits the peak of the one that starts it.
    peak_alone = measured_peak(options.length, False)
    peak_watched = measured_peak(options.length, True)
    model = Handwritten()
    x = torch.randn(1, options.length, HEADS * WIDTH)
    torch.testing.assert_close(run(model, x, True)[0], run(model, x, False)[0], rtol=1e-4, atol=1e-4)
    alone = []
    watched = []
    for _ in range(ROUNDS):
        alone.append(run(model, x, False)[1])
        watched.append(run(model, x, True)[1])
    figures = {
        "tokens": options.length,
        "time alone / watched": f"{min(alone) / min(watched):.2f}",
        "peak memory alone, MB": f"{peak_alone / 1e6:.0f}",
        "peak memory watched, MB": f"{peak_watched / 1e6:.0f}",
    }
    print_figures(figures)


if __name__ == "__main__":
    main()
