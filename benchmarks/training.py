"""Every task from its default recipe: the score it reaches, the time it takes, and what its heads became.

    python benchmarks/training.py [TASK …] [--out runs]

Trains into ``--out/TASK`` (a run that has ended is not repeated) and holds the score against the bar that the project
set itself. Then, of ``text``: 5-gram models of the same tokens and split; entropy and strongest heads, step by step.
Of ``agreement``: what each head is worth, and how much it looks from the verb to the subject. Of ``repeats``: accuracy
and the strongest induction head, step by step. Of all: when each kind of head arose.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch
from rich.console import Console

from regard.terminal import plain_table
from regard.training import evolution, train, trained
from regard.training.agreement_heads import carriers
from regard.training.folder import read_run
from regard.training.metrics import read_metrics
from regard.training.tasks import TASKS
from regard.training.tasks.agreement import AgreementTask
from regard.training.tasks.text import TextTask

# The least (of text: the most, as a share of Witten–Bell's) that a task must reach.
BARS = {"dates": 0.99, "agreement": 0.99, "digits": 0.97, "pixels": 0.97, "repeats": 0.95, "text": 0.95}
say = Console(width=100).print


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    given = parser.parse_args()
    say(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    missed = []
    for name in given.tasks or TASKS:
        result = train(name, given.out / name)
        assert result.best is not None
        score = result.best["scores"][TASKS[name].score]
        share = f"{100 * (result.watching or 0):.1f}%"
        say(
            f"\n[bold]{name}[/bold]: {TASKS[name].score} {score:.4f} at step {result.best['step']} of {result.steps}, "
            f"{result.seconds:.0f} s, watching {share}"
        )
        held = score
        if name == "text":
            held = _text(given.out / name, score)
            _strongest(given.out / name)
        if name == "agreement":
            _agreement(given.out / name)
        if name == "repeats":
            _repeats(given.out / name)
        say(evolution(given.out / name).table())
        if held < BARS[name] if name != "text" else held > BARS[name]:
            missed.append(name)
    if missed:
        raise SystemExit(f"below the bar: {', '.join(missed)}")


def _text(folder: Path, score: float) -> float:
    """Against counting; the share of Witten–Bell's bits that the model needs."""
    task = TextTask(TextTask.recipe.changed(read_run(folder)[1]), folder / "data")
    task.open()
    table = plain_table("bits per byte of the held-out text")
    for column in ("", "bits per byte", "the model needs"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("model", f"{score:.4f}", "")
    found = task.baselines()
    for name, bits in found.items():
        table.add_row(f"{name} 5-gram", f"{bits:.4f}", f"{100 * (score / bits - 1):+.1f}%")
    say(table)
    return score / found["Witten–Bell"]


def _strongest(folder: Path) -> None:
    """Step by step: how uniform maps are, and the largest score of any head."""
    seen = evolution(folder)
    names = {"previous": "natural clean previous", "induction": "repeated raw induction", "sink": "natural raw sinks"}
    table = plain_table("entropy as a share of a uniform map's, mean of the heads, and the strongest head of each kind")
    for column in ("step", "entropy", *names):
        table.add_column(column, justify="right")
    values = [seen.value("spread").mean(-1), *(seen.value(name).amax(-1) for name in names.values())]
    for k, step in enumerate(seen.steps):
        table.add_row(str(step), *(f"{float(x[k]):.2f}" for x in values))
    say(table)


def _agreement(folder: Path) -> None:
    task = AgreementTask(AgreementTask.recipe, folder / "data")
    table = plain_table("without a head")
    for column in ("head", "accuracy lost", "looks from verb to subject"):
        table.add_column(column, justify="left" if column == "head" else "right")
    for row in carriers(task, trained(folder)):
        table.add_row(f"{row['path']} {row['head']}", f"{row['lost']:.3f}", f"{row['attention']:.3f}")
    say(table)


def _repeats(folder: Path) -> None:
    """Accuracy between evaluations beside the strongest induction score of the records between them."""
    seen = evolution(folder)
    strongest = seen.value("repeated raw induction").amax(-1)
    table = plain_table("accuracy on what can be looked up, and the strongest induction head")
    for column in ("step", "accuracy", "induction", "recorded at"):
        table.add_column(column, justify="right")
    before = -1
    for line in read_metrics(folder / "metrics.jsonl"):
        if line.get("held_out"):
            between = [k for k, step in enumerate(seen.steps) if before < step <= line["step"]]
            told = (f"{float(strongest[between[-1]]):.3f}", str(seen.steps[between[-1]])) if between else ("", "")
            table.add_row(str(line["step"]), f"{line['accuracy']:.3f}", *told)
            before = line["step"]
    say(table)


if __name__ == "__main__":
    main()
