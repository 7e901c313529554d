"""For mkdocs: texts that stand outside of docs/ as pages of the site, links that lead where they lead in the
repository, and a package's names where a page says ``::: regard.masks``.

A page is written for those who read it in the repository. In the site a link to a file that is no page becomes the
file's path. In a table the repository's view wants \\| in code, and this one |.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
TAG = re.compile(r"(?P<name>\b(?:href|src|srcset)=)\"(?P<target>[^\"#\s]+)(?P<anchor>#[^\"\s]*)?\"")
CODE = re.compile(r"(```.*?^\s*```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
PACKAGE = re.compile(r"^::: (?P<package>regard[\w.]*)$(?!\n )", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.theme.static_templates.clear()  # pages for a server: where none was found, and a list of all
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    here = next((name for name, made in BESIDE.items() if made == uri), f"docs/{uri}")
    pieces = CODE.split(markdown)  # every other one is code
    told = (plain(piece) if code % 2 else moved(piece, here, uri) for code, piece in enumerate(pieces))
    return PACKAGE.sub(lambda found: listed(found["package"]), "".join(told))


def moved(text: str, here: str, page: str) -> str:
    """Links as they are in the repository's file ``here``, turned to those of the site's ``page``."""

    def turned(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link["target"]))
        inside = BESIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if ":" in link["target"] or not (ROOT / path).exists() or (inside is None and link.re is TAG):
            return link[0]  # elsewhere, or nowhere: mkdocs says so, or tests/test_site.py
        if inside is None:
            return f"`{path}`" if path.endswith(link["text"]) else f"{link['text']} (`{path}`)"
        target, anchor = os.path.relpath(inside, os.path.dirname(page) or "."), link["anchor"] or ""
        if link.re is TAG:  # mkdocs leaves tags as they are
            return f'{link["name"]}"{re.sub("[.]md$", ".html", target)}{anchor}"'
        return f"[{link['text']}]({target}{anchor})"

    return TAG.sub(turned, LINK.sub(turned, text))


def plain(code: str) -> str:
    return code if code.startswith("```") else code.replace("\\|", "|")


def listed(package: str) -> str:
    """A package's docstring and all of ``__all__``, each from the module that defines it: a function that is named as
    its module (``regard.models.load``) could not be found otherwise. What another page has is linked there.
    """
    tree, names = read(f"{package.replace('.', '/')}/__init__.py")
    imported = [(x.module, name) for x in tree.body if isinstance(x, ast.ImportFrom) for name in x.names]
    defined = {name.asname or name.name: f"{module}.{name.name}" for module, name in imported}
    pages = {f"regard.{page.stem}": page.name for page in (ROOT / "docs" / "api").glob("*.md")}
    lines, elsewhere = [f"::: {package}", "    options: { members: false }", ""], []
    for name in names:
        path = defined[name]
        owner = path if path in pages else path.rpartition(".")[0]
        if owner in pages and owner != package:
            elsewhere.append(f"[`{name}`]({pages[owner]}" + ("" if path == owner else f"#{owner}.{name}") + ")")
            continue
        options = f"heading: {name}, toc_label: {name}, show_root_heading: true, show_root_toc_entry: true"
        module = f"{path.replace('.', '/')}.py"
        if (ROOT / "src" / module).exists() and path == f"{package}.{name}":
            options += f", members: {read(module)[1]}"
        else:
            lines += [f'<a id="{package}.{name}"></a>', ""]
        lines += [f"::: {path}", f"    options: {{ {options} }}", ""]
    if elsewhere:
        lines += ["## On pages of their own", "", " · ".join(elsewhere), ""]
    return "\n".join(lines)


def read(module: str) -> tuple[ast.Module, list[str]]:
    """A module's source, and its ``__all__``."""
    tree = ast.parse((ROOT / "src" / module).read_text(encoding="utf-8"))
    names = (x.value for x in tree.body if isinstance(x, ast.Assign) and getattr(x.targets[0], "id", "") == "__all__")
    return tree, ast.literal_eval(next(names))
