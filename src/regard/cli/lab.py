"""``regard lab``: the workbench in a browser."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from regard import models
from regard.watching import table

if TYPE_CHECKING:
    from regard.lab.lab import Lab


def lab(
    given: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[MODEL|RECORDING|RUN]…",
            help="what to open: models' folders, what regard look --out wrote, runs of regard train; the bundled model "
            "and its run unless given",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="listen here; other machines than this one need the printed token")] = (
        "127.0.0.1"
    ),
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="8421, or the next free one, unless given")] = None,
    state: Annotated[
        Path | None, typer.Option(help="where the lab keeps its recordings; ~/.local/state/regard/lab unless given")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="print the address, open nothing")] = False,
    only_check: Annotated[bool, typer.Option("--check", help="start, ask itself for one thing of each kind, end")] = (
        False
    ),
) -> None:
    """See, count, prove and change attention in a browser. Ctrl-C ends it.

    regard lab smollm2 runs/pixels
    """
    # Here, and not above: every other command would wait for the server's libraries.
    from regard.lab.lab import default_state
    from regard.lab.serve import serve

    folders = given or [models.bundled()]
    if only_check:
        with TemporaryDirectory() as scratch:  # a lab that runs meanwhile is left alone
            _check(_opened(folders, state or Path(scratch)), host, port)
        return
    shown = sys.stdout.isatty() and not os.environ.get("SSH_CONNECTION") and not no_browser
    opened = _opened(folders, state or default_state())
    try:
        serve(opened, host=host, port=port, browser=shown)
    except KeyboardInterrupt:
        typer.echo("")
    finally:
        opened.close()


def _opened(folders: list[Path], state: Path) -> Lab:
    """A lab with these folders open, its first heads in the terminal, and a process that waits for work."""
    from regard.lab.first import first_look
    from regard.lab.lab import Lab

    lab = Lab(state)
    seen = first_look(lab, [lab.open(folder) for folder in folders])
    if seen is not None:
        Console().print(table.as_table(seen.heads(), "peak", 12))
    lab.jobs.warm("look")
    return lab


def _check(lab: Lab, host: str, port: int | None) -> None:
    from regard.lab.serve import check, serving

    with serving(lab, host=host, port=port) as (address, _):
        for line in check(address):
            typer.echo(line)
    typer.echo("the lab answers")
