"""Checks that the strongest K-compositions of a trained model lead from its previous-token head to induction heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims.theorems.heads_differ_in_a_trained_model import untrained_model
from regard.interp import atlas, circuits
from regard.models import bundled, load

Edges = set[tuple[str, str]]


def strongest_edges(model: nn.Module, kind: Any, count: int) -> Edges:
    """The pairs of heads with the largest z-scores of composition, from weights alone."""
    return {(edge.earlier, edge.later) for edge in circuits(model).composition(kind, count)}


def measured_heads(model: nn.Module) -> tuple[str, list[str]]:
    """The previous-token head and the induction heads of a model, as "layer.head", from attention on texts."""
    rows = atlas(model).rows
    previous = max(rows, key=lambda row: row["previous"])
    induction = [f"{row['layer']}.{row['head']}" for row in rows if "induction" in row["labels"]]
    return f"{previous['layer']}.{previous['head']}", induction


def check(
    *,
    seed: int = 0,
    trained: Callable[[], nn.Module] = lambda: load(bundled()),
    heads: Callable[[nn.Module], tuple[str, list[str]]] = measured_heads,
    edges: Callable[[nn.Module, Any, int], Edges] = strongest_edges,
) -> Evidence:
    """Compare edges from the weights of the bundled model with the heads that its attention shows."""
    evidence = Evidence()
    model = trained()
    source, targets = heads(model)
    expected = {(source, target) for target in targets}
    count = len(targets)
    found = edges(model, "k", count)
    evidence.add_statement(
        "The strongest K-compositions lead from the previous-token head to the induction heads.",
        bool(expected) and found == expected,
        f"from weights: {describe(found)}; on texts, head {source} attends to the previous token, and "
        f"{' and '.join(targets)} are induction heads",
    )
    # Controls: their statements must be false.
    by_query = edges(model, "q", count)
    evidence.add_control(
        "So do the strongest Q-compositions.", bool(expected) and by_query == expected, describe(by_query)
    )
    untrained = edges(untrained_model(bundled(), seed), "k", count)
    evidence.add_control(
        "So do the strongest K-compositions of the untrained model.",
        bool(expected) and untrained == expected,
        f"{len(untrained & expected)} of {count} lead from this head to one of these",
    )
    scores = circuits(model).composition("k")
    between = [edge.z for edge in scores if (edge.earlier, edge.later) in expected]
    others = [edge.z for edge in scores if edge.earlier != source]
    evidence.numbers |= {
        "smallest z between these heads": min(between, default=0.0),
        "largest z from another head": max(others, default=0.0),
        "pairs of heads": len(scores),
    }
    return evidence


def describe(edges: Edges) -> str:
    """Edges in words."""
    return ", ".join(f"{earlier} → {later}" for earlier, later in sorted(edges))


CLAIM = Claim(
    id="k-composition-marks-induction-heads",
    title="In the bundled model, K-composition with the previous-token head marks induction heads",
    citations=(("circuits-article", "Three kinds of composition"), ("circuits-article", "Two-layer model")),
    papers=("olsson-2022",),
    statement="An induction head reads, with its keys, what a head below it has moved one position on. So the "
    "strongest K-compositions of the bundled model lead from its previous-token head to its induction heads.",
    formula=r"\frac{\left\| W_{OV}^{(1)} \, W_K W_Q^T \right\|}"
    r"{\left\| W_{OV}^{(1)} \right\| \left\| W_K W_Q^T \right\|} \gg \frac{1}{\sqrt{D}}",
    refuted_by="Other pairs of heads of the bundled model with a larger K-composition.",
    control="Q-composition of the same heads, and an untrained model of the same shape.",
    verdict=HOLDS,
    check=check,
)
