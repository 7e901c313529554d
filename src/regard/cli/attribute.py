"""``regard attribute MODEL``: how much every token and every head of a text contributes to one prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard._errors import RegardError
from regard.cli.look import _check_column, _check_files, _find_folder, _read_text
from regard.cli.output_file import path_option

SORT_KEYS = ("contribution", "absolute")


def attribute_command(
    model: Annotated[
        Path | None,
        typer.Argument(
            parser=path_option,
            metavar="MODEL",
            help="folder of a model or of a run of regard train, or a GGUF file; default the bundled model",
            show_default=False,
        ),
    ] = None,
    stdin: Annotated[
        str | None, typer.Argument(metavar="[-]", help="- reads the text from standard input", show_default=False)
    ] = None,
    text: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="a file with the text; - is standard input")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="read only this many tokens, from the start")] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="the predicted token, as text or #ID; default the most likely one"),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="attribute the difference to the logit of this token")
    ] = None,
    position: Annotated[int, typer.Option(help="where it is predicted; -1 is after the last token")] = -1,
    steps: Annotated[int, typer.Option(help="average gradients over this many steps from empty embeddings")] = 1,
    direct: Annotated[
        bool,
        typer.Option("--direct", help="also split the logit exactly: embeddings, heads, feed-forwards, biases"),
    ] = False,
    sort: Annotated[str, typer.Option(help=f"column that orders the heads: {', '.join(SORT_KEYS)}")] = "contribution",
    most: Annotated[int, typer.Option(help="number of rows of each table; 0 means all")] = 10,
    csv: Annotated[
        Path | None, typer.Option(parser=path_option, metavar="FILE", help="write the numbers of all heads")
    ] = None,
) -> None:
    """Attribute a prediction to the tokens and heads of a model, with gradients. Ctrl-C stops.

    regard attribute smollm2 --text story.txt --target " king" --against " queen"
    """
    if most < 0:
        raise RegardError(f"--most must be at least 0, got {most}")
    if steps < 1:
        raise RegardError(f"--steps must be at least 1, got {steps}")
    if str(model) == "-" and stdin is None:
        model = None
        stdin = "-"
    _check_column(sort, SORT_KEYS)
    _check_files(None, csv)
    folder = _find_folder(model)
    if (folder / "recording.json").is_file():
        raise RegardError(f"MODEL must be a model, got the recording {folder}; attribution runs the model again")
    content = _read_text(stdin, text, None)
    assert content is not None

    # Here, not at the top: this imports torch, which takes seconds, and errors of the command line do not need it.
    from regard.cli.attribute_text import print_attribution

    print_attribution(
        folder,
        content,
        tokens=tokens,
        target=target,
        against=against,
        position=position,
        steps=steps,
        direct=direct,
        sort=sort,
        most=most,
        csv=csv,
    )
