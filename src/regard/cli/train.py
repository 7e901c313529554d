"""``regard train TASK``: train a small transformer, and record how its heads change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.end_signals import exit_at_interrupt
from regard.cli.output_file import path_option


def train_command(
    task: Annotated[str, typer.Argument(help="text, dates, agreement, digits, pixels or repeats")],
    out: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FOLDER", help="folder of the run; default runs/TASK")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(parser=path_option, metavar="FILE", help="a TOML file with changes of the task's recipe"),
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="name=value, for example steps=200 or model.layers=2")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="with torchrun: how many seconds a process waits for another one")
    ] = 40.0,
    recipe: Annotated[bool, typer.Option("--recipe", help="print the recipe, do not train")] = False,
) -> None:
    """Train a task into a folder, or continue the run in it. Ctrl-C saves and stops.

    regard train dates

    regard train text --set data.path=stories/ --set steps=500 --out runs/stories

    torchrun --nproc-per-node 2 -m regard train text --set parallel=fsdp
    """
    # Here, not at the top: distributed training takes a second to import, which no other command should pay.
    with exit_at_interrupt():
        from regard.cli.train_progress import run_training

    run_training(task, out, config, changes or [], recipe, timeout)
