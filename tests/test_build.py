"""The native module and its absence: what it reports and refuses, and that a build without a compiler succeeds.

These tests pass with the native module and without it.
"""

import importlib.util
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from regard.kernels import native

ROOT = Path(__file__).resolve().parent.parent
# Per family of processors, from the weakest to the best. Builds for tests also have "emulated".
NAMES = {
    "x86_64": ("portable", "avx2", "avx512", "avx512bf16"),
    "aarch64": ("portable", "neon"),
    "arm64": ("portable", "neon"),
}.get(platform.machine(), ("portable",))


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def load_native_anew() -> ModuleType:
    """A second copy of the module, as a first import of regard would create it now."""
    spec = importlib.util.spec_from_file_location("native_anew", native.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- what it can run --------------------------------------------------------------------------------------------------


def real_sets() -> tuple[str, ...]:
    return tuple(name for name in native.instruction_sets() if name != "emulated")


def test_instruction_sets_go_from_the_weakest_to_the_best():
    sets = real_sets()
    assert sets == NAMES[: len(sets)]
    assert bool(sets) == native.built()
    # The emulation is never the best set, and needs AVX2.
    if "emulated" in native.instruction_sets():
        assert native.instruction_sets()[:3] == ("portable", "emulated", "avx2")


def test_instruction_sets_agree_with_the_kernel_of_the_system():
    """A second derivation: Linux lists the flags that the processor has and the system allows."""
    expected = list(NAMES[:1])
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() in ("aarch64", "arm64"):
        expected = list(NAMES)
    if platform.machine() == "x86_64" and cpuinfo.exists():
        flags = set(re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), flags=re.MULTILINE)[1].split())
        needs = ({"avx2", "fma", "f16c"}, {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, {"avx512_bf16"})
        for name, need in zip(NAMES[1:], needs, strict=True):
            if not need <= flags:
                break
            expected.append(name)
    # Another system than Linux: at least what every machine has.
    supported = real_sets() if cpuinfo.exists() else real_sets()[:1]
    assert supported == (tuple(expected) if native.built() else ())


def chosen_with(isa: str) -> str:
    """The answer of a new process in which REGARD_ISA is set. It loads only the compiled file: torch is slow."""
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('_native', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "try: print('runs', module.chosen_instruction_set())\n"
        "except ValueError as error: print('refuses', error)"
    )
    result = run(code, sys.modules["regard._native"].__file__, REGARD_ISA=isa)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(not native.built(), reason="the native module was not built")
@pytest.mark.parametrize("name", ["mmx", "AVX2", *NAMES])
def test_an_instruction_set_is_forced_or_refused(name):
    supported = native.instruction_sets()
    answer = chosen_with(name)
    if name in supported:
        assert answer == f"runs {name}"
    else:
        assert answer.startswith("refuses REGARD_ISA must")
        assert f"got {name}" in answer
        known = re.fullmatch(r".*can run (.*) \(known names: (.*)\)", answer)
        assert known is not None and known[1] == ", ".join(supported)
        assert known[2].replace("emulated, ", "") == ", ".join(NAMES)


def test_an_empty_variable_chooses_the_best_set():
    if native.built():
        assert chosen_with("") == f"runs {native.instruction_sets()[-1]}"


# --- without the module -----------------------------------------------------------------------------------------------


def test_without_the_module_regard_warns_once_and_runs():
    code = (
        "import sys, warnings; sys.modules['regard._native'] = None\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import regard, torch\n"
        "    from regard.kernels import native\n"
        "    x = torch.ones(1, 1, 2, 3)\n"
        "    out = regard.attention(x, x, x)\n"
        "print([str(w.message) for w in caught if w.category is RuntimeWarning])\n"
        "print(native.built(), torch.equal(out, x))"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    warned, state = result.stdout.splitlines()
    assert warned.count("the native module of regard was not built") == 1
    assert state == "False True"


def test_the_missing_module_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "regard._native", None)
    with pytest.warns(RuntimeWarning, match="^the native module of regard was not built: everything runs on") as caught:
        pure = load_native_anew()
    assert len(caught) == 1
    assert not pure.built()
    assert pure.refusal(torch.zeros(1)) == "the native module of regard was not built"
    assert pure.instruction_sets() == ()
    with pytest.raises(RuntimeError, match="no instruction set is in use: the native module"):
        pure.instruction_set()


def test_a_module_that_does_not_load_is_not_reported_as_missing(monkeypatch):
    def broken(name: str) -> ModuleType:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.warns(RuntimeWarning, match=r"built but cannot be loaded \(regard._native: undefined symbol\)"):
        assert not load_native_anew().built()


def test_a_present_module_is_used_without_a_warning(monkeypatch, recwarn):
    fake = ModuleType("regard._native")
    fake.instruction_sets = lambda: ["portable", "avx2"]  # type: ignore[attr-defined]
    fake.chosen_instruction_set = lambda: "avx2"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "regard._native", fake)
    module = load_native_anew()
    assert not recwarn
    assert module.built()
    assert module.instruction_sets() == ("portable", "avx2")
    assert module.instruction_set() == "avx2"
    assert module.refusal(torch.zeros(1)) == ""
    assert "float64" in module.refusal(torch.zeros(1, dtype=torch.float64))


# --- real builds ------------------------------------------------------------------------------------------------------


def wheel(folder: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Build a wheel of this project without a network; the result and the names of the files inside."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    names = [name for path in folder.glob("*.whl") for name in zipfile.ZipFile(path).namelist()]
    return result, names


NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}


@pytest.mark.full
def test_without_a_compiler_the_pure_package_is_built(tmp_path):
    result, names = wheel(tmp_path, REGARD_NATIVE="", **NO_COMPILER)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [path.name.endswith("-py3-none-any.whl") for path in tmp_path.iterdir()] == [True]
    assert "regard/__init__.py" in names
    assert not [name for name in names if "_native" in name]


@pytest.mark.full
def test_a_required_native_module_that_cannot_be_built_is_an_error(tmp_path):
    result, names = wheel(tmp_path, REGARD_NATIVE="required", **NO_COMPILER)
    assert result.returncode != 0
    assert names == []


@pytest.mark.full
def test_the_wheel_holds_every_file_of_the_package(tmp_path):
    result, names = wheel(tmp_path, REGARD_NATIVE="required" if native.built() else "off")
    assert result.returncode == 0, result.stdout + result.stderr
    package = ROOT / "src" / "regard"
    expected = {
        "regard/" + path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in names if name.startswith("regard/")}
    assert inside - expected == {name for name in inside if name.startswith("regard/_native.")}
    assert expected <= inside
    assert any(name.startswith("regard/_native.") for name in inside) == native.built()
