"""``regard bench``: attention, watching and models raced against what people use."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from regard.bench import Case, Measured, Missing, cases, run
from regard.bench.page import milliseconds
from regard.bench.page import page as page_of
from regard.bench.race import OURS, LeftOut
from regard.bench.results import Results, read
from regard.files import renamed
from regard.shapes import number

WIDTH = 42  # of a case's name
NOISY = 0.25  # how far the median may lie above the best before a line says so


def bench(
    words: Annotated[list[str] | None, typer.Argument(help="operator, watching, models, or parts of names")] = None,
    seconds: Annotated[float, typer.Option(help="how long to race each case; three rounds at least")] = 3.0,
    list_: Annotated[bool, typer.Option("--list", help="print the names of cases, race none")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    out: Annotated[
        Path | None, typer.Option(help="a file that keeps figures: a case that is in it is not raced again")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="write all figures as a page of Markdown")] = None,
) -> None:
    """Race attention, watching and whole models against what people use: about 6 minutes for everything.

    regard bench
    regard bench operator --out mine.json
    regard bench causal decoding --seconds 1

    A ratio is the other's time over ours.
    All calls get the same inputs, are compared first, and run in turns.
    A run with --out that was stopped goes on where it was.
    """
    seconds = number("--seconds", seconds, least=0)
    chosen = cases(words or ())
    if list_:
        if as_json or out is not None or page is not None:
            raise ValueError("--list races nothing, so that there is nothing for --json, --out or --page")
        for case in chosen:
            typer.echo(f"{case.group:<10}{case.name}")
        return
    for file in (out, page):
        _writable(file)
    results = _begun(out)
    failed = _race(chosen, results, seconds, out, Console(highlight=False, markup=False, stderr=as_json))
    if as_json:
        typer.echo(json.dumps(results.ordered(chosen).to_dict(), ensure_ascii=False, indent=1))
    if page is not None:
        with renamed(page) as draft:
            draft.write_text(page_of(results.ordered(cases())), encoding="utf-8")
    if failed:
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        typer.echo(f"regard: {' '.join(failed[0].split())[:1000]}{others}", err=True)
        raise typer.Exit(1)


def _race(chosen: list[Case], results: Results, seconds: float, out: Path | None, console: Console) -> list[str]:
    """Run what is not in the results yet, tell of each case, keep it; what failed is returned, in a line each."""
    console.print(Text(_conditions(results), style="dim"))
    if kept := sum(results.get(case) is not None for case in chosen):
        console.print(Text(f"{kept} of {len(chosen)} cases are in {out} and are not raced again", style="dim"))
    failed, group = [], ""
    for case in chosen:
        if case.group != group:
            group = case.group
            console.print(Text(f"\n{group}", style="bold"))
        try:
            measured = results.get(case) or _run(case, seconds, console)
        except Missing as error:
            console.print(_line(case, f"left out: {error}"))
            continue
        except RuntimeError as error:
            said = str(error)  # that results differ; or what torch says, where memory is missing
            failed.append(said if said.startswith(case.name) else f"{case.name}: {said}")
            console.print(_line(case, "failed", "red"))
            continue
        console.print(_figures(case, measured, console.width))
        if case.wanted is not None and str(results.conditions["kernel"]) == "avx512bf16":
            console.print(Text(f"    wanted: {next(iter(measured.ratios))} {case.wanted} ×", style="dim"))
        results.add(measured)
        if out is not None:
            results.save(out)
    return failed


def _writable(file: Path | None) -> None:
    """Say before minutes of racing, not after them, that figures cannot be written there."""
    if file is not None and file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; give the name of a file")
    if file is not None and not os.access(file.parent, os.W_OK):
        why = "may not be written to" if file.parent.is_dir() else "is no folder"
        raise OSError(f"{file} cannot be written: {file.parent} {why}")


def _begun(file: Path | None) -> Results:
    """New results, or those in the file, if they were measured under today's conditions."""
    fresh = Results()
    if file is None or not file.exists():
        return fresh
    known = read(file)
    changed = [name for name in fresh.conditions if known.conditions.get(name) != fresh.conditions[name]]
    if changed:
        name = changed[0]
        raise ValueError(
            f"{file} was measured with {name} {known.conditions.get(name)}, here it is {fresh.conditions[name]}: "
            "figures of two conditions do not go together; give another name, or remove it"
        )
    return known


def _conditions(results: Results) -> str:
    return " · ".join(f"{name} {value}" for name, value in results.conditions.items() if value != "not installed")


def _run(case: Case, seconds: float, console: Console) -> Measured:
    with console.status(case.name), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")  # what compilers and other libraries say of themselves
        warnings.simplefilter("always", LeftOut)
        measured = run(case, seconds)
    for one in said:
        console.print(_line(case, str(one.message)))
    return measured


def _line(case: Case, said: str, style: str = "dim") -> Text:
    return Text(f"  {case.name:<{WIDTH}}").append(said, style=style)


def _figures(case: Case, measured: Measured, width: int) -> Text:
    """Our time, then how many times as long the others take, green where that is longer; below it what is too long."""
    line = Text(f"  {case.name:<{WIDTH}}{milliseconds(measured.best[OURS]):>8} ms")
    if measured.spread > NOISY:
        line.append(f"  noisy: median +{measured.spread:.0%}", style="yellow")
    for name, ratio in measured.ratios.items():
        other = Text(f"  {name} ", style="dim").append(f"{ratio:.2f} ×", style="green" if ratio > 1 else "yellow")
        if len(line.plain.splitlines()[-1]) + len(other) > width:
            line.append("\n  ")
        line.append(other)
    if measured.bytes:
        sizes = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in measured.bytes.items())
        line.append(f"\n    {sizes}", style="dim")
    return line
