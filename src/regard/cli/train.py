"""``regard train TASK``: train a small transformer, and watch its heads evolve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    task: Annotated[str, typer.Argument(help="text, dates, agreement, digits, pixels or repeats")],
    out: Annotated[Path | None, typer.Option(help="the run's folder; runs/TASK unless given")] = None,
    config: Annotated[Path | None, typer.Option(help="a TOML file with what differs from the task's recipe")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="name=value, e.g. steps=200 or model.layers=2")
    ] = None,
    recipe: Annotated[bool, typer.Option("--recipe", help="print the recipe, and train nothing")] = False,
) -> None:
    """Train a task into a folder, or go on with the run that is there. Ctrl-C saves and stops.

    regard train dates

    regard train text --set data.path=stories/ --set steps=500 --out runs/stories

    torchrun --nproc-per-node 2 -m regard train text --set parallel=fsdp
    """
    # Here, not at the top: what several processes need takes a second to import, which no other command should pay.
    from regard.cli.train_screen import run

    run(task, out, config, changes or [], recipe)
