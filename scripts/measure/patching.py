"""Compare attribution patching with exact patching, head by head, on repeated random tokens.

    python scripts/measure/patching.py                        # the bundled model
    python examples/smollm2.py smollm2
    python scripts/measure/patching.py smollm2 --block 12 --texts 1

The base is a block of tokens twice; the second time it ends before one token. Two sources and metrics:

- *token*: the source has another token where the base has the one that comes next; the metric is the difference of
  the logits of both at the last position.
- *block*: the source has other tokens in the first half, so that nothing repeats; the metric is the loss on the second
  half.

All heads are patched, output at all positions. Everything is seeded.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import print_conditions, print_figures
from torch import Tensor
from torch.nn import functional as F

import regard
from regard.interp import LogitDifference, PatchSweep, Site, attribution_patch, patch_sweep
from regard.interp._patch_metrics import Metric


def token_case(block: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Metric]:
    """The base, the source and the metric of the case *token*."""
    position = len(block) // 4
    base = torch.cat([block, block[:position]])[None]
    source = base.clone()
    source[0, position] = other[position]
    return base, source, LogitDifference(-1, int(block[position]), int(other[position]))


def block_case(block: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Metric]:
    """The base, the source and the metric of the case *block*."""
    base = torch.cat([block, block])[None]
    source = torch.cat([other, block])[None]

    def second_loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[0, len(block) : -1], block[1:])

    return base, source, second_loss


def names(sweep: PatchSweep, limit: int = 5) -> str:
    """The heads with the largest changes, as layer.head."""
    layers = {row["path"]: row["layer"] for row in sweep.rows}
    return " ".join(f"{layers[str(site.layer)]}.{site.head}" for site in sweep.top(limit))


def head_effect(sweep: PatchSweep, site: Site) -> float:
    """The effect of a head in a sweep."""
    for row in sweep.rows:
        if (row["path"], row["head"]) == (site.layer, site.head):
            return float(row["effect"])
    raise ValueError(f"{site} is not in the sweep")


def compare(model: Any, case: Any, block: Tensor, other: Tensor) -> dict[str, Any]:
    """The figures of one text."""
    base, source, metric = case(block, other)
    start = time.process_time()
    measured = patch_sweep(model, base, source, metric)
    middle = time.process_time()
    estimates = attribution_patch(model, base, source, metric)
    end = time.process_time()
    comparison = measured.compare(estimates)
    assert measured.source is not None
    largest = measured.top(1)[0]
    effects = [head_effect(sweep, largest) for sweep in (measured, estimates.over_positions())]
    return {
        "metric, base → source": f"{measured.before:.2f} → {measured.source:.2f}",
        "rank correlation": round(comparison.rank_correlation, 3),
        "correlation": round(comparison.correlation, 3),
        "top 5, measured": names(measured),
        "top 5, estimated": names(estimates.over_positions()),
        "effect of the first, measured / estimated": f"{effects[0]:.3f} / {effects[1]:.3f}",
        "CPU seconds, measured / estimated": f"{middle - start:.2f} / {end - middle:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a model folder; the bundled model by default")
    parser.add_argument("--block", type=int, default=24, help="tokens that are repeated")
    parser.add_argument("--texts", type=int, default=5)
    options = parser.parse_args()
    print_conditions()
    # In bfloat16 a logit has 8 bits, and small effects vanish.
    model = regard.models.load(options.folder or regard.models.bundled()).float()
    generator = torch.Generator().manual_seed(0)
    for case in (token_case, block_case):
        for text in range(options.texts):
            block, other = torch.randperm(len(model.tokenizer), generator=generator)[: 2 * options.block].chunk(2)
            print(f"{case.__name__.removesuffix('_case')}, text {text}")
            print_figures(compare(model, case, block, other), 42)


if __name__ == "__main__":
    main()
