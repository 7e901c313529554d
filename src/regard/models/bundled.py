"""The model that comes with the package: a small language model, trained by ``regard train text`` (scripts/bundle)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["bundled"]


def bundled() -> Path:
    """The folder of the language model that comes with the package, 3 layers of 4 heads: ``load(bundled())``.

    Beside the weights lie its recipe, its result and how its heads evolved (``regard.training.evolution(bundled())``).

    >>> sorted(file.name for file in bundled().glob("*.safetensors"))
    ['model.safetensors']
    >>> model = regard.models.load(bundled())
    >>> model.generate("import os", 3)
    '.path'
    """
    return Path(__file__).parent.parent / "bundled"
