"""All commands, and what becomes of errors."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer

from regard.cli import bench, budget, claims, convolve, describe, doctor, generate, lab, look, train
from regard.version import __version__

__all__ = ["app", "run"]

# What typer raises for a call that it cannot read; it gives no name to it, and prints it over several lines.
UsageError: Any = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="regard",
    help="Attention you can compute, count, prove and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("bench")(bench.bench)
app.command("budget")(budget.budget)
app.command("claims")(claims.claims)
app.command("convolve")(convolve.convolve)
app.command("describe")(describe.describe)
app.command("doctor")(doctor.doctor)
app.command("generate")(generate.generate)
app.command("lab")(lab.lab)
app.command("look")(look.look)
app.command("train")(train.train)


@app.callback(invoke_without_command=True)
def _all(show: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Attention you can compute, count, prove and see."""
    if show:
        typer.echo(f"regard {__version__}")
        raise typer.Exit


def run() -> int:
    """Run the command that was asked for, and return its exit code."""
    warnings.showwarning = lambda message, *_, **__: print(f"regard: {message}", file=sys.stderr)
    try:
        return app(standalone_mode=False) or 0
    except UsageError as error:
        return _refused(f"{error.format_message()}{_hint(error)}")
    except (ValueError, TypeError, OSError, MemoryError, RuntimeError, ImportError) as error:
        return _refused(str(error) or type(error).__name__)
    except typer.Abort:
        return 130


def _hint(error: Any) -> str:
    """Where what would be right is written, if the message does not say it."""
    said, context = error.format_message(), getattr(error, "ctx", None)
    if not said or context is None or "--help" in said:
        return ""
    return f" ({context.command_path} --help)"


def _refused(why: str) -> int:
    if why:  # there is none after help that nobody asked for
        print(f"regard: {' '.join(why.split())[:1000]}", file=sys.stderr)
    return 2
