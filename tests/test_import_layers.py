"""The map of the code: who may import whom, how modules are named, and how long they are.

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
    "_errors",
    "_version",
    "_lazy_names",
    "_cpu",
    "_checks",
    "_shapes",
    "_files",
    "_config_json",
    "_register_pytree",
    "_devices",
    "_attribution",
    "_lowered_scores",
    "_groups",
    "_merge_observations",
    "_observables",
    "plots",
    "_terminal",
    "_error_report",
    "masks",
    "positions",
    "kernels",
    "_saved_call",
    "_operator",
    "_running_modules",
    "_hooks",
    "nn",
    "models",
    "budget",
    "interp",
    "parallel",
    "training",
    "convolution",
    "claims",
    "bench",
    "zoo",
    "lab",
    "doctor",
    "cli",
    "__main__",
)
# Packages that users do not import from, and catalogues with one entry per file: their modules have plain names.
INTERNAL = frozenset({"kernels", "lab", "doctor", "cli"})
CATALOGUES = frozenset({("claims", "theorems"), ("training", "tasks"), ("training", "image_models")})
PUBLIC_MODULES = {"interp/figures.py", "interp/huggingface.py", "training/figures.py", "training/huggingface.py"}
LONGEST_MODULE = 450  # lines

# Beyond the order: what a layer may not reach, neither itself nor through what it imports.
NEVER = {
    "plots": frozenset(LAYERS) - {"plots", "_errors", "_files"},  # draws plain data
    "budget": frozenset({"nn"}),  # two derivations that agree are evidence only if neither knows the other
}


def module_of(path: Path, package: Path = PACKAGE) -> str:
    """`src/regard/nn/block.py` is `regard.nn._block`; a folder's `__init__.py` is the folder."""
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
    """`regard.nn._block` is in the layer `nn`; the package itself is in none."""
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


# --- the project ------------------------------------------------------------------------------------------------------


def test_imports_follow_the_layers():
    assert violations(sources()) == []


def test_a_private_module_of_a_public_package_starts_with_an_underscore():
    """Users import from the packages; `PUBLIC_MODULES` are the few modules that are documented by their own name."""
    plain = set()
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] in INTERNAL or inside.parts[:2] in CATALOGUES or path.name.startswith("_"):
            continue
        plain.add(inside.as_posix())
    assert plain == PUBLIC_MODULES


def test_modules_are_of_a_readable_size():
    long = {}
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > LONGEST_MODULE:
            long[path.relative_to(PACKAGE).as_posix()] = lines
    assert long == {}


def test_no_function_has_the_name_of_its_module():
    shadowed = []
    for name, source in sources().items():
        module = name.rpartition(".")[2]
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == module:
                shadowed.append(name)
    assert shadowed == []


def test_the_architecture_page_names_every_package():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert [name for name in packages if f"{name}/" not in text] == []


def test_only_the_boundary_to_python_knows_nanobind():
    knows = re.compile(r"^\s*#\s*include\s*[<\"]nanobind", flags=re.MULTILINE)
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert {path.name for path in files if knows.search(path.read_text(encoding="utf-8"))} == {
        "bindings.cpp",
        "tensor_arguments.h",
    }


# --- the checker can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("regard.masks", "from regard._operator import attention", "_operator stands below masks"),
        ("regard.masks", "import regard.nn._block as b", "nn stands below masks"),
        ("regard.masks", "def f():\n    from regard import nn", "regard.masks:2 imports regard.nn"),
        ("regard.masks", "from .kernels import reference", "kernels stands below masks"),
        ("regard.positions._rotary", "from ..nn._block import Block", "nn stands below positions"),
        ("regard.positions.__init__", "from ..nn import _block", "nn stands below positions"),
        ("regard.cli.look", "import regard", "imports regard itself"),
        ("regard.cli.look", "from .. import Causal", "imports regard itself"),
        ("regard.cli.look", "from regard import _native", "imports regard itself"),
        ("regard.cli.look", "import regard._native", "regard._native, which is in no layer"),
        ("regard.helpers", "", "regard.helpers is in no layer"),
        ("regard.plots", "from regard import _shapes", "plots reaches _shapes"),
        ("regard.budget._plan", "from regard.nn import _block", "budget reaches nn"),
        ("regard.budget._plan", "from regard.models import _bert", "budget reaches nn"),
    ],
)
def test_a_wrong_import_is_found(name, source, complaint):
    code = {
        "regard.__init__": "",
        "regard._shapes": "",
        "regard.nn.__init__": "",
        "regard.nn._block": "",
        "regard.models.__init__": "",
        "regard.models._bert": "from ..nn import _block",
        name: source,
    }
    assert any(complaint in problem for problem in violations(code)), violations(code)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("regard.__init__", "from regard.lab import app\nfrom . import _shapes"),
        ("regard.nn._block", "from . import _norm\nfrom ._norm import LayerNorm\nfrom .._shapes import check"),
        ("regard.nn._block", "import torch.nn\nfrom torch import nn\nfrom regarding import nn as other"),
        ("regard.nn.__init__", "from ._block import Block\nfrom regard.nn._norm import LayerNorm"),
        ("regard.claims.__init__", "import regard._operator\nfrom regard import _shapes"),
    ],
)
def test_a_right_import_is_left_alone(name, source):
    code = {"regard.__init__": "", "regard._shapes": "", "regard.nn._norm": "", name: source}
    assert violations(code) == []
