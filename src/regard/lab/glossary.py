"""The terms of the glossary. The lab shows the explanation of a term when the reader taps it.

They are read from ``glossary.md`` in this package, a copy of ``docs/glossary.md``: an installed package has no docs. A
test checks that both files are the same.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from typing import Any

GROUP = re.compile(r"## (?P<title>.+)")
# | **sink** (learned) | an extra logit … |
TERM = re.compile(r"\| \*\*(?P<name>[^*]+)\*\*(?: \((?P<note>.+?)\))? \| (?P<meaning>.+) \|")


def parse_glossary(markdown: str) -> list[dict[str, Any]]:
    r"""Return the groups of a glossary in Markdown: ``{"title", "terms": [{"name", "note", "meaning"}, …]}``.

    A heading starts a group, and each row of the table below it is a term. ``note`` is what follows the name in
    parentheses: another name, or the field in which the term has this meaning.

    >>> parse_glossary("## Rows\n| **peak** (memory) | the most bytes, \\|x\\| |")
    [{'title': 'Rows', 'terms': [{'name': 'peak', 'note': 'memory', 'meaning': 'the most bytes, |x|'}]}]
    """
    groups: list[dict[str, Any]] = []
    for line in markdown.splitlines():
        heading = GROUP.fullmatch(line)
        if heading is not None:
            groups.append({"title": heading["title"], "terms": []})
            continue
        row = TERM.fullmatch(line)
        if row is not None and groups:
            term = {name: _plain(row[name] or "") for name in ("name", "note", "meaning")}
            groups[-1]["terms"].append(term)
    return groups


@lru_cache(maxsize=1)
def read_glossary() -> list[dict[str, Any]]:
    """Return the groups of the glossary of this package."""
    return parse_glossary(resources.files("regard.lab").joinpath("glossary.md").read_text(encoding="utf-8"))


def _plain(text: str) -> str:
    r"""Remove the backslashes of Markdown: a table writes ``|`` as ``\|``."""
    return re.sub(r"\\([|*])", r"\1", text)
