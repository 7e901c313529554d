"""``regard budget MODEL FIELDS``: parameters, FLOPs, memory and time of a model, before it exists."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.output_file import path_option


def budget_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="a name such as gpt2 or llama-3-8b; or attention, block, encoder, decoder, encoder-decoder or vit with"
            " its sizes; or a config.json, or its folder (of any model of transformers)",
            show_default=False,
        ),
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Argument(help="sizes: d=512 heads=8 layers=6 vocab=32000 bias=no …", show_default=False)
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="n, tokens per sequence; default: the length of a known model, otherwise at most 512"),
    ] = None,
    source: Annotated[str | None, typer.Option(help="m, tokens that an encoder reads; default n")] = None,
    batch: Annotated[str | None, typer.Option(help="number of sequences; default 1")] = None,
    train: Annotated[bool, typer.Option("--train", help="a training step instead of a forward pass")] = False,
    optimizer: Annotated[
        str | None, typer.Option(help="with --train: adam (default), adam32, momentum, sgd, none")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="tiled (default), or plain, which stores n × n")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16, float16, float64")] = None,
    weights: Annotated[str | None, typer.Option(help="dtype of stored weights, if it differs: int8, int4 …")] = None,
    machine: Annotated[
        str | None, typer.Option(help="'this' (measured once when idle, 5 s), or a name; 'list' prints the names")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="24GB: the memory that may be used; default: that of the machine")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="measure 'this' machine again")] = False,
    fit: Annotated[
        str | None, typer.Option(help="params=110M,memory=2GiB,flops=1T,time=10ms: print models that fit")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="n=256:65536 (doubling) or d=256,512; n, batch, source, or an integer field"),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="a second model, such as mistral-7b: both side by side, with differences")
    ] = None,
    list_presets: Annotated[bool, typer.Option("--list", help="print the names of known models")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="compare with recurrence and convolution")] = False,
    formula: Annotated[bool, typer.Option("--formula", help="print formulas instead of numbers, and LaTeX")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(parser=path_option, metavar="FILE", help="plot cost against n, as .png, .svg or .pdf"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Count parameters, FLOPs, memory and time of a model, and name its bottleneck.

    regard budget gpt2

    regard budget llama-3-8b --against mistral-7b --machine A100-80GB --dtype bfloat16

    regard budget attention d=512 heads=8 bias=no

    regard budget my-model/config.json --tokens 1024 --train --machine A100-80GB --dtype bfloat16

    regard budget --fit params=110M,memory=2GiB --tokens 4096
    """
    # Here, not at the top: importing sympy takes half a second, which no other command should pay.
    from regard.cli.budget_modes import BudgetRequest, run_request

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
        "--memory": memory,
        "--refresh": refresh,
        "--plot": plot,
    }
    modes = {
        "--fit": fit,
        "--sweep": sweep,
        "--against": against,
        "--list": list_presets,
        "--compare": compare,
        "--formula": formula,
    }
    run_request(BudgetRequest(model, fields or [], options, modes, as_json))
