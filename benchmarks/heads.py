"""What the atlas finds in a trained model, in its untrained twin, and what its induction heads are worth.

    python examples/smollm2.py smollm2
    python benchmarks/heads.py smollm2 [--sets 40]

Kinds are counted in both models. The top 4 induction heads are taken out (by their means, and by zero), and so are
``--sets`` random sets of 4 other heads; the loss is that of a block of random tokens when it is said again, on blocks
that the atlas has not seen. Everything is seeded. Prints a table.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from regard.models import load
from regard.watching import ablate
from regard.watching.heads import Atlas, atlas, untrained

BLOCK = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", type=int, default=40)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    model = load(given.folder)
    start = time.perf_counter()
    found = atlas(model)
    seconds = time.perf_counter() - start
    print(f"{'heads':>44}  {len(found.rows)}")
    print(f"{'atlas with its control, s':>44}  {seconds:.1f}")
    print(f"{'kinds':>44}  {counts(found)}")
    print(f"{'kinds of the untrained twin':>44}  {counts(atlas(untrained(model), model.text))}")
    if not hasattr(model, "decoder"):
        return
    for by in ("mean", "zero"):
        for name, value in induction_matters(model, found, by, given.sets).items():
            print(f"{by + ' ablation: ' + name:>44}  {value}")


def counts(found: Atlas) -> dict[str, int]:
    return dict(Counter(label for row in found.rows for label in row["labels"]).most_common())


def induction_matters(model: Any, found: Atlas, by: str, sets: int) -> dict[str, Any]:
    """The change in loss without the top 4 induction heads, and without random sets of 4 others."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(len(model.text), generator=draw)[:BLOCK] for _ in range(2)]).repeat(1, 2)

    @torch.no_grad()
    def loss() -> float:
        logits = model(ids)[:, BLOCK:-1]  # the second time around
        return float(F.cross_entropy(logits.flatten(0, 1), ids[:, BLOCK + 1 :].flatten()))

    def without(heads: list[tuple[str, int]]) -> float:
        with ablate(model, heads, by=by, over=ids if by == "mean" else None):
            return loss() - before

    before = loss()
    top = found.top("induction", 4)
    others = [pair for pair in found.top("induction") if pair not in top]
    chance = random.Random(0)
    drawn = [chance.sample(others, 4) for _ in range(sets)]
    changes = [without(heads) for heads in drawn]
    ours = without(top)
    return {
        "top 4": spelled(top),
        "loss, all heads": round(before, 2),
        "change without the top 4": round(ours, 2),
        f"mean change of {sets} random sets": round(statistics.mean(changes), 3),
        "median": round(statistics.median(changes), 3),
        "largest": f"{max(changes):.2f} ({spelled(drawn[changes.index(max(changes))])})",
        "top 4 / mean": round(ours / statistics.mean(changes), 1),
    }


def spelled(heads: list[tuple[str, int]]) -> str:
    return " ".join(f"{path.split('.')[-2]}.{head}" for path, head in heads)


if __name__ == "__main__":
    main()
