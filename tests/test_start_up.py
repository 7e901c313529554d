"""What starts without torch, which takes seconds to import: the package, the list of commands, stored head types."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard import interp
from regard.cli.commands import COMMANDS
from regard.interp._atlas_store import model_fingerprint, save_atlas

# Runs the command line, then says whether torch was imported.
SCRIPT = """
import sys
from regard.cli import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def start(*arguments: object) -> list[str]:
    """The lines that a command prints, and whether it imported torch as the last one."""
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


LISTED = [name for name, command in COMMANDS.items() if not command.is_hidden]


@pytest.mark.parametrize(("option", "expected"), [("--help", LISTED), ("--version", [regard.__version__])])
def test_the_list_of_commands_needs_no_torch(option: str, expected: list[str]) -> None:
    lines = start(option)
    assert lines[-1] == "False"
    assert not [text for text in expected if text not in "\n".join(lines)]
    # A command for contributors is not listed.
    assert "zoo" not in "\n".join(lines)


@pytest.mark.usefixtures("own_cache")
def test_stored_head_types_are_printed_without_torch(tmp_path: Path) -> None:
    """The result for the bundled model, stored for a folder whose model cannot even be loaded."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    atlas = interp.atlas(regard.models.load(regard.models.bundled()))
    save_atlas(model_fingerprint(folder), atlas)
    lines = start("look", folder, "--kinds", "--csv", tmp_path / "heads.csv")
    assert lines[-1] == "False"
    assert atlas.to_csv() == (tmp_path / "heads.csv").read_text()


def test_the_list_says_what_each_command_says_of_itself() -> None:
    for name, command in COMMANDS.items():
        function = getattr(importlib.import_module(f"regard.cli.{command.module}"), f"{name}_command")
        paragraph = " ".join(function.__doc__.split("\n\n")[0].split())
        assert command.summary == paragraph


@pytest.mark.parametrize("package", [regard, interp])
def test_type_checkers_read_the_names_that_are_imported_at_first_use(package: object) -> None:
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    sources = {}
    for block in tree.body:
        if not isinstance(block, ast.If):
            continue
        for node in block.body:
            assert isinstance(node, ast.ImportFrom)
            for alias in node.names:
                is_module = node.module == package.__name__
                sources[alias.name] = f"{node.module}.{alias.name}" if is_module else node.module
    assert sources == package._SOURCES
    assert set(package.__all__) - {"__version__"} == set(sources)
    assert set(sources) <= set(dir(package))
    for name in sources:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = package.no_such_name
