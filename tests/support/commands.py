"""Run the command line in the process of the tests, because a new process needs seconds to import torch."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Any

import pytest

from regard import cli

__all__ = ["command"]


def command(monkeypatch: Any, capsys: Any, *arguments: object, stdin: bytes = b"") -> tuple[int, str, list[str]]:
    """Run `regard` with these arguments, in a terminal of 80 columns. Returns exit code, output, and error lines."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["regard", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with pytest.raises(SystemExit) as left:
        cli.main()
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err.splitlines()
