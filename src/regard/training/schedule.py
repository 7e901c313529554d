"""How fast to learn at each step."""

from __future__ import annotations

import math

from regard.training.recipe import Recipe

__all__ = ["rate"]


def rate(recipe: Recipe, step: int) -> float:
    """``rate · (t+1)/w`` for t < w;  then ``rate · (f + (1−f)·(1 + cos π u)/2)``, ``u = (t−w)/(T−1−w)``

    t = step, counted from 0; T = steps, w = warmup, f = floor. The first step learns already, the last at ``f · rate``.

    >>> recipe = Recipe("text", steps=11, batch=1, rate=1.0, warmup=2, floor=0.1)
    >>> [round(rate(recipe, t), 3) for t in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / recipe.warmup
    u = min(1.0, (step - recipe.warmup) / max(1, recipe.steps - 1 - recipe.warmup))
    return recipe.rate * (recipe.floor + (1 - recipe.floor) * (1 + math.cos(math.pi * u)) / 2)
