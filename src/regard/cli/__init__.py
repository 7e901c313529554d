"""The command line: one command a file. Bad input is one line on standard error and exit code 2."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; what a caller did wrong ends in one line, not in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without × or ✓ shows ?, and nothing is lost for it
    try:
        # Here, not at the top: torch takes seconds to import, and Ctrl-C may come before it is there.
        from regard.cli.commands import run

        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(130)
