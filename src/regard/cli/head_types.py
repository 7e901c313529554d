"""``regard look MODEL --kinds``: print the types of every head.

A stored result is printed without torch, which takes seconds to import. So the modules that need torch are imported
inside functions.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from regard._files import write_text
from regard.cli.look_printing import print_count, print_line, progress_bar
from regard.interp._atlas_store import stored_atlas
from regard.interp._atlas_table import Atlas
from regard.interp._head_table import STRONGEST


def print_head_types(
    folder: Path, other: Path | None, text: str | None, sort: str | None, most: int, csv: Path | None
) -> None:
    """Print the types of every head, or compare them with those of another model."""
    result = model_head_types(folder, text)
    if other is not None:
        from regard.interp._atlas_comparison import head_pair_csv, head_pair_table, type_table

        compared = model_head_types(other, text)
        console = Console()
        console.print(type_table(result, compared))
        console.print(head_pair_table(result, compared, sort, most or None))
        print_line(f"A, {folder}: types from {result.source}")
        print_line(f"B, {other}: types from {compared.source}")
        if csv is not None:
            write_text(head_pair_csv(result, compared), csv)
            print_line(f"pairs of heads: {csv}")
        return
    column = sort or STRONGEST
    Console().print(result.table(column, most or None))
    print_line(result.summary())
    if csv is not None:
        result.to_csv(csv)
        print_line(f"numbers: {csv}")
    print_count(len(result.rows), most, column)


def model_head_types(folder: Path, text: str | None) -> Atlas:
    """The head types of a model: those that are stored, or on a text of the user's own."""
    if text is None:
        stored = stored_atlas(folder)
        if stored is not None:
            return stored
    from regard.cli.look_model import load_model
    from regard.interp._head_atlas import atlas, folder_atlas

    with progress_bar("scoring") as progress:
        if text is None:
            return folder_atlas(folder, lambda: load_model(folder), progress)
        loaded, tokenizer = load_model(folder)
        return atlas(loaded, tokenizer, text=text, progress=progress)
