"""When the recorder records: the scheduled steps, the records that are made in any case, and the budget of time.

    due          a scheduled step was passed since the last record
    guaranteed   the record is due, and it is one of the few that are made even if they exceed the share
    fits         the record is due, and its expected cost stays within the share of the time

A due record that is neither guaranteed nor fits waits. If the next scheduled step comes first, it is left out.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median_low

from regard._checks import check_integer
from regard._errors import RegardError, RegardTypeError
from regard._files import write_text

Steps = Callable[[int], bool] | Sequence[int] | None

MIN_RECORDS = 12  # records that are made in any case, if the training has that many steps
RECENT_COSTS = 9  # records whose cost is remembered; their median is the expected cost of the next one
LEFT_OUT_FILE = "left-out.json"
MAX_FILE_BYTES = 2**22


class RecordSchedule:
    """The scheduled steps of a recorder.

    - ``steps``: a list of steps, a function of a step, or None for 0, 1, 2, 3, 4, 6, 8, 11 … (2^(k/2), rounded).
    - ``total``: the number of steps of the training; None if it is not known.
    - ``min_records``: how many of the scheduled records are guaranteed.
    """

    def __init__(self, steps: Steps, total: int | None, min_records: int) -> None:
        self.total = total
        self.min_records = check_integer("min_records", min_records)
        self._is_default = steps is None
        self._function: Callable[[int], bool] | None = None
        self._list: list[int] | None = None  # None: the default steps of a training of unknown length
        if callable(steps):
            self._function = steps
        elif steps is not None:
            self._list = _sorted_steps(steps)
        elif total is not None:
            self._list = _default_steps(total, min_records)
        self._guaranteed = self._guaranteed_steps()
        self._pending = False  # whether the function chose a step since the last record

    def reset(self) -> None:
        """A record was made, or records were removed: nothing is pending."""
        self._pending = False

    def is_scheduled(self, step: int, previous: int) -> bool:
        """Whether a scheduled step lies after ``previous`` and not after ``step``."""
        if self._function is not None:
            return bool(self._function(step))
        # Also a training that is longer than was expected has default steps.
        is_beyond_list = self._is_default and self.total is not None and previous >= self.total
        if self._list is None or is_beyond_list:
            return next_step(previous) <= step
        index = bisect_right(self._list, previous)
        return index < len(self._list) and self._list[index] <= step

    def is_due(self, step: int, last_recorded: int) -> bool:
        """Whether a scheduled step was passed since the last record."""
        if step == 0:
            return True
        if self._function is not None:
            self._pending = self._pending or self.is_scheduled(step, last_recorded)
            return self._pending
        return self.is_scheduled(step, last_recorded)

    def is_guaranteed(self, step: int, last_recorded: int, record_count: int) -> bool:
        """Whether a record that is due at ``step`` is made even if it exceeds the share."""
        if self._guaranteed is not None:
            index = bisect_right(self._guaranteed, last_recorded)
            return index < len(self._guaranteed) and self._guaranteed[index] <= step
        # The length is not known: the first records, and later at least one whenever the number of steps has doubled.
        return record_count < self.min_records or (self.min_records > 0 and step >= 2 * last_recorded)

    def due_share(self, step: int) -> float:
        """Return the share of all records that is due up to a step of a training whose length is known."""
        assert self.total is not None
        # The steps of a function are assumed to be evenly spaced.
        if self._list is None:
            return step / self.total
        count = bisect_right(self._list, self.total)
        return bisect_right(self._list, step) / count if count else 1.0

    def _guaranteed_steps(self) -> list[int] | None:
        """Return the guaranteed steps: spread evenly over the scheduled ones; None if these are not known."""
        if self.min_records == 0:
            return []
        if self._list is None:
            if self._function is None or self.total is None:
                return None
            return log_spaced_steps(self.total, self.min_records)
        scheduled = self._list
        if self.total is not None:
            scheduled = scheduled[: bisect_right(scheduled, self.total)]
        if len(scheduled) <= self.min_records:
            return scheduled
        if self.min_records == 1:
            return scheduled[:1]
        distance = (len(scheduled) - 1) / (self.min_records - 1)
        return [scheduled[round(k * distance)] for k in range(self.min_records)]


class TimeBudget:
    """The time that recording may take, by the time that has passed; over all starts of a training.

    - ``limit``: the largest share of the time.
    - ``spent``, ``elapsed_before``: seconds spent on recording, and seconds of the training, in earlier processes.
    - ``costs``: seconds of the last records, in earlier processes.
    """

    def __init__(self, limit: float, spent: float = 0.0, elapsed_before: float = 0.0, costs: Sequence[float] = ()):
        self.limit = limit
        self.spent = spent
        self._elapsed_before = elapsed_before
        self._costs = deque(costs, maxlen=RECENT_COSTS)
        self._start: float | None = None
        # The step, the time and ``spent`` from which the mean time of a step is measured.
        self._baseline: tuple[int, float, float] | None = None
        self._first_call: int | None = None

    def start(self, now: float) -> None:
        """Start the clock, at the first call only."""
        if self._start is None:
            self._start = now

    def elapsed(self, now: float) -> float:
        """Return the seconds since the start of the training, without the time between two processes."""
        in_this_process = 0.0 if self._start is None else now - self._start
        return self._elapsed_before + in_this_process

    def on_step(self, step: int, now: float) -> None:
        """Note that a step has ended. The first step of a process is slower than others, so it is not measured."""
        if self._first_call is None:
            self._first_call = step
        elif self._baseline is None and step > self._first_call:
            self._baseline = (step, now, self.spent)

    def add_record(self, cost: float) -> None:
        """Note that a record took ``cost`` seconds."""
        self.spent += cost
        self._costs.append(cost)

    def expected_cost(self) -> float | None:
        """Return the median cost of the last records; None before the second one, because the first one is slow."""
        return median_low(self._costs) if len(self._costs) > 1 else None

    def fits(self, step: int, now: float, schedule: RecordSchedule) -> bool:
        """Whether a record at this step is expected to stay within the share."""
        if self.limit == 0:
            return False
        cost = self.expected_cost()
        if cost is None:
            return True
        return self.spent + cost <= self._allowed_seconds(step, now, cost, schedule)

    def _allowed_seconds(self, step: int, now: float, cost: float, schedule: RecordSchedule) -> float:
        """Return the time that all records up to a step may take together."""
        elapsed = self.elapsed(now)
        total = schedule.total
        if total is None or step >= total or self._baseline is None or step <= self._baseline[0]:
            return self.limit * (elapsed + cost)
        # Early records need not wait: they get their part of what the whole training is expected to allow.
        first_step, since, spent_before = self._baseline
        training = (now - since) - (self.spent - spent_before)
        expected = elapsed + training / (step - first_step) * (total - step)
        # The last record is made in any case, so its cost is reserved.
        return (self.limit * expected - cost) * schedule.due_share(step)


def next_step(after: int) -> int:
    """Return the first default step after ``after``. Default steps are 0, 1, 2, 3, 4, 6, 8, 11 … (2^(k/2), rounded)."""
    if after < 0:
        return 0
    k = 2 * max(after, 1).bit_length() - 2  # 2^(k/2) ≤ after
    while round(2 ** (k / 2)) <= after:
        k += 1
    return round(2 ** (k / 2))


def steps_with_interval(total: int, every: int) -> list[int] | None:
    """Return the steps of a training of ``total`` steps that are recorded: the multiples of ``every``, and before the
    first one the default steps, because heads change most at the start. None if ``every`` is 0: default steps only.

    >>> steps_with_interval(100, 25)
    [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 25, 50, 75, 100]
    """
    if every == 0:
        return None
    steps = [0]
    while (step := next_step(steps[-1])) < min(every, total + 1):
        steps.append(step)
    return steps + list(range(every, total + 1, every))


def log_spaced_steps(total: int, count: int) -> list[int]:
    """Return ``count`` different steps from 0 to ``total`` that are spaced logarithmically, or all if there are fewer.

    >>> log_spaced_steps(600, 12)
    [0, 1, 2, 4, 7, 13, 24, 46, 88, 167, 316, 600]
    """
    if total < count:
        return list(range(total + 1))
    if count < 3:
        return [0, total][:count]
    steps = [0]
    for k in range(count - 1):
        step = round(total ** (k / (count - 2)))
        steps.append(max(step, steps[-1] + 1))
    return steps


def read_left_out(folder: Path, last_step: int = 2**60) -> list[int]:
    """Return the scheduled steps up to ``last_step`` whose records were left out; the file is not trusted."""
    file = folder / LEFT_OUT_FILE
    if not file.is_file() or file.stat().st_size > MAX_FILE_BYTES:
        return []
    try:
        steps = json.loads(file.read_text(encoding="utf-8"))["steps"]
        return sorted({check_integer("steps", step) for step in steps if step <= last_step})
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return []


def write_left_out(folder: Path, steps: Sequence[int]) -> None:
    """Write the steps whose records were left out, beside the records; without steps there is no file."""
    file = folder / LEFT_OUT_FILE
    if steps:
        write_text(json.dumps({"kind": "regard records left out", "steps": list(steps)}) + "\n", file)
    else:
        file.unlink(missing_ok=True)


def format_steps(steps: Sequence[int], most: int = 6) -> str:
    """Return steps as a text: "step 45" or "steps 45, 91, …, 512"; a long list is shortened.

    >>> format_steps([45, 1024]), format_steps(range(0, 100, 10))
    ('steps 45, 1,024', 'steps 0, 10, 20, 30, 40, …, 90')
    """
    texts = [f"{step:,}" for step in steps]
    if len(texts) > most:
        texts = [*texts[: most - 1], "…", texts[-1]]
    noun = "step" if len(steps) == 1 else "steps"
    return f"{noun} {', '.join(texts)}"


def describe_excess(share: float, limit: float) -> str:
    """Return why recording took more than its limit, to be appended to the share; an empty text if it did not.

    >>> describe_excess(0.31, 0.05), describe_excess(0.0502, 0.05)
    (', more than the 5% allowed: up to 12 records, and the last one, are made in any case', '')
    """
    # One slow record at the end may exceed the limit a little.
    if share <= 1.1 * limit:
        return ""
    reason = f"up to {MIN_RECORDS} records, and the last one, are made in any case"
    return f", more than the {100 * limit:.3g}% allowed: {reason}"


def _default_steps(total: int, min_records: int) -> list[int]:
    """Return the default steps up to ``total``, or closer ones if a short training would have too few records."""
    steps = [0]
    while (step := next_step(steps[-1])) < total:
        steps.append(step)
    steps.append(total)
    if len(steps) < min_records <= total + 1:
        return log_spaced_steps(total, min_records)
    return steps


def _sorted_steps(steps: object) -> list[int]:
    if isinstance(steps, str) or not isinstance(steps, Sequence | range):
        raise RegardTypeError(f"steps must be a list of steps or a function of a step, got {steps!r}")
    return sorted(check_integer("steps", step) for step in steps)


def check_share(share: float | None) -> float:
    """Return the limit that ``share`` means: None means no limit, which is 1."""
    limit = 1.0 if share is None else share
    if not isinstance(limit, int | float) or not math.isfinite(limit) or not 0 <= limit <= 1:
        raise RegardError(f"share is {share!r}; it must be a number from 0 to 1, or None for no limit")
    return limit
