"""The Triton kernels compile for GPUs that are not here, and need no more than these have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "measure" / "gpu_variants.py"


def compile_variants(*arguments: str) -> list[list[str]]:
    """The cells of the table that the script prints. The script fails if a variant needs too much."""
    command = [sys.executable, SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if re.match(r"\| (forward|backward|bias|second|every)", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_some_variants_compile() -> None:
    """The kernels of all passes for an NVIDIA and an AMD GPU."""
    passes = (
        "forward",
        "forward, all options",
        "forward, observed",
        "backward, queries",
        "backward, keys",
        "second pass",
    )
    options = ("--widths", "64", "--dtypes", "bfloat16", "--targets", "sm_80", "gfx942")
    rows = compile_variants(*options, "--passes", *passes)
    assert len(rows) == len(passes)
    for *_, nvidia, amd in rows:
        registers, _, shared = map(int, nvidia.split("/"))
        assert 0 < registers <= 255
        assert shared > 0
        assert re.fullmatch(r"\d+ / \d+ / \d+", amd)


def test_the_largest_tiles_fit_into_shared_memory() -> None:
    """Forward passes, second launches and gradients of biases, on the GPUs with the least shared memory."""
    passes = ("forward", "forward, careful", "backward, keys, all options, careful", "bias gradients, all options")
    options = ("--widths", "256", "--dtypes", "float32", "--targets", "sm_86", "gfx942")
    assert len(compile_variants(*options, "--passes", *passes)) == len(passes)


def test_rare_calls_compile() -> None:
    """Every kernel with every option, in hard attention, at scale 0, and with sizes of 1, which are constants."""
    rare = ("all options", "hard attention", "scale 0", "sizes of 1")
    passes = [f"every pass, {name}" for name in rare]
    rows = compile_variants("--widths", "32", "--dtypes", "bfloat16", "--targets", "sm_80", "--passes", *passes)
    assert len(rows) == len(rare)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_all_variants_compile(dtype: str) -> None:
    assert len(compile_variants("--dtypes", dtype)) == 12 * 5


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_all_kernels_compile_with_all_options(dtype: str) -> None:
    assert len(compile_variants("--dtypes", dtype, "--passes", "every pass, all options")) == 5
