"""The command line: one command a file. Bad input is one line on standard error and exit code 2."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import typer

from regard.cli import describe, generate

__all__ = ["app", "main"]

# What typer raises for a call that it cannot read; it gives no name to it, and prints it over several lines.
UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="regard",
    help="Attention you can compute, count, prove and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("describe")(describe.describe)
app.command("generate")(generate.generate)


@app.callback()
def _all() -> None:
    """Attention you can compute, count, prove and see."""


def main() -> None:
    """Run the command line; what a caller did wrong ends in one line, not in a traceback."""
    warnings.showwarning = lambda message, *_, **__: print(f"regard: {message}", file=sys.stderr)
    try:
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        _refused(error.format_message())
    except (ValueError, TypeError, OSError) as error:
        _refused(str(error))
    except typer.Abort:
        sys.exit(130)


def _refused(why: str) -> None:
    if why:  # there is none after help that nobody asked for
        print(f"regard: {' '.join(why.split())}", file=sys.stderr)
    sys.exit(2)
