"""``regard look MODEL``: every head of a model on a text or a picture, as a table, a recording, a page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from regard import models, watching
from regard.models.folder import Folder
from regard.watching import Seen, heads
from regard.watching.look import LOOK
from regard.watching.look import look as watched

LARGEST = 64 * 2**20  # bytes of a text file


def look(
    model: Annotated[Path, typer.Argument(help="a model's folder, or a recording that --out wrote")],
    given: Annotated[
        str | None, typer.Argument(help="- reads the text from standard input", show_default=False)
    ] = None,
    text: Annotated[Path | None, typer.Option(help="a file with the text; - is standard input")] = None,
    image: Annotated[Path | None, typer.Option(help="a picture, for image models")] = None,
    tokens: Annotated[int | None, typer.Option(help="read the first tokens only")] = None,
    layers: Annotated[str | None, typer.Option(help='watch these alone, e.g. "*.blocks.3.*"')] = None,
    sort: Annotated[str, typer.Option(help="the column that orders the table")] = "peak",
    most: Annotated[int, typer.Option(help="heads in the table; 0 is all")] = 20,
    out: Annotated[Path | None, typer.Option(help="save the recording in this folder")] = None,
    html: Annotated[Path | None, typer.Option(help="write one offline page")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="also save q and k, for exact weights later")] = False,
    no_text: Annotated[
        bool, typer.Option("--no-text", help="leave the text or picture out of what is written")
    ] = False,
    kinds: Annotated[bool, typer.Option("--kinds", help="score each head on the standard probes, and name it")] = False,
) -> None:
    """Watch every head of a model. Ctrl-C stops, and nothing is half-written.

    regard look smollm2 --text story.txt --html story.html
    """
    console = Console()
    if (model / "recording.json").is_file():
        if text or image or given or keep or kinds:
            raise ValueError(f"{model} is a recording: it is shown as it is, and reads no text or picture")
        seen = watching.open(model)
        if no_text:
            seen.about = {name: x for name, x in seen.about.items() if name not in ("tokens", "source", "image")}
    else:
        loaded, tokenizer = _loaded(model)
        if kinds:
            with _bar("scoring") as progress:
                found = heads.atlas(loaded, tokenizer, progress=progress)
            console.print(found.table(sort if sort != "peak" else None, most or None))
            if not (text or image or given):
                return
        seen = _run(loaded, tokenizer, given, text, image, tokens, layers, keep, no_text)
    shown = min(most or 10**9, len(seen.heads()))
    console.print(seen.table(sort, most or None))
    if shown < len(seen.heads()):
        console.print(f"{shown} of {len(seen.heads())} heads, by {sort}; --most 0 shows all.", highlight=False)
    if out is not None:
        seen.save(out)
        console.print(f"recording: {out}", highlight=False, soft_wrap=True)
    if html is not None:
        seen.to_html(html)
        console.print(f"page: {html} ({html.stat().st_size / 1e6:.1f} MB)", highlight=False, soft_wrap=True)


def _loaded(folder: Path) -> tuple[nn.Module, Any]:
    """A model of ours, or of a kind that only ``transformers`` knows, then with its tokenizer."""
    kind = Folder(folder).config.kind
    if kind in models.known() or find_spec("transformers") is None:
        return models.load(folder), None
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    reads = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModel
    loaded = reads.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return loaded.eval(), transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _run(
    model: nn.Module,
    tokenizer: Any,
    given: str | None,
    text: Path | None,
    image: Path | None,
    tokens: int | None,
    layers: str | None,
    keep: bool,
    no_text: bool,
) -> Seen:
    if given not in (None, "-"):
        raise ValueError(f"{given!r} is neither - nor an option; a text's file is given as --text {given}")
    if sum(x is not None for x in (given, text, image)) != 1:
        raise ValueError("give what to look at: --text FILE, --image FILE, or - for a text from standard input")
    words = None if image is not None else _read(Path("-") if text is None else text)
    with _bar("watching") as progress:
        return watched(
            model,
            words,
            image,
            tokenizer=tokenizer,
            observe=replace(LOOK, keep=keep),
            layers=layers,
            tokens=tokens,
            words=not no_text,
            progress=progress,
        )


def _read(file: Path) -> str:
    if str(file) == "-":
        data = sys.stdin.buffer.read(LARGEST + 1)
    else:
        with file.open("rb") as opened:
            data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"{file} is larger than {LARGEST // 2**20} MiB; give a part of it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}") from None


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar on standard error, where that is a terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
