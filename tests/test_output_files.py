"""Outputs: complete or absent, on the disk, through links, with the permissions of the file; never into a device."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import command

from regard import models, plots
from regard._errors import RegardError
from regard._files import atomic_write, check_output_file, check_regular_file, open_regular, read_regular, write_text
from regard.bench._results import Results

TEXT = "new"


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def make_special(folder: Path, kind: str) -> Path:
    """Something in ``folder`` that is not a regular file. Devices are made here; real ones are never touched."""
    path = folder / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root can make a device")
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.relpath(path))
        listener.close()
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- links -----------------------------------------------------------------------------------------------------------


def test_a_link_stays_and_its_file_is_replaced(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    target = folder / "elsewhere" / "target.txt"
    target.write_text("old")
    link = folder / "link.txt"
    link.symlink_to(target)
    second = folder / "second.txt"
    second.symlink_to("link.txt")
    write_text(TEXT, second)
    assert second.is_symlink() and link.is_symlink() and target.read_text() == TEXT
    assert sorted(os.listdir(folder)) == ["elsewhere", "link.txt", "second.txt"]
    assert os.listdir(folder / "elsewhere") == ["target.txt"]


def test_a_link_to_a_file_that_does_not_exist_makes_it(folder: Path) -> None:
    link = folder / "link.txt"
    link.symlink_to("target.txt")
    assert check_output_file(link) == Path(os.path.realpath(folder / "target.txt"))
    write_text(TEXT, link)
    assert link.is_symlink() and (folder / "target.txt").read_text() == TEXT


# --- what is not a regular file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket", "loop"])
def test_what_is_not_a_regular_file_is_neither_written_nor_read(folder: Path, kind: str) -> None:
    path = make_special(folder, kind)
    link = folder / "link"
    link.symlink_to(path.name)
    for output in (path, link):
        before = os.lstat(output)
        for write in (check_output_file, lambda file: write_text(TEXT, file), Results().save):
            with pytest.raises((RegardError, OSError), match=output.name) as caught:
                write(output)
            assert "\n" not in str(caught.value)
        after = os.lstat(output)
        assert (before.st_ino, before.st_mode) == (after.st_ino, after.st_mode)
        for read in (check_regular_file, open_regular, lambda file: read_regular(file, 10)):
            with pytest.raises((RegardError, OSError), match=output.name):
                read(output)
    assert sorted(os.listdir(folder)) == sorted([kind, "link"])


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_figures_are_not_written_there_either(folder: Path, kind: str) -> None:
    path = make_special(folder, kind)
    figure = path.rename(folder / "figure.png")
    with pytest.raises((RegardError, OSError), match=r"figure\.png"):
        plots.save(plots.heatmap(np.eye(2)), figure)
    assert os.listdir(folder) == ["figure.png"]


@pytest.mark.parametrize(
    "words",
    [
        ("look", "MODEL", "--text", "text.txt", "--csv", "OUT"),
        ("look", "MODEL", "--text", "text.txt", "--html", "OUT"),
        ("look", "MODEL", "--text", "text.txt", "--out", "OUT"),
        ("look", "MODEL", "--kinds", "--csv", "OUT"),
        ("bench", "causal", "--out", "OUT"),
        ("bench", "causal", "--page", "OUT"),
        ("claims", "--only", "hard-limit", "--report", "OUT"),
        ("claims", "--only", "hard-limit", "--markdown", "OUT"),
        ("convolve", "--plot", "OUT"),
        ("budget", "gpt2", "--plot", "OUT"),
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_commands_refuse_it_before_they_compute(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: tuple[str, ...]
) -> None:
    (folder / "text.txt").write_text("a b c")
    os.mkfifo(folder / "pipe.png")
    for name in ("models.load", "cli.claims.run_claims", "cli.bench.run", "cli.convolve.to_attention"):
        monkeypatch.setattr(f"regard.{name}", lambda *_, **__: pytest.fail("the computation has started"))
    monkeypatch.setattr("regard.cli.budget_modes.plan", lambda *_, **__: pytest.fail("the computation has started"))
    places = {"MODEL": str(models.bundled()), "OUT": "pipe.png"}
    code, _, errors = command(monkeypatch, capsys, *[places.get(word, word) for word in words])
    assert code == 2 and len(errors) == 1 and "pipe.png" in errors[0]
    assert stat.S_ISFIFO((folder / "pipe.png").lstat().st_mode)


# --- permissions and durability --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o027, 0o640)])
def test_a_new_file_has_the_permissions_of_the_umask(folder: Path, umask: int, expected: int) -> None:
    before = os.umask(umask)
    try:
        write_text(TEXT, folder / "a.txt")
        with atomic_write(folder / "b.txt") as temporary:
            assert mode_of(temporary) == expected
            # A writer may replace the temporary file by one with other permissions.
            temporary.unlink()
            temporary.write_text(TEXT)
            temporary.chmod(0o604)
    finally:
        os.umask(before)
    assert mode_of(folder / "a.txt") == mode_of(folder / "b.txt") == expected


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_keeps_its_permissions(folder: Path, mode: int) -> None:
    file = folder / "a.txt"
    file.write_text("old")
    file.chmod(mode)
    with atomic_write(file) as temporary:
        # Nobody else can read the new content before it is in place.
        assert mode_of(temporary) == 0o600
        temporary.write_text(TEXT)
    assert mode_of(file) == mode and file.read_text() == TEXT
    write_text(TEXT, file, mode=0o600)
    assert mode_of(file) == 0o600


def test_file_and_folder_are_on_the_disk_before_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    real_fsync = os.fsync
    real_replace = os.replace

    def fsync(handle: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        events.append("folder" if is_folder else "file")
        real_fsync(handle)

    def replace(source: Any, target: Any) -> None:
        events.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_text(TEXT, folder / "a.txt")
    assert events == ["file", "replace", "folder"]


def test_after_an_error_the_old_file_is_there(folder: Path) -> None:
    file = folder / "a.txt"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(file) as temporary:
        temporary.write_text(TEXT)
        raise ZeroDivisionError
    assert file.read_text() == "old" and os.listdir(folder) == ["a.txt"]


def test_the_longest_name_that_a_file_can_have(folder: Path) -> None:
    write_text(TEXT, folder / ("x" * 250))
    assert os.listdir(folder) == ["x" * 250]


def test_a_file_that_is_too_large_is_not_read(folder: Path) -> None:
    with (folder / "large").open("wb") as opened:
        opened.truncate(2**40)  # sparse: it takes no space
    with pytest.raises(RegardError, match="large has"):
        read_regular(folder / "large", 100)
