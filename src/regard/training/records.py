"""What heads did at one step of training, on disk: ``step-00000123.safetensors``, one file a step.

    means [T, 7]      the row values' means of each of the T heads, in the order of ``COLUMNS``
    map [T, g, g]     pooled maps, profile [T, 2r+1] (or [T, 2ry+1, 2rx+1]) the mean weight at each offset
    natural raw …     every score by probe, [T, names]; NaN where no row could show it

The file's own header says which heads these are, and how long it took. A file has its name once it is whole.
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

from regard.files import renamed, save_tensors
from regard.version import __version__
from regard.watching.heads import ACROSS
from regard.watching.table import COLUMNS

__all__ = ["Place", "Record", "clear", "files", "read", "write"]

KIND, FORMAT = "regard evolution", 1
NAME = re.compile(r"step-(\d{8,15})\.safetensors")
WEIGHTS = ("raw", "clean")
LONGEST = 2**40  # seconds, so that microseconds are whole numbers of 64 bits


@dataclass(frozen=True)
class Place:
    """One attention of the model: its path, its heads, how many queries and keys, and whether keys are another's."""

    path: str
    heads: tuple[int, ...]
    n: int
    m: int
    cross: bool

    def __post_init__(self) -> None:
        sizes = (*self.heads, self.n, self.m)
        if not isinstance(self.path, str) or not all(_is_size(x, 0) for x in sizes) or type(self.cross) is not bool:
            said = f"heads {self.heads!r}, n {self.n!r}, m {self.m!r} and cross {self.cross!r}"
            raise ValueError(f"a place is {self.path!r} with {said}")


@dataclass(frozen=True)
class Record:
    """All heads at one step; ``names``: what the columns of each table of scores are."""

    step: int
    model: str
    places: tuple[Place, ...]
    tensors: dict[str, Tensor]
    names: dict[str, tuple[str, ...]]
    seconds: dict[str, float]  # cost of this record; spent on records and elapsed until it was taken
    grid: tuple[int, int] | None = None

    @property
    def heads(self) -> list[tuple[str, int]]:
        return [(place.path, head) for place in self.places for head in place.heads]

    def scores(self, at: int) -> dict[str, dict[str, dict[str, float]]]:
        """The scores of one head, by probe, raw or clean, and name, as ``regard.watching.kinds`` takes them."""
        cross = [place.cross for place in self.places for _ in place.heads][at]
        found: dict[str, dict[str, dict[str, float]]] = {}
        for table, names in self.names.items():
            probe, _, weights = table.rpartition(" ")
            values = zip(names, self.tensors[table][at].tolist(), strict=True)
            kept = {name: x for name, x in values if not cross or name in ACROSS}
            found.setdefault(probe, {})[weights] = kept
        return found


def files(folder: Path) -> dict[int, Path]:
    """Steps and their files, in order; whatever else is in the folder (a folder of such a name) is left alone."""
    if not folder.is_dir():
        return {}
    found = ((NAME.fullmatch(file.name), file) for file in folder.iterdir())
    return dict(sorted((int(name[1]), file) for name, file in found if name and file.is_file()))


def write(folder: Path, record: Record) -> Path:
    """The file of one step; it is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step-{record.step:08d}.safetensors"
    told = {
        **{"kind": KIND, "format": FORMAT, "step": record.step, "model": record.model, "grid": record.grid},
        "places": [asdict(place) for place in record.places],
        **{"means": list(COLUMNS), "names": record.names, "seconds": record.seconds},
        "versions": {"regard": __version__, "torch": torch.__version__},
    }
    tensors = {name: x.to("cpu", torch.float32).contiguous() for name, x in record.tensors.items()}
    with renamed(file) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt", "regard": json.dumps(told, ensure_ascii=False)})
    return file


def clear(folder: Path, after: int) -> None:
    """Remove the records of later steps, and what a process that was killed had begun to write."""
    for step, file in files(folder).items():
        if step > after:
            file.unlink(missing_ok=True)
    for file in folder.glob(".step-*.safetensors.*") if folder.is_dir() else ():
        if not file.is_dir():
            file.unlink(missing_ok=True)


def read(file: Path) -> Record:
    """One step, checked: a file may come from anybody."""
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is no file")
        with safe_open(file, framework="pt") as opened:
            told = json.loads((opened.metadata() or {})["regard"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        return _checked(file, told, tensors)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        said = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{file} is no whole record of heads: {said}") from None


def _checked(file: Path, told: dict[str, Any], tensors: dict[str, Tensor]) -> Record:
    if told["kind"] != KIND or told["format"] != FORMAT:
        raise ValueError(f"it is a {told['kind']!r} of format {told['format']!r}, not a {KIND!r} of {FORMAT}")
    name = NAME.fullmatch(file.name)
    if type(told["step"]) is not int or name is None or int(name[1]) != told["step"]:
        raise ValueError(f"it says that its step is {told['step']!r}")
    if told["means"] != list(COLUMNS):
        raise ValueError(f"its means are {told['means']!r}")
    places = tuple(Place(**(x | {"heads": tuple(x["heads"])})) for x in told["places"])
    total = sum(len(place.heads) for place in places)
    names = {str(table): tuple(map(str, x)) for table, x in told["names"].items()}
    sizes = {"means": (total, len(COLUMNS))} | {table: (total, len(x)) for table, x in names.items()}
    for table, size in sizes.items():
        if table != "means" and table.rpartition(" ")[2] not in WEIGHTS:
            raise ValueError(f"it has scores of {table!r}")
        if tuple(tensors[table].shape) != size:
            raise ValueError(f"{table} has shape {list(tensors[table].shape)}, not {list(size)}")
    for table, dims in (("map", (3,)), ("profile", (2, 3))):
        if tensors[table].ndim not in dims or len(tensors[table]) != total:
            raise ValueError(f"{table} has shape {list(tensors[table].shape)} for {total} heads")
    if any(x.dtype != torch.float32 for x in tensors.values()):
        raise ValueError("its numbers are not float32")
    times = {what: told["seconds"][what] for what in ("cost", "spent", "elapsed")}
    if not all(type(x) in (int, float) and 0 <= x <= LONGEST for x in times.values()):  # NaN is not
        raise ValueError("its seconds are no times")
    seconds = {what: float(x) for what, x in times.items()}
    grid = told["grid"]
    if grid is not None and not (isinstance(grid, list) and len(grid) == 2 and all(_is_size(x, 1) for x in grid)):
        raise ValueError("its grid is not two sizes")
    return Record(told["step"], str(told["model"]), places, tensors, names, seconds, tuple(grid) if grid else None)


def _is_size(x: object, least: int) -> bool:
    return type(x) is int and least <= x < 2**31
