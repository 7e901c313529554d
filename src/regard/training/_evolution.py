"""``Evolution``: how the heads of a model changed during training, read from a recorder's folder."""

from __future__ import annotations

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

from regard._checks import check_integer
from regard._config_json import read_json
from regard._errors import RegardError
from regard._files import write_text
from regard.interp._atlas_store import RESULT_FILE, saved_model_step
from regard.interp._atlas_table import record_source
from regard.interp._head_table import HEAD_COLUMNS, csv_text
from regard.interp._head_types import HEAD_TYPES, count_labels, head_type_labels, head_type_scores
from regard.interp._records import Record, find_records, list_records, read_record
from regard.training._arrivals import describe_uncertainty, find_arrivals, sparse_gaps
from regard.training._evolution_tables import heads_table, types_table
from regard.training._measures import Measure, describe_measure
from regard.training._record_schedule import read_left_out

TYPE_COLUMNS = ("score", "confidence")  # columns of a head type


def evolution(folder: str | os.PathLike[str]) -> Evolution:
    """Read the records of a ``Recorder``.

    - ``folder``: the recorder's folder, or the folder of a run, whose records are in ``evolution``. A training may
      write to it at the same time; other files in it are ignored.

    >>> evolution(regard.models.bundled())
    Evolution of 12 heads of TextDecoder, steps 0 … 6000 (26 records)
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder")
    files = find_records(path)
    records = []
    for file in files.values():
        try:
            records.append(read_record(file))
        except FileNotFoundError:  # a training that resumes from a checkpoint removes later records
            continue
    if not records:
        raise RegardError(f"{path} has no records of heads: a Recorder writes files named step-….safetensors")
    records_folder = next(iter(files.values())).parent
    return Evolution(records, tuple(read_left_out(records_folder)), find_model_step(path, records_folder))


def find_model_step(folder: Path, records_folder: Path) -> int | None:
    """Return the step whose weights the model of a run has; None if there is no model or its step is not known.

    - ``folder``: the folder of the run, of its model or of its records.
    - ``records_folder``: the folder of its records.
    """
    run = folder
    if folder == records_folder and folder.resolve().name == "evolution":
        run = folder.resolve().parent
    try:
        return saved_model_step(read_json(run / RESULT_FILE))
    except (OSError, RegardError):
        return None


def recorded_share(folder: Path) -> float:
    """Return the share of the time that recording took, by the records in a folder."""
    return _share([read_record(file) for file in list_records(folder).values()])


def _share(records: Sequence[Record]) -> float:
    # The newest record knows the times of all. It need not be of the last step: the best weights are recorded last.
    seconds = max((record.seconds for record in records), key=lambda seconds: seconds["elapsed"])
    return seconds["spent"] / seconds["elapsed"] if seconds["elapsed"] else 0.0


@dataclass(frozen=True, repr=False)
class Evolution:
    """All records of a run, in the order of their steps; heads are numbered consecutively over all layers.

    - ``records``: the records.
    - ``left_out``: the scheduled steps whose records were left out to keep to the recorder's share of the time.
    - ``model_step``: the step whose weights the run's model has; None if there is none or its step is not known.

    >>> records = regard.training.evolution(regard.models.bundled())
    >>> records.value("previous score").shape, records.head_label(4)  # records × heads; layer 1, head 0
    (torch.Size([26, 12]), '1.0')
    >>> records.steps[::5], [round(x, 2) for x in records.value("previous score")[::5, 4].tolist()]
    ([0, 8, 45, 256, 1448, 6000], [0.05, 0.05, 0.04, 0.11, 0.91, 0.98])
    """

    records: Sequence[Record]
    left_out: Sequence[int] = ()
    model_step: int | None = None

    def __post_init__(self) -> None:
        first = self.records[0]
        for record in self.records[1:]:
            steps = f"the records of steps {first.step} and {record.step} are of different runs"
            if record.layers != first.layers or record.names != first.names:
                raise RegardError(f"{steps}: {_describe(first)} and {_describe(record)}, or their scores differ")
            for name in ("map", "profile"):
                shape = first.tensors[name].shape
                other = record.tensors[name].shape
                if shape != other:
                    raise RegardError(f"{steps}: {name} has shapes {list(shape)} and {list(other)}")

    def __repr__(self) -> str:
        steps = f"steps {self.steps[0]} … {self.steps[-1]} ({len(self.steps)} records)"
        return f"Evolution of {len(self.heads)} heads of {self.model}, {steps}"

    @property
    def model(self) -> str:
        """The class name of the recorded model."""
        return self.records[0].model

    @property
    def steps(self) -> list[int]:
        """The recorded steps, in order."""
        return [record.step for record in self.records]

    @property
    def paths(self) -> list[str]:
        """The module paths of the attention layers, in the order of their calls; the index is the layer's number."""
        return [layer.path for layer in self.records[0].layers]

    @property
    def heads(self) -> list[tuple[str, int]]:
        """(path, head) of every head, in the order of all values."""
        return self.records[0].heads

    @property
    def on_grid(self) -> bool:
        """Whether the model reads images, so that profiles are two-dimensional."""
        return self.records[0].tensors["profile"].ndim == 3

    @property
    def share(self) -> float:
        """The share of the time that recording took, up to the newest record."""
        return _share(self.records)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Pairs of recorded steps in a row that are too far apart to show what happened between them.

        >>> evolution(regard.models.bundled()).gaps
        []
        """
        return sparse_gaps(self.steps)

    def describe_records(self) -> str:
        """Return in a line how many records there are, of which steps, and how much time they took.

        >>> evolution(regard.models.bundled()).describe_records()
        '26 records of steps 0 … 6,000; recording took 0.9% of the time'
        """
        # Until the second record, the time that recording takes cannot be compared with that of training.
        if len(self.steps) == 1:
            return f"1 record, of step {self.steps[0]:,}"
        text = f"{len(self.steps)} records of steps {self.steps[0]:,} … {self.steps[-1]:,}"
        if self.left_out:
            text += f", {len(self.left_out)} left out"
        return f"{text}; recording took {100 * self.share:.1f}% of the time"

    def describe_model(self) -> str:
        """Return in a line of which step the run's model is, if that is not the last record; else an empty text.

        >>> evolution(regard.models.bundled()).describe_model()
        ''
        """
        if self.model_step is None or self.model_step == self.steps[-1]:
            return ""
        return f"the model is of step {self.model_step:,}, the last record of step {self.steps[-1]:,}"

    def describe_uncertainty(self) -> str:
        """Return in a sentence what the records do not show about arrivals; an empty text if they are close enough."""
        return describe_uncertainty(self.steps, self.arrivals())

    def head_label(self, index: int) -> str:
        """Return ``layer.head`` of the head with this number."""
        path, head = self.heads[index]
        return f"{self.paths.index(path)}.{head}"

    def names(self) -> list[str]:
        """Return every name that ``value`` accepts: means, scores and confidences of types, and scores by probe."""
        names = list(HEAD_COLUMNS)
        for head_type in HEAD_TYPES:
            names += [f"{head_type} {column}" for column in TYPE_COLUMNS]
        for table, scores in self.records[0].names.items():
            names += [f"{table} {score}" for score in scores]
        return names

    def measures(self) -> list[Measure]:
        """Return the group, the plain name and the meaning of every name that ``value`` accepts."""
        return [describe_measure(name, self.on_grid) for name in self.names()]

    def value(self, name: str) -> Tensor:
        """Return one value of every head over time, ``[records, heads]``; NaN where it could not be measured.

        - ``name``: "entropy", "induction confidence", "natural raw sink" …; ``names`` lists all.

        >>> records = evolution(regard.models.bundled())
        >>> best = records.value("induction confidence").amax(1)  # over all heads, at each record
        >>> [step for step, x in zip(records.steps, best.tolist(), strict=True) if x > 0.3][0]
        1448
        """
        if name in HEAD_COLUMNS:
            return self._column("means", list(HEAD_COLUMNS).index(name))
        head_type, _, part = name.rpartition(" ")
        if head_type in HEAD_TYPES and part in TYPE_COLUMNS:
            rows = []
            for types_of_heads in self.head_types():
                rows.append([types.get(head_type, {}).get(part, math.nan) for types in types_of_heads])
            return torch.tensor(rows)
        for table, scores in self.records[0].names.items():
            score = name.removeprefix(f"{table} ")
            if score != name and score in scores:
                return self._column(table, scores.index(score))
        # Names are long, so a typing mistake is likely.
        close = get_close_matches(name, self.names(), 3, 0.4) or list(HEAD_COLUMNS)
        raise RegardError(f"name is {name!r}, which is unknown; names() lists all, for example {', '.join(close)}")

    def _column(self, table: str, column: int) -> Tensor:
        return torch.stack([record.tensors[table][:, column] for record in self.records])

    def head_types(self) -> list[list[dict[str, dict[str, float]]]]:
        """Return ``{type: {score, control, confidence}}`` of every head at every record.

        The untrained control is the same head at step 0; without a record of step 0 there is no control.
        """
        return self._head_types

    @cached_property
    def _head_types(self) -> list[list[dict[str, dict[str, float]]]]:
        first = self.records[0]
        types: list[list[dict[str, dict[str, float]]]] = [[] for _ in self.records]
        for index in range(len(self.heads)):
            # Only a record of step 0 shows the untrained head.
            untrained = first.scores(index) if first.step == 0 else None
            for record, types_of_heads in zip(self.records, types, strict=True):
                types_of_heads.append(head_type_scores(record.scores(index), untrained))
        return types

    @cached_property
    def labels(self) -> list[list[list[str]]]:
        """The types that each head has with enough confidence, at every record; the most confident first.

        >>> evolution(regard.models.bundled()).labels[-1][4]  # of head 1.0, at the last record
        ['previous', 'positional', 'convolution']
        """
        labels = []
        for types_of_heads in self.head_types():
            labels.append([head_type_labels(types) for types in types_of_heads])
        return labels

    @property
    def counts(self) -> dict[str, int]:
        """How many heads have each type at the last record; a head with several types counts for each of them.

        >>> records = evolution(regard.models.bundled())
        >>> records.counts == regard.interp.atlas(regard.models.load(regard.models.bundled())).counts
        True
        """
        return count_labels(self.labels[-1])

    @property
    def source(self) -> str:
        """Where the types of the last record come from, in words."""
        return record_source(self.steps[-1], self.steps[0] == 0)

    def arrivals(self) -> list[dict[str, Any]]:
        """Return when each head took the types that it has at the last record.

        Rows are ``{kind, after, step, confirmed, path, layer, head, confidence}``, the earliest first.

        - ``step``: the first recorded step from which all later records have the label.
        - ``after``: the recorded step before, without the label: the head took the type between the two. None if the
          first record has the label.
        - ``confirmed``: whether at least two records have the label. If only the last one has it, it may pass.
        - ``confidence``: that of the last record.

        >>> rows = evolution(regard.models.bundled()).arrivals()
        >>> first = {row["kind"]: (row["after"], row["step"]) for row in reversed(rows)}
        >>> first["previous"], first["induction"], first["sink"]
        ((512, 724), (1024, 1448), (1448, 2048))
        """
        rows = []
        for index, (path, head) in enumerate(self.heads):
            for arrival in find_arrivals(self.steps, self.labels, index):
                confidence = self.head_types()[-1][index][arrival["kind"]]["confidence"]
                place = {"path": path, "layer": self.paths.index(path), "head": head}
                rows.append({**arrival, **place, "confidence": confidence})
        return sorted(rows, key=lambda row: (row["step"], -row["confidence"]))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per record and head: means, score and confidence of every type, labels; None if unknown."""
        rows = []
        for record, types_of_heads, labels in zip(self.records, self.head_types(), self.labels, strict=True):
            means = record.tensors["means"].tolist()
            for index, (path, head) in enumerate(self.heads):
                row = {"step": record.step, "layer": self.paths.index(path), "path": path, "head": head}
                for name, value in zip(HEAD_COLUMNS, means[index], strict=True):
                    row[name] = value if math.isfinite(value) else None
                for head_type in HEAD_TYPES:
                    scores = types_of_heads[index].get(head_type, {})
                    row |= {f"{head_type} {column}": scores.get(column) for column in TYPE_COLUMNS}
                rows.append({**row, "labels": labels[index]})
        return rows

    def map(self, step: int, path: str, head: int) -> Tensor:
        """Return a head's pooled map at a recorded step, without the empty bins of a text shorter than the map.

        >>> records = evolution(regard.models.bundled())
        >>> records.map(6000, "decoder.blocks.1.attention", 0).shape
        torch.Size([32, 32])
        """
        record, index = self._find(step, path, head)
        layer = next(layer for layer in record.layers if layer.path == path)
        cells = record.tensors["map"][index]
        for axis, count in ((0, layer.n), (1, layer.m)):
            bins = cells.shape[axis]
            # A text of fewer tokens than bins leaves bins empty.
            if 0 < count < bins:
                cells = cells.index_select(axis, torch.arange(count) * bins // count)
        return cells

    def profile(self, step: int, path: str, head: int) -> Tensor:
        """Return a head's mean weight at each offset −r … r at a recorded step; on a grid ``[2r+1, 2r+1]``.

        >>> records = evolution(regard.models.bundled())
        >>> profile = records.profile(6000, "decoder.blocks.1.attention", 0)  # offsets −16 … 16
        >>> int(profile.argmax()) - 16
        -1
        """
        record, index = self._find(step, path, head)
        return record.tensors["profile"][index]

    def table(self, heads: bool = False) -> Table:
        """Return a table for the terminal: when each type arrived, or with ``heads=True`` the types of each head.

        >>> evolution(regard.models.bundled()).table().row_count  # one row per type
        8
        """
        return heads_table(self) if heads else types_table(self)

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """Return ``rows`` as comma-separated text, and write it to ``file`` if one is given."""
        rows = [{**row, "labels": " ".join(row["labels"])} for row in self.rows()]
        columns = list(rows[0]) if rows else ["step"]
        return write_text(csv_text(columns, rows), file)

    def to_json(self, file: str | os.PathLike[str] | None = None) -> str:
        """Return ``rows`` and ``arrivals`` as JSON, and write it to ``file`` if one is given."""
        content = {
            "model": self.model,
            "steps": self.steps,
            "paths": self.paths,
            "columns": HEAD_COLUMNS,
            "share": self.share,
            "left_out": list(self.left_out),
            "model_step": self.model_step,
            "gaps": self.gaps,
            "source": self.source,
            "counts": self.counts,
            "arrivals": self.arrivals(),
            "rows": self.rows(),
        }
        return write_text(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False), file)

    def _find(self, step: int, path: str, head: int) -> tuple[Record, int]:
        """Return the record of a step, and the number of a head."""
        if check_integer("step", step) not in self.steps:
            raise RegardError(f"step is {step}; the recorded steps are {', '.join(map(str, self.steps))}")
        if (path, head) not in self.heads:
            known = ", ".join(self.paths[:6])  # show only six: large models have hundreds
            raise RegardError(f"there is no head {head} at {path!r}; there are {len(self.heads)} heads, at {known} …")
        return self.records[self.steps.index(step)], self.heads.index((path, head))


def _describe(record: Record) -> str:
    return f"{len(record.heads)} heads in {len(record.layers)} layers of {record.model}"
