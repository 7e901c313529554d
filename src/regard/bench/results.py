"""Figures on disk: one JSON file with its conditions, written after every case: a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from regard.bench.ledger import conditions
from regard.bench.race import OURS, Case, Measured
from regard.files import renamed

__all__ = ["Results", "read"]


class Results:
    """What was measured under one set of conditions, by case.

    >>> results = Results()
    >>> results.add(Measured("operator", "dense", {"regard": 2.0, "SDPA": 3.0}, {"regard": 2.1, "SDPA": 3.2}, 9))
    >>> [measured.name for measured in results]
    ['dense']
    """

    def __init__(self, conditions_of: dict[str, str | int] | None = None, date: str = "") -> None:
        self.conditions = conditions() if conditions_of is None else conditions_of
        self.date = date or datetime.now(UTC).date().isoformat()
        self._found: dict[tuple[str, str], Measured] = {}

    def __iter__(self) -> Any:
        return iter(self._found.values())

    def get(self, case: Case) -> Measured | None:
        """A case's figures, if they are there."""
        return self._found.get((case.group, case.name))

    def add(self, measured: Measured) -> None:
        """Take a case's figures in."""
        self._found[measured.group, measured.name] = measured

    def ordered(self, cases: Iterable[Case]) -> Results:
        """The same, in the order of these cases, whatever order they were measured in; others are left out."""
        same = Results(self.conditions, self.date)
        for case in cases:
            if (measured := self.get(case)) is not None:
                same.add(measured)
        return same

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a file."""
        return {"date": self.date, "conditions": self.conditions, "cases": [one.to_dict() for one in self]}

    def save(self, file: Path) -> None:
        """Write all of it; the file appears whole."""
        with renamed(file) as draft:
            draft.write_text(json.dumps(self.to_dict(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> Results:
    """What ``save`` wrote.

    Raises:
        ValueError: the file is not one of ours.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        found = Results(dict(data["conditions"]), str(data["date"]))
        for one in data["cases"]:
            found.add(Measured.from_dict(one))
        if any(OURS not in one.best or OURS not in one.median for one in found):
            raise ValueError
    except OSError as error:
        raise type(error)(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} is not a file that regard bench --out wrote; give another name") from None
    return found
