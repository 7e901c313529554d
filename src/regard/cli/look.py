"""``regard look MODEL``: every head of a model on a text or a picture, as a table, a recording, a page."""

from __future__ import annotations

import os
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
from regard.shapes import integer
from regard.terminal import plain
from regard.watching import Seen, atlas, heads, table
from regard.watching.look import LOOK
from regard.watching.look import look as watched
from regard.watching.recording import check_folder

LARGEST = 64 * 2**20  # bytes of a text file


def look(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="a model's folder, a run of regard train, or what --out wrote; the bundled model unless given",
            show_default=False,
        ),
    ] = None,
    given: Annotated[
        str | None, typer.Argument(help="- reads the text from standard input", show_default=False)
    ] = None,
    text: Annotated[Path | None, typer.Option(help="a file with the text; - is standard input")] = None,
    image: Annotated[Path | None, typer.Option(help="a picture, for image models")] = None,
    tokens: Annotated[int | None, typer.Option(help="read the first tokens only")] = None,
    layers: Annotated[str | None, typer.Option(help='watch these alone, e.g. "*.blocks.3.*"')] = None,
    sort: Annotated[str | None, typer.Option(help="the column that orders the table; peak unless given")] = None,
    most: Annotated[int, typer.Option(help="heads in the table; 0 is all")] = 20,
    out: Annotated[Path | None, typer.Option(help="save the recording in this folder")] = None,
    html: Annotated[Path | None, typer.Option(help="write one offline page")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="with --out: save q and k too, for exact weights")] = False,
    no_text: Annotated[
        bool, typer.Option("--no-text", help="leave the text or picture out of what is written")
    ] = False,
    csv: Annotated[Path | None, typer.Option(help="write the numbers of all heads, one line a head")] = None,
    kinds: Annotated[bool, typer.Option("--kinds", help="instead: score each head on probes, and name it")] = False,
) -> None:
    """Watch every head of a model. Ctrl-C stops, and nothing is half-written.

    regard look smollm2 --text story.txt --html story.html
    """
    integer("--most", most)
    if str(model) == "-" and given is None:  # no model, and the text from standard input
        model, given = None, "-"
    if model is not None and model.is_file() and model.name != "recording.json":
        raise ValueError(f"{model} is a file, not a model's folder; a text is given as --text {model}")
    model = models.bundled() if model is None else model
    if (model / "run.json").is_file():
        model = model / "model"
    recorded = (model / "recording.json").is_file()
    if recorded:
        unused = {"--text": text, "--image": image, "-": given, "--tokens": tokens, "--layers": layers}
        _refuse(f"{model} is a recording: it", unused | {"--keep": keep, "--kinds": kinds})
    elif model.name == "recording.json":
        raise ValueError(f"{model} is a file; a recording is its folder, {model.parent}")
    if kinds:
        unused = {
            "--image": image,
            "--tokens": tokens,
            "--layers": layers,
            "--keep": keep,
            "--out": out,
            "--html": html,
        }
        _refuse("--kinds", unused)
        _check_files(None, csv)
        _kinds(model, _read(given, text, None) if given or text else None, sort, most, csv)
        return
    if image is not None and tokens is not None:
        raise ValueError("--tokens cuts a text, and a picture is none; leave it out")
    if keep and out is None:
        raise ValueError("--keep saves q and k in the recording: give --out FOLDER too")
    sort = _column("peak" if sort is None else sort, table.COLUMNS)
    _check_files(out, html, csv)
    if recorded:
        seen = watching.open(model)
        if no_text:
            seen.about = {name: x for name, x in seen.about.items() if name not in ("tokens", "source", "ids", "image")}
    else:
        words = _read(given, text, image)
        loaded, tokenizer = _loaded(model)
        observe = replace(LOOK, keep=keep)
        options: dict[str, Any] = {"tokenizer": tokenizer, "observe": observe, "layers": layers, "tokens": tokens}
        with _bar("watching") as progress:
            seen = watched(loaded, words, image, **options, words=not no_text, progress=progress)
    _show(seen, sort, most)
    if csv is not None:
        seen.to_csv(csv)
        _say(f"numbers: {csv}")
    if out is not None:
        seen.save(out)
        _say(f"recording: {out}")
    if html is not None:
        seen.to_html(html)
        _say(f"page: {html} ({html.stat().st_size / 1e6:.1f} MB)")


def _refuse(what: str, unused: dict[str, Any]) -> None:
    for name, value in unused.items():
        if value not in (None, False):
            raise ValueError(f"{what} takes no {name}")


def _kinds(folder: Path, text: str | None, sort: str | None, most: int, csv: Path | None) -> None:
    if sort is not None:
        _column(sort, atlas.SORTS)
    loaded, tokenizer = _loaded(folder)
    with _bar("scoring") as progress:
        found = heads.atlas(loaded, tokenizer, text=text, progress=progress)
    Console().print(found.table(sort, most or None))
    if csv is not None:
        found.to_csv(csv)
        _say(f"numbers: {csv}")
    _say_how_many(len(found.rows), most, sort)


def _show(seen: Seen, sort: str, most: int) -> None:
    rows = seen.heads()
    Console().print(table.as_table(rows, sort, most or None))
    _say_how_many(len(rows), most, sort)


def _say_how_many(there: int, most: int, sort: str | None) -> None:
    if 0 < most < there:
        _say(f"{most} of {there} heads{f', by {sort}' if sort else ''}; --most 0 shows all.")


def _say(text: str) -> None:
    """A line as it is: a file's name may hold what a console takes for markup."""
    Console().print(plain(text), soft_wrap=True)


def _column(name: str, known: Any) -> str:
    if name not in known:
        raise ValueError(f"--sort is {name!r}; there are {', '.join(known)}")
    return name


def _check_files(out: Path | None, *files: Path | None) -> None:
    """Before the model runs: what could not be written afterwards."""
    if out is not None:
        check_folder(out)
    for file in files:
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            raise ValueError(f"{file} cannot be written: give a file in a folder that is there")


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


def _read(given: str | None, text: Path | None, image: Path | None) -> str | None:
    """The text to read; None where there is a picture."""
    if given not in (None, "-"):
        raise ValueError(f"{given!r} is neither - nor an option; a text is given as a file, --text FILE, or through -")
    if sum(x is not None for x in (given, text, image)) != 1:
        raise ValueError("give one thing to look at: --text FILE, --image FILE, or - for a text from standard input")
    if image is not None:
        return None
    if text is None or str(text) == "-":
        name, data = "standard input", sys.stdin.buffer.read(LARGEST + 1)
    else:
        try:
            with text.open("rb") as opened:
                name, data = str(text), opened.read(LARGEST + 1)
        except OSError as error:
            raise ValueError(f"{text} cannot be read: {error.strerror}") from None
    if len(data) > LARGEST:
        raise ValueError(f"{name} is larger than {LARGEST // 2**20} MiB; give a part of it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no UTF-8 text: {error}") from None


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """A progress bar on standard error, where that is a terminal."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
