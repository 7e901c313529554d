"""Attention in a convolution's place: how it learns beside convolutions, where its heads go, what replaces them.

    python benchmarks/convolution.py [PART …] [--out runs] [--seeds 3] [--kinds quadratic resnet]

``digits``: trains `pixels` into ``--out/pixels-KIND-SEED`` (a run that has ended is not repeated), quadratic heads and
the residual network with several seeds, the other kinds with one; then prints accuracies and offsets before and after,
and draws them (``centres.png`` in each folder). ``replace``: of those runs with quadratic heads, heads replaced by
convolutions: accuracy before and after, and time at 64 × 64 pixels.
``alpha``: the error of soft heads against α, beside its bound. ``stride``: products counted, direct and dense.
``shared``: what it saves that a batch of pictures shares its weights. All unless named; ends with an error where a bar
that the project set itself is missed.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import plots
from regard.budget.flops_of_ops import register
from regard.convolution import to_attention
from regard.convolution.of_run import replace_in_run
from regard.convolution.verify import verify
from regard.kernels import same_weights
from regard.terminal import plain_table
from regard.training import evolution, train
from regard.training.offset_figures import centres
from regard.training.offsets import offsets
from regard.training.tasks.pixels import PixelsTask

KINDS = PixelsTask.kinds
APART, COVERED, CHANGED, SIDE = 1.5, 7, 0.5, 64  # points, offsets of 9, points, pixels
say = Console(width=100, highlight=False).print


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what digits trains; two are compared")
    given = parser.parse_args()
    say(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    missed = [name for name in given.parts or PARTS if not PARTS[name](given)]
    if missed:
        raise SystemExit(f"below the bar: {', '.join(missed)}")


def _digits(given: argparse.Namespace) -> bool:
    out, seeds = given.out, given.seeds
    table = plain_table("held-out accuracy of `pixels`, percent")
    for column in ("model", "mean", "spread", "each", "weights", "seconds"):
        table.add_column(column, justify="left" if column == "model" else "right")
    means = {}
    for kind in dict.fromkeys([*given.kinds, "quadratic", "resnet"]):
        many = seeds if kind in ("quadratic", "resnet") else 1
        runs = [train("pixels", _folder(out, kind, seed), {"seed": seed, **_sizes(kind)}) for seed in range(many)]
        scores = [100 * run.best["scores"]["accuracy"] for run in runs if run.best is not None]
        means[kind] = statistics.mean(scores)
        spread = f"{statistics.stdev(scores):.2f}" if len(scores) > 1 else "–"
        each, took = " ".join(f"{x:.2f}" for x in scores), statistics.mean(run.seconds for run in runs)
        table.add_row(kind, f"{means[kind]:.2f}", spread, each, f"{_weights(kind):,}", f"{took:.0f}")
    say(table)
    most = [_offsets(out, "quadratic", seed) for seed in range(seeds)]
    apart = means["resnet"] - means["quadratic"]
    say(f"attention is {apart:+.2f} points behind convolutions; at most {APART} are wanted")
    say(f"the best layer covers {max(most)} of 9 neighbours; at least {COVERED} are wanted")
    return apart <= APART and max(most) >= COVERED


def _sizes(kind: str) -> dict[str, Any]:
    """What differs from the recipe: the residual network is as wide as makes it about as large."""
    return {"model.kind": kind, **({"model.d": 54} if kind == "resnet" else {})}


def _weights(kind: str) -> int:
    task = PixelsTask(PixelsTask.recipe.changed(_sizes(kind)))
    task.open()
    return sum(p.numel() for p in task.model().parameters() if p.requires_grad)


def _offsets(out: Path, kind: str, seed: int) -> int:
    """The table of one run, and its figure; the most neighbours that a layer covers at the end."""
    folder = _folder(out, kind, seed)
    seen = evolution(folder)
    covered = offsets(seen).covered()
    say(f"{kind}, seed {seed}: offsets of 9 that each layer covers, before {covered[0]}, after {covered[-1]}")
    plots.save(centres(seen), folder / "centres.png")
    return max(covered[-1])


def _replace(given: argparse.Namespace) -> bool:
    table = plain_table(f"heads of fit ≥ 0.9 replaced by 7 × 7 convolutions, {SIDE} × {SIDE} pixels")
    for column in ("seed", "replaced", "accuracy", "points", "ms before", "ms after", "faster", "logits differ"):
        table.add_column(column, justify="right")
    good = True
    for seed in range(given.seeds):
        done = replace_in_run(_folder(given.out, "quadratic", seed), 0.9, side=SIDE)
        (before, after), seen, (many, of) = done.accuracy, done.larger, done.replaced.heads
        points = 100 * (after - before)
        table.add_row(
            *(str(seed), f"{many} of {of}", f"{100 * before:.2f} → {100 * after:.2f}", f"{points:+.2f}"),
            *(f"{1e3 * seen.before:.0f}", f"{1e3 * seen.after:.0f}", f"{seen.speedup:.1f} ×"),
            f"{100 * seen.relative:.2g}%",
        )
        good &= abs(points) <= CHANGED and seen.speedup > 1 and many > 0
    say(table)
    return good


def _alpha(given: argparse.Namespace) -> bool:
    torch.manual_seed(0)
    conv, x = nn.Conv2d(4, 6, 3, padding=1).double(), torch.randn(2, 4, 12, 12).double()
    table = plain_table("largest error of a soft 3 × 3 convolution, over the largest output")
    for column in ("α", "error", "bound", "error / error before"):
        table.add_column(column, justify="right")
    before, good = None, True
    for alpha in (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0):
        found = verify(conv, to_attention(conv, alpha=alpha), x)
        ratio = "" if before is None else f"{found.outputs / before:.2e}"
        table.add_row(f"{alpha:g}", f"{found.outputs:.2e}", f"{found.bound:.2e}", ratio)
        good &= found.outputs <= found.bound
        before = found.outputs
    say(table)
    return good


def _stride(given: argparse.Namespace) -> bool:
    """FLOPs of score and value products, by torch's own counter."""
    table = plain_table("FLOPs of score and value products, 3 × 3, 16 → 32 channels, 33 × 31 pixels")
    for column in ("stride", "queries", "of", "direct", "dense", "dense / direct"):
        table.add_column(column, justify="right")
    good = True
    for stride in (1, 2, 3, (2, 1), (4, 3)):
        conv = nn.Conv2d(16, 32, 3, stride=stride, padding=1)
        x = torch.randn(1, 16, 33, 31)
        direct, dense = (_products(to_attention(conv, direct=kind), x) for kind in (True, False))
        asked, every = (_queries(to_attention(conv, direct=kind), x) for kind in (True, False))
        table.add_row(str(stride), f"{asked}", f"{every}", f"{direct:,}", f"{dense:,}", f"{dense / direct:.4f}")
        good &= direct * every == dense * asked
    say(table)
    return good


def _shared(given: argparse.Namespace) -> bool:
    """Weights that a batch shares computed once, against entry by entry; both in turn, the same results."""
    table = plain_table("attention at scale 0 with a Quadratic of 9 heads on 8 × 8 cells, values of width 12")
    for column in ("batch", "", "one by one (ms)", "shared (ms)", "ratio"):
        table.add_column(column, justify="right")
    good = True
    for batch, backward in ((16, False), (64, False), (64, True)):
        near, q = regard.Quadratic(8, 8, heads=9), torch.zeros(batch, 9, 64, 1)
        v = torch.randn(batch, 9, 64, 12, requires_grad=backward)
        times = {1: math.inf, same_weights.WIDEST: math.inf}
        results = []
        for _ in range(20):
            for widest in times:
                same_weights.WIDEST = widest
                began = time.perf_counter()
                y = regard.attention(q, q, v, bias=near, scale=0.0)
                if backward:
                    y.sum().backward()
                times[widest] = min(times[widest], time.perf_counter() - began)
                results.append(y.detach())
        assert all(torch.allclose(x, results[0], atol=1e-6) for x in results)
        apart, together = times.values()
        label = "forward + backward" if backward else "forward"
        table.add_row(str(batch), label, f"{1e3 * apart:.2f}", f"{1e3 * together:.2f}", f"{apart / together:.2f}")
        good &= together < apart
    say(table)
    return good


def _queries(layer: nn.Module, x: torch.Tensor) -> int:
    return len(layer._tokens(x)[1][0])  # type: ignore[operator]


def _products(layer: nn.Module, x: torch.Tensor) -> int:
    """What torch's counter, with our formulas registered, sees of the operator in a call of the layer."""
    register()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    return int(counter.get_flop_counts()["Global"][torch.ops.regard.attention])


def _folder(out: Path, kind: str, seed: int) -> Path:
    return out / f"pixels-{kind}-{seed}"


PARTS = {"digits": _digits, "replace": _replace, "alpha": _alpha, "stride": _stride, "shared": _shared}

if __name__ == "__main__":
    main()
