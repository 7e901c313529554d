"""When the recorder looks: at which steps, and in which share of the time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.recorder_worker import record, short, steps
from support.tiny_task import Tiny
from torch import Tensor, nn

from regard import models
from regard.cli.train_progress import _describe_recording
from regard.training import Evolution, evolution, train
from regard.training import _record_schedule as schedule
from regard.training import _recorder as recording
from regard.training._arrivals import sparse_gaps

pytestmark = pytest.mark.usefixtures("full_tiles")


def test_steps_are_spaced_by_the_root_of_two() -> None:
    wanted = [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91]
    for after in range(-1, 90):
        assert schedule.next_step(after) == next(x for x in wanted if x > after)
    assert schedule.next_step(2**40) == round(2**40.5)


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


def drive(
    recorder: recording.Recorder, clock: Clock, last: int, seconds: Callable[[int], float] = lambda k: 1.0
) -> None:
    """Train to the step ``last``; step k + 1 takes ``seconds(k)``."""
    for k in range(last + 1):
        recorder.step(k)
        clock.now += seconds(k)
    recorder.finish(last)


@pytest.mark.filterwarnings("ignore:no record of")
def test_a_record_waits_for_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    mine = short(tmp_path, call=clock.cost(0.5), min_records=0)
    taken, shares = [], []
    for k in range(200):
        if mine.step(k):
            taken.append(k)
            shares.append(mine.share)
        clock.now += 1.0
    # k records of 0.5 s are 5 % of 10 k s: of k/2 s of recording and of the steps. The second one makes the cost known.
    assert taken == [0, 1, 29, 38, 48, 64, 91, 128, 181]
    assert all(share <= 0.05 for share in shares[2:])
    assert mine.left_out == [2, 3, 4, 6, 8, 11, 16]  # 23, 32 and 45 were made late, at 29, 38 and 48
    assert record(tmp_path, 181).seconds == pytest.approx({"cost": 0.5, "spent": 4.5, "elapsed": 185.5})
    mine.finish(199)
    assert steps(tmp_path)[-1] == 199
    assert mine.share == pytest.approx(5 / 205)


def test_what_is_left_out_is_said_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    mine = short(tmp_path, call=clock.cost(3.0), total=100)
    with pytest.warns(UserWarning, match=r"no record of step.*may take 5% of the time.*share") as caught:
        drive(mine, clock, 100)
    assert len(caught) == 1 and caught[0].filename == __file__
    scheduled = [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 100]
    assert len(steps(tmp_path)) == schedule.MIN_RECORDS and steps(tmp_path)[-1] == 100
    assert sorted([*steps(tmp_path), *mine.left_out]) == scheduled
    assert mine.share > 0.05  # the guaranteed records come first
    assert schedule.read_left_out(tmp_path) == mine.left_out
    # Another process continues with what is remembered, without what came after its checkpoint.
    again = short(tmp_path, call=clock.cost(3.0), total=100)
    assert again.left_out == mine.left_out
    again.resume_from(mine.left_out[0])
    assert again.left_out == [] and schedule.read_left_out(tmp_path) == []
    (tmp_path / schedule.LEFT_OUT_FILE).write_text('{"steps": ["1", -3]}')
    assert schedule.read_left_out(tmp_path) == []


@pytest.mark.parametrize(("total", "slow"), [(None, 1.0), (600, 1.0), (600, 10.0)])
def test_a_lucky_step_and_a_cold_record_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: float, total: int | None
) -> None:
    """One step that is a hundred times faster, and a first record that is fifty times slower, are no measure."""
    clock = Clock(monkeypatch)
    costs = iter([5.0])

    def call(of: nn.Module, ids: Tensor) -> Any:
        clock.now += next(costs, 0.1)
        return of(ids)

    mine = short(tmp_path, call=call, total=total)
    drive(mine, clock, 600, lambda k: slow / 100 if k in (3, 7) else slow)
    taken = steps(tmp_path)
    assert mine.share <= 0.05 and taken[0] == 0 and taken[-1] == 600
    assert all(b <= 2 * a + 1 for a, b in pairwise(taken))
    if total is not None:  # all 20 scheduled ones, at most a step late
        assert len(taken) == 20 and mine.left_out == []


@pytest.mark.filterwarnings("ignore:no record of")
# With an unknown end, 11 steps have fewer than twelve default steps: that combination is not promised.
@pytest.mark.parametrize(
    ("chosen", "last"),
    [("unknown end", 600), *((chosen, last) for chosen in ("default", "list", "function") for last in (11, 600))],
)
def test_however_slow_there_are_twelve_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, chosen: str
) -> None:
    clock = Clock(monkeypatch)
    plan = {"list": range(last + 1), "function": lambda k: True}.get(chosen)
    total = None if chosen == "unknown end" else last
    mine = short(tmp_path, call=clock.cost(1000.0), total=total, steps=plan)
    for k in range(last + 1):
        if k < 64 or k % 16 == 0 or k == last:  # fewer calls, a faster test
            mine.step(k)
        clock.now += 1.0
    mine.finish(last)
    taken = steps(tmp_path)
    assert schedule.MIN_RECORDS <= len(taken) <= 2 * schedule.MIN_RECORDS and taken[-1] == last
    if chosen != "list":  # these are spaced logarithmically
        assert all(b <= 3 * max(a, 1) for a, b in pairwise(taken))


def test_a_run_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real training on a machine where a record takes as long as several steps."""
    ticks = itertools.count()
    monkeypatch.setattr(recording, "perf_counter", lambda: float(next(ticks)))
    with pytest.warns(UserWarning, match="no record of") as caught:
        result = train(Tiny, tmp_path / "run", {"steps": 60, "evaluate": 30, "save": 30})
    assert len(caught) == 1 and caught[0].filename == __file__
    history = evolution(tmp_path / "run")
    # The best step, 30 or 60, has a record too.
    assert len(history.steps) in (schedule.MIN_RECORDS, schedule.MIN_RECORDS + 1) and history.gaps == []
    assert len(result.left_out) == 1 and tuple(history.left_out) == result.left_out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["left_out"] == list(result.left_out)
    assert result.recording_share is not None and result.recording_share > 0.05
    text = _describe_recording(result, result.recording_share)
    assert "more than the 5% allowed: up to 12 records" in text and f"no record of step {result.left_out[0]}" in text
    assert "%" in _describe_recording(replace(result, left_out=()), 0.01)
    assert "allowed" not in _describe_recording(replace(result, left_out=()), 0.01)


def test_few_records_show_the_same_arrivals() -> None:
    """The records that a slow machine makes in any case find each arrival within one record."""
    every = evolution(models.bundled())
    plan = schedule.RecordSchedule(None, every.steps[-1], schedule.MIN_RECORDS)
    few = Evolution([record for record in every.records if plan.is_guaranteed(record.step, record.step - 1, 0)])
    assert schedule.MIN_RECORDS - 1 <= len(few.steps) < len(every.steps) and few.gaps == []  # there is no step 1
    arrived = {(row["kind"], row["path"], row["head"]): row for row in few.arrivals()}
    for row in every.arrivals():
        same = arrived[row["kind"], row["path"], row["head"]]
        assert same["after"] <= row["step"] and row["after"] < same["step"]  # the two intervals overlap
    assert {"induction", "previous", "sink"} <= {kind for kind, _, _ in arrived}


@pytest.mark.parametrize("total", [50, 100, 600, 2500])
def test_a_distance_between_records_keeps_the_early_ones(total: int) -> None:
    steps = schedule.steps_with_interval(total, 25)
    assert steps is not None and steps[:10] == [0, 1, 2, 3, 4, 6, 8, 11, 16, 23]
    assert steps[10:] == list(range(25, total + 1, 25))
    plan = schedule.RecordSchedule(steps, total, schedule.MIN_RECORDS)
    guaranteed = [step for step in steps if plan.is_guaranteed(step, step - 1, 0)]
    assert len(guaranteed) == schedule.MIN_RECORDS and sparse_gaps(guaranteed) == []
    assert schedule.steps_with_interval(3, 25) == [0, 1, 2, 3] and schedule.steps_with_interval(total, 0) is None


@pytest.mark.filterwarnings("ignore:no record of")
def test_a_run_that_goes_on_counts_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    first = short(tmp_path, call=clock.cost(0.5), min_records=0)
    for k in range(60):
        first.step(k)
        clock.now += 1.0
    assert steps(tmp_path) == [0, 1, 29, 38, 48]
    clock.now = 1e6  # another process, another clock
    second = short(tmp_path, call=clock.cost(0.5), min_records=0)
    assert second.share == pytest.approx(2.5 / 50.5)
    with pytest.raises(ValueError, match=r"step is 40, but .* has records up to step 48; .*resume_from"):
        second.step(40)
    second.resume_from(40)
    assert steps(tmp_path) == [0, 1, 29, 38] and second.share == pytest.approx(2 / 40)
    assert not second.step(38)  # is there already
    taken = []
    for k in range(41, 60):
        taken += [k] * second.step(k)
        clock.now += 1.0
    assert taken == [51]
    second.resume_from(0)
    assert steps(tmp_path) == [0] and not second.step(0)


@pytest.mark.filterwarnings("ignore:no record of")
def test_without_a_limit_and_without_time(tmp_path: Path) -> None:
    for share in (None, 1, 1.0):
        mine = short(tmp_path / str(share), share=share)
        assert [mine.step(k) for k in range(5)] == [True] * 5
    mine = short(tmp_path / "none", share=0)
    assert [mine.step(k) for k in range(5)] == [True] + [False] * 4
    mine.finish(5)
    assert steps(tmp_path / "none") == [0, 5] and mine.left_out == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="share is nan"):
        short(tmp_path / "nan", share=float("nan"))


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


@pytest.mark.filterwarnings("ignore:no record of")
def test_a_known_end_that_leaves_no_time_thins_the_records_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    mine = short(tmp_path, call=clock.cost(2.0), total=400, steps=range(0, 401, 10), min_records=0)
    for k in range(401):
        mine.step(k)
        clock.now += 1.0
    mine.finish(400)
    taken = steps(tmp_path)
    gaps = [b - a for a, b in pairwise(taken)]
    assert (
        mine.share <= 0.05 and len(taken) >= 8 and max(gaps) <= 120
    )  # the second record comes early, to measure the cost
