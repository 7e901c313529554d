"""The command line in the tests' own process: torch takes seconds to import anew."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

import pytest

from regard import cli

__all__ = ["command"]


def command(monkeypatch: Any, capsys: Any, *given: object, stdin: bytes = b"") -> tuple[int, str, list[str]]:
    """Exit code, standard output, lines on standard error; the terminal has 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["regard", *map(str, given)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err.splitlines()
