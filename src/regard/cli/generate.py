"""``regard generate FOLDER PROMPT``: text as a model writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard import models
from regard.models.generate import Writer


def generate(
    folder: Annotated[Path, typer.Argument(help="a folder with config.json, *.safetensors and tokenizer.json")],
    prompt: Annotated[str, typer.Argument(help="what the model continues, or answers")],
    length: Annotated[int, typer.Option(help="most tokens to write")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 tokens are drawn")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="draw among the k likeliest; needs a temperature")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="draw among the likeliest that reach this probability; needs a temperature")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed draws the same tokens")] = None,
) -> None:
    """Continue a prompt, token by token. Ctrl-C stops.

    regard generate smollm2 "Once upon a time" --temperature 0.8 --top-p 0.9 --seed 1
    """
    model = models.load(folder)
    if not isinstance(model, Writer):
        kind = model.config.architecture or model.config.kind
        raise ValueError(f"{folder} holds a {kind}, which does not write text; GPT-2, Llama, Mistral, Qwen and T5 do")
    pieces = model.stream(prompt, length, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()
