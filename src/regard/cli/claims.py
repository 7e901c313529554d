"""``regard claims``: every claim of the theory, executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from regard import plots
from regard.claims import Result, ledger, run
from regard.claims.claim import FAILS, HOLDS, HOLDS_IF, UNDECIDED
from regard.claims.ledger import PARTS
from regard.files import renamed

MARKS = {HOLDS: ("✓", "green"), HOLDS_IF: ("◐", "yellow"), FAILS: ("✗", "red"), UNDECIDED: ("?", "magenta")}


def claims(
    only: Annotated[
        list[str] | None, typer.Option(help="run these claims: --only ID,ID or several times --only ID")
    ] = None,
    source: Annotated[str | None, typer.Option(help="run the claims of one document: 000 … 004")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="claims about training with real runs, three seeds each")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    report: Annotated[Path | None, typer.Option(help="write a page: statements, figures, numbers, code")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write a table and the corrections")] = None,
) -> None:
    """Run the claims of the theory; exits with 1 where a verdict is not the recorded one.

    regard claims --source 002
    regard claims --only hard-limit,strided --json
    regard claims --report claims.html
    """
    if report is not None:
        plots.part("")  # it draws: what is missing is said now, not after minutes
    chosen = ledger([name.strip() for given in only or () for name in given.split(",")], source)
    console = Console(highlight=False, markup=False, stderr=as_json)  # JSON has standard output for itself
    columns = (TextColumn("{task.completed} of {task.total}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(chosen[0].id, total=len(chosen))

        def told(result: Result) -> None:
            at = chosen.index(result.claim)
            progress.update(bar, advance=1, description=chosen[at + 1].id if at + 1 < len(chosen) else "")
            if not as_json:
                new = at == 0 or _part(chosen[at - 1].id) != _part(result.claim.id)
                for line in [*_heading(result.claim.id, first=at == 0)] * new + _lines(result, console.width):
                    console.print(line)

        results = run(chosen, full=full, told=told)
    if as_json:
        typer.echo(json.dumps([one.to_dict() for one in results], ensure_ascii=False, allow_nan=False, indent=1))
    else:
        console.print()
        console.print(_summary(results))
    _write(results, report, markdown)
    if not all(one.as_recorded for one in results):
        raise typer.Exit(1)


def _part(name: str) -> str:
    return next(part for part, names in PARTS.items() if name in names)


def _heading(name: str, *, first: bool) -> list[Text]:
    """The name of the ledger's part, after an empty line unless it is the first."""
    return [*([] if first else [Text()]), Text(_part(name), style="bold")]


def _lines(result: Result, width: int) -> list[Text]:
    """The claim with its verdict, and the evidence below it."""
    mark, colour = MARKS[result.verdict]
    first = Text(f"{mark} ", style=colour)
    first.append(f"{result.claim.id:<42}", style="default")
    first.append(f"{result.verdict:<18}", style=colour)
    first.append(f"{result.seconds:5.1f} s", style="dim")
    said = Text(f"  {result.line}", style="dim")
    if not result.missing:  # what to install is said in full
        said.truncate(width, overflow="ellipsis")
    other = Text(f"  recorded: {result.claim.verdict}", style="bold red")
    return [first, *([] if result.as_recorded else [other]), *([said] if result.line else [])]


def _summary(results: list[Result]) -> str:
    counts = [f"{verdict} {sum(one.verdict == verdict for one in results)}" for verdict in (HOLDS, HOLDS_IF, FAILS)]
    other = sum(not one.as_recorded for one in results)
    seconds = sum(one.seconds for one in results)
    return f"claims: {len(results)}; {', '.join(counts)}; not as recorded {other}; {seconds:.0f} s"


def _write(results: list[Result], report: Path | None, markdown: Path | None) -> None:
    if report is not None:
        from regard.claims.report import report as page

        with renamed(report) as temporary:
            temporary.write_text(page(results), encoding="utf-8")
    if markdown is not None:
        from regard.claims.markdown import markdown as text

        with renamed(markdown) as temporary:
            temporary.write_text(text(results), encoding="utf-8")
