"""The map of the code: who may import whom, and whether ARCHITECTURE.md tells the truth about it.

A module imports only layers above its own, and its own folder. `regard/__init__.py` may import everything; nobody
imports it, because that would tie all layers into one.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "regard"

LAYERS = (
    "version",
    "system",
    "shapes",
    "files",
    "config",
    "values",
    "scores",
    "observables",
    "plots",
    "terminal",
    "masks",
    "positions",
    "kernels",
    "kept",
    "attention",
    "nn",
    "models",
    "budget",
    "watching",
    "training",
    "convolution",
    "claims",
    "bench",
    "lab",
    "doctor",
    "cli",
    "__main__",
)
# Beyond the order: what a layer may not reach, neither itself nor through what it imports.
NEVER = {
    "plots": frozenset(LAYERS) - {"plots"},  # draws plain data
    "budget": frozenset({"nn"}),  # two derivations that agree are evidence only if neither knows the other
}


def module_of(path: Path, package: Path = PACKAGE) -> str:
    """`src/regard/nn/block.py` is `regard.nn.block`; a folder's `__init__.py` is the folder."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, str]:
    """The text of every module, by name; packages end with `.__init__`, so that relative imports can be resolved."""
    return {
        module_of(path) + (".__init__" if path.name == "__init__.py" else ""): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(name: str, source: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each module of ours that a source imports, inside functions too.

    `from a import b` means the module `a.b` if there is one, else the module `a`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = name.split(".")[: -node.level]
                base = ".".join([*parent, base] if base else parent)
            inside = [f"{base}.{alias.name}" for alias in node.names]
            found = [module if module in modules else base for module in inside]
        else:
            continue
        for module in found:
            if module == "regard" or module.startswith("regard."):
                yield node.lineno, module


def layer_of(module: str) -> str:
    """`regard.nn.block` is in the layer `nn`; the package itself is in none."""
    return module.split(".")[1] if "." in module else ""


def violations(code: Mapping[str, str]) -> list[str]:
    """Every import that breaks the rules, in words."""
    modules = frozenset(name.removesuffix(".__init__") for name in code)
    problems = []
    reaches: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    for name, source in code.items():
        layer = layer_of(name.removesuffix(".__init__"))
        if not layer:
            continue
        if layer not in LAYERS:
            problems.append(f"{name} is in no layer: give it a place in LAYERS and in ARCHITECTURE.md")
            continue
        for line, module in imports(name, source, modules):
            other = layer_of(module)
            if not other:
                problems.append(f"{name}:{line} imports regard itself, which ties all layers together")
            elif other not in LAYERS:
                problems.append(f"{name}:{line} imports {module}, which is in no layer")
            elif LAYERS.index(other) > LAYERS.index(layer):
                problems.append(f"{name}:{line} imports {module}, but {other} stands below {layer}")
            reaches[layer].add(other)

    for layer, forbidden in NEVER.items():
        for other in sorted(reachable(layer, reaches) & forbidden):
            problems.append(f"{layer} reaches {other}, which it must never do")
    return problems


def reachable(layer: str, reaches: Mapping[str, set[str]]) -> set[str]:
    """What a layer imports, what that imports, and so on."""
    found: set[str] = set()
    todo = [layer]
    while todo:
        new = reaches.get(todo.pop(), set()) - found
        found |= new
        todo.extend(new)
    return found


def the_map(text: str) -> list[str]:
    """Files and folders that the tree under `src/regard/` names, as paths relative to it, in order.

    The tree is a fenced block; indentation says what is in what; the first word of a line is the name. A line whose
    first word is neither `name.py` nor `folder/` continues the remark before it.
    """
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        lines = [line for line in block.splitlines() if line.strip()]
        roots = [i for i, line in enumerate(lines) if line.split()[0] == "src/regard/"]
        if roots:
            return paths_of_tree(lines[roots[0] :])
    raise AssertionError("no fenced block with a line src/regard/")


def paths_of_tree(lines: list[str]) -> list[str]:
    """The paths of an indented tree whose first line is its root; folders end with a slash."""
    paths: list[str] = []
    stack = [(indent(lines[0]), "")]
    for line in lines[1:]:
        word, depth = line.split()[0], indent(line)
        if depth <= stack[0][0]:
            break
        if not word.endswith((".py", "/")):
            continue
        while depth <= stack[-1][0]:
            stack.pop()
        paths.append(stack[-1][1] + word)
        if word.endswith("/"):
            stack.append((depth, paths[-1]))
    return paths


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


# --- the project ------------------------------------------------------------------------------------------------------


def test_imports_follow_the_layers():
    assert violations(sources()) == []


@pytest.fixture(scope="module")
def architecture() -> list[str]:
    return the_map((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))


def test_the_map_names_every_module_and_no_other(architecture):
    there = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    there = {path for path in there if not path.startswith("claims/theorems/")}  # one a claim: test_claims.py
    assert sorted(path for path in architecture if path.endswith(".py")) == sorted(there)
    assert [path for path in architecture if path.endswith("/") and not (PACKAGE / path).is_dir()] == []


def test_the_map_lists_the_layers_in_their_order(architecture):
    shown = [path.rstrip("/").removesuffix(".py") for path in architecture if "/" not in path.rstrip("/")]
    assert shown == [layer for layer in LAYERS if layer in shown]


def test_only_the_bindings_know_nanobind():
    knows = re.compile(r"^\s*#\s*include\s*[<\"]nanobind", flags=re.MULTILINE)
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert [path.name for path in files if knows.search(path.read_text(encoding="utf-8"))] == ["bindings.cpp"]


# --- the checker can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("regard.masks", "from regard.attention import attention", "attention stands below masks"),
        ("regard.masks", "import regard.nn.block as b", "nn stands below masks"),
        ("regard.masks", "def f():\n    from regard import nn", "regard.masks:2 imports regard.nn"),
        ("regard.masks", "from .kernels import reference", "kernels stands below masks"),
        ("regard.positions.rotary", "from ..nn.block import Block", "nn stands below positions"),
        ("regard.positions.__init__", "from ..nn import block", "nn stands below positions"),
        ("regard.cli.look", "import regard", "imports regard itself"),
        ("regard.cli.look", "from .. import Causal", "imports regard itself"),
        ("regard.cli.look", "from regard import _native", "imports regard itself"),
        ("regard.cli.look", "import regard._native", "regard._native, which is in no layer"),
        ("regard.helpers", "", "regard.helpers is in no layer"),
        ("regard.plots", "from regard import shapes", "plots reaches shapes"),
        ("regard.budget.plan", "from regard.nn import block", "budget reaches nn"),
        ("regard.budget.plan", "from regard.models import bert", "budget reaches nn"),
    ],
)
def test_a_wrong_import_is_found(name, source, complaint):
    code = {
        "regard.__init__": "",
        "regard.shapes": "",
        "regard.nn.__init__": "",
        "regard.nn.block": "",
        "regard.models.__init__": "",
        "regard.models.bert": "from ..nn import block",
        name: source,
    }
    assert any(complaint in problem for problem in violations(code)), violations(code)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("regard.__init__", "from regard.lab import app\nfrom . import shapes"),
        ("regard.nn.block", "from . import norm\nfrom .norm import LayerNorm\nfrom ..shapes import check"),
        ("regard.nn.block", "import torch.nn\nfrom torch import nn\nfrom regarding import nn as other"),
        ("regard.nn.__init__", "from .block import Block\nfrom regard.nn.norm import LayerNorm"),
        ("regard.claims.__init__", "import regard.attention\nfrom regard import shapes"),
    ],
)
def test_a_right_import_is_left_alone(name, source):
    code = {"regard.__init__": "", "regard.shapes": "", "regard.nn.norm": "", name: source}
    assert violations(code) == []


def test_the_map_is_read_by_indentation():
    text = """
```python
regard.attention(q, k, v)
```
```
csrc/           ignored.py is not a module
src/regard/     the package
  shapes.py     — the alphabet
  positions/    — one scheme a file,
                continued here
    rotary.py   — turns
    deep/
      leaf.py
  attention.py
tests/
  test_a.py
```
"""
    assert the_map(text) == [
        "shapes.py",
        "positions/",
        "positions/rotary.py",
        "positions/deep/",
        "positions/deep/leaf.py",
        "attention.py",
    ]
    with pytest.raises(AssertionError, match="no fenced block"):
        the_map("```\nsrc/\n```")
