"""What the parts of ``regard look`` print alike: lines, how many heads are left out, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from regard._terminal import literal_text


def print_line(text: str) -> None:
    # A file name may contain characters that the console would interpret as markup.
    Console().print(literal_text(text), soft_wrap=True)


def print_count(total: int, shown: int, sort: str | None) -> None:
    """Print how many heads a table leaves out."""
    if 0 < shown < total:
        line = f"{shown} of {total} heads"
        if sort:
            line += f", by {sort}"
        print_line(f"{line}; --most 0 shows all.")


@contextmanager
def progress_bar(description: str, unit: str = "layers") -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar on standard error, if that is a terminal. ``unit`` names what is counted."""
    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
