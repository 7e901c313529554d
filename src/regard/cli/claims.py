"""``regard claims``: run the claims of the theory, and print their verdicts."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from regard import plots
from regard._errors import RegardError
from regard._files import write_text
from regard.claims import Result, list_claims, run_claims
from regard.claims._claim import FALSE_AS_STATED, HOLDS, HOLDS_CONDITIONALLY, UNDECIDED
from regard.claims._documents import DOCUMENTS
from regard.claims._registry import TOPICS
from regard.cli.output_file import check_writable, path_option

MARKS = {
    HOLDS: ("✓", "green"),
    HOLDS_CONDITIONALLY: ("◐", "yellow"),
    FALSE_AS_STATED: ("✗", "red"),
    UNDECIDED: ("?", "magenta"),
}


def claims_command(
    only: Annotated[
        list[str] | None, typer.Option(help="ids of claims to run: --only ID,ID or several --only ID")
    ] = None,
    source: Annotated[str | None, typer.Option(help=f"run the claims of one document: {', '.join(DOCUMENTS)}")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="check claims about training with real runs, three seeds each")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    report: Annotated[
        Path | None,
        typer.Option(parser=path_option, metavar="FILE", help="write an HTML page: statements, figures, numbers, code"),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(parser=path_option, metavar="FILE", help="write a Markdown page: a table and corrections"),
    ] = None,
) -> None:
    """Run the claims of the theory; the exit code is 1 if a verdict differs from the recorded one.

    regard claims --source homework-3
    regard claims --only hard-limit,strided --json
    regard claims --report claims.html
    """
    if report is not None:
        # The report has figures: report a missing matplotlib now, not after minutes.
        plots.import_matplotlib("")
    for file in (report, markdown):
        if file is not None:
            check_writable(file)
    ids: list[str] = []
    for text in only or ():
        if not text.strip():
            raise RegardError("--only must be ids of claims, for example hard-limit,strided, got an empty text")
        ids += [name.strip() for name in text.split(",")]
    chosen = list_claims(ids, source)  # all claims if neither is given

    # With --json nothing but JSON goes to standard output.
    console = Console(highlight=False, markup=False, stderr=as_json)
    columns = (TextColumn("{task.completed} of {task.total}"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(chosen[0].id, total=len(chosen))

        def print_result(result: Result) -> None:
            index = chosen.index(result.claim)
            # The bar names the claim that runs now: the one after this result.
            if index + 1 < len(chosen):
                progress.update(bar, description=chosen[index + 1].id)
            progress.update(bar, advance=1)
            if as_json:
                return
            # A heading before the first claim of each topic.
            topic = _topic(result.claim.id)
            if index == 0 or _topic(chosen[index - 1].id) != topic:
                if index > 0:
                    console.print()
                console.print(Text(topic, style="bold"))
            for line in _result_lines(result, console.width):
                console.print(line)

        results = run_claims(chosen, full=full, on_result=print_result)

    if as_json:
        entries = [result.to_dict() for result in results]
        typer.echo(json.dumps(entries, ensure_ascii=False, allow_nan=False, indent=1))
    else:
        console.print()
        console.print(_summary(results))
    _write_files(results, report, markdown)
    if not all(result.as_recorded for result in results):
        raise typer.Exit(1)


def _topic(claim_id: str) -> str:
    return next(topic for topic, ids in TOPICS.items() if claim_id in ids)


def _result_lines(result: Result, width: int) -> list[Text]:
    """The claim with its verdict, its title, what holds if the claim does not, and the evidence."""
    mark, colour = MARKS[result.verdict]
    first = Text(f"{mark} ", style=colour)
    first.append(f"{result.claim.id:<42}", style="default")
    first.append(f"{result.verdict:<20}", style=colour)
    first.append(f"{result.seconds:5.1f} s", style="dim")
    lines = [first]
    if not result.as_recorded:
        lines.append(Text(f"  recorded: {result.claim.verdict}", style="bold red"))
    lines += _wrapped(result.claim.heading, width)
    if result.claim.what_holds:
        lines += _wrapped(f"What holds: {result.claim.what_holds}", width, style=MARKS[HOLDS][1])
    if result.summary:
        evidence = Text(f"  {result.summary}", style="dim")
        # The name of a missing package is shown in full.
        if not result.missing:
            evidence.truncate(width, overflow="ellipsis")
        lines.append(evidence)
    return lines


def _wrapped(text: str, width: int, style: str = "default") -> list[Text]:
    """A text in lines that fit the terminal, all of them indented."""
    lines = textwrap.wrap(text, max(20, width), initial_indent="  ", subsequent_indent="  ")
    return [Text(line, style=style) for line in lines]


def _summary(results: list[Result]) -> str:
    counts = Counter(result.verdict for result in results)
    verdicts = ", ".join(f"{verdict} {counts[verdict]}" for verdict in (HOLDS, HOLDS_CONDITIONALLY, FALSE_AS_STATED))
    differing = 0
    seconds = 0.0
    for result in results:
        differing += not result.as_recorded
        seconds += result.seconds
    return f"claims: {len(results)}; {verdicts}; not as recorded {differing}; {seconds:.0f} s"


def _write_files(results: list[Result], report: Path | None, markdown: Path | None) -> None:
    # Imported here: only these options need the modules.
    if report is not None:
        from regard.claims._html_report import html_report

        write_text(html_report(results), report)
    if markdown is not None:
        from regard.claims._markdown import markdown_report

        write_text(markdown_report(results), markdown)
