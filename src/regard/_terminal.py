"""Tables and text for the terminal."""

from __future__ import annotations

import re

from rich import box
from rich.table import Table
from rich.text import Text

_UNPRINTABLE = r"\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(rf"[\x00-\x1f{_UNPRINTABLE}]")
_CONTROL_IN_LINES = re.compile(rf"[\x00-\x08\x0b-\x1f{_UNPRINTABLE}]")


def frameless_table(title: str | None = None) -> Table:
    """Return a table without borders, so that more columns fit into the terminal."""
    return Table(
        title=None if title is None else literal_text(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def literal_text(text: str) -> Text:
    """Return text that rich does not parse as markup, with control characters replaced; names come from files."""
    return Text(printable(text))


def printable(text: str, *, lines: bool = False) -> str:
    """Replace every character that a terminal would obey instead of showing it by �.

    These are control characters (escape codes start with one), line separators, marks that reverse the direction of the
    text after them, and halves of surrogate pairs. Text from a file must pass through here before it is printed.

    - ``lines``: keep line breaks and tabs (default: False).
    """
    if lines:
        return _CONTROL_IN_LINES.sub("�", text)
    return _CONTROL.sub("�", text)


def printable_json(text: str) -> str:
    """Escape what ``printable`` replaces in the text of a JSON document, whose meaning stays the same."""
    return _CONTROL_IN_LINES.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
