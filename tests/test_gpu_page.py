"""docs/gpu.md and docs/gpu-variants.md say what the code does: backends, refusals, tiles, registers and counts."""

from __future__ import annotations

import ast
import inspect
import math
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import _devices
from regard._lowered_scores import Scores
from regard.kernels import native, reference, score_tiles, self_check
from regard.kernels import triton as kernels
from regard.kernels.choose_backend import resolve_backend
from regard.kernels.triton._tile_sizes import MAX_WIDTH, tile_size

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
VARIANTS = (ROOT / "docs" / "gpu-variants.md").read_text(encoding="utf-8")
SCRIPT = ROOT / "scripts" / "measure" / "gpu_variants.py"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KIB = 1024
# Shared memory of a multiprocessor in KiB, and the threads that it can hold.
MULTIPROCESSORS = {"sm_80": (164, 2048), "sm_86": (100, 1536), "sm_90": (228, 2048), "sm_100": (228, 2048)}


def rows_after(text: str, words: str) -> list[list[str]]:
    """The cells of the first table after these words, without its header."""
    lines = text[text.index(words) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


def codes(cell: str) -> list[str]:
    """The words in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def fake(device: str, dtype: torch.dtype, width: int = 64) -> torch.Tensor:
    """A tensor without memory, on any device."""
    with FakeTensorMode():
        return torch.empty(1, 2, 5, width, dtype=dtype, device=device)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest GPU and the oldest Triton that the kernels support, and a self-check that they passed."""
    monkeypatch.setattr(self_check, "verdict_of", lambda *arguments: self_check.Verdict(""))
    monkeypatch.setattr(kernels, "_capability", lambda device: kernels.LEAST_CAPABILITY)
    monkeypatch.setattr(kernels, "_version", lambda: kernels.LEAST_VERSION)
    monkeypatch.setattr(kernels, "installed", lambda: True)
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    monkeypatch.delenv("REGARD_BACKEND", raising=False)


# --- what runs where, and what is refused -----------------------------------------------------------------------------


@pytest.mark.skipif(not native.built(), reason="the native module was not built")
def test_what_runs_where(a_gpu: None) -> None:
    described = set()
    for where, dtypes, backend, working in rows_after(PAGE, "## What runs where"):
        device = codes(where)[0]
        width = MAX_WIDTH + 1 if "wider" in where else MAX_WIDTH
        for name in codes(dtypes):
            q = fake(device, getattr(torch, name), width)
            assert resolve_backend("auto", q, q) == backend, (where, name)
            if backend == "reference":
                assert score_tiles.working_dtype(q) == getattr(torch, working), (where, name)
            described.add((device, getattr(torch, name)))
    # Every device with every dtype that it has.
    expected = {(device, dtype) for device in ("cpu", *_devices.GPU_TYPES) for dtype in FLOATS}
    assert described == expected - {("mps", torch.float64)}
    assert not _devices.has_float64(torch.device("mps"))


def test_what_the_kernels_take(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {name: (taken, refused) for name, taken, refused in rows_after(PAGE, "## What the kernels take")}
    # A refusal receives no options, so it cannot depend on them.
    assert list(inspect.signature(kernels.refusal).parameters) == ["q", "v"]

    taken, refused = table.pop("device")
    assert {"cpu", *_devices.GPU_TYPES} == {*codes(taken), *codes(refused)}
    for device in codes(taken):
        assert kernels.refusal(fake(device, torch.float16)) == ""
    for device in codes(refused):
        assert "q is on" in kernels.refusal(fake(device, torch.float16))

    taken, refused = table.pop("dtype")
    assert {getattr(torch, name) for name in codes(taken)} == kernels.DTYPES == set(self_check.TOLERANCES)
    assert {getattr(torch, name) for name in codes(taken + refused)} == set(FLOATS)
    for dtype in FLOATS:
        assert (kernels.refusal(fake("cuda", dtype)) == "") == (dtype in kernels.DTYPES)

    assert table.pop("widths of q, k and v") == (f"up to {MAX_WIDTH}", f"from {MAX_WIDTH + 1} on")
    widest = fake("cuda", torch.float16, MAX_WIDTH)
    wider = fake("cuda", torch.float16, MAX_WIDTH + 1)
    assert kernels.refusal(widest, widest) == ""
    assert kernels.refusal(wider, widest)
    assert kernels.refusal(widest, wider)

    for name, attribute, least in (
        ("compute capability of an NVIDIA GPU", "_capability", kernels.LEAST_CAPABILITY),
        ("version of Triton", "_version", kernels.LEAST_VERSION),
    ):
        taken, refused = table.pop(name)
        assert taken == f"from {least[0]}.{least[1]} on"
        older = tuple(int(part) for part in refused.removeprefix("up to ").split("."))
        with monkeypatch.context() as patch:
            patch.setattr(kernels, attribute, lambda *arguments, older=older: older)
            assert kernels.refusal(widest)

    taken, refused = table.pop("options of a call")
    assert refused == "none"
    assert codes(taken) == [field.name for field in fields(Scores)]
    assert table == {}


@pytest.mark.usefixtures("full_tiles")
def test_tolerances_of_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's limits are those that the comparison of each part uses."""
    table = {name: cells for name, *cells in rows_after(PAGE, "they may differ by")}
    limits: dict[str, float] = {}
    means: dict[str, float] = {}

    def record(name: str, ours: object, exact: object, dtype: torch.dtype, slack: float = 1.0) -> str:
        limits[name] = slack * self_check.TOLERANCES[dtype]
        means[name] = slack * self_check.MEAN_TOLERANCES[dtype]
        return ""

    monkeypatch.setattr(self_check, "_difference", record)
    monkeypatch.setattr(reference, "bin_masses", lambda *arguments: None, raising=False)
    for column, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        _, call = next(iter(self_check._calls(dtype)))
        for compare in self_check._PARTS.values():
            assert compare(reference, call, torch.device("cpu")) == ""
        parts = {
            "output": "out",
            "gradients": "dq",
            "lse": "lse",
            "observables": "entropy",
            "weights on bins": "the weight on a bin",
        }
        for name, part in parts.items():
            largest, mean = table[name][column].split(" / ")
            assert float(largest) == pytest.approx(limits[part]), (name, dtype)
            assert float(mean) == pytest.approx(means[part]), (name, dtype)
    assert len(list(self_check._calls(torch.float32))) == 11
    assert "runs eleven calls" in PAGE


def test_tile_sizes() -> None:
    for kind, *cells in rows_after(PAGE, "The sizes of tiles depend"):
        for width, cell in zip((64, 128, 256), cells, strict=True):
            size = tile_size(kind, 2, width)
            assert cell == f"{size.rows} × {size.keys}", (kind, width)
            assert size.warps == 8
        assert tile_size(kind, 2, 32) == tile_size(kind, 2, 64)


def test_the_example_of_the_costs() -> None:
    size = tile_size("forward", 2, 64)
    flops = 4 * size.rows * size.keys * 64
    read = 2 * size.keys * 64 * 2
    assert f"= {flops:,} FLOPs" in PAGE
    assert f"= {read:,}. That is {flops // read} FLOPs per byte" in " ".join(PAGE.split())
    observed = tile_size("forward observed", 2, 64)
    assert f"and {2 * observed.rows // 2} in an observed call" in PAGE


# --- the table of variants --------------------------------------------------------------------------------------------


def script_constants() -> dict[str, Any]:
    """The constants of the script, without running it: it would import Triton."""
    constants: dict[str, Any] = {}
    for statement in ast.parse(SCRIPT.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        name = statement.targets[0].id
        if name in ("WIDTHS", "PASSES", "TABLE_DTYPES", "NO_SPILLS_TO"):
            constants[name] = ast.literal_eval(statement.value)
        if name == "TARGETS":
            assert isinstance(statement.value, ast.Dict)
            keys = [ast.literal_eval(key) for key in statement.value.keys if key is not None]
            limits = [ast.literal_eval(value.elts[2]) for value in statement.value.values]  # type: ignore[attr-defined]
            constants[name] = dict(zip(keys, limits, strict=True))
    return constants


CONSTANTS = script_constants()
TARGETS = list(CONSTANTS["TARGETS"])
Key = tuple[str, str, int, str]


def variants() -> dict[Key, tuple[int, int, int]]:
    """Registers, spilled bytes and KiB of shared memory by pass, dtype, width and target."""
    table = {}
    for name, dtype, width, *cells in rows_after(VARIANTS, "<!-- variants -->"):
        for target, cell in zip(TARGETS, cells, strict=True):
            registers, spilled, shared = map(int, cell.split("/"))
            table[name, dtype, int(width), target] = (registers, spilled, shared)
    return table


def test_the_table_of_variants_is_complete() -> None:
    expected = set()
    for name in CONSTANTS["PASSES"]:
        for dtype in CONSTANTS["TABLE_DTYPES"]:
            for width in CONSTANTS["WIDTHS"]:
                expected |= {(name, dtype, width, target) for target in TARGETS}
    assert set(variants()) == expected
    assert f"| pass | dtype | d | {' | '.join(TARGETS)} |" in VARIANTS
    limits = " and ".join(", ".join(map(str, CONSTANTS["TARGETS"].values())).rsplit(", ", 1))
    assert f"may have {limits} KiB" in " ".join(VARIANTS.split())


def test_variants_fit_their_gpus() -> None:
    for (name, _, width, target), (registers, spilled, shared) in variants().items():
        assert shared <= CONSTANTS["TARGETS"][target]
        assert 0 < registers <= (256 if target == "gfx942" else 255)
        first_launch = not name.endswith("careful")
        if name.startswith("forward") and first_launch and width <= CONSTANTS["NO_SPILLS_TO"]:
            assert spilled == 0, (name, width, target)


def test_all_spills_are_named() -> None:
    spills = []
    for (name, dtype, width, target), (_, spilled, _) in variants().items():
        if spilled:
            spills.append([name, dtype, str(width), target, str(spilled)])
    assert rows_after(PAGE, "<!-- spills -->") == spills


def count_programs(target: str, registers: int, shared: int) -> int:
    """How many programs of 8 warps a multiprocessor holds, by registers, shared memory and threads."""
    registers = math.ceil(registers / 8) * 8
    if target == "gfx942":
        # A program has 8 wavefronts on 4 SIMD units, whose lanes have 512 registers.
        return min(512 // registers // 2, 64 // max(1, shared))
    memory, threads = MULTIPROCESSORS[target]
    return min(65536 // (256 * registers), memory // (shared + 1), threads // 256)


def test_programs_per_multiprocessor() -> None:
    table = variants()
    for name, width, *cells in rows_after(PAGE, "<!-- programs -->"):
        for target, cell in zip(TARGETS, cells, strict=True):
            registers, _, shared = table[name, "float16", int(width), target]
            assert int(cell) == count_programs(target, registers, shared), (name, width, target)


def test_counted_operations_and_copies() -> None:
    """The page's counts are those of the kernels, compiled now."""
    pytest.importorskip("triton")
    command = [sys.executable, ROOT / "scripts" / "measure" / "gpu_operations.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert rows_after(printed, "| pass | operations") == rows_after(PAGE, "<!-- operations -->")
    assert rows_after(printed, "| pass | asynchronous") == rows_after(PAGE, "<!-- copies -->")
