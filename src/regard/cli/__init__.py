"""The command line: one command a file. Bad input is one line on standard error and exit code 2."""

from __future__ import annotations

import sys
import warnings

import typer

from regard.cli import describe, generate

__all__ = ["app", "main"]

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
        app()
    except (ValueError, TypeError, OSError) as error:
        print(f"regard: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
