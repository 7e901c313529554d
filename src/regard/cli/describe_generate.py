"""``regard describe FOLDER`` prints a model as a table; ``regard generate FOLDER PROMPT`` prints generated text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard import models
from regard._errors import RegardError
from regard._terminal import printable
from regard.models._generate import TextGenerator


def describe_command(
    folder: Annotated[
        str | None,
        typer.Argument(help="a folder with config.json and *.safetensors, or a GGUF file; default: the bundled model"),
    ] = None,
) -> None:
    """Print layers, heads, dimensions and parameters of a model."""
    path = models.bundled()
    if folder is not None:
        path = _checked_folder(folder)
    typer.echo(printable(str(models.describe(models.load(path))), lines=True))


def _checked_folder(text: str) -> Path:
    """Return the path of a folder. An empty text is refused: as a path it would mean the current folder."""
    if not text.strip():
        raise RegardError(
            "folder must be a folder with config.json and *.safetensors, or a GGUF file, got an empty text"
        )
    return Path(text)


def generate_command(
    folder: Annotated[
        str, typer.Argument(help="a folder with config.json, *.safetensors and tokenizer.json, or a GGUF file")
    ],
    prompt: Annotated[str, typer.Argument(help="the text that the model continues or answers")],
    length: Annotated[int, typer.Option(help="largest number of new tokens")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token; above 0 tokens are drawn")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="draw from the k most likely tokens; needs a temperature")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="draw from the most likely tokens that reach this probability; needs temperature"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed draws the same tokens")] = None,
) -> None:
    """Continue a prompt, token by token. Ctrl-C stops.

    regard generate smollm2 "Once upon a time" --temperature 0.8 --top-p 0.9 --seed 1
    """
    model = models.load(_checked_folder(folder))
    if not isinstance(model, TextGenerator):
        name = model.config.architecture or model.config.model_type
        raise RegardError(f"{folder} holds a {name}, which generates no text; GPT-2, Llama, its relatives and T5 do")
    for piece in model.stream(prompt, length, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed):
        typer.echo(printable(str(piece), lines=True), nl=False)
    typer.echo()
