"""For mkdocstrings: docstrings as Markdown. They nearly are; examples, lists of parameters and tables need marks."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ENTRY = re.compile(r"^(?P<names>\w[\w, ]*): ", re.MULTILINE)


def markdown(docstring: str) -> str:
    return "\n\n".join(marked(paragraph) for paragraph in docstring.split("\n\n"))


def marked(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if len(lines) > 2 and set(lines[1]) == {"-"}:  # ``Parameters`` over a line, and entries
        return f"**{lines[0]}**\n\n" + ENTRY.sub(r"- **\g<names>**: ", "\n".join(lines[2:]))
    first = next((i for i, line in enumerate(lines) if line.lstrip().startswith(">>> ")), None)
    if first is not None:
        return "\n".join([*lines[:first], "", fenced(lines[first:], "pycon")])
    if len(lines) > 1 and all(re.search(r"^\S.* {3,}\S", line) for line in lines):
        return fenced(lines, "text")
    return paragraph


def fenced(lines: list[str], language: str) -> str:
    indent = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join([f"```{language}", *(line[indent:] for line in lines), "```"])


class Docstrings(Extension):
    """Rewrites every docstring once, when its object is made."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
