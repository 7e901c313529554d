"""The examples of docs/kernel-example.md: the page shows the diff files, and these apply, compile and are correct."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kernel-example.md"
FOLDER = ROOT / "docs" / "kernel-examples"
# The section of the page that explains each diff.
SECTIONS = {
    "time_bias": "Adding a bias, step by step",
    "concentration": "Adding an observable, step by step",
}
ORDERS = [("time_bias",), ("concentration",), ("time_bias", "concentration"), ("concentration", "time_bias")]
RENEW = "the code has changed: repeat the example's change, and renew the diff file and the page"

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def changed_files(name: str) -> list[str]:
    """The files that a diff changes."""
    return re.findall(r"^\+\+\+ b/(.*)$", (FOLDER / f"{name}.diff").read_text(encoding="utf-8"), re.MULTILINE)


def apply(name: str, folder: Path) -> None:
    """Apply a diff to a copy of the tree. A changed context is an error; moved lines are not."""
    # The folder may lie within a repository, which git must not find.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "--verbose", str(FOLDER / f"{name}.diff")]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"{RENEW}\n{result.stderr}"


def copy_files(names: tuple[str, ...], folder: Path) -> None:
    """Copy the files that these diffs change."""
    for name in names:
        for file in changed_files(name):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_shows_exactly_the_diff(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, _, section = text.partition(f"\n## {SECTIONS[name]}\n")
    section = re.split(r"^## ", section, maxsplit=1, flags=re.MULTILINE)[0]
    hunks = re.findall(r"^```diff\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert "".join(hunks) == (FOLDER / f"{name}.diff").read_text(encoding="utf-8")


def test_every_diff_is_on_the_page() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(SECTIONS)
    text = PAGE.read_text(encoding="utf-8")
    shown = sum(text.count(f"\n## {title}\n") for title in SECTIONS.values())
    assert shown == len(SECTIONS)


@needs_git
@pytest.mark.parametrize("names", ORDERS, ids=" then ".join)
def test_the_diffs_apply(names: tuple[str, ...], tmp_path: Path) -> None:
    copy_files(names, tmp_path)
    for name in names:
        apply(name, tmp_path)
    for name in names:
        for file in changed_files(name):
            assert (tmp_path / file).read_bytes() != (ROOT / file).read_bytes(), file


@pytest.mark.full
@needs_git
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.skipif(shutil.which("c++") is None, reason="a C++ compiler is not installed")
@pytest.mark.parametrize("name", SECTIONS)
def test_the_kernels_with_a_diff_equal_plain_loops(name: str, tmp_path: Path) -> None:
    copy_files((name,), tmp_path)
    for folder in ("csrc", "tests/native"):
        shutil.copytree(ROOT / folder, tmp_path / folder, dirs_exist_ok=True)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test-native", tmp_path / "scripts")
    apply(name, tmp_path)

    command = [str(tmp_path / "scripts" / "test-native")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 failed" in result.stdout.splitlines()[-1]
    log = next(tmp_path.glob("build/native*/build.log")).read_text(encoding="utf-8")
    assert "warning:" not in log, log
