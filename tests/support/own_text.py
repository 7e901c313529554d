"""A small generated text, and the text task on it."""

from __future__ import annotations

import random
from pathlib import Path

from regard.training._recipe import Recipe
from regard.training.tasks.text import TextTask

__all__ = ["opened", "prose", "recipe", "written"]

WORDS = "the head of a token looks at what came before it and gives more weight to one key than another"
SMALL = {
    **{"batch": 4, "model.d": 32, "model.heads": 2, "model.layers": 2, "model.hidden": 48},
    **{"data.vocabulary": 300, "data.window": 64, "data.opening": 0.0, "data.quoted": 0.0},
}


def prose(seed: int, paragraphs: int) -> str:
    """Paragraphs of random English words, with some letters beyond ASCII."""
    draw = random.Random(seed)
    lines = (" ".join(draw.choices(WORDS.split(), k=draw.randint(8, 30))) + " — één.\n" for _ in range(paragraphs))
    return "\n".join(lines)


def written(folder: Path) -> Path:
    """Write a file of such paragraphs, and return its path."""
    file = folder / "prose.txt"
    file.write_text(prose(0, 400), encoding="utf-8")
    return file


def recipe(path: Path | str, **changes: object) -> Recipe:
    return TextTask.default_recipe.with_changes({**SMALL, "data.path": str(path), **changes})


def opened(path: Path | str, prepared: Path | None = None, **changes: object) -> TextTask:
    task = TextTask(recipe(path, **changes), prepared)
    task.prepare()
    task.open()
    return task
