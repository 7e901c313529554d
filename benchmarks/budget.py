"""The planner against the machine: predicted peak memory and time of a step beside what is measured.

    python benchmarks/budget.py memory          # n = 256 … 16,384, inference and training; about 2 minutes
    python benchmarks/budget.py time            # measures the machine first; about a minute
    python benchmarks/budget.py time --quick

Memory is what torch's allocator hands out above what was there before the step, from its own record of every
allocation (a profiler's), so it holds on any machine and in any noise. Time is the median of interleaved rounds, each
case warmed, with the machine measured before and after them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from regard import budget
from regard.nn import Decoder, Encoder, RMSNorm
from regard.positions import Rotary

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def steps(model: nn.Module, ids: Tensor) -> dict[str, Callable[[], object]]:
    """One of inference and one of training, without an optimizer's."""

    def infer() -> object:
        with torch.no_grad():
            return model(ids)

    def train() -> None:
        logits = model(ids)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()

    return {"inference": infer, "training": train}


def memory() -> Table:
    """Two decoders at every length, both steps."""
    llama = {"norm": "rms", "gated": True, "kv_heads": 2, "bias": False, "hidden": 704}
    made = {
        "usual": (Decoder(256, 4, 4, vocab=1000), budget.decoder(256, 4, 4, vocab=1000)),
        "Llama's": (
            Decoder(256, 4, 4, vocab=1000, position=Rotary(64), **(llama | {"norm": RMSNorm})),  # type: ignore[arg-type]
            budget.decoder(256, 4, 4, vocab=1000, position="rotary", **llama),  # type: ignore[arg-type]
        ),
    }
    table = Table(title="Decoder, d = 256, 4 layers: peak memory above the state before the step, MB")
    for name in ("blocks", "n", "step", "measured", "predicted", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    worst = 0.0
    for name, (model, spec) in made.items():
        assert sum(p.numel() for p in model.parameters()) == spec.parameters
        for n in LENGTHS:
            ids = torch.randint(0, 1000, (1, n))
            for kind, step in steps(model, ids).items():
                model.zero_grad(set_to_none=True)
                found = budget.allocated(step).most
                plan = budget.plan(spec, n, training=kind == "training", optimizer="none")
                ratio = plan.memory.peak / found
                worst = max(worst, abs(ratio - 1))
                table.add_row(
                    name, f"{n:,}", kind, f"{found / 1e6:.1f}", f"{plan.memory.peak / 1e6:.1f}", f"{ratio:.3f}"
                )
            model.zero_grad(set_to_none=True)
    table.caption = f"largest deviation {worst:.1%}"
    return table


def between(a: budget.Machine, b: budget.Machine) -> budget.Machine:
    """The mean of two measurements of one machine, which drifts while it is shared."""
    rates = {
        name: {x: (getattr(a, name)[x] + getattr(b, name)[x]) / 2 for x in a.peak} for name in ("peak", "attention")
    }
    single = ("bandwidth", "activation", "call", "attention_call", "rows")
    return replace(a, **rates, **{name: (getattr(a, name) + getattr(b, name)) / 2 for name in single})


def timings(quick: bool) -> Table:
    """Forward passes where projections dominate and where attention does."""
    before = budget.measure()
    cases: list[tuple[str, nn.Module, budget.Model, int, int]] = []
    widths = ((256, 4, 4, (128, 1024, 8192)), (512, 8, 4, (64, 512, 2048, 8192)), (1024, 16, 2, (32, 256, 2048)))
    for d, heads, layers, lengths in widths:
        for n in lengths:
            cases.append((f"decoder {d}", Decoder(d, heads, layers), budget.decoder(d, heads, layers), n, 1))
    for n, batch in ((512, 4), (4096, 1)):
        cases.append(("encoder 384", Encoder(384, 6, 4), budget.encoder(384, 6, 4), n, batch))
    table = Table(title=f"Forward pass, float32, on {before.name}")
    for name in ("model", "batch × n", "attention", "ms", "spread", "predicted", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    rounds: dict[int, list[float]] = {i: [] for i in range(len(cases))}
    inputs = [torch.randn(batch, n, spec.d) for _, _, spec, n, batch in cases]
    with torch.no_grad():
        for _ in range(3 if quick else 9):
            for i, (_, model, _, _, _) in enumerate(cases):
                model(inputs[i])  # the case before left its own data in the caches
                start = time.perf_counter()
                model(inputs[i])
                rounds[i].append(time.perf_counter() - start)
    here = between(before, budget.measure())
    worst = 0.0
    for i, (name, _, spec, n, batch) in enumerate(cases):
        plan = budget.plan(spec, n, batch=batch, machine=here)
        found, predicted = statistics.median(rounds[i]), plan.seconds or 0.0
        spread = (max(rounds[i]) - min(rounds[i])) / found
        worst = max(worst, abs(predicted / found - 1))
        share = f"{plan.shares['attention']:.0%}"
        cells = (f"{found * 1e3:.1f}", f"{spread:.0%}", f"{predicted * 1e3:.1f}", f"{predicted / found:.2f}")
        table.add_row(name, f"{batch} × {n:,}", share, *cells)
    rates = f"products {here.rate('float32') / 1e9:.0f}, attention {here.attention_rate('float32') / 1e9:.0f} GFLOP/s"
    table.caption = f"largest deviation {worst:.0%}; {rates}, memory {here.bandwidth / 1e9:.0f} GB/s"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("memory", "time"))
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    given = parser.parse_args()
    torch.manual_seed(0)
    table: Any = memory() if given.what == "memory" else timings(given.quick)
    Console().print(table)


if __name__ == "__main__":
    main()
