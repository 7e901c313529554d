"""``regard patch``: run the model once per patch, and print what changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from regard import interp, plots
from regard._errors import RegardError
from regard.cli.look_printing import print_line, progress_bar
from regard.cli.predicting_model import PredictingModel, checked_position
from regard.interp import Logit, LogitDifference, PatchSweep


def print_patches(
    folder: Path,
    text: str,
    source_text: str | None,
    *,
    tokens: int | None,
    target: str | None,
    against: str | None,
    position: int,
    parts: list[str],
    positions: str | list[int],
    layers: str | None,
    estimate: bool,
    most: int,
    save: Path | None,
    csv: Path | None,
    figure: Path | None,
) -> None:
    """Patch every head of a model in turn and print the result; the arguments are the options of the command."""
    predicting = PredictingModel.load(folder)
    labelled = predicting.read(text, tokens)
    n = len(labelled.ids)
    ids = torch.tensor([labelled.ids])
    source: Any = torch.zeros_like
    if source_text is not None:
        source_ids = predicting.read(source_text, tokens).ids
        if len(source_ids) != n:
            raise RegardError(
                f"both texts must have the same number of tokens, so that positions correspond, got {n} and "
                f"{len(source_ids)}; --tokens {min(n, len(source_ids))} reads the first of both"
            )
        source = torch.tensor([source_ids])
    metric = _metric(predicting, target, against, checked_position(position, n))

    if estimate:
        sweep = interp.attribution_patch(predicting.model, ids, source, metric).over_positions()
    else:
        with progress_bar("patching", "patches") as progress:
            sweep = interp.patch_sweep(
                predicting.model,
                ids,
                source,
                metric,
                parts=parts,
                positions=positions,  # type: ignore[arg-type]
                layers=layers,
                file=save,
                progress=progress,
            )
    Console().print(sweep.table(most or None))
    if 0 < most < len(sweep.rows):
        print_line(f"{most} of {len(sweep.rows)} patches, the largest changes first; --most 0 shows all.")
    if csv is not None:
        sweep.to_csv(csv)
        print_line(f"numbers: {csv}")
    if figure is not None:
        _draw(sweep, figure)
        print_line(f"figure: {figure}")


def _metric(predicting: PredictingModel, target: str | None, against: str | None, position: int) -> Any:
    if target is None:
        return "loss"
    chosen = predicting.token_id("--target", target)
    if against is None:
        return Logit(position, chosen)
    other = predicting.token_id("--against", against)
    if other == chosen:
        raise RegardError(f"--against must be another token than --target, got {against!r} twice")
    return LogitDifference(position, chosen, other)


def _draw(sweep: PatchSweep, file: Path) -> None:
    plots.save(interp.figures.patching(sweep), file)
