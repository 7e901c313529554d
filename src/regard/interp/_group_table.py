"""Heads × groups of keys: the mean weight of each head on each group, in rows, as a table, and for the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from regard._devices import widest
from regard._errors import RegardError
from regard._observables import Observation
from regard._terminal import frameless_table, literal_text
from regard.interp._head_table import HEAD_COLUMNS, format_number, shorten_paths, sort_value
from regard.interp._token_text import visible_label

PREFIX = "on "  # of the columns of groups: "on system"
ELSEWHERE = "elsewhere"
ELSEWHERE_MEANING = "weight on keys in no group, and on learned sinks"
MOST_COLUMNS = 10  # of a table for the terminal
MOST_PAGE_GROUPS = 24  # on a page; groups without room are in the CSV file
MOST_MAP_GROUPS = 8  # with more groups the page has no weights from group to group


def group_means(observation: Observation) -> dict[str, torch.Tensor]:
    """The mean weight ``[H]`` of the rows that count on each group, by column; empty if no groups were measured."""
    groups = observation.observe.groups
    if groups is None or observation.groups is None or observation.counted is None:
        return {}
    means = observation.mean("groups")
    columns = {PREFIX + name: means[:, c] for c, name in enumerate(groups.names)}
    rest = 1 - widest(observation.groups).sum(-1)
    counts = observation.counted.sum((0, 2))
    # Rounding can make the rest of a row negative.
    columns[ELSEWHERE] = torch.where(observation.counted, rest, 0.0).sum((0, 2)).div(counts).clamp(min=0)
    return columns


def group_columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The columns of groups that some row has, in the order of the groups; layers may have different groups."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(name for name in row if name.startswith(PREFIX))
    if not columns:
        return []
    return [*columns, ELSEWHERE]


def group_table(rows: Iterable[Mapping[str, Any]], sort: str | None = None, limit: int | None = None) -> Table:
    """Rows of heads as a table for the terminal, with one column per group.

    It has all heads, or the ``limit`` heads with the largest ``sort``. If there are more groups than columns, it has
    the groups with the largest mean over all heads.
    """
    rows = list(rows)
    columns = group_columns(rows)
    if not columns:
        raise RegardError("no groups of keys were observed; observe with Observe(groups=regard.Groups(…))")
    if sort is not None:
        if sort not in (*HEAD_COLUMNS, *columns):
            raise RegardError(f"sort must be one of {', '.join((*HEAD_COLUMNS, *columns))}, got {sort!r}")
        rows.sort(key=lambda row: sort_value(row, sort), reverse=True)
    shown = largest_columns(rows, columns, MOST_COLUMNS)
    _, names = shorten_paths([row["path"] for row in rows])
    table = frameless_table("mean weight on each group")
    if len(shown) < len(columns):
        table.caption = literal_text(f"{len(shown) - 1} of {len(columns) - 1} groups, those with the largest weight")
        table.caption_justify = "left"
    table.add_column("layer", overflow="fold")
    table.add_column("head", justify="right", no_wrap=True)
    for name in shown:
        table.add_column(literal_text(visible_label(name.removeprefix(PREFIX))), justify="right", overflow="ellipsis")
    for row in rows[:limit]:
        cells = [format_number(row.get(name)) for name in shown]
        table.add_row(literal_text(names[row["path"]]), str(row["head"]), *cells)
    return table


def largest_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], most: int) -> list[str]:
    """At most ``most`` columns of groups, in their order: those with the largest sum over rows, and ``ELSEWHERE``."""
    sums = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        sums[name] = math.fsum(value for value in values if value is not None)
    largest = sorted(columns[:-1], key=lambda name: -sums[name])[: most - 1]
    return [name for name in columns if name in largest or name == ELSEWHERE]


def page_groups(
    observations: Mapping[str, Observation], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]] | None:
    """The groups that a page shows: name, label, and how many keys; None if no groups were observed."""
    columns = group_columns(rows)
    if not columns:
        return None
    sizes: dict[str, int] = {}
    for observation in observations.values():
        groups = observation.observe.groups
        if groups is not None:
            counts = groups.sizes().reshape(-1, len(groups)).amax(0).tolist()
            sizes |= {PREFIX + name: count for name, count in zip(groups.names, counts, strict=True)}
    shown = largest_columns(rows, columns, MOST_PAGE_GROUPS)
    entries = []
    for name in shown:
        entries.append({"name": name, "label": visible_label(name.removeprefix(PREFIX)), "keys": sizes.get(name)})
    return entries


def page_group_map(observation: Observation, shown: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """Per head the weights from group to group ``[C, C]``, as numbers or None; None if there are too many groups."""
    groups = observation.observe.groups
    if groups is None or observation.groups is None or len(groups) > MOST_MAP_GROUPS or observation.n != observation.m:
        return None
    if [entry["name"] for entry in shown[:-1]] != [PREFIX + name for name in groups.names]:
        return None
    return [[[page_number(x) for x in row] for row in head] for head in observation.group_map().tolist()]


def page_number(x: float | None) -> float | None:
    """A weight with four decimals; None if it is not known or not finite."""
    return round(x, 4) if x is not None and math.isfinite(x) else None
