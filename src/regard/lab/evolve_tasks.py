"""What can be trained in the lab: every task of the library, with a few of its numbers to choose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from regard.training.recipe import Recipe
from regard.training.tasks import TASKS

__all__ = ["OPTIONS", "changed", "offered"]

STEPS = (20, 50, 100, 200, 400, 600, 1000, 1600, 2500, 4000, 6000)
RATES = (0.25, 0.5, 1, 2, 4)  # times the recipe's own
RECORD = 0.15  # the share of the time for watching heads: more than a run's own, for here they are what is looked at
# What can be chosen, and its name in a recipe.
OPTIONS = {
    "steps": "steps",
    "rate": "rate",
    "layers": "model.layers",
    "heads": "model.heads",
    "kind": "model.kind",
}


def changed(recipe: Recipe, seed: int, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What is chosen (None is not), and what follows from fewer steps: an early warmup, and numbers often enough."""
    own = {OPTIONS[name]: x for name, x in chosen.items() if x is not None}
    steps = int(own.get("steps", recipe.steps))
    return {
        "seed": seed,
        "warmup": min(recipe.warmup, steps // 4),
        "evaluate": min(recipe.evaluate, max(1, steps // 10)),
        "save": min(recipe.save, max(5, steps // 60)),
        "record": RECORD,
        "record_every": min(recipe.record_every, max(1, steps // 24)),
        **own,
    }


@lru_cache(maxsize=1)
def offered() -> list[dict[str, Any]]:
    """Every task with what it learns, and the values of its options that go with its other defaults."""
    found = []
    for name, task in TASKS.items():
        recipe, model = task.recipe, task.recipe.model
        d, layers, heads = (int(model[x]) for x in ("d", "layers", "heads"))
        options: dict[str, dict[str, Any]] = {
            "steps": {"values": sorted({*STEPS, recipe.steps}), "value": recipe.steps},
            "layers": {"values": list(range(1, max(4, layers) + 1)), "value": layers},
            "heads": {"values": [x for x in range(1, 17) if d % x == 0 and d // x % 2 == 0], "value": heads},
            "rate": {"values": [recipe.rate * x for x in RATES], "value": recipe.rate},
        }
        if "kind" in model:
            options["kind"] = {"values": list(getattr(task, "kinds", [model["kind"]])), "value": model["kind"]}
        found.append({"name": name, "about": task.about, "score": task.score, "options": options})
    return found
