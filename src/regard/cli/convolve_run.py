"""``regard convolve --run``: heads of a trained model of pictures, and what becomes of it without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from regard import plots
from regard.convolution.of_run import ReplacedRun, replace_in_run
from regard.terminal import plain_table

__all__ = ["convolve_run"]


def convolve_run(run: Path, threshold: float, radius: int, side: int, plot: Path | None, as_json: bool) -> None:
    """Replace heads of a run, and print, draw and time what came out."""
    done = replace_in_run(run, threshold, radius=radius, side=side)
    rows = _rows(done)
    if plot is not None:
        plots.save(_figure(done), plot)
    if as_json:
        seen = {"small": done.replaced.comparison, "larger": done.larger}
        told: dict[str, Any] = {name: {**vars(x), "speedup": x.speedup} for name, x in seen.items()}
        before, after = done.accuracy
        told["accuracy"] = {"before": before, "after": after, "pictures": done.pictures}
        typer.echo(json.dumps({"heads": rows, "side": done.side, **told}, ensure_ascii=False))
        return
    _print(done, rows, threshold, radius)


def _rows(done: ReplacedRun) -> list[dict[str, Any]]:
    gone = {(path, one.head) for path, heads in done.replaced.swapped.items() for one in heads}
    return [
        {
            **{"layer": layer, "head": one.head, "centre": list(one.centre), "width": one.width, "fit": one.fit},
            **{"uniform": one.uniform, "off": one.off, "replaced": (path, one.head) in gone},
        }
        for layer, (path, heads) in enumerate(done.replaced.found.items())
        for one in heads
    ]


def _print(done: ReplacedRun, rows: list[dict[str, Any]], threshold: float, radius: int) -> None:
    say = Console(highlight=False, markup=False, soft_wrap=True).print
    table = plain_table()
    for column in ("layer.head", "centre", "width", "fit", "if uniform", "replaced"):
        table.add_column(column, justify="right")
    for row in rows:
        centre = ", ".join(f"{x:+.2f}" for x in row["centre"])
        numbers = (f"{row[name]:.{digits}f}" for name, digits in (("width", 2), ("fit", 4), ("uniform", 4)))
        table.add_row(f"{row['layer']}.{row['head']}", centre, *numbers, "yes" if row["replaced"] else "")
    Console(highlight=False, markup=False).print(table)
    many, of = done.replaced.heads
    taps = f"{2 * radius + 1} × {2 * radius + 1} taps"
    say(f"{many} of {of} heads have a fit of {threshold:g} or more with {taps}, and became convolutions")
    before, after = done.accuracy
    say(
        f"accuracy on {done.pictures} held-out pictures: {before:.4f} before, {after:.4f} after "
        f"({100 * (after - before):+.2f} points)"
    )
    seen = done.larger
    say(
        f"{done.side} × {done.side} pixels: {seen.before * 1e3:.1f} ms before, {seen.after * 1e3:.1f} ms after, "
        f"{seen.speedup:.1f} times as fast; logits differ by {100 * seen.relative:.2g}% of their size"
    )


def _figure(done: ReplacedRun) -> Any:
    """Every head's kernel, a row a layer, with its fit."""
    found = list(done.replaced.found.values())
    kernels = [[one.kernel.numpy() for one in heads] for heads in found]
    titles = [f"{one.fit:.3f}" for heads in found for one in heads]
    title = "the convolution nearest to each head, and its fit; the query is in the middle"
    columns = range(max(map(len, found)))
    return plots.grid(
        kernels,
        titles,
        row_labels=range(len(found)),
        column_labels=columns,
        x_label="head",
        y_label="layer",
        title=title,
    )
