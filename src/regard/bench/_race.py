"""Time several calls that compute the same result. The calls alternate, so that noise affects all of them equally.

A "peer" is the call of another library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]
OURS = "regard"
SHORT_CALL = 50  # milliseconds; a shorter call is run once untimed before it is timed


class MissingPeer(Exception):
    """A case cannot run on this computer; the message says which library is missing.

    >>> raise MissingPeer("transformers is not installed")
    Traceback (most recent call last):
    regard.bench._race.MissingPeer: transformers is not installed
    """


class PeerSkipped(UserWarning):
    """The call of another library fails on this computer, so the case runs without it."""


@dataclass(frozen=True)
class Case:
    """One benchmark case: several implementations of the same computation.

    - ``group``, ``name``: the section of the results table, and the label of the row.
    - ``make``: builds the calls, checks that their results are equal, and returns them by name; one is "regard".
    - ``target``: the ratio (time of the first peer / time of regard) that this project aims for on a CPU with AVX-512
      and its bfloat16 instructions; None if there is no target.
    - ``memory``: whether to measure the bytes that each call allocates.
    - ``units_per_call``: how many units one call processes, for example generated tokens; times are per unit.

    >>> from regard.bench import cases
    >>> cases(["window"])[0].name
    'window ±256, 1×8×16384×64'
    """

    group: str
    name: str
    make: Callable[[], Mapping[str, Call]]
    target: float | None = None
    memory: bool = False
    units_per_call: int = 1


@dataclass(frozen=True)
class Measurement:
    """The figures of a case: best and median milliseconds per unit, by the name of the call.

    >>> Measurement("operator", "dense", {"regard": 2.0, "SDPA": 3.0}, {"regard": 2.1, "SDPA": 3.2}, 9).ratios
    {'SDPA': 1.5}
    """

    group: str
    name: str
    best: dict[str, float]
    median: dict[str, float]
    rounds: int
    bytes: dict[str, int] = field(default_factory=dict)
    target: float | None = None

    @property
    def ratios(self) -> dict[str, float]:
        """The best time of each peer divided by regard's best time."""
        return {name: best / self.best[OURS] for name, best in self.best.items() if name != OURS}

    @property
    def spread(self) -> float:
        """``median / best − 1`` of regard's own times: how much they vary between rounds."""
        return self.median[OURS] / self.best[OURS] - 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a file, including the ratios."""
        return asdict(self) | {"ratios": {name: round(ratio, 3) for name, ratio in self.ratios.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Return the measurement from the data that ``to_dict`` returned."""
        return cls(**{key: value for key, value in data.items() if key != "ratios"})  # ratios are computed


def race(
    calls: Mapping[str, Call], seconds: float, units_per_call: int = 1
) -> tuple[dict[str, float], dict[str, float], int]:
    """Return the best and the median milliseconds per unit of each call, and the number of rounds.

    There are at least 3 rounds. Further rounds follow until ``seconds`` have passed, at most 200 in total.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 3 or (time.perf_counter() < end and rounds < 200):
        rounds += 1
        for name, call in calls.items():
            # Worker threads of another library may still be spinning after its call, and our own may be asleep. One
            # untimed call lets both settle; this matters only for short calls.
            if not times[name] or times[name][-1] * units_per_call < SHORT_CALL:
                call()
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3 / units_per_call)
    # Other work on the machine only makes calls slower, so the best time is closest to the true one.
    best = {name: _round(min(measured)) for name, measured in times.items()}
    median = {name: _round(statistics.median(measured)) for name, measured in times.items()}
    return best, median, rounds


def _round(milliseconds: float) -> float:
    """Round to five significant digits; the others are noise."""
    return float(f"{milliseconds:.5g}")


def assert_same(a: Tensor, b: Tensor, tolerance: float | None = None) -> None:
    """Raise ``AssertionError`` unless two results agree within the tolerance; the default depends on their dtype."""
    if tolerance is None:
        tolerance = 2e-4 if a.dtype == torch.float32 else 2e-2  # half precision rounds more coarsely
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def random_qkv(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    """Return random q, k and v of one shape; the numbers are the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for _ in range(3)]
