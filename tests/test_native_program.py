"""The programs of tests/native, which need no Python: the kernels against plain loops, here and on 64-bit ARM."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


def run(*arguments: str) -> str:
    command = [ROOT / "scripts" / "test-native", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.skipif(shutil.which("c++") is None, reason="a C++ compiler is not installed")
def test_this_machine() -> None:
    assert " 0 failed" in run().splitlines()[-1]


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="g++-aarch64-linux-gnu is not installed")
@pytest.mark.skipif(shutil.which("qemu-aarch64-static") is None, reason="qemu-user-static is not installed")
def test_arm() -> None:
    output = run("arm")
    assert " 0 failed" in output.splitlines()[-1]
    assert "neon:" in output
    assert "neonbf16:" in output
