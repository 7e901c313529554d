"""Attribute one logit of a whole model to all its heads: time against a training step, and peak memory.

    python examples/smollm2.py smollm2
    python scripts/measure/attribution.py smollm2 8192 [--map 64] [--rounds 2]
    python scripts/measure/attribution.py smollm2 8192 --alone   # without the plain step: its memory is not measured
    python scripts/measure/attribution.py --kernel 4096          # the backward pass of the kernel alone
    python scripts/measure/attribution.py --monitor              # training steps with and without AttentionMonitor

The plain step is a forward and a backward pass of the same model of transformers with sdpa, to the gradients of all
weights, without an optimizer. Both compute the logits of the last position only. The text is CPython's documentation.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import peak_memory, print_conditions, print_figures
from watch_long_text import text_ids

import regard
from regard._attribution import AttributionRequest


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_model(options: argparse.Namespace) -> dict[str, object]:
    """Time both in turns. The peak memory is read before the plain step runs for the first time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    ids = text_ids(options.folder, options.n)
    with torch.no_grad():
        token = int(model(ids, use_cache=False, logits_to_keep=1).logits.argmax())
    results = []

    def attribute() -> None:
        results.append(regard.interp.attribute(model, ids, token, map=options.map))

    def plain_step() -> None:
        model(ids, use_cache=False, logits_to_keep=1).logits[0, -1, token].backward()
        model.zero_grad(set_to_none=True)

    attribution_times = [seconds(attribute)]
    memory = peak_memory()
    plain_times = []
    if not options.alone:
        plain_times.append(seconds(plain_step))
        for _ in range(options.rounds - 1):
            attribution_times.append(seconds(attribute))
            plain_times.append(seconds(plain_step))

    result = results[0]
    heads = sum(layer.keys.shape[1] for layer in result.values())
    figures: dict[str, object] = {"tokens": options.n, "heads": heads, "map": options.map}
    figures["attribution, s"] = round(min(attribution_times), 2)
    if plain_times:
        figures["plain step, sdpa, s"] = round(min(plain_times), 2)
        figures["attribution / plain step"] = round(min(attribution_times) / min(plain_times), 2)
    figures["peak memory of the process with attribution alone, GiB"] = round(memory / 2**30, 2)
    path, head, contribution = result.top(1)[0]
    figures["strongest head"] = f"{path} {head}: {contribution:.3f}"
    return figures


def measure_kernel(n: int, rounds: int, map_size: int) -> dict[str, object]:
    """The backward pass of one causal call of 8 heads, with and without contributions, in turns."""
    q, k, v = (torch.randn(1, 8, n, 64, requires_grad=True) for _ in range(3))
    requests = {
        "plain": None,
        "keys and rows": AttributionRequest(0),
        "keys, rows and map": AttributionRequest(map_size),
    }
    best = dict.fromkeys(requests, float("inf"))
    for _ in range(rounds):
        for name, request in requests.items():
            out = regard.attention(q, k, v, mask=regard.Causal(), observe=request)  # type: ignore[arg-type]
            grad = torch.randn_like(out)
            best[name] = min(best[name], seconds(lambda out=out, grad=grad: out.backward(grad)))
    figures: dict[str, object] = {"tokens": n, "map": map_size}
    for name, value in best.items():
        figures[f"backward, {name}, ms"] = round(value * 1000, 1)
        figures[f"{name} / plain"] = round(value / best["plain"], 3)
    return figures


def measure_monitor(rounds: int) -> dict[str, object]:
    """Steps of the trainer's text task in two runs: one with the monitor, one without, in turns."""
    sizes = {"steps": 12, "warmup": 1, "record": 0, "evaluate": 1000, "save": 1000}
    best = {"without": float("inf"), "with": float("inf")}
    for _ in range(rounds):
        for name in best:
            with TemporaryDirectory() as folder:
                clock = _StepClock()
                if name == "with":
                    clock = _MonitoredClock()
                regard.training.train("text", f"{folder}/run", sizes, listener=clock)
                best[name] = min(best[name], clock.best)
    return {
        "step without the monitor, ms": round(best["without"] * 1000, 1),
        "step with the monitor, ms": round(best["with"] * 1000, 1),
        "with / without": round(best["with"] / best["without"], 3),
    }


class _StepClock(regard.training.Listener):
    """The shortest time from one step to the next."""

    def __init__(self) -> None:
        self.best = float("inf")
        self.last = time.perf_counter()

    def on_step(self, step: int, values: dict[str, float]) -> None:
        now = time.perf_counter()
        if step > 2:
            self.best = min(self.best, now - self.last)
        self.last = now


class _MonitoredClock(_StepClock):
    def on_start(self, task: Any, model: torch.nn.Module, step: int) -> None:
        self.monitor = regard.training.AttentionMonitor(model)

    def on_step(self, step: int, values: dict[str, float]) -> None:
        self.monitor.step(step)
        super().on_step(step, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("n", type=int, nargs="?", default=8192, help="number of tokens")
    parser.add_argument("--map", type=int, default=64, help="cells per side of the maps")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="do not run the plain step")
    parser.add_argument("--kernel", type=int, metavar="N", help="measure the kernel's backward pass on N tokens")
    parser.add_argument("--monitor", action="store_true", help="measure the steps of a training")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.kernel:
        print_figures(measure_kernel(options.kernel, options.rounds, options.map))
    elif options.monitor:
        print_figures(measure_monitor(options.rounds))
    elif options.folder is None:
        parser.error("give the folder of a model, --kernel or --monitor")
    else:
        print_figures(measure_model(options))
    print_conditions()


if __name__ == "__main__":
    main()
