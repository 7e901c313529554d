"""The tasks that can be trained in the lab, and the options of each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from regard.training._recipe import Recipe
from regard.training.tasks import TASKS

STEPS = (20, 50, 100, 200, 400, 600, 1000, 1600, 2500, 4000, 6000)
RATE_FACTORS = (0.25, 0.5, 1, 2, 4)  # learning rates, relative to the recipe's
MAX_HEADS = 16
RECORD_SHARE = 0.15  # share of the time that is spent on recording heads; the page needs more records than a recipe
# Option → its name in a recipe.
OPTIONS = {"steps": "steps", "rate": "rate", "layers": "model.layers", "heads": "model.heads", "kind": "model.kind"}


def recipe_changes(recipe: Recipe, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes to a recipe for these options; None keeps the recipe's value.

    In a short run the warm-up is also shorter, and saving and evaluation are more frequent.
    """
    chosen = {OPTIONS[name]: value for name, value in options.items() if value is not None}
    steps = int(chosen.get("steps", recipe.steps))
    return {
        "seed": seed,
        "warmup": min(recipe.warmup, steps // 4),
        "evaluate": min(recipe.evaluate, max(1, steps // 10)),
        "save": min(recipe.save, max(5, steps // 60)),
        "record": RECORD_SHARE,
        "record_every": min(recipe.record_every, max(1, steps // 24)),
        **chosen,
    }


@lru_cache(maxsize=1)
def list_tasks() -> list[dict[str, Any]]:
    """Return every task with its description, and for each option the values that are valid with the other defaults."""
    tasks = []
    for name, task in TASKS.items():
        recipe = task.default_recipe
        model = recipe.model
        width = int(model["d"])
        layers = int(model["layers"])
        # Heads must divide the width, and rotary positions need an even width per head.
        head_counts = [heads for heads in range(1, MAX_HEADS + 1) if width % (2 * heads) == 0]
        rates = [recipe.rate * factor for factor in RATE_FACTORS]
        options: dict[str, dict[str, Any]] = {
            "steps": {"values": sorted({*STEPS, recipe.steps}), "value": recipe.steps},
            "layers": {"values": list(range(1, max(4, layers) + 1)), "value": layers},
            "heads": {"values": head_counts, "value": int(model["heads"])},
            "rate": {"values": rates, "value": recipe.rate},
        }
        if "kind" in model:
            kinds = list(getattr(task, "kinds", [model["kind"]]))
            options["kind"] = {"values": kinds, "value": model["kind"]}
        tasks.append({"name": name, "about": task.description, "score": task.score, "options": options})
    return tasks
