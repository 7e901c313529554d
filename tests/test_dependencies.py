"""Declared, pinned, locked and installed versions agree, and no lowest version has a known vulnerability."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("requirements-lab.lock", "requirements-dev.lock", "requirements-dist.lock")

# The first versions without the vulnerabilities that are known of them.
FIXED = {
    "anyio": "4.14.2",
    "filelock": "3.20.3",
    "h11": "0.16.0",
    "jupyter-server": "2.20.0",
    "jupyterlab": "4.6.2",
    "notebook": "7.5.6",
    "pillow": "12.3.0",
    "scikit-learn": "1.5.0",
    "starlette": "1.3.1",
    "transformers": "5.10.0",
}


def declared() -> list[Requirement]:
    """All requirements of pyproject.toml, with those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    return [Requirement(line) for line in lines]


def pins(file: str) -> dict[str, str]:
    """The versions of a constraints or lock file, by canonical name."""
    lines = re.findall(r"^([\w.-]+)==([^\s\\]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def test_no_lowest_version_has_a_known_vulnerability() -> None:
    lowest: dict[str, list[Version]] = {}
    for requirement in declared():
        (floor,) = (part.version for part in requirement.specifier if part.operator == ">=")
        lowest.setdefault(canonicalize_name(requirement.name), []).append(Version(floor))
    for name, fixed in FIXED.items():
        assert min(lowest[name]) >= Version(fixed), name


def test_pinned_and_installed_versions_satisfy_what_is_declared() -> None:
    pinned = pins("constraints.txt")
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(pinned[name]), name
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
        assert requirement.specifier.contains(installed, prereleases=True), name


@pytest.mark.parametrize("file", LOCKS)
def test_a_lock_file_has_the_pinned_versions_with_hashes_and_no_address(file: str) -> None:
    text = (ROOT / file).read_text()
    pinned = pins("constraints.txt")
    locked = pins(file)
    assert locked and "torch" not in locked and "regard" not in locked
    for name, version in locked.items():
        assert pinned[name] == version, name
    entries = re.split(r"\n(?=\S)", text.strip())
    for entry in entries:
        if "==" in entry:
            assert re.fullmatch(r"[\w.-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry[:100]
    assert "://" not in text and "index-url" not in text


def test_what_setup_installs_is_locked() -> None:
    """Everything that the package requires, besides torch, is in a lock file, as far as it is declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lab = pins("requirements-lab.lock")
    dev = pins("requirements-dev.lock") | lab
    extras = project["optional-dependencies"]
    for line in project["dependencies"] + extras["train"]:
        assert canonicalize_name(Requirement(line).name) in {*lab, "torch"}
    for line in extras["dev"]:
        # Triton belongs to torch: builds of torch for GPUs require one version of it, so it has no hash either.
        assert canonicalize_name(Requirement(line).name) in {*dev, "triton"}
    dist = pins("requirements-dist.lock")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for line in [*build, "build", "auditwheel"]:
        assert canonicalize_name(Requirement(line).name) in dist


def test_scripts_check_the_hashes() -> None:
    for script in ("setup", "dist"):
        assert "--require-hashes" in (ROOT / "scripts" / script).read_text()


USEFUL = [
    "x-1.2.tar.gz",
    "x-1.2-py3-none-any.whl",
    "x-1.2-py2.py3-none-any.whl",
    "x-1.2-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    "x-1.2-cp39-abi3-macosx_11_0_arm64.whl",
    "x-1.2-cp314-cp314t-win_amd64.whl",
]
NOT_USEFUL = [
    "x-1.3.tar.gz",
    "x-1.2-cp310-cp310-manylinux_2_17_x86_64.whl",
    "x-1.2-cp311-cp311-musllinux_1_2_x86_64.whl",
    "x-1.2-pp311-pypy311_pp73-win_amd64.whl",
    "x-1.2-cp311-cp311-win32.whl",
    "x-1.2.exe",
]
CHOOSE = """
import json, sys
from lock_hashes import is_useful
from pip._vendor.packaging.version import Version
print(json.dumps([name for name in sys.argv[1:] if is_useful(name, Version("1.2"))]))
"""


def test_only_files_of_supported_platforms_are_locked() -> None:
    # In a process of its own: after `import pip`, setuptools gives the process the distutils of the standard library,
    # and then torch.compile fails in every later test of that process.
    result = subprocess.run(
        [sys.executable, "-c", CHOOSE, *USEFUL, *NOT_USEFUL],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == USEFUL
