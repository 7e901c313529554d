"""``regard patch MODEL``: which heads carry what differs between two texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from regard._errors import RegardError
from regard.cli.look import _check_files, _find_folder, _read_text
from regard.cli.output_file import check_figure_file, path_option

PARTS = ("output", "pattern", "q", "k", "v")


def patch_command(
    model: Annotated[
        Path | None,
        typer.Argument(
            parser=path_option,
            metavar="MODEL",
            help="folder of a model or of a run of regard train, or a GGUF file; default the bundled model",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="a file with the text that is run")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            parser=path_option,
            metavar="FILE",
            help="a file with the text whose values are put in; without it, heads are set to zero",
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="read only this many tokens of both texts, from the start")] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="measure the logit of this token, as text or #ID; default the loss"),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="with --target: minus the logit of this token")
    ] = None,
    position: Annotated[int, typer.Option(help="with --target: where it is predicted; -1 is after the end")] = -1,
    parts: Annotated[str, typer.Option(help=f"what to patch, separated by commas: {', '.join(PARTS)}")] = "output",
    positions: Annotated[
        str, typer.Option(help="all positions of a head together, each of them alone, or some: 3,5,-1")
    ] = "all",
    layers: Annotated[str | None, typer.Option(help='patch only these layers, e.g. "*.blocks.3.*"')] = None,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="estimate all outputs from one backward pass (needs --source)"),
    ] = False,
    most: Annotated[int, typer.Option(help="number of rows in the table; 0 means all")] = 20,
    save: Annotated[
        Path | None,
        typer.Option(parser=path_option, metavar="FILE", help="keep finished runs in this file, and continue from it"),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="write all numbers, one line per patch")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="draw the effects: .svg, .pdf or .png")
    ] = None,
) -> None:
    """Put values of another text into each head, and measure what changes. Ctrl-C stops; --save continues.

    regard patch smollm2 --text base.txt --source other.txt --target " Paris" --against " Rome"
    """
    if most < 0:
        raise RegardError(f"--most must be at least 0, got {most}")
    if text is None:
        raise RegardError("--text is missing: give a file with the text that is run, or - for standard input")
    if against is not None and target is None:
        raise RegardError("--against needs --target: the difference of two logits is measured")
    if position != -1 and target is None:
        raise RegardError("--position needs --target: without it the loss of all tokens is measured")
    if estimate and source is None:
        raise RegardError("--estimate needs --source FILE: it estimates from the difference of two runs")
    chosen_parts = _chosen_parts(parts)
    chosen_positions = _chosen_positions(positions)
    if estimate:
        unused = {"--save": save, "--layers": layers, "--parts": None if parts == "output" else parts}
        unused["--positions"] = None if positions == "all" else positions
        for name, value in unused.items():
            if value is not None:
                raise RegardError(f"--estimate takes no {name}: it estimates the output of every head at each position")
    _check_files(None, csv, save)
    if figure is not None:
        if len(chosen_parts) > 1:
            raise RegardError(f"--figure draws one part, got --parts {parts}; give one of them")
        check_figure_file(figure)
    folder = _find_folder(model)
    if (folder / "recording.json").is_file():
        raise RegardError(f"MODEL must be a model, got the recording {folder}; patching runs the model again")
    content = _read_text(None, text, None)
    source_content = None
    if source is not None:
        source_content = _read_text(None, source, None)
    assert content is not None

    # Here, not at the top: this imports torch, which takes seconds, and errors of the command line do not need it.
    from regard.cli.patch_text import print_patches

    print_patches(
        folder,
        content,
        source_content,
        tokens=tokens,
        target=target,
        against=against,
        position=position,
        parts=chosen_parts,
        positions=chosen_positions,
        layers=layers,
        estimate=estimate,
        most=most,
        save=save,
        csv=csv,
        figure=figure,
    )


def _chosen_parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PARTS:
            raise RegardError(f"--parts must be among {', '.join(PARTS)}, separated by commas, got {text!r}")
    return list(dict.fromkeys(names))


def _chosen_positions(text: str) -> str | list[int]:
    """ "all", "each", or a list of positions."""
    if text in ("all", "each"):
        return text
    if not re.fullmatch(r"-?\d{1,9}(,-?\d{1,9})*", text):
        raise RegardError(f"--positions must be all, each, or numbers such as 3,5,-1, got {text!r}")
    return [int(number) for number in text.split(",")]
