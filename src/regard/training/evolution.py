"""How the heads of a model evolved while it learned: a recorder's folder as a table over steps, layers and heads."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from regard.shapes import integer
from regard.terminal import plain, plain_table
from regard.training import records
from regard.training.records import Record
from regard.watching.kinds import KINDS, kinds, labels
from regard.watching.seen import written
from regard.watching.table import COLUMNS

__all__ = ["Evolution", "evolution"]

PARTS = ("score", "confidence")  # columns of a kind
HELD = 2  # records in a row that a label must be held for


def evolution(folder: str | os.PathLike[str]) -> Evolution:
    """Open what a ``Recorder`` wrote: its folder, or a run's folder that has it as ``evolution``.

    The folder may be written to meanwhile; what else is in it is left alone.

    >>> evolution(regard.models.bundled())
    Evolution of 12 heads of TextDecoder, steps 0 … 6000 (26 records)
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder")
    found = records.files(path) or records.files(path / "evolution")
    read = []
    for file in found.values():
        try:
            read.append(records.read(file))
        except FileNotFoundError:  # a run that goes back to a checkpoint removes what came after it
            continue
    if not read:
        raise ValueError(
            f"{path} has no records of heads: a Recorder writes step-….safetensors, and {path.name} has none"
        )
    return Evolution(read)


@dataclass(frozen=True, repr=False)
class Evolution:
    """All records of a run, in the order of their steps; heads are numbered through all layers.

    >>> seen = regard.training.evolution(regard.models.bundled())
    >>> seen.value("previous score").shape, seen.label(4)  # records × heads; layer 1, head 0
    (torch.Size([26, 12]), '1.0')
    >>> seen.steps[::5], [round(x, 2) for x in seen.value("previous score")[::5, 4].tolist()]
    ([0, 8, 45, 256, 1448, 6000], [0.05, 0.05, 0.04, 0.11, 0.91, 0.98])
    """

    records: Sequence[Record]

    def __post_init__(self) -> None:
        first = self.records[0]
        for one in self.records[1:]:
            if one.places != first.places or one.names != first.names:
                raise ValueError(
                    f"the records of steps {first.step} and {one.step} are of other heads or other scores: "
                    f"{_told(first)}, then {_told(one)}; a folder holds one run"
                )
            for name in ("map", "profile"):
                if one.tensors[name].shape != first.tensors[name].shape:
                    raise ValueError(
                        f"{name} is {list(first.tensors[name].shape)} at step {first.step} and "
                        f"{list(one.tensors[name].shape)} at step {one.step}; a folder holds one run"
                    )

    def __repr__(self) -> str:
        steps = f"steps {self.steps[0]} … {self.steps[-1]} ({len(self.steps)} records)"
        return f"Evolution of {len(self.heads)} heads of {self.model}, {steps}"

    @property
    def model(self) -> str:
        """The class of the model that was recorded."""
        return self.records[0].model

    @property
    def steps(self) -> list[int]:
        """The recorded steps, in order."""
        return [record.step for record in self.records]

    @property
    def paths(self) -> list[str]:
        """The layers, in the order of the calls: a layer's number is its place here."""
        return [place.path for place in self.records[0].places]

    @property
    def heads(self) -> list[tuple[str, int]]:
        """(path, head) of every head, in the order of all values."""
        return self.records[0].heads

    @property
    def on_grid(self) -> bool:
        """Whether rows are cells of a picture, so that profiles lie in the plane."""
        return self.records[0].tensors["profile"].ndim == 3

    @property
    def share(self) -> float:
        """The share of the time that recording took, until the last record."""
        seconds = self.records[-1].seconds
        return seconds["spent"] / seconds["elapsed"] if seconds["elapsed"] else 0.0

    def label(self, at: int) -> str:
        """``layer.head`` of a head by its number."""
        path, head = self.heads[at]
        return f"{self.paths.index(path)}.{head}"

    def names(self) -> list[str]:
        """Everything that ``value`` knows: means, kinds' scores and confidences, and every score by probe."""
        scored = [f"{table} {name}" for table, names in self.records[0].names.items() for name in names]
        return [*COLUMNS, *(f"{kind} {part}" for kind in KINDS for part in PARTS), *scored]

    def value(self, name: str) -> Tensor:
        """One number over time, ``[steps, heads]``: ``"entropy"``, ``"induction confidence"``, ``"natural raw sink"``…

        NaN where it could not be had.

        >>> seen = evolution(regard.models.bundled())
        >>> surest = seen.value("induction confidence").amax(1)  # of all heads, at each record
        >>> [step for step, x in zip(seen.steps, surest.tolist(), strict=True) if x > 0.3][0]
        1448
        """
        if name in COLUMNS:
            at = list(COLUMNS).index(name)
            return torch.stack([record.tensors["means"][:, at] for record in self.records])
        kind, _, part = name.rpartition(" ")
        if kind in KINDS and part in PARTS:
            return torch.tensor([[x.get(kind, {}).get(part, math.nan) for x in step] for step in self.kinds()])
        for table, names in self.records[0].names.items():
            if name.startswith(f"{table} ") and (score := name[len(table) + 1 :]) in names:
                return torch.stack([record.tensors[table][:, names.index(score)] for record in self.records])
        close = get_close_matches(name, self.names(), 3, 0.4) or list(COLUMNS)
        raise ValueError(f"there is no {name!r}; near it are {', '.join(close)}, and names() lists all")

    def kinds(self) -> list[list[dict[str, dict[str, float]]]]:
        """``{kind: {score, control, confidence}}`` at every step of every head; see ``regard.watching.kinds``.

        The untrained control is the same head at step 0, before it learned anything; without that record there is none.
        """
        return self._kinds

    @cached_property
    def _kinds(self) -> list[list[dict[str, dict[str, float]]]]:
        first, many = self.records[0], range(len(self.heads))
        before = [first.scores(at) if first.step == 0 else None for at in many]
        return [[kinds(record.scores(at), before[at]) for at in many] for record in self.records]

    @cached_property
    def labels(self) -> list[list[list[str]]]:
        """The kinds that each head is sure to be, at every step; the surest first.

        >>> evolution(regard.models.bundled()).labels[-1][4]  # of head 1.0, at the last record
        ['previous', 'positional', 'convolution']
        """
        return [[labels(found) for found in step] for step in self.kinds()]

    def arrivals(self) -> list[dict[str, Any]]:
        """When each head took its type: the first step since when it has held a label to the end, two records or more.

        Rows ``{kind, step, path, layer, head, confidence}``, the earliest first; the confidence is the last one.

        >>> first = {row["kind"]: row["step"] for row in reversed(evolution(regard.models.bundled()).arrivals())}
        >>> first["previous"], first["induction"], first["sink"]
        (724, 1448, 2048)
        """
        found = []
        for at, (path, head) in enumerate(self.heads):
            for kind in self.labels[-1][at]:
                since = len(self.steps) - 1
                while since > 0 and kind in self.labels[since - 1][at]:
                    since -= 1
                if len(self.steps) - since >= HELD:
                    sure = self.kinds()[-1][at][kind]["confidence"]
                    place = {"path": path, "layer": self.paths.index(path), "head": head}
                    found.append({"kind": kind, "step": self.steps[since], **place, "confidence": sure})
        return sorted(found, key=lambda row: (row["step"], -row["confidence"]))

    def rows(self) -> list[dict[str, Any]]:
        """One row a step and head: means, every kind's score and confidence, labels; None where there is none."""
        found = []
        layers = {path: layer for layer, path in enumerate(self.paths)}
        for s, record in enumerate(self.records):
            means = record.tensors["means"].tolist()
            for at, (path, head) in enumerate(self.heads):
                named = self.kinds()[s][at]
                values = {f"{kind} {part}": named.get(kind, {}).get(part) for kind in KINDS for part in PARTS}
                place = {"step": record.step, "layer": layers[path], "path": path, "head": head}
                numbers = dict(zip(COLUMNS, map(_finite, means[at]), strict=True))
                found.append({**place, **numbers, **values, "labels": self.labels[s][at]})
        return found

    def map(self, step: int, path: str, head: int) -> Tensor:
        """A head's pooled map at a recorded step, less the bins that no token falls into: those of short texts.

        >>> seen = evolution(regard.models.bundled())
        >>> seen.map(6000, "decoder.blocks.1.attention", 0).shape
        torch.Size([32, 32])
        """
        record, at = self._at(step, path, head)
        place = next(place for place in record.places if place.path == path)
        cells = record.tensors["map"][at]
        for axis, count in ((0, place.n), (1, place.m)):
            g = cells.shape[axis]
            if 0 < count < g:
                cells = cells.index_select(axis, torch.arange(count) * g // count)
        return cells

    def profile(self, step: int, path: str, head: int) -> Tensor:
        """A head's mean weight at each offset −r … r at a recorded step; on a grid ``[2r+1, 2r+1]``.

        >>> seen = evolution(regard.models.bundled())
        >>> profile = seen.profile(6000, "decoder.blocks.1.attention", 0)  # offsets −16 … 16
        >>> int(profile.argmax()) - 16
        -1
        """
        record, at = self._at(step, path, head)
        return record.tensors["profile"][at]

    def table(self, heads: bool = False) -> Table:
        """For the terminal: when each kind came and which head took it first; with ``heads=True`` what each became.

        >>> evolution(regard.models.bundled()).table().row_count  # a row a kind
        8
        """
        return self._by_head() if heads else self._by_kind()

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """``rows`` as comma-separated text, written to ``file`` where one is given."""
        text = io.StringIO()
        rows = [{**row, "labels": " ".join(row["labels"])} for row in self.rows()]
        writer = csv.DictWriter(text, list(rows[0]) if rows else ["step"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return written(text.getvalue(), file)

    def to_json(self, file: str | os.PathLike[str] | None = None) -> str:
        """``rows`` and ``arrivals`` as JSON, written to ``file`` where one is given."""
        told = {"model": self.model, "steps": self.steps, "paths": self.paths, "columns": COLUMNS, "share": self.share}
        data = told | {"arrivals": self.arrivals(), "rows": self.rows()}
        return written(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False), file)

    def _at(self, step: int, path: str, head: int) -> tuple[Record, int]:
        if integer("step", step) not in self.steps:
            raise ValueError(f"step {step} was not recorded; there are {', '.join(map(str, self.steps))}")
        if (path, head) not in self.heads:
            known = ", ".join(self.paths[:6]) + (" …" if len(self.paths) > 6 else "")
            raise ValueError(f"there is no head {head} at {path!r}; there are {len(self.heads)} heads, at {known}")
        return self.records[self.steps.index(step)], self.heads.index((path, head))

    def _by_kind(self) -> Table:
        table = plain_table(f"{len(self.heads)} heads of {self.model}, steps {self.steps[0]} … {self.steps[-1]}")
        table.add_column("kind", no_wrap=True)
        for name in ("heads at the end", "first at step", "by head", "surest head"):
            table.add_column(name, justify="right")
        arrived = self.arrivals()
        for kind in KINDS:
            held = [at for at, named in enumerate(self.labels[-1]) if kind in named]
            came = [row for row in arrived if row["kind"] == kind]
            first = [str(came[0]["step"]), f"{came[0]['layer']}.{came[0]['head']}"] if came else ["–", "–"]
            sure = {at: self.kinds()[-1][at][kind]["confidence"] for at in held}
            best = max(sure, key=lambda at: sure[at]) if sure else None
            table.add_row(kind, str(len(held)), *first, "–" if best is None else f"{self.label(best)} {sure[best]:.2f}")
        return table

    def _by_head(self) -> Table:
        first, last = self.steps[0], self.steps[-1]
        table = plain_table(f"{len(self.heads)} heads of {self.model}, step {first} → {last}")
        table.add_column("head", no_wrap=True)
        for name in ("entropy", "spread", "distance"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("kinds since step (confidence)", overflow="fold")
        since = {(row["path"], row["head"], row["kind"]): row["step"] for row in self.arrivals()}
        values = {name: self.value(name) for name in ("entropy", "spread", "distance")}
        for at, (path, head) in enumerate(self.heads):
            numbers = (f"{_short(x[0, at], name)} → {_short(x[-1, at], name)}" for name, x in values.items())
            sure = self.kinds()[-1][at]
            named = (
                f"{kind} {since.get((path, head, kind), last)} ({sure[kind]['confidence']:.2f})"
                for kind in self.labels[-1][at]
            )
            table.add_row(self.label(at), *numbers, plain(", ".join(named)))
        return table


def _told(record: Record) -> str:
    return f"{len(record.heads)} heads at {len(record.places)} places of {record.model}"


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _short(x: Tensor, name: str) -> str:
    value = float(x)
    return "–" if not math.isfinite(value) else f"{value:.{1 if name == 'distance' else 2}f}"
