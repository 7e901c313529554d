"""Compare the planner with the machine: predicted and measured peak memory and time of a step.

    python scripts/measure/budget.py memory          # n = 256 … 16,384, inference and training; about 2 minutes
    python scripts/measure/budget.py time            # measures the machine first; about a minute
    python scripts/measure/budget.py time --quick

Memory is what torch's allocator hands out above the state before the step, from the profiler's record of every
allocation, so other processes do not affect it. Time is the median of interleaved rounds, with one untimed call before
each timed one, and the machine is measured before and after them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
QUICK_LENGTHS = LENGTHS[:2]
# Width, heads, layers, and lengths: in short texts projections dominate, in long ones attention.
DECODERS = (
    (256, 4, 4, (128, 1024, 8192)),
    (512, 8, 4, (64, 512, 2048, 8192)),
    (1024, 16, 2, (32, 256, 2048)),
)


def model_steps(model: nn.Module, ids: Tensor) -> dict[str, Callable[[], object]]:
    """One inference step and one training step, without an optimizer."""

    def infer() -> object:
        with torch.no_grad():
            return model(ids)

    def train() -> None:
        logits = model(ids)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()

    return {"inference": infer, "training": train}


def add_columns(table: Table, *names: str) -> None:
    """Add right-aligned columns."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def measure_memory(quick: bool) -> Table:
    """Peak memory of both steps of two decoders at every length."""
    llama: dict[str, Any] = {"gated": True, "kv_heads": 2, "bias": False, "hidden": 704}
    models = {
        "usual": (Decoder(256, 4, 4, vocab=1000), budget.decoder(256, 4, 4, vocab=1000)),
        "Llama's": (
            Decoder(256, 4, 4, vocab=1000, position=Rotary(64), norm=RMSNorm, **llama),
            budget.decoder(256, 4, 4, vocab=1000, position="rotary", norm="rms", **llama),
        ),
    }
    table = Table(title="Decoder, d = 256, 4 layers: peak memory above the state before the step, MB")
    add_columns(table, "blocks", "n", "step", "measured", "predicted", "ratio")
    largest_deviation = 0.0
    for name, (model, spec) in models.items():
        assert sum(p.numel() for p in model.parameters()) == spec.parameters
        for n in QUICK_LENGTHS if quick else LENGTHS:
            ids = torch.randint(0, 1000, (1, n))
            for kind, step in model_steps(model, ids).items():
                model.zero_grad(set_to_none=True)
                measured = budget.measure_allocations(step).peak
                predicted = budget.plan(spec, n, training=kind == "training", optimizer="none").memory.peak
                ratio = predicted / measured
                largest_deviation = max(largest_deviation, abs(ratio - 1))
                table.add_row(name, f"{n:,}", kind, f"{measured / 1e6:.1f}", f"{predicted / 1e6:.1f}", f"{ratio:.3f}")
            model.zero_grad(set_to_none=True)
    table.caption = f"largest deviation {largest_deviation:.1%}"
    return table


@dataclass
class TimedCase:
    """A model, its description for the planner, its input, and the measured seconds of each round."""

    name: str
    model: nn.Module
    spec: budget.Model
    n: int
    batch: int = 1
    seconds: list[float] = field(default_factory=list)


def timed_cases() -> list[TimedCase]:
    """Forward passes where projections dominate, and where attention does."""
    cases = []
    for d, heads, layers, lengths in DECODERS:
        for n in lengths:
            cases.append(TimedCase(f"decoder {d}", Decoder(d, heads, layers), budget.decoder(d, heads, layers), n))
    for n, batch in ((512, 4), (4096, 1)):
        cases.append(TimedCase("encoder 384", Encoder(384, 6, 4), budget.encoder(384, 6, 4), n, batch))
    return cases


def mean_machine(a: budget.Machine, b: budget.Machine) -> budget.Machine:
    """The mean of two measurements of one machine: its speed drifts while it is shared."""
    means: dict[str, Any] = {}
    for name in ("bandwidth", "activation", "call", "attention_call", "rows"):
        means[name] = (getattr(a, name) + getattr(b, name)) / 2
    for name in ("peak", "attention"):
        first = getattr(a, name)
        second = getattr(b, name)
        means[name] = {dtype: (first[dtype] + second[dtype]) / 2 for dtype in a.peak}
    return replace(a, **means)


def measure_times(quick: bool) -> Table:
    """The time of a forward pass of each case."""
    machine_before = budget.measure_machine()
    cases = timed_cases()
    with torch.no_grad():
        for _ in range(3 if quick else 9):
            for case in cases:
                x = torch.randn(case.batch, case.n, case.spec.d)
                # One untimed call: the previous case has left its own data in the caches.
                case.model(x)
                start = time.perf_counter()
                case.model(x)
                case.seconds.append(time.perf_counter() - start)
    machine = mean_machine(machine_before, budget.measure_machine())

    table = Table(title=f"Forward pass, float32, on {machine.name}")
    add_columns(table, "model", "batch × n", "attention", "ms", "spread", "predicted", "ratio")
    largest_deviation = 0.0
    for case in cases:
        plan = budget.plan(case.spec, case.n, batch=case.batch, machine=machine)
        measured = statistics.median(case.seconds)
        predicted = plan.seconds or 0.0
        spread = (max(case.seconds) - min(case.seconds)) / measured
        largest_deviation = max(largest_deviation, abs(predicted / measured - 1))
        table.add_row(
            case.name,
            f"{case.batch} × {case.n:,}",
            f"{plan.shares['attention']:.0%}",
            f"{measured * 1e3:.1f}",
            f"{spread:.0%}",
            f"{predicted * 1e3:.1f}",
            f"{predicted / measured:.2f}",
        )
    products = machine.rate("float32") / 1e9
    attention = machine.attention_rate("float32") / 1e9
    rates = f"products {products:.0f}, attention {attention:.0f} GFLOP/s, memory {machine.bandwidth / 1e9:.0f} GB/s"
    table.caption = f"largest deviation {largest_deviation:.0%}; {rates}"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("memory", "time"))
    parser.add_argument("--quick", action="store_true", help="fewer rounds, or fewer lengths")
    options = parser.parse_args()
    torch.manual_seed(0)
    measure = measure_memory if options.what == "memory" else measure_times
    Console().print(measure(options.quick))


if __name__ == "__main__":
    main()
