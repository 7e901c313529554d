"""``regard attribute``: run the model, and print what contributes to a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from regard import interp
from regard._errors import RegardError
from regard._terminal import frameless_table, literal_text
from regard.cli.look_printing import print_count, print_line
from regard.cli.predicting_model import PredictingModel, checked_position
from regard.interp import Attribution, TokenText


def print_attribution(
    folder: Path,
    text: str,
    *,
    tokens: int | None,
    target: str | None,
    against: str | None,
    position: int,
    steps: int,
    direct: bool,
    sort: str,
    most: int,
    csv: Path | None,
) -> None:
    """Attribute a prediction of a model and print the result; the arguments are the options of the command."""
    predicting = PredictingModel.load(folder)
    labelled = predicting.read(text, tokens)
    n = len(labelled.ids)
    row = checked_position(position, n)
    ids = torch.tensor([labelled.ids])
    logits = predicting.logits(ids)[0, row].float()
    chosen = int(logits.argmax()) if target is None else predicting.token_id("--target", target)
    name = repr(predicting.label(chosen))
    what = f"the logit of {name}"
    number: Any = (row, chosen)
    split: Any = chosen  # what the logit parts add up to
    if against is not None:
        other = predicting.token_id("--against", against)
        if other == chosen:
            raise RegardError(f"--against must be another token than the target, which is {name}")
        what += f" minus that of {predicting.label(other)!r}"
        number = (row, chosen, other)
        split = (chosen, other)

    attribution = interp.attribute(predicting.model, ids, number, steps=steps)
    console = Console()
    place = "after the last token" if row == n - 1 else f"after token {row}, {labelled.labels[row]!r}"
    line = f"{what} {place}: {attribution.value:.4f}"
    if target is None:
        line += f"; {name} is the most likely token, {float(logits.softmax(-1)[chosen]):.1%}"
    print_line(line)
    console.print(_token_table(attribution, labelled, most))
    console.print(attribution.table(sort, most or None))
    print_count(len(attribution.heads()), most, sort)
    if direct:
        parts = interp.logit_attribution(predicting.model, ids, split, row)
        console.print(parts.table(most or None))
    if csv is not None:
        attribution.to_csv(csv)
        print_line(f"numbers: {csv}")


def _token_table(attribution: Attribution, labelled: TokenText, most: int) -> Table:
    """The tokens with the largest contributions of either sign, in the order of the text."""
    contributions = attribution.tokens[0].tolist()
    order = sorted(range(len(contributions)), key=lambda i: -abs(contributions[i]))
    chosen = sorted(order[: most or None])
    title = f"{len(contributions)} tokens"
    if len(chosen) < len(contributions):
        title = f"the {len(chosen)} of {title} that contribute most"
    if attribution.baseline is not None:
        total = sum(contributions)
        reached = attribution.value - attribution.baseline
        title += f"; together {total:.4f} of {reached:.4f}"
    table = frameless_table(title)
    table.add_column("position", justify="right")
    table.add_column("token", overflow="fold")
    table.add_column("contribution", justify="right", no_wrap=True)
    for i in chosen:
        table.add_row(str(i), literal_text(repr(labelled.labels[i])), f"{contributions[i]:.4g}")
    return table
