"""What the documents promise: examples run, links lead somewhere, exports exist and are documented."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
from support.commands import command
from support.printed import run_module_examples, run_text_examples

import regard

pytestmark = pytest.mark.usefixtures("full_tiles")

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = sorted(
    name for _, name, _ in pkgutil.walk_packages(regard.__path__, "regard.") if not name.endswith("_native")
)


@pytest.mark.parametrize("name", ["regard", *MODULES])
def test_examples_in_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    # The names a reader of the page has at hand: the module's own, and torch.
    import torch

    assert run_module_examples(module, {"torch": torch, "regard": regard}) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_on_pages_runs(page: Path) -> None:
    """Each block in a namespace of its own; a block with >>> is checked for what it prints."""
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if block.startswith(">>>"):
            assert run_text_examples(block, page.name) == 0
        elif "import" in block:  # a block without imports is a signature, shown and not run
            exec(compile(block, page.name, "exec"), {})  # noqa: S102


SHOWN = [
    (page, *block.split("\n", 1))
    for page in PAGES
    for block in re.findall(r"```\n\$ (regard budget .*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
]


@pytest.mark.parametrize(("page", "line", "said"), SHOWN, ids=[f"{page.name}: {line}" for page, line, _ in SHOWN])
def test_commands_on_pages_print_what_is_shown(
    page: Path, line: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An ellipsis stands for lines that are left out."""
    code, out, _ = command(monkeypatch, capsys, *shlex.split(line)[1:])
    printed = "\n".join(x.rstrip() for x in out.rstrip().splitlines())
    pattern = ".*".join(re.escape(part.strip("\n")) for part in said.split("…\n"))
    assert code == 0 and re.fullmatch(pattern + r"\n?", printed, re.DOTALL), printed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def _home(name: str) -> str:
    """The module that a name on a page comes from: ``regard.plots.save`` → ``regard.plots``."""
    module = regard
    for part in name.split(".")[1:]:
        if f"{module.__name__}.{part}" in MODULES:
            importlib.import_module(f"{module.__name__}.{part}")
        if not inspect.ismodule(found := getattr(module, part, None)):
            break
        module = found
    return module.__name__


def _public() -> list[str]:
    """Packages that export something, and the modules whose names the pages use. ``regard.cli`` is the command's."""
    packages = {"regard", *(name for _, name, package in pkgutil.walk_packages(regard.__path__, "regard.") if package)}
    named = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named |= set(re.findall(r"\bregard(?:\.\w+)+", text))
        for module, names in re.findall(r"\bfrom (regard[\w.]*) import \(?([\w, ]+)", text):
            named |= {f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip()}
    found = packages | set(map(_home, named))
    return sorted(name for name in found - {"regard.cli"} if hasattr(importlib.import_module(name), "__all__"))


@pytest.mark.parametrize("name", _public())
def test_exports_exist_and_have_an_example(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)  # the linter keeps their order
    exports = {export: getattr(module, export) for export in module.__all__}
    without = [export for export, x in exports.items() if callable(x) and ">>> " not in (x.__doc__ or "")]
    assert not without, f"no example in the docstring of {', '.join(without)}"


def test_every_public_name_at_the_top_is_in_the_operators_pages() -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in PAGES)
    missing = [name for name in regard.__all__ if name not in pages]
    assert not missing
