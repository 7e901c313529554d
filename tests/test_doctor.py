"""``regard doctor``: what it finds, that its self-test can fail, and the version. All of it on the pure package too."""

from __future__ import annotations

import importlib.metadata
import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.commands import command

import regard
from regard import _cpu as system
from regard import _version as version
from regard.cli.doctor import _self_test_table
from regard.doctor import device_test, edge_cases, environment, self_test
from regard.doctor.checks import CHECKS, _advice, run_checks
from regard.doctor.self_test import Row, relative_error, run_self_test
from regard.kernels import native, reference, triton

pytestmark = pytest.mark.usefixtures("full_tiles")

BACKEND = "native" if native.built() else "reference"
KERNEL = native if native.built() else reference
WELL: dict[str, Any] = {"backend": BACKEND, "rows": [], "corners": {}, "seconds": 0.0, "passed": True, "failed": []}


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment alone: the self-test takes its time."""
    monkeypatch.setitem(CHECKS, "self_test", lambda: WELL)


@pytest.fixture
def pure(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a build without a compiler leaves it."""
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_missing", "the native module of regard was not built")


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_a_gpu_is_described_and_a_wrong_one_is_a_problem(untested, monkeypatch, capsys):
    described = {"device": "cuda:0", "device name": "a GPU", "triton": "3.7"}
    monkeypatch.setitem(CHECKS, "devices", lambda: {"cuda:0": described})
    monkeypatch.setitem(CHECKS, "device_test", lambda: {"cuda:0": {"error": 1e-6, "problem": ""}})
    code, out, _ = command(monkeypatch, capsys, "doctor")
    assert code == 0 and "cuda:0: a GPU, triton 3.7" in out and "cuda:0 computes what the CPU computes" in out
    monkeypatch.setitem(CHECKS, "device_test", lambda: {"cuda:0": {"error": None, "problem": "the output is bad"}})
    code, out, _ = command(monkeypatch, capsys, "doctor")
    assert code == 1 and "✗ cuda:0 computes wrong results: the output is bad" in " ".join(out.split())


def test_the_verdicts_of_the_gpu_kernels_are_printed(untested, monkeypatch, capsys):
    verdicts = {"cuda:0": {"float32": "", "bfloat16": "", "float16": "plain, forward: out differs"}}
    monkeypatch.setitem(CHECKS, "kernel_check", lambda: verdicts)
    code, out, _ = command(monkeypatch, capsys, "doctor")
    said = " ".join(out.split())
    assert code == 1 and "cuda:0: the Triton kernels passed their self-check in float32, bfloat16" in said
    assert "✗ the Triton kernels are not used for float16 on cuda:0: plain, forward: out differs" in said


def test_the_long_test_of_a_gpu_is_printed_and_can_fail(untested, monkeypatch, capsys):
    row = Row("masks", cases=3, error={"forward": 1e-6}, torch_error={"forward": 1e-6})
    result = WELL | {"backend": "triton", "rows": [row.to_dict()]}
    monkeypatch.setattr(device_test, "_gpus", lambda: [torch.device("cuda:0")])
    monkeypatch.setattr(device_test, "run_self_test", lambda backend, device: result)
    monkeypatch.setitem(CHECKS, "kernel_check", lambda: {})
    code, out, _ = command(monkeypatch, capsys, "doctor", "--gpu")
    assert code == 0 and "self-test, triton backend on cuda:0" in out and "masks" in out
    monkeypatch.setattr(device_test, "run_self_test", lambda backend, device: result | {"failed": ["masks: bad"]})
    code, out, _ = command(monkeypatch, capsys, "doctor", "--gpu")
    assert code == 1 and "✗ self-test on cuda:0 failed: masks: bad" in out


@pytest.mark.skipif(not triton.installed(), reason="Triton is not installed")
def test_the_self_test_runs_on_the_gpu_kernels(monkeypatch):
    """In the interpreter, with few of its cases; a wrong kernel fails it."""
    if not triton.interpreted():
        pytest.skip("the kernels run on the GPU")
    kinds = self_test._cases_by_kind
    monkeypatch.setattr(self_test, "_masked_cases", lambda generator: iter(()))
    monkeypatch.setattr(self_test, "_mixed_cases", lambda generator: iter(()))
    monkeypatch.setattr(
        self_test, "_cases_by_kind", lambda generator: {"some": iter([next(kinds(generator)["biases"])])}
    )
    report = run_self_test("triton")
    assert report["passed"] and report["backend"] == "triton" and report["corners"] == {}
    forward = triton.forward
    monkeypatch.setattr(triton, "forward", lambda *a: forward(*a)._replace(out=forward(*a).out * 1.01))
    assert run_self_test("triton")["failed"][0].startswith("some: forward errs")


def test_without_a_gpu_the_long_test_is_refused_in_one_line(untested, monkeypatch, capsys):
    monkeypatch.setattr(device_test, "_gpus", lambda: [])
    monkeypatch.setattr(triton, "device_refusal", lambda device, dtype: "not here")
    code, out, err = command(monkeypatch, capsys, "doctor", "--gpu")
    assert code == 2 and not out and len(err) == 1 and "--gpu needs a CUDA or ROCm device" in err[0]


def test_a_report_is_markdown_alone(untested, monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "doctor", "--report")
    assert (code, err) == (0, [])
    lines = out.splitlines()
    assert lines[:3] == ["### regard doctor", "", "```text"] and lines[-1] == "```"
    assert "\x1b" not in out and "✓ all well" in lines
    code, _, err = command(monkeypatch, capsys, "doctor", "--report", "--json")
    assert code == 2 and "--report" in err[0]


# --- what is printed --------------------------------------------------------------------------------------------------


def test_all_is_well_here(monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "doctor")
    assert (code, err) == (0, [])
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1] == "✓ all well" and "✗" not in out
    assert lines[0].startswith(f"versions  regard {regard.__version__}, python 3.")
    for label in ("cpu", "memory", "native", "threads", "extras", "files"):
        assert sum(line.startswith(label + "  ") for line in lines) == 1, label
    assert f"self-test, {BACKEND} backend" in out
    if native.built():
        assert f"in use {native.instruction_set()}" in " ".join(out.split())


def test_the_same_as_data(monkeypatch, capsys, untested):
    code, out, err = command(monkeypatch, capsys, "doctor", "--json")
    assert (code, err) == (0, [])
    found = json.loads(out)
    assert found["well"] is True and found["problems"] == []
    assert list(found) == [*CHECKS, "problems", "notes", "well"]
    assert found["versions"] == environment.versions()
    assert found["native"]["built"] == native.built()
    assert found["threads"]["torch"] == torch.get_num_threads()
    assert found["memory"]["total"] > found["memory"]["available"] > 0
    assert found["kept"]["machine"].endswith("regard/machine.json")


def test_the_pure_package_is_tested_and_says_how_to_get_the_rest(monkeypatch, capsys, pure):
    code, out, _ = command(monkeypatch, capsys, "doctor")
    assert code == 0
    assert "self-test, reference backend" in out and "reference backend  " not in out
    said = " ".join(out.split())
    assert "native the native module of regard was not built threads" in said
    assert "note: the native module of regard was not built: everything runs on the reference backend" in said
    assert "--no-cache-dir --force-reinstall --no-deps and a C++17 compiler" in said


def test_a_check_that_raises_is_reported_and_the_others_go_on(monkeypatch, capsys, untested):
    def broken() -> None:
        raise OSError("no such [b]file[/b]")

    monkeypatch.setitem(CHECKS, "memory", broken)
    code, out, err = command(monkeypatch, capsys, "doctor")
    assert (code, err) == (1, [])
    assert "memory    not known: OSError: no such [b]file[/b]" in out
    assert "✗ memory could not be checked: OSError: no such [b]file[/b]" in out
    assert "files     " in out and "all well" not in out


@pytest.mark.parametrize("name", CHECKS)
def test_any_check_may_raise(name, monkeypatch, capsys, untested):
    monkeypatch.setitem(CHECKS, name, lambda: 1 / 0)
    code, out, _ = command(monkeypatch, capsys, "doctor")
    assert code == 1 and f"✗ {name.replace('_', '-')} could not be checked: ZeroDivisionError" in out


def test_missing_extras_are_named_with_their_command(monkeypatch, capsys, untested):
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(environment, "version", missing)
    code, out, _ = command(monkeypatch, capsys, "doctor")
    assert code == 0
    for extra, package in (("hf", "transformers"), ("plot", "matplotlib"), ("train", "scikit-learn")):
        assert f"{package} is missing" in out and f"pip install 'regard[{extra}]'" in out


# --- the environment -------------------------------------------------------------------------------------------------


def test_openmp_runtimes_are_found_by_their_files():
    maps = """
7f00-7f01 r-xp 00000000 08:01 1 /venv/lib/torch/lib/libgomp.so.1
7f01-7f02 r--p 00000000 08:01 1 /venv/lib/torch/lib/libgomp.so.1
7f02-7f03 r-xp 00000000 08:01 2 /with space/scikit_learn.libs/libgomp-e985bcbb.so.1.0.0
7f03-7f04 r-xp 00000000 08:01 3 /opt/intel/libiomp5.so
7f04-7f05 r-xp 00000000 08:01 4 /usr/lib/llvm/libomp.so.5
7f05-7f06 r-xp 00000000 08:01 5 /usr/lib/libcomposite.so.1
7f06-7f07 r-xp 00000000 08:01 6 /usr/lib/libompl.so
7f07-7f08 rw-p 00000000 00:00 0 [heap]
"""
    assert environment.openmp_runtimes(maps.splitlines()) == [
        "/opt/intel/libiomp5.so",
        "/usr/lib/llvm/libomp.so.5",
        "/venv/lib/torch/lib/libgomp.so.1",
        "/with space/scikit_learn.libs/libgomp-e985bcbb.so.1.0.0",
    ]


def test_the_native_module_brings_no_second_openmp():
    """In a process that has torch alone; other packages bring what they bring."""
    code = """
import torch, regard
from regard.doctor import environment
regard.attention(*torch.ones(3, 1, 2, 3, 4))
print(*environment.threads()["openmp"], sep="\\n")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 1, done.stdout


def files(monkeypatch: pytest.MonkeyPatch, **given: str) -> None:
    monkeypatch.setattr(
        system, "read_system_file", lambda file: given.get(file.rpartition("/")[2].replace(".", "_"), "")
    )


def test_a_containers_limits_count(monkeypatch):
    meminfo = "MemTotal:       8 kB\nMemAvailable:   6 kB\n"
    files(monkeypatch, meminfo=meminfo, memory_max="max\n", memory_current="0", cpu_max="max 100000\n")
    cores = system.usable_cores()
    assert environment.memory() == {"total": 8192, "available": 6144}
    files(monkeypatch, meminfo=meminfo, memory_max="4096\n", memory_current="1000\n", cpu_max="50000 100000\n")
    assert environment.memory() == {"total": 4096, "available": 3096}
    assert cores >= system.usable_cores() == 1
    files(monkeypatch)
    assert environment.memory() == {"total": None, "available": None}


def test_what_the_system_does_not_tell_is_said(monkeypatch, capsys, untested):
    files(monkeypatch)
    monkeypatch.setattr(environment.platform, "machine", lambda: "aarch64")
    code, out, _ = command(monkeypatch, capsys, "doctor")
    assert code == 0 and "memory    the system does not report it" in out
    assert "          has " not in out and "OpenMP" not in out


def test_advice():
    built = {"built": True, "instruction_sets": ["portable", "avx2"], "in_use": "portable", "forced": "portable"}
    threads = {"torch": 64, "cores": 2, "openmp": ["/a/libgomp.so.1", "/b/libiomp5.so"]}
    assert _advice({"native": built, "threads": threads}) == [
        "REGARD_ISA selects portable, though avx2 is available",
        "torch uses 64 threads on 2 cores, which is slow; set OMP_NUM_THREADS=2",
        "more than one OpenMP runtime is loaded: their threads compete, and calls become slow",
    ]
    built |= {"forced": None}
    assert _advice({"native": built, "threads": threads | {"torch": 2, "openmp": []}}) == []
    assert _advice({"native": {"error": "…"}, "threads": {"error": "…"}}) == []


# --- the self-test can fail -------------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, change: Any) -> None:
    """Change the results of a kernel's function in float32; float64 is what they are compared with."""
    right = getattr(KERNEL, name)

    def spoiled(q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        result = right(q, *rest, **options)
        return result if q.dtype == torch.float64 else change(result)

    monkeypatch.setattr(KERNEL, name, spoiled)


def masks(count: int = 3) -> Any:
    generator = torch.Generator().manual_seed(0)
    return (self_test._case(generator, mask=mask) for mask in self_test._masks(generator)[:count])


def test_a_wrong_kernel_is_found(monkeypatch, capsys):
    spoil(monkeypatch, "forward", lambda made: made._replace(out=made.out * (1 + 1e-3)))
    code, out, err = command(monkeypatch, capsys, "doctor")
    assert (code, err) == (1, []) and "all well" not in out
    said = " ".join(out[out.index("✗ self-test") :].split())
    assert said.startswith("✗ self-test failed: no mask, no bias: forward errs by 1.0e-03, ")
    assert "× torch's own error (and " in said


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("forward", lambda made: made._replace(out=made.out + 1e-4), "forward"),
        ("forward", lambda made: made._replace(out=made.out * math.nan), "forward"),
        ("backward", lambda made: replace(made, q=made.q * 1.001), "backward"),
        ("backward", lambda made: replace(made, v=made.v.flip(2)), "backward"),
    ],
    ids=["a little", "NaN", "q's gradient", "v's gradient in another order"],
)
def test_wrong_numbers_are_found(name, change, part, monkeypatch):
    spoil(monkeypatch, name, change)
    row = self_test._run_row(Row("masks"), masks(), BACKEND)
    assert row.cases == 3 and row.problem.startswith(f"{part} errs by ")


@pytest.mark.parametrize(
    "name", ["entropy", "peak", "offset", "distance", "sink", "local", "map", "profile", "key_mass", "groups"]
)
def test_a_wrong_observable_is_found(name, monkeypatch):
    def change(made: Any) -> Any:
        *kept, values = made
        return (*kept, values | {name: values[name] * 1.001})

    spoil(monkeypatch, "observed", change)
    assert self_test._run_observables(Row("observables"), masks(), BACKEND).problem.startswith("forward errs by ")


def test_a_kernel_that_raises_is_reported(monkeypatch):
    def broken(made: Any) -> Any:
        raise RuntimeError("illegal instruction")

    spoil(monkeypatch, "forward", broken)
    spoil(monkeypatch, "output", broken)
    assert self_test._run_row(Row("masks"), masks(1), BACKEND).problem == "RuntimeError: illegal instruction"
    for check in edge_cases.EDGE_CASES.values():
        assert edge_cases.find_problem(check, BACKEND) == "RuntimeError: illegal instruction"


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("rows without keys are 0", lambda made: made + 1e-6),
        ("hidden NaN stays hidden", lambda made: made * math.nan),
        ("ties share at scale ∞", lambda made: made * 1.0001),
        ("threads change no bit", lambda made: made + torch.get_num_threads()),
    ],
)
def test_a_corner_that_is_wrong_is_found(what, change, monkeypatch):
    assert edge_cases.find_problem(edge_cases.EDGE_CASES[what], BACKEND) == ""
    spoil(monkeypatch, "output", change)
    spoil(monkeypatch, "forward", lambda made: made._replace(out=change(made.out)))
    assert edge_cases.find_problem(edge_cases.EDGE_CASES[what], BACKEND) == "wrong result"


def test_the_self_test_leaves_threads_and_random_numbers_as_they_are(monkeypatch):
    monkeypatch.setattr(self_test, "_cases_by_kind", lambda g: {"masks": masks(1)})
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    found = run_self_test()
    assert found["passed"] and found["failed"] == []
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def test_an_error_that_is_no_number_is_null_in_json(monkeypatch, capsys):
    row = Row("masks")
    exact = [torch.ones(1, dtype=torch.float64)]
    row.add("forward", relative_error([torch.tensor([math.nan])], exact), relative_error([torch.ones(1)], exact))
    row.judge()
    failed = WELL | {"rows": [row.to_dict()], "passed": False, "failed": [f"masks: {row.problem}"]}
    monkeypatch.setitem(CHECKS, "self_test", lambda: failed)
    code, out, _ = command(monkeypatch, capsys, "doctor", "--json")
    assert code == 1 and json.loads(out)["self_test"]["rows"][0]["error"] == {"forward": None}
    code, out, _ = command(monkeypatch, capsys, "doctor")
    assert code == 1 and "nan" in out
    assert run_checks()["problems"] == ["self-test failed: masks: forward errs by nan, nan × torch's own error"]


# --- the version ------------------------------------------------------------------------------------------------------


def test_the_version_is_the_installed_one(monkeypatch, capsys):
    assert regard.__version__ == importlib.metadata.version("regard") == version.__version__
    assert command(monkeypatch, capsys, "--version") == (0, f"regard {regard.__version__}\n", [])


def test_sources_that_were_never_installed_have_no_version(monkeypatch):
    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(version, "version", missing)
    assert version._installed() == "0+unknown"


def test_narrow_terminals_keep_names_and_marks():
    row = {"what": "no mask", "cases": 3, "error": {"forward": 1e-7}, "ratio": {"forward": 1.0}, "passed": True}
    given = {"backend": "native", "seconds": 2.0, "rows": [row], "corners": {"ties share": "no"}}
    for wide, width in ((True, 80), (False, 40)):
        console = Console(width=width)
        with console.capture() as said:
            console.print(_self_test_table(given, wide=wide))
        lines = said.get().splitlines()
        assert any(line.startswith("no mask") and line.rstrip().endswith("✓") for line in lines)
        assert any(line.startswith("ties share") and line.rstrip().endswith("✗") for line in lines)
