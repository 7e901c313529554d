"""``regard budget MODEL FIELDS``: parameters, FLOPs, bytes and time of a model, counted before it exists."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def budget(
    model: Annotated[
        str | None,
        typer.Argument(
            help="attention, block, encoder, decoder, encoder-decoder or vit; or a config.json, or its folder",
            show_default=False,
        ),
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Argument(help="sizes: d=512 heads=8 layers=6 vocab=32000 bias=no …", show_default=False)
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="n; 512 unless given", show_default=False)] = None,
    source: Annotated[str | None, typer.Option(help="m, of what an encoder reads; n unless given")] = None,
    batch: Annotated[str | None, typer.Option(help="sequences at once; 1 unless given")] = None,
    train: Annotated[bool, typer.Option("--train", help="a training step instead of a forward pass")] = False,
    optimizer: Annotated[
        str | None, typer.Option(help="of --train: adam (unless given), adam32, momentum, sgd, none")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="tiled (unless given), or plain, which stores n × n")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (unless given), bfloat16, float16, float64")] = None,
    weights: Annotated[str | None, typer.Option(help="what weights alone are stored in: int8, int4 …")] = None,
    machine: Annotated[
        str | None, typer.Option(help="'this' (measured once, 5 s), or one by name; 'list' names them")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="measure 'this' machine anew")] = False,
    fit: Annotated[str | None, typer.Option(help="params=110M,memory=2GiB,flops=1T,time=10ms: what fits?")] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="n=256:65536 (doubling) or d=256,512; n, batch, source, any field that is a number"),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="attention beside recurrence and convolution")] = False,
    formula: Annotated[bool, typer.Option("--formula", help="formulas instead of numbers, and LaTeX")] = False,
    plot: Annotated[Path | None, typer.Option(help="cost against n, as .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Count parameters, FLOPs, bytes and time of a model, and name its bottleneck.

    regard budget attention d=512 heads=8 bias=no

    regard budget gpt2/config.json --tokens 1024 --train --machine A100-80GB --dtype bfloat16

    regard budget --fit params=110M,memory=2GiB --tokens 4096
    """
    # Here, not at the top: sympy takes half a second, which no other command should pay.
    from regard.cli.budget_answers import Asked, answer

    options = {
        "--tokens": tokens,
        "--source": source,
        "--batch": batch,
        "--train": train,
        "--optimizer": optimizer,
        "--attention": attention,
        "--dtype": dtype,
        "--weights": weights,
        "--machine": machine,
        "--refresh": refresh,
        "--plot": plot,
    }
    modes = {"--fit": fit, "--sweep": sweep, "--compare": compare, "--formula": formula}
    answer(Asked(model, fields or [], options, modes, as_json))
