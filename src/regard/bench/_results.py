"""Results of a run, as a JSON file and as a Markdown page.

The file is written after every case, so that a stopped run can continue.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from regard._config_json import LARGEST_JSON
from regard._errors import RegardError
from regard._files import read_regular, write_text
from regard.bench._cases import conditions
from regard.bench._race import OURS, Case, Measurement

# The introduction of each group in docs/benchmarks.md.
INTRODUCTIONS = {
    "operator": """## The operator

`regard.attention` on tensors `B×H×n×d`, float32 unless the name says otherwise. SDPA is torch's own
`scaled_dot_product_attention`; where it needs a mask or a bias as a tensor, that tensor is built before the race. The
time to compile FlexAttention is not counted either.""",
    "instructions": """## Instruction sets

The same call on the best instruction set of this machine (ours) and on each weaker one. `regard bench` fails if the
best set is slower than a weaker one by more than noise: the larger of 5% and the spread of either's times, but at most
25%.""",
    "watching": """## Watching

Ours measures the row values (entropy, distance, peak …) of every head and a 64 × 64 map. The other keeps the n × n
weights, as `output_attentions=True` does, and computes the entropy from them, for one layer also the map. "Not watched"
is the same call without observing.""",
    "groups": """## Groups of keys

An observed call that also measures the weight of each row on 8 groups, whose keys are interleaved (ours) or 8 runs, and
the same call without groups. `regard bench` fails if groups add more than 4% on a CPU, beyond noise.""",
    "models": """## Models

Models of this library against `transformers` (with SDPA) on the same weights, which are random, in the sizes of MiniLM
and SmolLM2-135M. Tokens generated in bfloat16 are not compared: rounding decides between near ties.""",
}


class Results:
    """Measurements under one set of conditions, by case.

    >>> results = Results()
    >>> results.add(Measurement("operator", "dense", {"regard": 2.0, "SDPA": 3.0}, {"regard": 2.1, "SDPA": 3.2}, 9))
    >>> [measurement.name for measurement in results]
    ['dense']
    """

    def __init__(self, measured_under: dict[str, str | int] | None = None, date: str = "") -> None:
        self.conditions = conditions() if measured_under is None else measured_under
        self.date = date or datetime.now(UTC).date().isoformat()
        self._measurements: dict[tuple[str, str], Measurement] = {}

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._measurements.values())

    def get(self, case: Case) -> Measurement | None:
        """Return the figures of a case, or None if it was not measured."""
        return self._measurements.get((case.group, case.name))

    def add(self, measurement: Measurement) -> None:
        """Add the figures of a case, or replace them."""
        self._measurements[measurement.group, measurement.name] = measurement

    def ordered(self, cases: Iterable[Case]) -> Results:
        """Return the figures of these cases only, in the order of ``cases``."""
        results = Results(self.conditions, self.date)
        for case in cases:
            measurement = self.get(case)
            if measurement is not None:
                results.add(measurement)
        return results

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a file."""
        return {"date": self.date, "conditions": self.conditions, "cases": [one.to_dict() for one in self]}

    def save(self, file: Path) -> None:
        """Write everything; the file is complete or absent, never half-written."""
        write_text(json.dumps(self.to_dict(), ensure_ascii=False, indent=1) + "\n", file)


def read_results(file: Path) -> Results:
    """Read what ``save`` wrote.

    Raises:
        RegardError: the file was not written by ``save``.
    """
    try:
        content = read_regular(file, LARGEST_JSON)
    except OSError as error:
        raise type(error)(f"{file} cannot be read: {error.strerror}") from None
    try:
        data = json.loads(content.decode("utf-8"))
        results = Results(dict(data["conditions"]), str(data["date"]))
        for case in data["cases"]:
            results.add(Measurement.from_dict(case))
        if any(OURS not in one.best or OURS not in one.median for one in results):
            raise KeyError(OURS)  # every ratio needs it
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise RegardError(f"{file} is not a file that regard bench --out wrote; give another name") from None
    return results


def results_report(results: Results) -> str:
    """Return the conditions and the figures as Markdown, ready to paste into an issue.

    >>> print(results_report(Results({"CPU": "a CPU", "threads": 2}, "2026-01-31")))
    ### regard bench, 2026-01-31
    <BLANKLINE>
    | condition | value |
    |---|---|
    | CPU | a CPU |
    | threads | 2 |
    <BLANKLINE>
    """
    lines = [f"### regard bench, {results.date}", "", "| condition | value |", "|---|---|"]
    for name, value in results.conditions.items():
        cell = str(value).replace("|", "\\|")
        lines.append(f"| {name} | {cell} |")
    parts = ["\n".join(lines)]
    for group in INTRODUCTIONS:
        rows = [one for one in results if one.group == group]
        if not rows:
            continue
        parts += [
            f"#### {group}",
            "A ratio is the other's time over ours: above 1, ours is faster.",
            _times_table(rows),
        ]
        if any(one.bytes for one in rows):
            parts.append(_memory_table(rows))
    return "\n\n".join(parts) + "\n"


def results_page(results: Results) -> str:
    """Return the results page as Markdown.

    >>> print(results_page(Results({"CPU": "a CPU", "threads": 2}, "2026-01-31")).splitlines()[0])
    # Benchmarks
    """
    parts = [_header(results)]
    for group, introduction in INTRODUCTIONS.items():
        rows = [one for one in results if one.group == group]
        if not rows:
            continue
        parts += [introduction, _times_table(rows)]
        if any(one.bytes for one in rows):
            parts += ["Peak memory of the tensors that these calls allocate, without the inputs:", _memory_table(rows)]
    return "\n\n".join(parts) + "\n"


def _header(results: Results) -> str:
    installed = [f"{name} {value}" for name, value in results.conditions.items() if value != "not installed"]
    absent = [name for name, value in results.conditions.items() if value == "not installed"]
    measured = f"{results.date}: {', '.join(installed)}."
    if absent:
        measured += f" Not installed, so not raced: {', '.join(absent)}."
    measured += " Machines differ and cores are shared: compare ratios of one run, never times of two runs."
    measured = "\n".join(textwrap.wrap(measured, 120, break_on_hyphens=False))
    return f"""# Benchmarks

Times of this library and of others. `make bench` writes this page (with `regard bench --page`), and
`docs/benchmarks.json`, which has every figure. All calls of a line get the same inputs. Their results are compared
first, then the calls are timed in turns; the best of at least three rounds counts. **A ratio is the other's time over
ours: above 1, ours is faster.** Run `regard bench` on your machine; `regard bench causal decoding` runs only the cases
with these words in their names, `--device cuda` (or mps, xpu) runs them on a GPU, and `--report` prints conditions and
figures as Markdown for an issue.

{measured}

[log.md](log.md) has older figures, longer runs and failed attempts."""


def _times_table(rows: list[Measurement]) -> str:
    peers = list(dict.fromkeys(name for one in rows for name in one.ratios))
    lines = [f"| case | ours, ms | {' | '.join(peers)} | spread |", "|---|---:|" + "---:|" * (len(peers) + 1)]
    for one in rows:
        ratios = [f"{one.ratios[name]:.2f} ×" if name in one.ratios else "" for name in peers]
        ours = format_milliseconds(one.best[OURS])
        lines.append(f"| {one.name} | {ours} | {' | '.join(ratios)} | {one.spread:.0%} |")
    return "\n".join([*lines, "", "Spread: how far the median of our rounds lies above their best."])


def _memory_table(rows: list[Measurement]) -> str:
    rows = [one for one in rows if one.bytes]
    names = list(dict.fromkeys(name for one in rows for name in one.bytes))
    lines = [f"| case | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for one in rows:
        sizes = [f"{one.bytes[name] / 1e6:,.0f} MB" if name in one.bytes else "" for name in names]
        lines.append(f"| {one.name} | {' | '.join(sizes)} |")
    return "\n".join(lines)


def format_milliseconds(milliseconds: float) -> str:
    """Format a time: whole milliseconds from 1,000 on; below that, one to three decimals.

    >>> format_milliseconds(1234.5), format_milliseconds(98.76), format_milliseconds(0.01234)
    ('1,234', '98.8', '0.012')
    """
    if milliseconds >= 1000:
        return f"{milliseconds:,.0f}"
    if milliseconds >= 10:
        return f"{milliseconds:.1f}"
    if milliseconds >= 1:
        return f"{milliseconds:.2f}"
    return f"{milliseconds:.3f}"
