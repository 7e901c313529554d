"""What was seen, on disk: ``recording.json`` says what it is, one safetensors file holds the numbers.

``recording.json`` names the file of numbers and is replaced last, in one step: whoever is stopped while saving leaves
the old recording or the new one. Nothing of size n × n is stored; with ``Observe(keep=True)`` q and k are, and any
exact weight can be asked for later. Numbers are mapped, not read, when a recording is opened.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.files import renamed, save_tensors
from regard.kept import KeptCall
from regard.observables import ROW_VALUES, Observation, Observe
from regard.scores import RelativeTerm, Scores
from regard.shapes import integer
from regard.version import __version__

__all__ = ["check_folder", "read", "write"]

KIND, FORMAT = "regard recording", 1
NAME = "recording.json"
TENSORS = tuple(f.name for f in fields(Observation) if f.name not in ("observe", "n", "m", "kept"))
SCORES = ("lo", "hi", "mask", "bias", "sinks")
LARGEST = 256 * 2**20  # bytes of recording.json


def write(folder: str | os.PathLike[str], calls: Mapping[str, list[Observation]], about: Mapping[str, Any]) -> None:
    """Save calls by path and what they are about; an older recording there is replaced, anything else refused."""
    path = Path(folder)
    check_folder(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    places = []
    for p, (place, seen) in enumerate(calls.items()):
        entries = [_packed(f"{p}.{c}", observation, tensors) for c, observation in enumerate(seen)]
        places.append({"path": place, "calls": entries})
    values = f"values-{secrets.token_hex(6)}.safetensors"
    own = {
        "kind": KIND,
        "format": FORMAT,
        "values": values,
        "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"regard": __version__, "torch": torch.__version__},
    }
    # What an opened recording says of itself is said anew when it is saved again.
    described = own | {name: x for name, x in about.items() if name not in own} | {"places": places}
    text = json.dumps(described, indent=1, ensure_ascii=False)
    with renamed(path / values) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt"})
    with renamed(path / NAME) as temporary:
        temporary.write_text(text, encoding="utf-8")
    for old in path.glob("values-*.safetensors"):
        if old.name != values:
            old.unlink()


def check_folder(path: Path) -> None:
    """A recording can be saved there: nothing is, or an older one."""
    if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / NAME).is_file())):
        raise FileExistsError(f"{path} is there and is no recording; save into a new or an empty folder")


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, list[Observation]], dict[str, Any]]:
    """Calls by path, and what else the recording says of itself."""
    path = Path(folder)
    file = path / NAME
    if not file.is_file():
        raise FileNotFoundError(f"{path} is no recording: it has no {NAME}")
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError(f"{file.stat().st_size:,} bytes")
        about = json.loads(file.read_text(encoding="utf-8"))
        if about["kind"] != KIND:
            raise ValueError(f"its kind is {about['kind']!r}")
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']!r}, and this version reads {FORMAT}")
        values = path / Path(about["values"]).name
        if not values.is_file():
            raise ValueError(f"{values.name} is not there")
        with safe_open(values, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
        calls = {
            place["path"]: [_unpacked(f"{p}.{c}", entry, tensors) for c, entry in enumerate(place["calls"])]
            for p, place in enumerate(about.pop("places"))
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        said = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is no whole recording of regard: {said}") from None
    return calls, about


def _packed(name: str, observation: Observation, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """One call as plain data; its tensors go into ``tensors`` under its name."""
    for field in TENSORS:
        value = getattr(observation, field)
        if value is not None:
            tensors[f"{name}.{field}"] = value.detach().cpu().contiguous().clone()
    asked = asdict(observation.observe) | {"queries": None}
    kept = [_packed_call(f"{name}.kept.{i}", call, tensors) for i, call in enumerate(observation.kept)]
    return {"n": observation.n, "m": observation.m, "observe": asked, "kept": kept}


def _packed_call(name: str, call: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    def store(field: str, value: Tensor) -> None:
        tensors[f"{name}.{field}"] = value.detach().cpu().contiguous().clone()

    scores = call.scores
    store("q", call.q)
    store("k", call.k)
    for field in SCORES:
        if getattr(scores, field) is not None:
            store(field, getattr(scores, field))
    for i, term in enumerate(scores.terms):
        for field in ("table", "query_at", "key_at"):
            store(f"term.{i}.{field}", getattr(term, field))
    # JSON has no infinity, and hard attention needs one.
    return {"scale": str(scores.scale), "softcap": scores.softcap, "firsts": [term.first for term in scores.terms]}


def _unpacked(name: str, entry: dict[str, Any], tensors: Mapping[str, Tensor]) -> Observation:
    asked = dict(entry["observe"])
    for field in ("profile", "grid", "heads"):
        if isinstance(asked.get(field), list):
            asked[field] = tuple(asked[field])
    kept = tuple(_unpacked_call(f"{name}.kept.{i}", call, tensors) for i, call in enumerate(entry["kept"]))
    found: dict[str, Any] = {field: tensors.get(f"{name}.{field}") for field in TENSORS}
    if found["rows"] is None:
        raise KeyError(f"{name}.rows")
    observation = Observation(observe=Observe(**asked), n=entry["n"], m=entry["m"], kept=kept, **found)
    _check(name, observation)
    return observation


def _check(name: str, x: Observation) -> None:
    """The sizes that a recording states are those of its numbers: it may come from anybody."""
    heads = len(x.rows)
    if x.rows.ndim != 1 or len(x.heads) != heads:
        raise ValueError(f"{name} has {len(x.heads)} heads and {heads} counts")
    for size in (x.n, x.m):
        if size is not None:
            integer(f"{name}: n and m", size)
    batch = None if x.counted is None else x.counted.shape[0]
    sizes: dict[str, tuple[int | None, ...]] = dict.fromkeys((*ROW_VALUES, "counted"), (batch, heads, x.n))
    sizes |= {"key_mass": (heads, x.m), "value_norm": (batch, heads, x.m), "map_rows": (heads, None)}
    sizes |= {"map": (heads, None, None), "top": (batch, heads, x.n, None), "top_at": (batch, heads, x.n, None)}
    for field, expected in sizes.items():
        value = getattr(x, field)
        if value is not None and not _has(value, expected):
            raise ValueError(f"{name}.{field} has shape {list(value.shape)}, which is not what it says it is")
    for field in ("profile", "profile_rows"):
        value = getattr(x, field)
        if value is not None and (value.ndim not in (2, 3) or value.shape[0] != heads):
            raise ValueError(f"{name}.{field} has shape {list(value.shape)}, which is not what it says it is")


def _has(value: Tensor, expected: tuple[int | None, ...]) -> bool:
    return value.ndim == len(expected) and all(y in (None, x) for x, y in zip(value.shape, expected, strict=True))


def _unpacked_call(name: str, entry: dict[str, Any], tensors: Mapping[str, Tensor]) -> KeptCall:
    firsts: Sequence[int] = entry["firsts"]
    terms = []
    for i, first in enumerate(firsts):
        table, query_at, key_at = (tensors[f"{name}.term.{i}.{field}"] for field in ("table", "query_at", "key_at"))
        terms.append(RelativeTerm(table, query_at, key_at, first))
    options: dict[str, Any] = {field: tensors.get(f"{name}.{field}") for field in SCORES}
    scores = Scores(float(entry["scale"]), float(entry["softcap"]), terms=tuple(terms), **options)
    return KeptCall(tensors[f"{name}.q"], tensors[f"{name}.k"], scores)
