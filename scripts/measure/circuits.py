"""Compare what weights say about heads with what heads do: candidates of ``circuits`` against the atlas.

    python examples/smollm2.py smollm2
    python scripts/measure/circuits.py smollm2          # or a GGUF file, or nothing for the bundled model

The atlas measures attention on texts. Printed are the precision at k (how many of the k heads with the largest score
from weights are among the k heads with the largest confidence in the atlas), the rank correlation of all heads, and
time and memory. The control is a copy of the model with new random weights.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from common import peak_memory, print_conditions, print_figures

from regard.interp import Circuits, circuits
from regard.interp._head_atlas import Atlas, atlas, untrained_copy
from regard.models import bundled, load

COUNTS = (4, 10, 20)


def precision(scores: list[float], reference: list[float], k: int) -> str:
    """How many of the top k of one list are in the top k of the other."""
    top = set(torch.tensor(scores).topk(k).indices.tolist())
    expected = set(torch.tensor(reference).topk(k).indices.tolist())
    return f"{len(top & expected)} of {k}"


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation; equal numbers share the mean of their ranks."""
    ranks = []
    for values in (a, b):
        x = torch.tensor(values, dtype=torch.float64)
        rank = (x.unsqueeze(1) > x).sum(1) + ((x.unsqueeze(1) == x).sum(1) - 1) / 2
        ranks.append(rank - rank.mean())
    return float((ranks[0] * ranks[1]).sum() / (ranks[0].norm() * ranks[1].norm()))


def agreement(scores: list[float], reference: list[float]) -> str:
    """Precision at k, for every k for which the atlas has k heads of the type, and the rank correlation."""
    positive = sum(value > 0.05 for value in reference)
    counts = [k for k in COUNTS if k <= positive] or [positive]
    parts = [precision(scores, reference, k) for k in counts]
    return f"{', '.join(parts)}; rank correlation {rank_correlation(scores, reference):.2f}"


def confidences(head_atlas: Atlas, head_type: str) -> list[float]:
    return [row["kinds"][head_type]["confidence"] for row in head_atlas.rows]


def column(found: Circuits, name: str) -> list[float]:
    return [row[name] if row[name] is not None else 0.0 for row in found.heads]


def induction_with_copying(found: Circuits) -> list[float]:
    best: dict[str, float] = {}
    for pair in found.induction(copying=True):
        best.setdefault(pair.later, pair.score)
    return [best.get(f"{row['layer']}.{row['head']}", 0.0) for row in found.heads]


def induction_by_composition(found: Circuits, by: str) -> list[float]:
    """Previous score of the earlier head times K-composition, instead of the match."""
    previous = {f"{row['layer']}.{row['head']}": max(row["previous"], 0.0) for row in found.heads}
    best: dict[str, float] = {}
    for edge in found.composition("k"):
        score = previous[edge.earlier] * max(getattr(edge, by), 0.0)
        best[edge.later] = max(best.get(edge.later, 0.0), score)
    return [best.get(f"{row['layer']}.{row['head']}", 0.0) for row in found.heads]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", default=bundled())
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print_conditions()
    model = load(options.model)
    before = peak_memory()
    start = time.perf_counter()
    found = circuits(model)
    heads_seconds = time.perf_counter() - start
    start = time.perf_counter()
    found.induction()
    match_seconds = time.perf_counter() - start
    start = time.perf_counter()
    edges = [found.composition(kind) for kind in ("q", "k", "v")]
    composition_seconds = time.perf_counter() - start
    memory = peak_memory() - before

    figures: dict[str, Any] = {
        "heads": len(found.heads),
        "pairs of heads": len(edges[0]),
        "weights, verification, scores of heads, s": round(heads_seconds, 1),
        "match of all pairs, s": round(match_seconds, 1),
        "Q-, K- and V-composition of all pairs, s": round(composition_seconds, 1),
        "more peak memory than the model, MB": round(memory / 1e6),
    }
    for kind, of_kind in zip("QKV", edges, strict=True):
        strongest = [f"{edge.earlier} → {edge.later} (z {edge.z:.0f})" for edge in of_kind[:4]]
        figures[f"strongest {kind}-composition"] = ", ".join(strongest)
    figures["candidates of induction"] = ", ".join(
        f"{pair.earlier} → {pair.later} ({pair.score:.2f})" for pair in found.induction(6)
    )

    start = time.perf_counter()
    head_atlas = atlas(model, stored=False)
    figures["atlas, s"] = round(time.perf_counter() - start, 1)
    induction = confidences(head_atlas, "induction")
    previous = confidences(head_atlas, "previous")
    top = sorted(range(len(induction)), key=lambda index: -induction[index])[:6]
    rows = head_atlas.rows
    figures["induction heads of the atlas"] = ", ".join(f"{rows[i]['layer']}.{rows[i]['head']}" for i in top)
    random_tokens = circuits(model, means="random tokens")
    for name, result in (("weights alone", found), ("means of random tokens", random_tokens)):
        figures[f"previous, {name}"] = agreement(column(result, "previous"), previous)
        figures[f"induction, {name}"] = agreement(column(result, "induction"), induction)
        figures[f"induction × copying, {name}"] = agreement(induction_with_copying(result), induction)
        for by in ("z", "value"):
            scores = induction_by_composition(result, by)
            figures[f"previous × K-composition ({by}), {name}"] = agreement(scores, induction)
    figures["duplicate"] = agreement(column(found, "duplicate"), confidences(head_atlas, "duplicate"))
    control = circuits(untrained_copy(model))
    figures["control: largest z of K-composition"] = round(control.composition("k", 1)[0].z, 1)
    figures["control: largest induction score"] = round(control.induction(1)[0].score, 4)
    print_figures(figures, 58)


if __name__ == "__main__":
    main()
