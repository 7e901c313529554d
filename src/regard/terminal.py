"""What commands print: tables without a frame, and texts that a terminal shows as they are."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["plain", "plain_table"]


def plain_table(title: str | None = None) -> Table:
    """A table without a frame, which is half as wide as one with."""
    return Table(
        title=None if title is None else plain(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def plain(text: str) -> Text:
    """A text that a terminal shows as it is: names come from files, and may hold markup or a terminal's own codes."""
    return Text("".join(letter if letter.isprintable() else "�" for letter in text))
