"""Measure attention in place of convolutions: accuracy, where its heads attend, and what replaces them.

    python scripts/measure/convolution.py [PART …] [--out runs] [--seeds 3] [--kinds quadratic resnet]

- ``digits``: trains `pixels` into ``--out/pixels-KIND-SEED``; a finished run is not repeated. Quadratic heads and the
  residual network are trained with several seeds, other kinds with one. Prints accuracies and the offsets that heads
  cover before and after, and draws them (``centres.png`` in each folder).
- ``replace``: in the runs with quadratic heads, replaces heads by convolutions: accuracy before and after, and time at
  64 × 64 pixels.
- ``alpha``: the error of soft heads against α, with its bound.
- ``stride``: counted products of the direct and the dense form.
- ``shared``: the time that is saved if a batch of pictures shares its weights.

All parts run by default. Exits with an error if a part misses its target.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import run_parts
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import plots
from regard._terminal import frameless_table
from regard.budget._op_flops import register_flop_formulas
from regard.convolution import to_attention
from regard.convolution._replace_in_run import replace_in_run
from regard.convolution._verify import verify
from regard.kernels import zero_scale
from regard.training import evolution, train
from regard.training._pixel_offsets import head_offsets
from regard.training.figures import plot_offsets
from regard.training.tasks.pixels import PixelsTask

KINDS = PixelsTask.kinds
COMPARED = ("quadratic", "resnet")
MAX_ACCURACY_GAP = 1.5  # percentage points between convolutions and attention
MIN_COVERED = 7  # of the 9 offsets of a 3 × 3 kernel
MAX_ACCURACY_CHANGE = 0.5  # percentage points, by replacing heads
SIDE = 64  # pixels
show = Console(width=100, highlight=False).print


def make_table(title: str, *columns: str) -> Table:
    """A table with right-aligned columns."""
    table = frameless_table(title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def run_folder(out: Path, kind: str, seed: int) -> Path:
    return out / f"pixels-{kind}-{seed}"


def recipe_changes(kind: str) -> dict[str, Any]:
    """The changes to the default recipe. The residual network gets a width that gives it about as many weights."""
    changes: dict[str, Any] = {"model.kind": kind}
    if kind == "resnet":
        changes["model.d"] = 54
    return changes


def count_weights(kind: str) -> int:
    task = PixelsTask(PixelsTask.default_recipe.with_changes(recipe_changes(kind)))
    task.open()
    return sum(p.numel() for p in task.model().parameters() if p.requires_grad)


def measure_digits(options: argparse.Namespace) -> bool:
    """Train all kinds, and compare quadratic heads with the residual network."""
    table = make_table(
        "held-out accuracy of `pixels`, percent", "model", "mean", "spread", "each", "weights", "seconds"
    )
    means = {}
    for kind in dict.fromkeys([*options.kinds, *COMPARED]):
        scores = []
        seconds = []
        for seed in range(options.seeds if kind in COMPARED else 1):
            run = train("pixels", run_folder(options.out, kind, seed), {"seed": seed, **recipe_changes(kind)})
            assert run.best is not None
            scores.append(100 * run.best["scores"]["accuracy"])
            seconds.append(run.seconds)
        means[kind] = statistics.mean(scores)
        spread = "–"
        if len(scores) > 1:
            spread = f"{statistics.stdev(scores):.2f}"
        each = " ".join(f"{score:.2f}" for score in scores)
        row = [kind, f"{means[kind]:.2f}", spread, each, f"{count_weights(kind):,}", f"{statistics.mean(seconds):.0f}"]
        table.add_row(*row)
    show(table)

    covered = max(show_offsets(options.out, "quadratic", seed) for seed in range(options.seeds))
    gap = means["resnet"] - means["quadratic"]
    show(f"attention is {gap:+.2f} points behind convolutions (target: at most {MAX_ACCURACY_GAP})")
    show(f"the best layer covers {covered} of 9 offsets (target: at least {MIN_COVERED})")
    return gap <= MAX_ACCURACY_GAP and covered >= MIN_COVERED


def show_offsets(out: Path, kind: str, seed: int) -> int:
    """Print and draw the offsets of one run. Returns the largest number of offsets that a layer covers at the end."""
    folder = run_folder(out, kind, seed)
    heads = evolution(folder)
    covered = head_offsets(heads).count_covered()
    show(f"{kind}, seed {seed}: offsets of 9 that each layer covers, before {covered[0]}, after {covered[-1]}")
    plots.save(plot_offsets(heads), folder / "centres.png")
    return max(covered[-1])


def measure_replacement(options: argparse.Namespace) -> bool:
    """Replace the heads that are nearly convolutions, in each run with quadratic heads."""
    columns = ("seed", "replaced", "accuracy", "points", "ms before", "ms after", "faster", "logits differ")
    table = make_table(f"heads of fit ≥ 0.9 replaced by 7 × 7 convolutions, {SIDE} × {SIDE} pixels", *columns)
    met = True
    for seed in range(options.seeds):
        result = replace_in_run(run_folder(options.out, "quadratic", seed), 0.9, side=SIDE)
        before, after = result.accuracy
        replaced, heads = result.replacement.heads
        points = 100 * (after - before)
        table.add_row(
            str(seed),
            f"{replaced} of {heads}",
            f"{100 * before:.2f} → {100 * after:.2f}",
            f"{points:+.2f}",
            f"{1e3 * result.larger.before:.0f}",
            f"{1e3 * result.larger.after:.0f}",
            f"{result.larger.speedup:.1f} ×",
            f"{100 * result.larger.relative:.2g}%",
        )
        met &= abs(points) <= MAX_ACCURACY_CHANGE and result.larger.speedup > 1 and replaced > 0
    show(table)
    return met


def measure_alpha(options: argparse.Namespace) -> bool:
    """The error of soft heads must stay below its bound at every α."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 3, padding=1).double()
    x = torch.randn(2, 4, 12, 12).double()
    title = "largest error of a soft 3 × 3 convolution, relative to the largest output"
    table = make_table(title, "α", "error", "bound", "error / previous error")
    met = True
    previous_error: float | None = None
    for alpha in (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0):
        result = verify(conv, to_attention(conv, alpha=alpha), x)
        ratio = ""
        if previous_error is not None:
            ratio = f"{result.outputs / previous_error:.2e}"
        table.add_row(f"{alpha:g}", f"{result.outputs:.2e}", f"{result.bound:.2e}", ratio)
        met &= result.outputs <= result.bound
        previous_error = result.outputs
    show(table)
    return met


def measure_stride(options: argparse.Namespace) -> bool:
    """The FLOPs of both forms must be in the same ratio as their numbers of queries."""
    title = "FLOPs of score and value products, 3 × 3, 16 → 32 channels, 33 × 31 pixels"
    table = make_table(title, "stride", "queries", "of", "direct", "dense", "dense / direct")
    met = True
    for stride in (1, 2, 3, (2, 1), (4, 3)):
        conv = nn.Conv2d(16, 32, 3, stride=stride, padding=1)
        x = torch.randn(1, 16, 33, 31)
        flops = {}
        queries = {}
        for direct in (True, False):
            layer = to_attention(conv, direct=direct)
            flops[direct] = count_products(layer, x)
            queries[direct] = layer._tokens(x)[1].shape[1]
        cells = (f"{queries[True]}", f"{queries[False]}", f"{flops[True]:,}", f"{flops[False]:,}")
        table.add_row(str(stride), *cells, f"{flops[False] / flops[True]:.4f}")
        met &= flops[True] * queries[False] == flops[False] * queries[True]
    show(table)
    return met


def count_products(layer: nn.Module, x: Tensor) -> int:
    """The FLOPs of the operator in one call of the layer, by torch's counter with our formulas registered."""
    register_flop_formulas()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    return int(counter.get_flop_counts()["Global"][torch.ops.regard.attention])


def measure_shared_weights(options: argparse.Namespace) -> bool:
    """Computing the weights that a batch shares once must be faster than computing them for each entry."""
    title = "attention at scale 0 with a Quadratic of 9 heads on 8 × 8 cells, values of width 12"
    table = make_table(title, "batch", "", "one by one (ms)", "shared (ms)", "ratio")
    widest = zero_scale.MAX_WIDTH
    met = True
    for batch, backward in ((16, False), (64, False), (64, True)):
        bias = regard.Quadratic(8, 8, heads=9)
        q = torch.zeros(batch, 9, 64, 1)
        v = torch.randn(batch, 9, 64, 12, requires_grad=backward)
        times = {1: math.inf, widest: math.inf}
        results = []
        for _ in range(20):
            # A largest width of 1 turns the sharing off.
            for width in times:
                zero_scale.MAX_WIDTH = width
                start = time.perf_counter()
                y = regard.attention(q, q, v, bias=bias, scale=0.0)
                if backward:
                    y.sum().backward()
                times[width] = min(times[width], time.perf_counter() - start)
                results.append(y.detach())
        assert all(torch.allclose(y, results[0], atol=1e-6) for y in results)
        label = "forward + backward" if backward else "forward"
        ratio = times[1] / times[widest]
        table.add_row(str(batch), label, f"{1e3 * times[1]:.2f}", f"{1e3 * times[widest]:.2f}", f"{ratio:.2f}")
        met &= ratio > 1
    show(table)
    return met


PARTS = {
    "digits": measure_digits,
    "replace": measure_replacement,
    "alpha": measure_alpha,
    "stride": measure_stride,
    "shared": measure_shared_weights,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of models that digits trains")
    options = parser.parse_args()
    run_parts(PARTS, options.parts, options)


if __name__ == "__main__":
    main()
