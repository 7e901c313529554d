"""The command line: one command per file. A user error prints one line on standard error and exits with code 2."""

from __future__ import annotations

import signal
import sys
import threading

from regard.cli.end_signals import exit_now, raise_at_interrupt

__all__ = ["main"]


def main() -> None:
    """Run the command line; a user error prints one line, not a traceback, and so does Ctrl-C."""
    # While modules are imported, and when Python ends, an exception for Ctrl-C could become another error or a
    # traceback. So only a command that runs gets one. A Ctrl-C that is ignored stays ignored.
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_now)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show × or ✓ shows ? instead of failing.
            stream.reconfigure(errors="replace")
    # Here, not at the top: torch takes seconds to import, and Ctrl-C may come during that time.
    from regard.cli.commands import run

    try:
        with raise_at_interrupt():
            code = run()
    except KeyboardInterrupt:
        # Ctrl-C between the commands' own handling and the end.
        print("regard: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)
