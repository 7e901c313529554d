"""Records of all heads at one training step, on disk: ``step-00000123.safetensors``, one file per step.

    means [T, 7]      means of the row values of each of the T heads, in the order of ``HEAD_COLUMNS``
    map [T, g, g]     pooled attention maps
    profile           [T, 2r+1], on a grid [T, 2ry+1, 2rx+1]: the mean weight at each offset
    natural raw …     [T, names]: scores; per probe one table for raw and one for clean weights (no sinks); NaN: unknown

The header says which heads these are and how long the measurement took. A file gets its name when it is complete.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard._checks import describe_value
from regard._errors import RegardError
from regard._files import atomic_write, save_tensors
from regard._version import __version__
from regard.interp._head_scores import CROSS_ATTENTION_SCORES
from regard.interp._head_table import HEAD_COLUMNS
from regard.interp._recording_files import StoredTensors, check_own_file, is_text, parse_json, reason_in_words

KIND = "regard evolution"
FORMAT = 1
FILE_NAME = re.compile(r"step-(\d{8,15})\.safetensors")
WEIGHTS = ("raw", "clean")
MOST_BYTES = 2**31  # of a file
MAX_SECONDS = 2**40  # so that microseconds fit into 64-bit integers
STORED_SCORES = {"value_weighted": "moved"}  # the names of scores in files, if they differ from those in Python


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of the model.

    - ``path``: the path of its module.
    - ``heads``: the indices of its heads.
    - ``n``, ``m``: the numbers of queries and keys in the first probe.
    - ``cross``: whether it is cross-attention.
    """

    path: str
    heads: tuple[int, ...]
    n: int
    m: int
    cross: bool

    def __post_init__(self) -> None:
        sizes = (*self.heads, self.n, self.m)
        valid = isinstance(self.path, str) and is_text(self.path) and type(self.cross) is bool
        valid = valid and all(_is_size(x, 0) for x in sizes) and 0 < len(self.heads) == len(set(self.heads))
        if not valid:
            sizes_text = ", ".join(map(describe_value, (self.heads, self.n, self.m, self.cross)))
            raise RegardError(f"the layer {describe_value(self.path)} has invalid heads, n, m or cross: {sizes_text}")


@dataclass(frozen=True)
class Record:
    """All heads at one step. ``names`` are the column names of each table of scores."""

    step: int
    model: str
    layers: tuple[AttentionLayer, ...]
    tensors: dict[str, Tensor]
    names: dict[str, tuple[str, ...]]
    seconds: dict[str, float]  # "cost" of this record; "spent" on all records so far; "elapsed" since the start
    grid: tuple[int, int] | None = None

    @property
    def heads(self) -> list[tuple[str, int]]:
        """(path, head) of every head, in the order of the tensors."""
        heads = []
        for layer in self.layers:
            heads += [(layer.path, head) for head in layer.heads]
        return heads

    def scores(self, index: int) -> dict[str, dict[str, dict[str, float]]]:
        """Return the scores of one head by probe, raw or clean, and name: the input of ``head_type_scores``."""
        path, _ = self.heads[index]
        cross = any(layer.cross for layer in self.layers if layer.path == path)
        scores: dict[str, dict[str, dict[str, float]]] = {}
        for table, names in self.names.items():
            probe, _, weights = table.rpartition(" ")
            values = dict(zip(names, self.tensors[table][index].tolist(), strict=True))
            # Scores that compare positions make no sense between two sequences.
            if cross:
                values = {name: value for name, value in values.items() if name in CROSS_ATTENTION_SCORES}
            scores.setdefault(probe, {})[weights] = values
        return scores


def list_records(folder: Path) -> dict[int, Path]:
    """Return the record files of a folder by step, in order; anything else in the folder is ignored."""
    if not folder.is_dir():
        return {}
    files = {}
    for file in folder.iterdir():
        match = FILE_NAME.fullmatch(file.name)
        if match and file.is_file():
            files[int(match[1])] = file
    return dict(sorted(files.items()))


def find_records(folder: Path) -> dict[int, Path]:
    """Return the record files of a recorder's folder, or of the folder of a run, which has them in ``evolution``."""
    return list_records(folder) or list_records(folder / "evolution")


def write_record(folder: Path, record: Record) -> Path:
    """Write the file of one step, which appears complete or not at all; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = record_file(folder, record.step)
    names = {}
    for table, columns in record.names.items():
        names[table] = [STORED_SCORES.get(name, name) for name in columns]
    header = {
        "kind": KIND,
        "format": FORMAT,
        "step": record.step,
        "model": record.model,
        "grid": record.grid,
        "places": [asdict(layer) for layer in record.layers],
        "means": list(HEAD_COLUMNS),
        "names": names,
        "seconds": record.seconds,
        "versions": {"regard": __version__, "torch": torch.__version__},
    }
    tensors = {name: x.to("cpu", torch.float32).contiguous() for name, x in record.tensors.items()}
    metadata = {"format": "pt", "regard": json.dumps(header, ensure_ascii=False)}
    with atomic_write(file) as temporary:
        save_tensors(tensors, temporary, metadata=metadata)
    return file


def record_file(folder: Path, step: int) -> Path:
    """Return the file of the record of a step."""
    return folder / f"step-{step:08d}.safetensors"


def remove_record(folder: Path, step: int) -> None:
    """Remove the record of a step, if there is one."""
    record_file(folder, step).unlink(missing_ok=True)


def remove_unfinished_records(folder: Path) -> None:
    """Remove the unfinished files of a process that was killed."""
    for file in folder.glob(".step-*.safetensors.*"):
        if not file.is_dir():
            file.unlink(missing_ok=True)


def read_record(file: Path) -> Record:
    """Read and check the record of one step; the file is not trusted."""
    try:
        check_own_file(file)
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise RegardError(f"it has {size:,} bytes, at most {MOST_BYTES:,} are allowed")
        with safe_open(file, framework="pt") as opened:
            header = parse_json((opened.metadata() or {})["regard"].encode("utf-8"))
            return _checked_record(file, header, StoredTensors(opened))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise RegardError(f"{file} is not a complete record of heads: {reason_in_words(error)}") from None


def _checked_record(file: Path, header: dict[str, Any], stored: StoredTensors) -> Record:
    """Return the record of a file, after a check of every entry that is used."""
    if header["kind"] != KIND or header["format"] != FORMAT:
        given = f"a {describe_value(header['kind'])} of format {describe_value(header['format'])}"
        raise RegardError(f"it is {given}, not a {KIND!r} of format {FORMAT}")
    match = FILE_NAME.fullmatch(file.name)
    if type(header["step"]) is not int or match is None or int(match[1]) != header["step"]:
        raise RegardError(f"its header has step {describe_value(header['step'])}, not the step in the file's name")
    if not isinstance(header["model"], str) or not is_text(header["model"]):
        raise RegardError(f"its model is {describe_value(header['model'])}, not a text")
    # The columns of means are read by position, so the file must have the same columns in the same order.
    if header["means"] != list(HEAD_COLUMNS):
        raise RegardError(f"its means are {describe_value(header['means'])}, not {list(HEAD_COLUMNS)}")
    layers = _checked_layers(header["places"])
    head_count = sum(len(layer.heads) for layer in layers)
    names = _checked_names(header["names"])

    tensors = {name: stored[name] for name in ("means", "map", "profile", *names)}
    sizes = {"means": (head_count, len(HEAD_COLUMNS))}
    for table, columns in names.items():
        sizes[table] = (head_count, len(columns))
    for table, size in sizes.items():
        if tuple(tensors[table].shape) != size:
            raise RegardError(f"{table} has shape {list(tensors[table].shape)}, not {list(size)}")
    _check_maps(tensors["map"], tensors["profile"], head_count)
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise RegardError(f"{name} is {tensor.dtype}, not float32")
        # NaN stands for a number that is not known.
        if bool(tensor.isinf().any()):
            raise RegardError(f"{name} has an infinite number")

    seconds = {}
    for name in ("cost", "spent", "elapsed"):
        value = header["seconds"][name]
        # NaN fails the comparison.
        if type(value) not in (int, float) or not 0 <= value <= MAX_SECONDS:
            raise RegardError(f"its seconds[{name!r}] is {describe_value(value)}, not from 0 to {MAX_SECONDS}")
        seconds[name] = float(value)
    grid = header["grid"]
    if grid is not None:
        if not isinstance(grid, list) or len(grid) != 2 or not all(_is_size(x, 1) for x in grid):
            raise RegardError(f"its grid is {describe_value(grid)}, not two sizes")
        grid = tuple(grid)
    return Record(header["step"], header["model"], layers, tensors, names, seconds, grid)


def _checked_layers(entries: object) -> tuple[AttentionLayer, ...]:
    """The layers of a header: different paths, and different heads in each."""
    if not isinstance(entries, list) or not entries:
        raise RegardError(f"its places are {describe_value(entries)}, not a list of at least one layer")
    layers = []
    for entry in entries:
        layers.append(AttentionLayer(**(entry | {"heads": tuple(entry["heads"])})))
    if len({layer.path for layer in layers}) != len(layers):
        raise RegardError("two of its layers have the same path")
    return tuple(layers)


def _checked_names(entries: object) -> dict[str, tuple[str, ...]]:
    """The names of the columns of each table of scores."""
    if not isinstance(entries, dict):
        raise RegardError(f"its names are {describe_value(entries)}, not a JSON object")
    python_names: dict[str, str] = {stored: name for name, stored in STORED_SCORES.items()}
    names: dict[str, tuple[str, ...]] = {}
    for table, columns in entries.items():
        probe, _, weights = table.rpartition(" ")
        # Every probe has two tables of scores: for raw and for clean weights.
        both = all(f"{probe} {other}" in entries for other in WEIGHTS)
        if not probe or weights not in WEIGHTS or not both:
            raise RegardError(f"it has a table {describe_value(table)}, not '<probe> raw' and '<probe> clean'")
        if not isinstance(columns, list) or not all(isinstance(name, str) and is_text(name) for name in columns):
            raise RegardError(f"the scores of {table!r} are {describe_value(columns)}, not a list of names")
        if len(set(columns)) != len(columns):
            raise RegardError(f"two scores of {table!r} have the same name")
        names[table] = tuple(python_names.get(str(name), str(name)) for name in columns)
    return names


def _check_maps(maps: Tensor, profile: Tensor, head_count: int) -> None:
    """Raise unless maps are square, and the offset 0 is in the middle of a profile."""
    if maps.ndim != 3 or len(maps) != head_count or maps.shape[1] != maps.shape[2]:
        raise RegardError(f"map has shape {list(maps.shape)}, not [{head_count}, g, g]")
    odd = all(size % 2 == 1 for size in profile.shape[1:])
    if profile.ndim not in (2, 3) or len(profile) != head_count or not odd:
        raise RegardError(
            f"profile has shape {list(profile.shape)}, not [{head_count}, odd] or [{head_count}, odd, odd]"
        )


def _is_size(x: object, least: int) -> bool:
    return type(x) is int and least <= x < 2**31
