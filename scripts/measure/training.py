"""Train every task with its default recipe: the score it reaches, the time it takes, and what its heads have become.

    python scripts/measure/training.py [TASK …] [--out runs]

Trains into ``--out/TASK``; a finished run is not repeated. Exits with an error if a score misses its target. For all
tasks, prints when each head type arose. In addition:

- ``text``: 5-gram models of the same tokens and split; entropy and the strongest heads, step by step.
- ``agreement``: the accuracy that is lost without each head, and its weight from the verb to the subject.
- ``repeats``: accuracy and the strongest induction head, step by step.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import print_conditions
from rich.console import Console

from regard._terminal import frameless_table
from regard.training import evolution, load_trained_model, train
from regard.training._agreement_heads import rank_agreement_heads
from regard.training._metrics_file import read_metrics
from regard.training._run_folder import read_run
from regard.training.tasks import TASKS
from regard.training.tasks.agreement import AgreementTask
from regard.training.tasks.text import TextTask

# The lowest accuracy that a task must reach.
TARGETS = {"dates": 0.99, "agreement": 0.99, "digits": 0.97, "pixels": 0.97, "repeats": 0.95}
# The most bits per byte that the text model may need, as a share of the Witten–Bell 5-gram model's.
TEXT_TARGET = 0.95
# Columns of the table of heads, and the values of an evolution that they show.
STRONGEST = {"previous": "natural clean previous", "induction": "repeated raw induction", "sink": "natural raw sinks"}
show = Console(width=100).print


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    options = parser.parse_args()
    print_conditions()
    missed = [name for name in options.tasks or TASKS if not meets_target(name, options.out / name)]
    if missed:
        raise SystemExit(f"targets missed: {', '.join(missed)}")


def meets_target(name: str, folder: Path) -> bool:
    """Train one task, print what it has learned, and return whether its score meets the target."""
    result = train(name, folder)
    assert result.best is not None
    metric = TASKS[name].score
    score = result.best["scores"][metric]
    recording_share = 100 * (result.recording_share or 0)
    show(
        f"\n[bold]{name}[/bold]: {metric} {score:.4f} at step {result.best['step']} of {result.steps}, "
        f"{result.seconds:.0f} s, {recording_share:.1f}% of them for recording heads"
    )
    if name == "text":
        met = show_text_baselines(folder, score) <= TEXT_TARGET
        show_strongest_heads(folder)
    else:
        met = score >= TARGETS[name]
    if name == "agreement":
        show_agreement_heads(folder)
    if name == "repeats":
        show_repeats(folder)
    show(evolution(folder).table())
    return met


def show_text_baselines(folder: Path, score: float) -> float:
    """Compare with n-gram models. Returns the model's bits per byte as a share of the Witten–Bell model's."""
    task = TextTask(TextTask.default_recipe.with_changes(read_run(folder)[1]), folder / "data")
    task.open()
    table = frameless_table("bits per byte of the held-out text")
    table.add_column("")
    table.add_column("bits per byte", justify="right")
    table.add_column("the model needs", justify="right")
    table.add_row("model", f"{score:.4f}", "")
    baselines = task.baselines()
    for name, bits in baselines.items():
        table.add_row(f"{name} 5-gram", f"{bits:.4f}", f"{100 * (score / bits - 1):+.1f}%")
    show(table)
    return score / baselines["Witten–Bell"]


def show_strongest_heads(folder: Path) -> None:
    """Step by step: how uniform the maps are, and the largest score of any head."""
    heads = evolution(folder)
    table = frameless_table("entropy relative to a uniform map, mean of all heads, and the strongest head of each type")
    for column in ("step", "entropy", *STRONGEST):
        table.add_column(column, justify="right")
    columns = [heads.value("spread").mean(-1)]
    for name in STRONGEST.values():
        columns.append(heads.value(name).amax(-1))
    for record, step in enumerate(heads.steps):
        table.add_row(str(step), *(f"{float(column[record]):.2f}" for column in columns))
    show(table)


def show_agreement_heads(folder: Path) -> None:
    """What each head is worth."""
    task = AgreementTask(AgreementTask.default_recipe, folder / "data")
    table = frameless_table("without a head")
    table.add_column("head")
    table.add_column("accuracy lost", justify="right")
    table.add_column("weight from verb to subject", justify="right")
    for row in rank_agreement_heads(task, load_trained_model(folder)):
        table.add_row(f"{row['path']} {row['head']}", f"{row['lost']:.3f}", f"{row['attention']:.3f}")
    show(table)


def show_repeats(folder: Path) -> None:
    """The accuracy of each evaluation, and the strongest induction score of the last record before it."""
    heads = evolution(folder)
    strongest = heads.value("repeated raw induction").amax(-1)
    table = frameless_table("accuracy on repeated tokens, and the strongest induction head")
    for column in ("step", "accuracy", "induction", "recorded at"):
        table.add_column(column, justify="right")
    previous_step = -1
    for line in read_metrics(folder / "metrics.jsonl"):
        if not line.get("held_out"):
            continue
        step = line["step"]
        records = [index for index, recorded in enumerate(heads.steps) if previous_step < recorded <= step]
        cells = ["", ""]
        if records:
            cells = [f"{float(strongest[records[-1]]):.3f}", str(heads.steps[records[-1]])]
        table.add_row(str(step), f"{line['accuracy']:.3f}", *cells)
        previous_step = step
    show(table)


if __name__ == "__main__":
    main()
