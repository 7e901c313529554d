"""What strangers install: the sdist, the wheel built from it, its tag, and the commands outside of the repository.

Real builds, without a network: the build's tools and every dependency are those of the environment that runs the tests.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

import regard
from regard.kernels import native

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = Path(sysconfig.get_path("purelib"))
SYSTEM = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
TORCHS = "libgomp.so.1"  # torch brings it under this name, and has loaded it before


def succeeded(*command: object, cwd: Path, **environment: str) -> str:
    """What a command prints; it must end with 0."""
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    succeeded(*build, ROOT, cwd=folder, REGARD_NATIVE="required" if native.built() else "off")
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the sdist, and tagged as scripts/dist does it."""
    (made,) = sdist.parent.glob("*.whl")
    if not native.built():
        return made
    line = re.search(r"auditwheel (repair .*?) --wheel-dir", (ROOT / "scripts" / "dist").read_text())
    assert line is not None
    tagged = sdist.parent / "tagged"
    succeeded(sys.executable, "-m", "auditwheel", *line[1].split(), "--wheel-dir", tagged, made, cwd=sdist.parent)
    (made,) = tagged.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every installed package but regard."""
    folder = tmp_path_factory.mktemp("others")
    for path in PACKAGES.iterdir():
        if "regard" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def installed(wheel: Path, others: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("installed")
    succeeded(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    succeeded(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(f"{others}\n")
    return folder / "venv" / "bin"


def test_the_sdist_holds_what_a_build_and_the_tests_need(sdist: Path) -> None:
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert {"CMakeLists.txt", "LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml"} <= tops
    assert {"csrc", "docs", "examples", "scripts", "src", "tests"} <= tops
    assert not {".ci", ".git", ".gitignore", ".venv", "build", "dist", "runs", "site"} & tops
    for folder in ("csrc", "src", "tests"):
        there = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert there <= names, folder
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert sdist.stat().st_size < 10e6


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    opened = zipfile.ZipFile(wheel)
    (about,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
    said, _, described = opened.read(about).decode().partition("\n\n")
    assert f"Version: {regard.__version__}" in said and "License-Expression: Apache-2.0" in said
    assert "Description-Content-Type: text/markdown" in said and "Requires-Python: >=3.11" in said
    assert described.strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert about.replace("METADATA", "licenses/LICENSE") in opened.namelist()
    assert wheel.stat().st_size < 10e6


@pytest.mark.skipif(not native.built(), reason="the pure wheel has no module")
def test_the_module_asks_for_nothing_that_is_not_everywhere(wheel: Path) -> None:
    """The tag is manylinux's; OpenMP is torch's: a copy in the wheel would be a second pool of threads."""
    assert re.search(r"-manylinux_2_\d+_(x86_64|aarch64)\.whl$", wheel.name)
    abi = "abi3" if sys.version_info >= (3, 12) else f"cp3{sys.version_info.minor}"
    assert f"-{abi}-" in wheel.name
    opened = zipfile.ZipFile(wheel)
    names = opened.namelist()
    assert not [name for name in names if ".libs/" in name]
    (name,) = (name for name in names if name.startswith("regard/_native."))
    module = ELFFile(io.BytesIO(opened.read(name)))
    dynamic = module.get_section_by_name(".dynamic")
    needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert needed <= SYSTEM | {TORCHS}
    assert not [tag for tag in dynamic.iter_tags() if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]
    assert module.get_section_by_name(".symtab") is None, "it is not stripped"


def headers_compile_for_arm() -> bool:
    """Whether the cross compiler accepts this interpreter's headers, as scripts/dist checks it."""
    command = ["aarch64-linux-gnu-g++", "-fsyntax-only", "-x", "c++", "-I", sysconfig.get_path("include"), "-"]
    result = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=60)
    return result.returncode == 0


def test_the_variables_for_arm_are_those_of_the_script() -> None:
    """The next test builds with the variables that scripts/dist sets for ARCH=aarch64."""
    script = (ROOT / "scripts" / "dist").read_text(encoding="utf-8")
    variables = re.search(r"^ +cross=\((_PYTHON.*?)\)$", script, re.MULTILINE | re.DOTALL)
    assert variables is not None
    names = re.findall(r"(\w+)=", variables[1])
    assert names == ["_PYTHON_HOST_PLATFORM", "SETUPTOOLS_EXT_SUFFIX", "CMAKE_ARGS"]
    options = re.search(r"^ +options=\((.*?)\)$", script, re.MULTILINE | re.DOTALL)
    assert options is not None
    names = re.findall(r"-D(\w+)=", options[1])
    assert names == ["CMAKE_SYSTEM_NAME", "CMAKE_SYSTEM_PROCESSOR", "CMAKE_CXX_COMPILER"]


@pytest.mark.skipif(not native.built() or platform.machine() != "x86_64", reason="not another machine than ARM")
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="g++-aarch64-linux-gnu is not installed")
def test_the_wheel_for_arm_can_be_built_elsewhere(tmp_path: Path) -> None:
    if not headers_compile_for_arm():
        pytest.skip("this Python's headers do not compile for ARM")
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    variables = {
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": suffix.replace("x86_64", "aarch64"),
        "CMAKE_ARGS": "-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 "
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
        "REGARD_NATIVE": "required",
    }
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT)
    succeeded(*build, cwd=tmp_path, **variables)
    (made,) = tmp_path.glob("*.whl")
    assert made.name.endswith("linux_aarch64.whl")
    opened = zipfile.ZipFile(made)
    (name,) = (name for name in opened.namelist() if name.startswith("regard/_native."))
    assert ELFFile(io.BytesIO(opened.read(name)))["e_machine"] == "EM_AARCH64" and "x86" not in name
    shown = succeeded(sys.executable, "-m", "auditwheel", "show", made, cwd=tmp_path)
    assert "_aarch64" in shown and "manylinux_2_" in shown


def test_the_commands_work_outside_of_the_repository(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("The cat sat on the mat, and the dog sat on the cat.")
    home = {"HOME": str(tmp_path / "home"), "XDG_STATE_HOME": "", "XDG_CACHE_HOME": "", "PYTHONPATH": ""}

    def run(*command: object) -> str:
        program, *rest = command
        return succeeded(installed / str(program), *rest, cwd=tmp_path, **home)

    code = (
        "import regard; from regard.kernels import native; print(regard.__file__, regard.__version__, native.built())"
    )
    file, version, built = run("python", "-W", "ignore", "-c", code).split()
    assert Path(file).is_relative_to(installed.parent)
    assert (version, built) == (regard.__version__, str(native.built()))
    assert run("regard", "--version") == f"regard {regard.__version__}\n"

    found = json.loads(run("regard", "doctor", "--json"))
    assert found["well"] and found["native"]["built"] == native.built()
    assert len(found["threads"]["openmp"]) == 1 and "/torch/lib/" in found["threads"]["openmp"][0]
    assert found["kept"]["lab"] == str(tmp_path / "home" / ".local" / "state" / "regard" / "lab")

    assert "heads" in run("regard", "look", "--text", "story.txt")
    assert "1,024" in run("regard", "budget", "attention", "d=512", "heads=8")
    assert "not as recorded 0" in run("regard", "claims", "--only", "hard-limit")
    assert ": equal" in run("regard", "convolve", "--kernel", "3x3")
    assert run("regard", "lab", "--check").endswith("the lab responds\n")
    run("regard", "train", "repeats", "--set", "steps=6", "--set", "warmup=2", "--out", "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["versions"]["regard"] == regard.__version__


def test_sources_that_were_never_installed_run(others: Path, tmp_path: Path) -> None:
    """On PYTHONPATH, without metadata: no version is known, and there is no compiled module."""
    (tmp_path / "regard").symlink_to(ROOT / "src" / "regard")
    path = f"{tmp_path}{os.pathsep}{others}"
    said = succeeded(sys.executable, "-S", "-W", "ignore", "-m", "regard", "--version", cwd=tmp_path, PYTHONPATH=path)
    assert said == "regard 0+unknown\n"
