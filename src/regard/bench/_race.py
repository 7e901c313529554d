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

from regard._devices import CPU, synchronize

Call = Callable[[], object]
OURS = "regard"
SHORT_CALL = 50  # milliseconds; a shorter call is run once untimed before it is timed
PAUSE = 0.02  # seconds before that untimed call
LEAST_NOISE = 0.05
MOST_NOISE = 0.25  # a larger spread must not hide that a call is slower


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
    - ``least``: a ratio below this is an error, apart from noise; None if the ratios are only reported.
    - ``memory``: whether to measure the bytes that each call allocates.
    - ``units_per_call``: how many units one call processes, for example generated tokens; times are per unit.
    - ``device``: where the calls run; the CPU waits for it at both ends of a time.

    >>> from regard.bench import cases
    >>> cases(["window"])[0].name
    'window ±256, 1×8×16384×64'
    """

    group: str
    name: str
    make: Callable[[], Mapping[str, Call]]
    target: float | None = None
    least: float | None = None
    memory: bool = False
    units_per_call: int = 1
    device: torch.device = CPU


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

    def slower_than(self, least: float) -> list[str]:
        """The names of the peers whose ratio is below ``least`` by more than noise.

        Noise is the larger of 5% and the spread of either call's times, but at most 25%.

        >>> measured = Measurement("operator", "dense", {"regard": 2.0, "SDPA": 1.5}, {"regard": 2.1, "SDPA": 1.5}, 9)
        >>> measured.slower_than(1.0), measured.slower_than(0.75)
        (['SDPA'], [])
        >>> noisy = Measurement("operator", "dense", {"regard": 2.0, "SDPA": 1.5}, {"regard": 4.0, "SDPA": 1.5}, 9)
        >>> noisy.slower_than(1.0)
        ['SDPA']
        """
        names = []
        for name, ratio in self.ratios.items():
            spread = max(self.spread, self.median[name] / self.best[name] - 1)
            noise = min(max(LEAST_NOISE, spread), MOST_NOISE)
            if ratio * (1 + noise) < least:
                names.append(name)
        return names

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
    calls: Mapping[str, Call], seconds: float, units_per_call: int = 1, device: torch.device = CPU
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
            # Worker threads of another library spin for some milliseconds after its call, and take the cores from the
            # next one. After a pause they sleep. An untimed call then wakes the threads of the call that is timed.
            if not times[name] or times[name][-1] * units_per_call < SHORT_CALL:
                time.sleep(PAUSE)
                call()
            # A call to a device returns when its work is queued, not when it is done.
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
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


def random_qkv(
    *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False, device: torch.device = CPU
) -> list[Tensor]:
    """Return random q, k and v of one shape; the numbers are the same in every run and on every device."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for _ in range(3):
        x = torch.randn(shape, generator=generator).to(dtype).to(device)
        tensors.append(x.requires_grad_(grad))
    return tensors
