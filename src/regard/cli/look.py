"""``regard look MODEL``: observe every head of a model on a text or an image, as a table, a recording or a page."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from regard._errors import RegardError
from regard._files import check_regular_file
from regard.cli.head_types import print_head_types
from regard.cli.output_file import check_writable, path_option
from regard.interp._atlas_table import ATLAS_SORT_KEYS
from regard.interp._head_table import HEAD_COLUMNS, STRONGEST

MAX_TEXT_BYTES = 64 * 2**20
GROUP_KINDS = ("special", "sentences", "words", "chat")  # of groups_of, which imports torch
MOST_NAMES = 1000  # files of a folder that are compared with a name that does not exist
ACCEPTED = "the folder of a model, a run or a recording, or a GGUF file (without it, the bundled model)"


def look_command(
    model: Annotated[
        Path | None,
        typer.Argument(
            parser=path_option,
            metavar="MODEL",
            help="folder of a model, of a run of regard train, or of a recording, or a GGUF file; default the bundled "
            "model",
            show_default=False,
        ),
    ] = None,
    stdin: Annotated[
        str | None, typer.Argument(metavar="[-]", help="- reads the text from standard input", show_default=False)
    ] = None,
    text: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="a file with the text; - is standard input")
    ] = None,
    image: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="an image file, for image models")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="read only this many tokens, from the start")] = None,
    generate: Annotated[
        int | None, typer.Option(help="let the model continue the text by up to this many tokens, and observe them too")
    ] = None,
    layers: Annotated[str | None, typer.Option(help='observe only these layers, e.g. "*.blocks.3.*"')] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="special|sentences|words|chat",
            help="also measure the weight of every head on groups of tokens: special tokens, sentences, words, or the "
            "roles of a chat",
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            help="column that orders the table (a wrong name lists all); default peak, with --kinds confidence"
        ),
    ] = None,
    most: Annotated[int, typer.Option(help="number of heads in the table; 0 means all")] = 20,
    out: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FOLDER", help="save the recording in this folder")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="write an offline HTML page")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="with --out: also save q and k, for exact weights")] = False,
    no_text: Annotated[bool, typer.Option("--no-text", help="do not write the text or image into any file")] = False,
    csv: Annotated[
        Path | None,
        typer.Option(parser=path_option, metavar="FILE", help="write the numbers of all heads, one line per head"),
    ] = None,
    kinds: Annotated[
        bool,
        typer.Option(
            "--kinds",
            help="print the types of every head, from probes (--text gives the natural one); with --html, observe the "
            "text or image, and add the types to table, CSV and page",
        ),
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(
            parser=path_option,
            metavar="FOLDER",
            help="with --kinds: compare with the heads of this model, of any shape",
        ),
    ] = None,
) -> None:
    """Observe every head of a model. Ctrl-C stops, and no file is left half-written.

    regard look smollm2 --text story.txt --html story.html
    """
    if most < 0:
        raise RegardError(f"--most must be at least 0, got {most}")
    # Without a model, the - for standard input is the first argument.
    if str(model) == "-" and stdin is None:
        model = None
        stdin = "-"
    model = _find_folder(model)
    is_recording = (model / "recording.json").is_file()
    if is_recording:
        # A recording is not computed again, so options of a computation would be ignored.
        unused = {"--text": text, "--image": image, "-": stdin, "--tokens": tokens, "--layers": layers}
        unused |= {"--generate": generate, "--groups": groups}
        _refuse_options(f"{model} is a recording: it", unused | {"--keep": keep, "--kinds": kinds})
    if kinds and html is None:
        unused = {"--image": image, "--tokens": tokens, "--layers": layers, "--keep": keep, "--out": out}
        _refuse_options("--kinds without --html", unused | {"--generate": generate, "--groups": groups})
        _check_files(None, csv)
        # Without a text of their own, all heads have one stored result.
        probe_text = None
        if stdin or text:
            probe_text = _read_text(stdin, text, None)
        if sort is not None:
            _check_column(sort, ATLAS_SORT_KEYS)
        other = None
        if compare is not None:
            other = _find_folder(compare)
        return print_head_types(model, other, probe_text, sort, most, csv)
    if compare is not None:
        raise RegardError("--compare needs --kinds without --html, because it compares the types of heads")
    if image is not None and tokens is not None:
        raise RegardError("--tokens needs a text; leave it out with --image")
    if generate is not None:
        if generate < 1:
            raise RegardError(f"--generate must be at least 1, got {generate}")
        if image is not None:
            raise RegardError("--generate needs a text; leave it out with --image")
    if groups is not None:
        if groups not in GROUP_KINDS:
            raise RegardError(f"--groups must be one of {', '.join(GROUP_KINDS)}, got {groups!r}")
        if image is not None:
            raise RegardError("--groups needs a text; leave it out with --image")
    if keep and out is None:
        raise RegardError("--keep needs --out FOLDER, because it saves q and k in the recording")
    column = sort or ("confidence" if kinds else "peak")
    _check_column(column, [*HEAD_COLUMNS, STRONGEST] if kinds else HEAD_COLUMNS)
    _check_files(out, html, csv)

    # Here, not at the top: this imports torch, which takes seconds, and stored head types are printed without it.
    from regard.cli import look_model

    if is_recording:
        recording = look_model.read_recording(model, no_text)
    else:
        recording = look_model.observe_model(
            model,
            _read_text(stdin, text, image),
            image,
            tokens=tokens,
            generate=generate,
            layers=layers,
            groups=groups,
            keep=keep,
            no_text=no_text,
        )
        if kinds or html is not None or out is not None:
            look_model.add_head_types(recording, model, compute=kinds)
    look_model.print_recording(recording, column, most, generated=generate is not None, with_types=kinds)
    look_model.write_files(recording, csv, out, html)


def _find_folder(model: Path | None) -> Path:
    """The folder of the model or recording; a run has its model in a subfolder."""
    if model is None:
        from regard.models import bundled

        return bundled()
    if not model.exists():
        raise RegardError(f"MODEL must be {ACCEPTED}, got {str(model)!r}, which does not exist{_similar_names(model)}")
    if model.name == "recording.json":
        raise RegardError(f"MODEL must be a folder; a recording is the folder {model.parent}, got {model}")
    if model.is_file():
        if _is_gguf(model):
            return model
        raise RegardError(f"MODEL must be {ACCEPTED}, got the file {model}; give a text as --text {model}")
    if (model / "run.json").is_file():
        if not (model / "model" / "config.json").is_file():
            # Here, not at the top: this imports torch, which takes seconds.
            from regard.models._folder import describe_run_model

            raise RegardError(f"MODEL must be {ACCEPTED}, got the run {model}; {describe_run_model(model)}")
        return model / "model"
    if not (model / "recording.json").is_file() and not (model / "config.json").is_file():
        raise RegardError(f"MODEL must be {ACCEPTED}, got {str(model)!r}, which has no config.json or recording.json")
    return model


def _is_gguf(file: Path) -> bool:
    # Here, not at the top: this imports torch, which takes seconds. Names that end in .gguf do not need it.
    if file.suffix.lower() == ".gguf":
        return True
    from regard.models._gguf_format import is_gguf

    return is_gguf(file)


def _similar_names(model: Path) -> str:
    """Folders and GGUF files with a similar name beside one that does not exist: "; similar: …"."""
    try:
        entries = islice(model.absolute().parent.iterdir(), MOST_NAMES)
        names = [path.name for path in entries if path.is_dir() or path.suffix == ".gguf"]
    except OSError:
        return ""
    matches = [str(model.parent / name) for name in get_close_matches(model.name, sorted(names), n=3)]
    if not matches:
        return ""
    return f"; similar: {', '.join(matches)}"


def _refuse_options(subject: str, unused: dict[str, Any]) -> None:
    for name, value in unused.items():
        if value not in (None, False):
            raise RegardError(f"{subject} takes no {name}")


def _check_column(name: str, columns: Any) -> None:
    if name not in columns:
        raise RegardError(f"--sort must be one of {', '.join(columns)}, got {name!r}")


def _check_files(out: Path | None, *files: Path | None) -> None:
    """Raise an error for files that cannot be written, before the model runs and not afterwards."""
    if out is not None:
        from regard.interp._recording_files import check_recording_folder

        check_recording_folder(out)
    for file in files:
        if file is not None:
            check_writable(file)


def _read_text(stdin: str | None, text: Path | None, image: Path | None) -> str | None:
    """The text to read; None if the input is an image."""
    if stdin not in (None, "-"):
        raise RegardError(f"a text must be given as --text FILE or through -, got {stdin!r}")
    if sum(x is not None for x in (stdin, text, image)) != 1:
        raise RegardError("give one input: --text FILE, --image FILE, or - for a text from standard input")
    if image is not None:
        return None

    # One byte more than allowed is enough to see that an input is too large.
    if text is None or str(text) == "-":
        name = "standard input"
        data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    else:
        name = str(text)
        try:
            # A pipe of this process, as in --text <(command), was opened on purpose. Another pipe may have no writer.
            if not _is_open_stream(text):
                check_regular_file(text)
            with text.open("rb") as opened:
                data = opened.read(MAX_TEXT_BYTES + 1)
        except OSError as error:
            accepted = "--text takes a file, or - for standard input"
            raise RegardError(f"{accepted}; {text} cannot be read: {error.strerror}") from None
    if len(data) > MAX_TEXT_BYTES:
        raise RegardError(f"{name} must be at most {MAX_TEXT_BYTES // 2**20} MiB; give a part of it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RegardError(f"{name} must be UTF-8 text: {error}") from None


def _is_open_stream(file: Path) -> bool:
    """Whether a name is one of the streams that the shell has opened for this process: /dev/stdin or /dev/fd/63."""
    return str(file) == "/dev/stdin" or str(file.parent) in ("/dev/fd", "/proc/self/fd")
