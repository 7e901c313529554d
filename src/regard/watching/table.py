"""Every head as one row of numbers: for the terminal, for spreadsheets, for other programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from rich.table import Table

from regard.observables import Observation
from regard.terminal import plain, plain_table

__all__ = ["COLUMNS", "as_csv", "as_json", "as_table", "rows", "shortened"]

# Name → what it is; means over the rows that count.
COLUMNS = {
    "entropy": "nats",
    "spread": "entropy over ln(visible keys): 0 one key, 1 all alike",
    "peak": "largest weight",
    "distance": "tokens between query and key",
    "offset": "tokens from query to key, − is back",
    "sink": "weight on the first keys",
    "local": "weight on the nearest keys",
}


def rows(seen: Mapping[str, Observation]) -> list[dict[str, Any]]:
    """``{"path", "head", "rows", …}`` for each head; a number that cannot be had (calls of unequal sizes) is None."""
    found = []
    for path, observation in seen.items():
        columns = {name: _means(observation, name) for name in COLUMNS}
        for at, head in enumerate(observation.heads):
            values = {name: None if x is None else _number(x[at]) for name, x in columns.items()}
            found.append({"path": path, "head": head, "rows": int(observation.rows[at]), **values})
    return found


def as_table(heads: Iterable[Mapping[str, Any]], sort: str | None = None, most: int | None = None) -> Table:
    """The rows as a table for the terminal, perhaps the ``most`` with the largest ``sort``."""
    heads = list(heads)
    if sort is not None:
        if sort not in COLUMNS:
            raise ValueError(f"sort is {sort!r}; there are {', '.join(COLUMNS)}")
        heads.sort(key=lambda row: -math.inf if row[sort] is None else row[sort], reverse=True)
    pattern, places = shortened([row["path"] for row in heads])
    of = f" of {pattern}" if pattern else ""
    title = f"{len(heads)} heads{of}" + (f", by {sort}" if sort else "")
    table = plain_table(title)
    table.add_column("place", overflow="fold")
    for name in ("head", *COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    for row in heads[:most]:
        numbers = ("–" if row[name] is None else f"{row[name]:.2f}" for name in COLUMNS)
        table.add_row(plain(places[row["path"]]), str(row["head"]), *numbers)
    return table


def shortened(paths: list[str]) -> tuple[str, dict[str, str]]:
    """``*.blocks.*.attention`` and each path's own part of it: what all paths share is said once, in the title."""
    if len(set(paths)) == 1:
        numbers = [part for part in paths[0].split(".") if part.isdecimal()]
        return paths[0], {paths[0]: numbers[-1] if numbers else "·"}
    parts = {path: path.split(".") for path in paths}
    columns = list(zip(*parts.values(), strict=False))
    shared = [len(set(names)) == 1 for names in columns]
    if len(parts) < 2 or len(set(map(len, parts.values()))) != 1 or not any(shared):
        return "", {path: path for path in paths}
    pattern = ".".join(names[0] if same else "*" for names, same in zip(columns, shared, strict=True))
    own = {path: ".".join(x for x, same in zip(p, shared, strict=True) if not same) for path, p in parts.items()}
    return pattern, own


def as_csv(heads: Iterable[Mapping[str, Any]]) -> str:
    """The rows as comma-separated text with a header; what is not there is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, ["path", "head", "rows", *COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(heads)
    return text.getvalue()


def as_json(heads: Iterable[Mapping[str, Any]]) -> str:
    """The rows as a JSON list, with what the columns mean."""
    return json.dumps({"columns": COLUMNS, "heads": list(heads)}, indent=1, ensure_ascii=False)


def _means(observation: Observation, name: str) -> torch.Tensor | None:
    if observation.counted is None or observation.entropy is None:
        return None
    if name != "spread":
        return observation.mean(name) if getattr(observation, name) is not None else None
    if observation.visible is None:
        return None
    most = observation.visible.double().log()
    share = torch.where(most > 0, observation.entropy.double() / most, 0.0)
    counted = observation.counted
    return torch.where(counted, share, 0).sum((0, 2)) / counted.sum((0, 2))


def _number(x: torch.Tensor) -> float | None:
    """A float, or None for a head without rows."""
    value = float(x)
    return value if math.isfinite(value) else None
