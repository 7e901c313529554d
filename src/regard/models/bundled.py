"""The model that comes with the package: a small language model, trained by ``regard train text`` (scripts/bundle)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["bundled"]


def bundled() -> Path:
    """Its folder: ``load(bundled())``. Beside the weights lie its recipe, its result and how its heads evolved
    (``regard.training.evolution(bundled())``)."""
    return Path(__file__).parent.parent / "bundled"
