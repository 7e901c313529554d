"""Hooks of mkdocs: pages from files outside of docs/, links between them, and the public names of a package.

Pages are written for readers of the repository, and three things must change for the site:

- A link to a page outside of docs/, such as README.md, leads to its page in the site.
- A link to a file that is not a page becomes the file's path as text.
- In tables, code has ``\\|`` in the repository's view, and ``|`` in the site.

A line ``::: regard.masks`` becomes the documentation of every public name of that package.
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
# Files outside of docs/, and their pages.
OUTSIDE_PAGES = {
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
    """Leave out the pages that only a web server needs: 404.html and the site map."""
    config.theme.static_templates.clear()
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/."""
    for name, page in OUTSIDE_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the text of one page for the site."""
    page_path = page.file.src_uri
    source_path = f"docs/{page_path}"
    for outside_path, outside_page in OUTSIDE_PAGES.items():
        if outside_page == page_path:
            source_path = outside_path

    # A split at a group gives text and code in turns; links are in the text only.
    parts = CODE.split(markdown)
    for index, part in enumerate(parts):
        if index % 2 == 0:
            parts[index] = rewrite_links(part, source_path, page_path)
        elif not part.startswith("```"):
            parts[index] = part.replace("\\|", "|")
    return PACKAGE.sub(lambda match: package_reference(match["package"]), "".join(parts))


def rewrite_links(text: str, source_path: str, page_path: str) -> str:
    """Turn the links of the repository's file ``source_path`` into links of the site's page ``page_path``."""

    def rewrite(link: re.Match[str]) -> str:
        is_tag = link.re is TAG
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source_path), link["target"]))
        if ":" in link["target"] or not (ROOT / path).exists():
            return link[0]  # another site, or a dead link, which mkdocs or tests/test_site.py reports
        site_path = OUTSIDE_PAGES.get(path)
        if site_path is None and path.startswith("docs/"):
            site_path = path.removeprefix("docs/")

        # Files that are not pages are not part of the site, so the text names them instead.
        if site_path is None and is_tag:
            return link[0]
        if site_path is None and path.endswith(link["text"]):
            return f"`{path}`"
        if site_path is None:
            return f"{link['text']} (`{path}`)"

        target = os.path.relpath(site_path, os.path.dirname(page_path) or ".")
        anchor = link["anchor"] or ""
        if is_tag:  # mkdocs does not rewrite the links of HTML tags
            target = re.sub("[.]md$", ".html", target)
            return f'{link["name"]}"{target}{anchor}"'
        return f"[{link['text']}]({target}{anchor})"

    return TAG.sub(rewrite, LINK.sub(rewrite, text))


def package_reference(package: str) -> str:
    """The docstring of a package, and every name of its ``__all__`` from the module that defines it.

    A name that has its own page, or that another page documents, becomes a link to that page.
    """
    tree, public_names = read_module(f"{package.replace('.', '/')}/__init__.py")
    defined_at = {}
    # Also the imports for type checkers: some packages import their names only at first use.
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                defined_at[alias.asname or alias.name] = f"{statement.module}.{alias.name}"
    pages = {f"regard.{page.stem}": page.name for page in (ROOT / "docs" / "api").glob("*.md")}

    lines = [f"::: {package}", "    options: { members: false }", ""]
    links = []
    for name in public_names:
        path = defined_at[name]
        owner = path.rpartition(".")[0]
        if path in pages and path != package:
            links.append(f"[`{name}`]({pages[path]})")
            continue
        if owner in pages and owner != package:
            links.append(f"[`{name}`]({pages[owner]}#{owner}.{name})")
            continue
        options = f"heading: {name}, toc_label: {name}, show_root_heading: true, show_root_toc_entry: true"
        module = f"{path.replace('.', '/')}.py"
        if not (ROOT / "src" / module).exists():
            module = f"{path.replace('.', '/')}/__init__.py"
        if path == f"{package}.{name}" and (ROOT / "src" / module).exists():
            options += f", members: {read_module(module)[1]}"
        else:
            # The anchor of the public name: mkdocstrings only makes one for the module that defines it.
            lines += [f'<a id="{package}.{name}"></a>', ""]
        lines += [f"::: {path}", f"    options: {{ {options} }}", ""]
    if links:
        lines += ["## On pages of their own", "", " · ".join(links), ""]
    return "\n".join(lines)


def read_module(module: str) -> tuple[ast.Module, list[str]]:
    """The syntax tree of a module, and its ``__all__``."""
    tree = ast.parse((ROOT / "src" / module).read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "__all__":
            return tree, ast.literal_eval(statement.value)
    raise ValueError(f"{module} has no __all__")
