"""When the recorder looks: at which steps, and in which share of the time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from recorder_worker import record, short, steps
from torch import Tensor, nn

from regard.training import recorder as recording

pytestmark = pytest.mark.usefixtures("full_tiles")


def test_steps_are_spaced_by_the_root_of_two() -> None:
    wanted = [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91]
    for after in range(-1, 90):
        assert recording._next(after) == next(x for x in wanted if x > after)
    assert recording._next(2**40) == round(2**40.5)


def test_steps_of_ones_own(tmp_path: Path) -> None:
    for name, chosen in (("list", [5, 3]), ("function", lambda k: k in (3, 5))):
        mine = short(tmp_path / name, steps=chosen, share=None)
        assert [k for k in range(7) if mine.step(k)] == [0, 3, 5]
        mine.finish(6)
        mine.finish(6)
        assert steps(tmp_path / name) == [0, 3, 5, 6]
    late = short(tmp_path / "late", steps=[3, 5], share=None)
    assert [k for k in (1, 4, 8) if late.step(k)] == [4, 8]  # a step that was passed is made up for once


class Clock:
    """A clock that stands still: training takes a second a step, a record what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(recording, "perf_counter", lambda: self.now)

    def cost(self, seconds: float) -> Callable[[nn.Module, Tensor], Any]:
        def call(of: nn.Module, ids: Tensor) -> Any:
            self.now += seconds
            return of(ids)

        return call


def test_a_record_waits_for_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    mine = short(tmp_path, call=clock.cost(0.5))
    taken, shares = [], []
    for k in range(200):
        if mine.step(k):
            taken.append(k)
            shares.append(mine.share)
        clock.now += 1.0
    # k records of 0.5 s are 5 % of 10 k s: of k/2 s of recording and of the steps.
    assert taken == [0, 19, 29, 38, 48, 64, 91, 128, 181]
    assert shares[0] == 1 and all(share <= 0.05 for share in shares[1:])
    assert record(tmp_path, 181).seconds == pytest.approx({"cost": 0.5, "spent": 4.5, "elapsed": 185.5})
    mine.finish(199)
    assert steps(tmp_path)[-1] == 199
    assert mine.share == pytest.approx(5 / 205)


def test_a_run_that_goes_on_counts_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    first = short(tmp_path, call=clock.cost(0.5))
    for k in range(60):
        first.step(k)
        clock.now += 1.0
    assert steps(tmp_path) == [0, 19, 29, 38, 48]
    clock.now = 1e6  # another process, another clock
    second = short(tmp_path, call=clock.cost(0.5))
    assert second.share == pytest.approx(2.5 / 50.5)
    with pytest.raises(ValueError, match=r"step is 40, but .* has records up to step 48; .*back_to"):
        second.step(40)
    second.back_to(40)
    assert steps(tmp_path) == [0, 19, 29, 38] and second.share == pytest.approx(2 / 40)
    assert not second.step(38)  # is there already
    taken = []
    for k in range(41, 60):
        taken += [k] * second.step(k)
        clock.now += 1.0
    assert taken == [51]
    second.back_to(0)
    assert steps(tmp_path) == [0] and not second.step(0)


def test_without_a_limit_and_without_time(tmp_path: Path) -> None:
    for share in (None, 1, 1.0):
        mine = short(tmp_path / str(share), share=share)
        assert [mine.step(k) for k in range(5)] == [True] * 5
    mine = short(tmp_path / "none", share=0)
    assert [mine.step(k) for k in range(5)] == [True] + [False] * 4
    mine.finish(5)
    assert steps(tmp_path / "none") == [0, 5]


@pytest.mark.parametrize("every", [None, 20])
def test_a_known_end_lets_early_records_in_and_keeps_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | None
) -> None:
    """5% of the time are some 40 records of half a second, and the first steps get their part of them."""
    clock = Clock(monkeypatch)
    chosen = None if every is None else range(0, 401, every)
    mine = short(tmp_path, call=clock.cost(0.5), total=400, steps=chosen)
    for k in range(401):
        mine.step(k)
        clock.now += 50.0 if k == 0 else 1.0  # the first step is slow: time enough for 1, and no measure of the others
    mine.finish(400)
    if every is None:
        assert steps(tmp_path) == [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 400]
    else:
        assert steps(tmp_path) == list(chosen or ())
    assert mine.share <= 0.05


def test_a_known_end_that_leaves_no_time_thins_the_records_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    mine = short(tmp_path, call=clock.cost(2.0), total=400, steps=range(0, 401, 10))
    for k in range(401):
        mine.step(k)
        clock.now += 1.0
    mine.finish(400)
    taken = steps(tmp_path)
    gaps = [b - a for a, b in pairwise(taken)]
    assert mine.share <= 0.05 and len(taken) >= 8 and max(gaps) <= 80
