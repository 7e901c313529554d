"""Check a file that a command will write, before the work and not minutes later."""

from __future__ import annotations

from pathlib import Path

import typer

from regard._files import check_output_file
from regard.plots._drawing import figure_format


def check_writable(file: Path) -> None:
    """Raise an error for a file that cannot be written."""
    check_output_file(file)


def check_figure_file(file: Path) -> None:
    """Raise an error for a figure that cannot be written, or whose format is not known."""
    figure_format(file)
    check_output_file(file)


def path_option(name: str) -> Path:
    """A file or folder on the command line. The empty name would be the current folder."""
    if not name.strip():
        raise typer.BadParameter(f"must be the name of a file or folder, got {name!r}")
    return Path(name)
