"""``regard describe FOLDER``: a model as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard import models


def describe(
    folder: Annotated[
        Path | None, typer.Argument(help="a folder with config.json and *.safetensors; the bundled model unless given")
    ] = None,
) -> None:
    """Layers, heads, dimensions and parameters of a model."""
    typer.echo(str(models.describe(models.load(folder or models.bundled()))))
