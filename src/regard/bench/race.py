"""Calls that do the same, raced: compared first, then timed in turns, so that noise meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Call", "Case", "LeftOut", "Measured", "Missing", "race", "same", "tensors"]

Call = Callable[[], object]
OURS = "regard"
SHORT = 50  # milliseconds


class Missing(Exception):
    """A case cannot be run here; the message says what it needs.

    >>> raise Missing("transformers is not installed")
    Traceback (most recent call last):
    regard.bench.race.Missing: transformers is not installed
    """


class LeftOut(UserWarning):
    """Another's call that cannot be run here is left out of a race."""


@dataclass(frozen=True)
class Case:
    """One line of a table: ``make`` builds the calls by name, ours among them, checked to do the same.

    ``wanted`` is the least ratio (the first peer's time over ours) that this project asks of itself on a CPU with
    AVX-512 and its bfloat16 instructions; ``memory`` asks for the bytes that each call allocates, too.

    >>> from regard.bench import cases
    >>> cases(["window"])[0].name
    'window ±256, 1×8×16384×64'
    """

    group: str
    name: str
    make: Callable[[], Mapping[str, Call]]
    wanted: float | None = None
    memory: bool = False
    unit: int = 1  # what one call does several of: tokens that are written


@dataclass(frozen=True)
class Measured:
    """A case's figures: milliseconds a unit by name, best and median, and peers' best over ours.

    >>> Measured("operator", "dense", {"regard": 2.0, "SDPA": 3.0}, {"regard": 2.1, "SDPA": 3.2}, 9).ratios
    {'SDPA': 1.5}
    """

    group: str
    name: str
    best: dict[str, float]
    median: dict[str, float]
    rounds: int
    bytes: dict[str, int] = field(default_factory=dict)
    wanted: float | None = None

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as long as ours each peer takes."""
        return {name: t / self.best[OURS] for name, t in self.best.items() if name != OURS}

    @property
    def spread(self) -> float:
        """How far the median of our rounds lies above their best, as a share of it."""
        return self.median[OURS] / self.best[OURS] - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a file, with the ratios."""
        return asdict(self) | {"ratios": {name: round(r, 3) for name, r in self.ratios.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measured:
        """What ``to_dict`` gave."""
        return cls(**{key: value for key, value in data.items() if key != "ratios"})


def race(calls: Mapping[str, Call], seconds: float, unit: int = 1) -> tuple[dict[str, float], dict[str, float], int]:
    """Best and median milliseconds of each call, and the rounds: at least 3, then until the time is up, at most 200.

    A call that takes less than 50 ms runs once more before it is timed: so its own threads are awake, and those of
    another library, which turn while they wait for work, are not.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or (time.perf_counter() < end and rounds < 200):
        rounds += 1
        for name, call in calls.items():
            if not took[name] or took[name][-1] * unit < SHORT:
                call()
            start = time.perf_counter()
            call()
            took[name].append((time.perf_counter() - start) * 1e3 / unit)
    best = {name: _digits(min(times)) for name, times in took.items()}
    return best, {name: _digits(statistics.median(times)) for name, times in took.items()}, rounds


def _digits(t: float) -> float:
    """Five digits: more would be noise in a file."""
    return float(f"{t:.5g}")


def same(a: Tensor, b: Tensor, loose: float | None = None) -> None:
    """Raise ``AssertionError`` unless two results agree as their dtype allows."""
    if loose is None:
        loose = 2e-4 if a.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(a, b, rtol=loose, atol=loose)


def tensors(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    """q, k and v of one shape, the same in every run."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_(grad) for _ in range(3)]
