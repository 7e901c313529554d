"""A small text of one's own, and the text task on it."""

from __future__ import annotations

import random
from pathlib import Path

from regard.training.recipe import Recipe
from regard.training.tasks.text import TextTask

__all__ = ["opened", "prose", "recipe", "written"]

SAID = "the head of a token looks at what came before it and gives more weight to one key than another"
SMALL = {
    **{"batch": 4, "model.d": 32, "model.heads": 2, "model.layers": 2, "model.hidden": 48},
    **{"data.vocabulary": 300, "data.window": 64, "data.opening": 0.0, "data.quoted": 0.0},
}


def prose(seed: int, paragraphs: int) -> str:
    """English of a kind, with some letters beyond ASCII, in paragraphs."""
    draw = random.Random(seed)
    said = (" ".join(draw.choices(SAID.split(), k=draw.randint(8, 30))) + " — één.\n" for _ in range(paragraphs))
    return "\n".join(said)


def written(folder: Path) -> Path:
    """A file of such English."""
    found = folder / "prose.txt"
    found.write_text(prose(0, 400), encoding="utf-8")
    return found


def recipe(path: Path | str, **changes: object) -> Recipe:
    return TextTask.recipe.changed({**SMALL, "data.path": str(path), **changes})


def opened(path: Path | str, prepared: Path | None = None, **changes: object) -> TextTask:
    task = TextTask(recipe(path, **changes), prepared)
    task.prepare()
    task.open()
    return task
