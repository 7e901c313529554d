"""``regard zoo``: check ``regard.watch`` on every architecture of the installed ``transformers``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from regard._checks import check_integer, check_number
from regard._errors import RegardError
from regard._files import write_text
from regard._terminal import printable
from regard.cli.output_file import check_writable, path_option
from regard.zoo import (
    Architecture,
    Limits,
    Result,
    current_versions,
    list_architectures,
    read_results,
    results_page,
    run_checks,
)

MOST_SECONDS = 3600
MOST_MEMORY = 2**20  # MiB
STYLES = {
    "exact": "green",
    "no attention": "dim",
    "other attention": "dim",
    "not built": "dim",
    "differs": "red",
    "error": "red",
}


def zoo_command(
    names: Annotated[list[str] | None, typer.Argument(help="architectures, e.g. gpt2; all by default")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=path_option,
            metavar="FILE",
            help="save the results in this file (.zoo.jsonl); architectures that are in it are not checked again",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="write all results as a Markdown page")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="check also what has a result")] = False,
    seconds: Annotated[float, typer.Option(help="time limit per architecture")] = 60.0,
    memory: Annotated[int, typer.Option(help="memory limit per architecture, in MiB")] = 6144,
    jobs: Annotated[int, typer.Option(help="how many architectures are checked at the same time")] = 1,
) -> None:
    """Check regard.watch on every architecture of transformers, tiny and random, against eager attention.

    regard zoo gpt2 bert
    regard zoo --write docs/models-supported.md

    It is for contributors. An interrupted run continues where it stopped. The exit code is 1 if a result differs, or
    an architecture ended with an error.
    """
    seconds = check_number("--seconds", seconds, least=1)
    if seconds > MOST_SECONDS:
        raise RegardError(f"--seconds must be at most {MOST_SECONDS}, got {seconds:g}")
    limits = Limits(seconds, check_integer("--memory", memory, least=512, most=MOST_MEMORY))
    jobs = check_integer("--jobs", jobs, least=1, most=256)
    try:
        versions = current_versions()
    except ImportError:
        raise RegardError("regard zoo needs transformers, which is not installed") from None
    chosen = _choose(names or [])
    # A default would be read as text from the command line.
    if out is None:
        out = Path(".zoo.jsonl")
    for file in (out, write):
        if file is not None:
            check_writable(file)

    results = {}
    for name, result in read_results(out).items():
        # Results of other versions say nothing about these.
        if result.versions == versions:
            results[name] = result
    todo = [architecture for architecture in chosen if again or architecture.name not in results]
    console = Console(highlight=False, markup=False)
    if len(todo) < len(chosen):
        known = len(chosen) - len(todo)
        console.print(Text(f"{known} of {len(chosen)} architectures are in {out} and are not checked again", "dim"))
    for number, result in enumerate(run_checks(todo, out, limits=limits, jobs=jobs), 1):
        results[result.name] = result
        console.print(_line(result, number, len(todo)), soft_wrap=True)

    wanted = [results[architecture.name] for architecture in chosen]
    counts = Counter(result.outcome for result in wanted)
    console.print(" · ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    if write is not None:
        write_text(results_page(results.values()), write)
    if counts["differs"] or counts["error"]:
        raise typer.Exit(1)


def _choose(names: list[str]) -> list[Architecture]:
    known = list_architectures()
    if not names:
        return list(known.values())
    for name in names:
        if name not in known:
            raise RegardError(f"architecture must be one of the {len(known)} of transformers, e.g. gpt2, got {name!r}")
    return [known[name] for name in names]


def _line(result: Result, number: int, total: int) -> Text:
    text = Text(f"{number:>4}/{total} {result.name:<32}")
    text.append(f"{result.outcome:<16}", STYLES.get(result.outcome, "yellow"))
    text.append(printable(result.reason))
    return text
