"""Memory grows with n, never with n²: forward, backward and observables, as scripts/measure/memory.py measures it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parent.parent / "scripts" / "measure" / "memory.py"


def extra_bytes(n: int, observe: bool) -> int:
    """Peak memory above the inputs for one causal + ALiBi call, forward and backward."""
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(n), *(["--observe"] if observe else [])]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=3000).stdout)[
        "extra_bytes"
    ]


def test_memory_is_linear() -> None:
    """From 2,048 to 8,192 keys n² grows 16 ×; what is needed above the inputs may grow 4 × and a constant."""
    small, large = extra_bytes(2048, True), extra_bytes(8192, True)
    tensor = 8192 * 64 * 4  # one of q, k, v, out, dq, dk, dv
    assert large < small + 16 * tensor
    assert large < 8192 * 8192 * 4 / 2  # one n × n float32 would be 256 MiB


@pytest.mark.full
@pytest.mark.parametrize("observe", [False, True])
def test_32768_tokens_fit_in_600_megabytes(observe: bool) -> None:
    assert extra_bytes(32_768, observe) < 600e6
