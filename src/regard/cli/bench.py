"""``regard bench``: time attention, observation and whole models against other libraries."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from regard._checks import check_number
from regard._devices import find_device
from regard._errors import RegardError
from regard._files import write_text
from regard._terminal import printable, printable_json
from regard.bench import Case, Measurement, MissingPeer, cases, conditions, run
from regard.bench._race import OURS, PeerSkipped
from regard.bench._results import Results, format_milliseconds, read_results, results_page, results_report
from regard.cli.output_file import check_writable, path_option

WIDTH = 44  # width of the column of case names
NOISY = 0.25  # a case is marked if its median is this much above its best time


def bench_command(
    words: Annotated[
        list[str] | None, typer.Argument(help="operator, instructions, watching, models, or parts of names")
    ] = None,
    seconds: Annotated[float, typer.Option(help="time per case; at least three rounds are run")] = 3.0,
    list_: Annotated[bool, typer.Option("--list", help="print the names of the cases, run none")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="where the calls run: cpu, cuda, cuda:1, mps or xpu")
    ] = "cpu",
    report: Annotated[
        bool, typer.Option("--report", help="print conditions and figures as Markdown, to paste into an issue")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_option,
            metavar="FILE",
            help="save the results in this file; cases that are in it are not run again",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="write all results as a Markdown page")
    ] = None,
) -> None:
    """Time attention, observation and whole models against other libraries: about 6 minutes for all cases.

    regard bench
    regard bench operator --out mine.json
    regard bench causal decoding --seconds 1
    regard bench operator --device cuda --report

    A ratio is the other library's time divided by ours.
    All calls get the same inputs. Their results are compared first; then the calls run alternately.
    An interrupted run with --out continues where it stopped.
    """
    seconds = check_number("--seconds", seconds, least=0)
    where = find_device(device, "--device")
    chosen = cases(words or (), where)
    if report and (as_json or list_):
        raise RegardError("--report prints Markdown and cannot be combined with --json or --list")
    if list_:
        if as_json or out is not None or page is not None:
            raise RegardError("--list runs no case and cannot be combined with --json, --out or --page")
        for case in chosen:
            typer.echo(f"{case.group:<14}{case.name}")
        return
    for file in (out, page):
        if file is not None:
            check_writable(file)
    results = _load_results(out, where)
    # What is printed for people must not mix with what is printed for programs and issues.
    console = Console(highlight=False, markup=False, stderr=as_json or report)
    failures = _run_cases(chosen, results, seconds, out, console)
    if as_json:
        entries = results.ordered(chosen).to_dict()
        typer.echo(printable_json(json.dumps(entries, ensure_ascii=False, indent=1)))
    if report:
        typer.echo(printable(results_report(results.ordered(chosen)), lines=True), nl=False)
    if page is not None:
        write_text(results_page(results.ordered(cases((), where))), page)
    if failures:
        message = f"regard: {printable(' '.join(failures[0].split()))[:1000]}"  # one line, whatever torch writes
        if len(failures) > 1:
            message += f" (and {len(failures) - 1} more)"
        typer.echo(message, err=True)
        raise typer.Exit(1)


def _run_cases(chosen: list[Case], results: Results, seconds: float, out: Path | None, console: Console) -> list[str]:
    """Run the cases that have no result yet, print and save each; return one error message per failed case."""
    conditions = (f"{name} {value}" for name, value in results.conditions.items() if value != "not installed")
    console.print(Text(" · ".join(conditions), style="dim"))
    saved = sum(results.get(case) is not None for case in chosen)
    if saved:
        console.print(Text(f"{saved} of {len(chosen)} cases are in {out} and are not run again", style="dim"))

    failures = []
    group = ""
    for case in chosen:
        if case.group != group:
            group = case.group
            console.print(Text(f"\n{group}", style="bold"))
        try:
            measurement = results.get(case) or _run_case(case, seconds, console)
        except MissingPeer as error:
            console.print(_line(case, f"left out: {error}"))
            continue
        except RuntimeError as error:
            # Results differ, or torch ran out of memory. The other cases still run.
            failures.append(f"{case.name}: {str(error).removeprefix(f'{case.name}: ')}")
            console.print(_line(case, "failed", "red"))
            continue
        console.print(_figures(case, measurement, console.width))
        # Targets apply to one instruction set only.
        if case.target is not None and str(results.conditions["kernel"]) == "avx512bf16":
            console.print(Text(f"    target: {next(iter(measurement.ratios))} {case.target} ×", style="dim"))
        if case.least is not None:
            slower = measurement.slower_than(case.least)
            if slower:
                failures.append(f"{case.name}: slower than {', '.join(slower)} by more than noise")
        results.add(measurement)
        if out is not None:
            results.save(out)
    return failures


def _load_results(file: Path | None, device: torch.device) -> Results:
    """New results, or those in the file if they were measured under the same conditions."""
    new = Results() if device.type == "cpu" else Results(conditions(device))
    if file is None or not file.exists():
        return new
    saved = read_results(file)
    # A condition that only one of them has is a difference too: the figures of a GPU name the GPU.
    for name in new.conditions | saved.conditions:
        value = new.conditions.get(name)
        if saved.conditions.get(name) != value:
            raise RegardError(
                f"{file} was measured with {name} {saved.conditions.get(name)}, here it is {value}: "
                "results of two conditions cannot be combined; give another file, or remove it"
            )
    return saved


def _run_case(case: Case, seconds: float, console: Console) -> Measurement:
    with console.status(case.name), warnings.catch_warnings(record=True) as caught:
        # Warnings of compilers and other libraries are not about the case.
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", PeerSkipped)
        measurement = run(case, seconds)
    for warning in caught:
        console.print(_line(case, str(warning.message)))
    return measurement


def _line(case: Case, text: str, style: str = "dim") -> Text:
    return Text(f"  {case.name:<{WIDTH}}").append(text, style=style)


def _figures(case: Case, measurement: Measurement, width: int) -> Text:
    """Our time, then one ratio per other library, green if that library is slower; more lines if they do not fit."""
    line = Text(f"  {case.name:<{WIDTH}}{format_milliseconds(measurement.best[OURS]):>8} ms")
    if measurement.spread > NOISY:
        line.append(f"  noisy: median +{measurement.spread:.0%}", style="yellow")
    for name, ratio in measurement.ratios.items():
        style = "green" if ratio > 1 else "yellow"
        other = Text(f"  {name} ", style="dim").append(f"{ratio:.2f} ×", style=style)
        if len(line.plain.splitlines()[-1]) + len(other) > width:
            line.append("\n  ")
        line.append(other)
    if measurement.bytes:
        sizes = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in measurement.bytes.items())
        line.append(f"\n    {sizes}", style="dim")
    return line
