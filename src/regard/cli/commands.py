"""The list of all commands, and how their errors are printed."""

from __future__ import annotations

import sys
import warnings
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from regard._error_report import is_report, report_error
from regard._terminal import printable
from regard._version import __version__
from regard.cli.end_signals import exit_at_interrupt

# The error that typer raises for a command line that it cannot parse. typer does not export this class, and would
# print several lines.
UsageError: Any = typer.BadParameter.__mro__[1]
LONGEST_LINE = 2000  # characters of a line on standard error


class Interrupted(Exception):
    """Ctrl-C during a command."""


class Command(NamedTuple):
    """Where a command is, and its line in the list of ``regard --help``, which imports no command."""

    module: str  # a module of this package with the function ``<command>_command``
    summary: str  # the first sentences of that function's docstring
    is_hidden: bool = False  # whether ``regard --help`` leaves it out: it is for contributors


COMMANDS = {
    "attribute": Command(
        "attribute", "Attribute a prediction to the tokens and heads of a model, with gradients. Ctrl-C stops."
    ),
    "bench": Command(
        "bench",
        "Time attention, observation and whole models against other libraries: about 6 minutes for all cases.",
    ),
    "budget": Command("budget", "Count parameters, FLOPs, memory and time of a model, and name its bottleneck."),
    "claims": Command(
        "claims", "Run the claims of the theory; the exit code is 1 if a verdict differs from the recorded one."
    ),
    "convolve": Command(
        "convolve",
        "Write a convolution as attention: which head is which tap, whether both agree, how long both take.",
    ),
    "describe": Command("describe_generate", "Print layers, heads, dimensions and parameters of a model."),
    "doctor": Command(
        "doctor",
        "Describe this machine and run a self-test against float64; the exit code is 1 if something is wrong.",
    ),
    "generate": Command("describe_generate", "Continue a prompt, token by token. Ctrl-C stops."),
    "lab": Command("lab", "Inspect, count, prove and change attention in a browser. Ctrl-C ends it."),
    "look": Command("look", "Observe every head of a model. Ctrl-C stops, and no file is left half-written."),
    "patch": Command(
        "patch",
        "Put values of another text into each head, and measure what changes. Ctrl-C stops; --save continues.",
    ),
    "train": Command("train", "Train a task into a folder, or continue the run in it. Ctrl-C saves and stops."),
    "zoo": Command(
        "zoo",
        "Check regard.watch on every architecture of transformers, tiny and random, against eager attention.",
        is_hidden=True,
    ),
}


class CommandGroup(TyperGroup):
    """All commands. Only the module of the command that runs is imported: some commands do not need torch."""

    is_listing = False  # while the list of ``regard --help`` is printed

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None if there is no command of this name."""
        if cmd_name not in COMMANDS:
            return None
        if self.is_listing:
            command = COMMANDS[cmd_name]
            return TyperCommand(cmd_name, help=command.summary, hidden=command.is_hidden)
        with exit_at_interrupt():
            module = import_module(f"regard.cli.{COMMANDS[cmd_name].module}")
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(cmd_name)(getattr(module, f"{cmd_name}_command"))
        return typer.main.get_command(single)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        self.is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.is_listing = False

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a command line; name similar commands if there is none."""
        if args[0] not in COMMANDS:
            similar = get_close_matches(args[0], COMMANDS)
            if similar:
                hint = f"Did you mean {' or '.join(repr(name) for name in similar)}?"
            else:
                listed = [name for name, command in COMMANDS.items() if not command.is_hidden]
                hint = f"Commands are {', '.join(listed)}."
            raise UsageError(f"No such command {args[0]!r}. {hint}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command of this context."""
        # typer itself would end silently at Ctrl-C.
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


app = typer.Typer(
    name="regard",
    cls=CommandGroup,
    help="Attention you can compute, count, prove and see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _global_options(show: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    """Attention you can compute, count, prove and see."""
    if show:
        typer.echo(f"regard {__version__}")
        raise typer.Exit


def run() -> int:
    """Run the command of this process's command line, and return its exit code."""
    # Print a warning as one line too, without the source line that Python adds.
    warnings.showwarning = lambda message, *_, **__: _print_line(str(message))
    try:
        return app(standalone_mode=False) or 0
    except UsageError as error:
        message = error.format_message()
        context = getattr(error, "ctx", None)
        if message and context is not None and "--help" not in message:
            message += f" ({context.command_path} --help)"
        # The message is empty if typer has printed the help instead.
        if message:
            _print_line(message)
        return 2
    except (Interrupted, typer.Abort):
        print("regard: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:
        # Everything else, panics of libraries too, which are not of the class Exception.
        if not is_report(error):
            raise
        _print_line(report_error(error))
        return 2


def _print_line(message: str) -> None:
    print(f"regard: {printable(' '.join(message.split()))[:LONGEST_LINE]}", file=sys.stderr)
