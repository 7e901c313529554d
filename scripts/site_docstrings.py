"""Extension of mkdocstrings that turns docstrings into Markdown: examples, lists of parameters, and tables."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

PARAMETER = re.compile(r"^(?P<names>\w[\w, ]*): ", re.MULTILINE)
TABLE_LINE = re.compile(r"^\S.* {3,}\S")


def to_markdown(docstring: str) -> str:
    """The docstring as Markdown, paragraph by paragraph."""
    return "\n\n".join(paragraph_to_markdown(paragraph) for paragraph in docstring.split("\n\n"))


def paragraph_to_markdown(paragraph: str) -> str:
    """An underlined heading becomes bold, an example or a table becomes a code block, other text stays."""
    lines = paragraph.splitlines()
    if len(lines) > 2 and set(lines[1]) == {"-"}:
        return f"**{lines[0]}**\n\n" + PARAMETER.sub(r"- **\g<names>**: ", "\n".join(lines[2:]))
    for index, line in enumerate(lines):
        if line.lstrip().startswith(">>> "):
            return "\n".join([*lines[:index], "", code_block(lines[index:], "pycon")])
    if len(lines) > 1 and all(TABLE_LINE.search(line) for line in lines):
        return code_block(lines, "text")
    return paragraph


def code_block(lines: list[str], language: str) -> str:
    """A fenced code block, without the indentation of its first line."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join([f"```{language}", *(line[indent:] for line in lines), "```"])


class Docstrings(Extension):
    """Rewrites every docstring once, when griffe creates its object."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
