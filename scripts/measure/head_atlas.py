"""Count the head types of a trained model and of its untrained twin, and measure what its induction heads are worth.

    python examples/smollm2.py smollm2
    python scripts/measure/head_atlas.py smollm2 [--sets 40]

The program ablates the top 4 induction heads (mean ablation and zero ablation), and ``--sets`` random sets of 4 other
heads. The loss is that of the second occurrence of a block of random tokens; the atlas has not used these blocks.
Everything is seeded.
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
from common import print_figures
from torch.nn import functional as F

from regard.interp import ablate
from regard.interp._head_atlas import Atlas, atlas, untrained_copy
from regard.models import load

BLOCK = 48


def count_head_types(head_atlas: Atlas) -> dict[str, int]:
    """How many heads have each type, the most frequent type first."""
    counts: Counter[str] = Counter()
    for row in head_atlas.rows:
        counts.update(row["labels"])
    return dict(counts.most_common())


def induction_matters(model: Any, head_atlas: Atlas, by: str, sets: int) -> dict[str, Any]:
    """The change in loss without the top 4 induction heads, and without random sets of 4 other heads."""
    generator = torch.Generator().manual_seed(1)
    blocks = [torch.randperm(len(model.tokenizer), generator=generator)[:BLOCK] for _ in range(2)]
    ids = torch.stack(blocks).repeat(1, 2)

    @torch.no_grad()
    def repeated_block_loss() -> float:
        logits = model(ids)[:, BLOCK:-1]
        return float(F.cross_entropy(logits.flatten(0, 1), ids[:, BLOCK + 1 :].flatten()))

    all_heads_loss = repeated_block_loss()

    def loss_change_without(heads: list[tuple[str, int]]) -> float:
        with ablate(model, heads, by=by, over=ids if by == "mean" else None):
            return repeated_block_loss() - all_heads_loss

    top = head_atlas.top("induction", 4)
    others = [head for head in head_atlas.top("induction") if head not in top]
    rng = random.Random(0)
    random_sets = [rng.sample(others, 4) for _ in range(sets)]
    changes = [loss_change_without(heads) for heads in random_sets]
    top_change = loss_change_without(top)
    worst_set = random_sets[changes.index(max(changes))]
    return {
        "top 4": head_names(top),
        "loss, all heads": round(all_heads_loss, 2),
        "change without the top 4": round(top_change, 2),
        f"mean change of {sets} random sets": round(statistics.mean(changes), 3),
        "median": round(statistics.median(changes), 3),
        "largest": f"{max(changes):.2f} ({head_names(worst_set)})",
        "top 4 / mean": round(top_change / statistics.mean(changes), 1),
    }


def head_names(heads: list[tuple[str, int]]) -> str:
    """Heads as layer.head, for example 18.6."""
    return " ".join(f"{path.split('.')[-2]}.{head}" for path, head in heads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", type=int, default=40)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    model = load(options.folder)
    start = time.perf_counter()
    head_atlas = atlas(model, stored=False)
    seconds = time.perf_counter() - start
    untrained_atlas = atlas(untrained_copy(model), model.tokenizer)

    figures: dict[str, Any] = {
        "heads": len(head_atlas.rows),
        "atlas with its control, s": round(seconds, 1),
        "head types": count_head_types(head_atlas),
        "head types of the untrained twin": count_head_types(untrained_atlas),
    }
    if hasattr(model, "decoder"):
        for by in ("mean", "zero"):
            for name, value in induction_matters(model, head_atlas, by, options.sets).items():
                figures[f"{by} ablation: {name}"] = value
    print_figures(figures, 48)


if __name__ == "__main__":
    main()
