"""What several measurement programs share: the printed conditions, peak memory, and targets that must be met."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable
from typing import Any


def print_conditions() -> None:
    """Print what the figures depend on; figures can only be compared under equal conditions."""
    # Imported here: memory.py must not load more than the operator that it measures.
    from regard import bench

    print(", ".join(f"{name} {value}" for name, value in bench.conditions().items()))


def print_figures(figures: dict[str, Any], width: int = 36) -> None:
    """Print one line per figure."""
    for name, value in figures.items():
        print(f"{name:>{width}}  {value}")


def peak_memory() -> int:
    """The peak resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_parts(parts: dict[str, Callable[[Any], bool]], names: Iterable[str], options: Any) -> None:
    """Run the named parts, or all of them. Exit with an error if a part returns False: it has missed its target."""
    print_conditions()
    missed = [name for name in list(names) or parts if not parts[name](options)]
    if missed:
        raise SystemExit(f"targets missed: {', '.join(missed)}")
