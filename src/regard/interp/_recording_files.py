"""Recordings on disk: ``recording.json`` describes a recording, one safetensors file holds its numbers.

``recording.json`` names the file of numbers. It is replaced last and in one step, so an interrupted save leaves the old
recording or the new one. Nothing of size n × n is stored. With ``Observe(keep=True)`` q and k are stored, and any exact
weight can be computed later. The numbers of a loaded recording are mapped from the file, and read when they are needed.
Groups of keys are stored once, and each call names its groups by their number.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard._checks import check_integer, describe_value
from regard._errors import RegardError
from regard._files import atomic_write, check_regular_file, make_folder, read_regular, save_tensors, write_text
from regard._groups import Groups
from regard._lowered_scores import RelativeTerm, Scores
from regard._observables import LARGEST, ROW_VALUES, Observation, Observe
from regard._saved_call import SavedCall
from regard._shapes import DTYPES, aligned
from regard._version import __version__

KIND = "regard recording"
FORMAT = 1
NAME = "recording.json"
MOST_BYTES = 256 * 2**20  # of recording.json
MOST_LEVELS = 64  # of nested entries
LONGEST_NAME = 255  # characters of a file name
LONGEST_REASON = 500  # characters of the reason why a file is refused
TENSOR_FIELDS = tuple(f.name for f in fields(Observation) if f.name not in ("observe", "n", "m", "saved_calls"))
SCORE_FIELDS = ("lo", "hi", "mask", "bias", "sinks")
# The observables that are integers, and the smallest number of each; −1 stands for no key.
LEAST_INTEGERS = {"rows": 0, "visible": 0, "map_rows": 0, "profile_rows": 0, "peak_at": -1, "top_at": -1}
# Values that are merged, drawn and listed together: each of these needs another one.
NEEDED = {"map": "map_rows", "map_rows": "map", "profile": "profile_rows", "profile_rows": "profile", "top_at": "top"}
# The tensors of a relative term: its attributes and their names in the file.
TERM_FIELDS = {"table": "table", "query_positions": "query_at", "key_positions": "key_at"}


def write_recording(
    folder: str | os.PathLike[str], calls: Mapping[str, list[Observation]], metadata: Mapping[str, Any]
) -> None:
    """Save the calls of each path and the metadata. An older recording in the folder is replaced."""
    path = Path(folder)
    check_recording_folder(path)
    make_folder(path)
    tensors: dict[str, Tensor] = {}
    layers = []
    groups: list[Groups] = []
    for p, (module_path, observations) in enumerate(calls.items()):
        entries = [_pack(f"{p}.{c}", observation, tensors, groups) for c, observation in enumerate(observations)]
        layers.append({"path": module_path, "calls": entries})
    values_name = f"values-{secrets.token_hex(6)}.safetensors"
    header = {
        "kind": KIND,
        "format": FORMAT,
        "values": values_name,
        "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"regard": __version__, "torch": torch.__version__},
    }
    # A loaded recording has the header of its own file in its metadata; the new header replaces it, and comes first.
    description: dict[str, Any] = header | {"places": layers}
    metadata = {name: metadata[name] for name in metadata if name != "key_groups"}
    if groups:
        description["key_groups"] = [list(one.names) for one in groups]
        for g, one in enumerate(groups):
            _store(f"key_groups.{g}", one.labels, tensors)
    text = json.dumps(header | metadata | description, indent=1, ensure_ascii=False)
    with atomic_write(path / values_name) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt"})
    write_text(text, path / NAME)
    # Only now can nothing refer to the old numbers any more.
    for old in path.glob("values-*.safetensors"):
        if old.name != values_name:
            old.unlink()


def check_recording_folder(path: Path) -> None:
    """Raise unless a recording can be saved in a folder: it is new, empty, or holds an older recording."""
    if not path.exists() or (path / NAME).is_file():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise FileExistsError(f"{path} exists and is not a recording; save into a new or empty folder")


def read_recording(folder: str | os.PathLike[str]) -> tuple[dict[str, list[Observation]], dict[str, Any]]:
    """The calls of each path, and the metadata. The folder may come from anyone, so everything in it is checked."""
    path = Path(folder)
    file = path / NAME
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not a recording: it has no {NAME}")
    try:
        check_own_file(file)
        metadata = parse_json(read_regular(file, MOST_BYTES))
        if metadata["kind"] != KIND:
            raise RegardError(f"its kind is {describe_value(metadata['kind'])}, not {KIND!r}")
        if metadata["format"] != FORMAT:
            raise RegardError(f"its format is {describe_value(metadata['format'])}, this version reads {FORMAT}")
        with safe_open(_values_file(path, metadata["values"]), framework="pt") as opened:
            tensors = StoredTensors(opened)
            groups = _unpack_groups(metadata.pop("key_groups", []), tensors)
            calls = _unpack_layers(metadata.pop("places"), tensors, groups)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise RegardError(f"{path} is not a complete recording: {reason_in_words(error)}") from None
    return calls, metadata


def parse_json(content: bytes) -> dict[str, Any]:
    """The entries of a JSON object of anyone: not deeply nested, and without integers that fit into no tensor."""
    # Larger integers become floats, as in every other reader of JSON.
    entries = json.loads(content.decode("utf-8"), parse_int=_parse_integer)
    if not isinstance(entries, dict):
        raise RegardError(f"it holds {type(entries).__name__}, not an object with entries")
    level: list[Any] = [entries]
    for _ in range(MOST_LEVELS):
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return entries
    raise RegardError(f"its entries are nested more than {MOST_LEVELS} levels deep")


def _parse_integer(digits: str) -> int | float:
    if len(digits) > len(str(-(2**63))):
        return float(digits)
    value = int(digits)
    return value if abs(value) < 2**63 else float(value)


def reason_in_words(error: Exception) -> str:
    """Why a file is refused, in one line."""
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    return " ".join(str(error).split())[:LONGEST_REASON]


def _values_file(folder: Path, name: object) -> Path:
    """The file of numbers. A recording from someone else must not read files outside of its folder."""
    if not isinstance(name, str) or name != Path(name).name or len(name) > LONGEST_NAME:
        raise RegardError(f"its values are in {describe_value(name)}, not in a file of its folder")
    file = folder / name
    if not file.exists():
        raise RegardError(f"{name!r} is missing")
    check_own_file(file)
    return file


def check_own_file(file: Path) -> None:
    """Raise unless a file is a regular one that lies in its folder; a link may lead to any file of the machine."""
    check_regular_file(file)
    if file.resolve().parent != file.parent.resolve():
        raise RegardError(f"{file.name!r} is a link that leads out of its folder")


class StoredTensors:
    """The tensors of an open safetensors file, by name. Only those that are used are loaded."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self._names = frozenset(opened.keys())

    def get(self, name: str) -> Tensor | None:
        if name not in self._names:
            return None
        return aligned(self._opened.get_tensor(name))

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.get(name)
        if tensor is None:
            raise KeyError(name)
        return tensor


def _store(name: str, value: Tensor, tensors: dict[str, Tensor]) -> None:
    tensors[name] = value.detach().cpu().contiguous().clone()


def _pack(name: str, observation: Observation, tensors: dict[str, Tensor], all_groups: list[Groups]) -> dict[str, Any]:
    """One call as plain data; its tensors go into ``tensors`` under its name, and its groups into ``all_groups``."""
    for field in TENSOR_FIELDS:
        value = getattr(observation, field)
        if value is not None:
            _store(f"{name}.{field}", value, tensors)
    groups = observation.observe.groups
    observe = asdict(replace(observation.observe, groups=None)) | {"queries": None}
    # Without groups there is no entry, so that older versions can read the recording.
    del observe["groups"]
    if groups is not None:
        if groups not in all_groups:
            all_groups.append(groups)
        observe["groups"] = all_groups.index(groups)
    saved_calls = []
    for i, call in enumerate(observation.saved_calls):
        assert isinstance(call, SavedCall)
        saved_calls.append(_pack_saved_call(f"{name}.kept.{i}", call, tensors))
    return {"n": observation.n, "m": observation.m, "observe": observe, "kept": saved_calls}


def _pack_saved_call(name: str, call: SavedCall, tensors: dict[str, Tensor]) -> dict[str, Any]:
    scores = call.scores
    _store(f"{name}.q", call.q, tensors)
    _store(f"{name}.k", call.k, tensors)
    for field in SCORE_FIELDS:
        if getattr(scores, field) is not None:
            _store(f"{name}.{field}", getattr(scores, field), tensors)
    for i, term in enumerate(scores.terms):
        for attribute, field in TERM_FIELDS.items():
            _store(f"{name}.term.{i}.{field}", getattr(term, attribute), tensors)
    first_offsets = [term.first_offset for term in scores.terms]
    # The scale is text: hard attention has the scale infinity, and JSON has no infinity.
    return {"scale": str(scores.scale), "softcap": scores.softcap, "firsts": first_offsets}


def _unpack_groups(entries: object, tensors: StoredTensors) -> list[Groups]:
    """The groups that the calls of a recording name by number; ``Groups`` checks labels and names."""
    if not isinstance(entries, list):
        raise RegardError(f"its key_groups are {describe_value(entries)}, not a list")
    groups = []
    for g, names in enumerate(entries):
        if not isinstance(names, list) or not all(isinstance(name, str) and is_text(name) for name in names):
            raise RegardError(f"the names of its key_groups {g} are {describe_value(names)}, not a list of texts")
        labels = tensors[f"key_groups.{g}"]
        if labels.dtype != torch.int64:
            raise RegardError(f"key_groups.{g} is {labels.dtype}, not torch.int64")
        groups.append(Groups(labels, names))
    return groups


def _unpack_layers(layers: object, tensors: StoredTensors, groups: list[Groups]) -> dict[str, list[Observation]]:
    if not isinstance(layers, list):
        raise RegardError(f"its places are {describe_value(layers)}, not a list of layers")
    calls: dict[str, list[Observation]] = {}
    for p, layer in enumerate(layers):
        module_path = layer["path"]
        if not isinstance(module_path, str) or not is_text(module_path):
            raise RegardError(f"the path of layer {p} is {describe_value(module_path)}, not a text")
        if module_path in calls:
            raise RegardError(f"the path {describe_value(module_path)} is that of two layers")
        entries = layer["calls"]
        if not isinstance(entries, list) or not entries:
            raise RegardError(f"layer {p} has the calls {describe_value(entries)}, not a list of at least one")
        calls[module_path] = [_unpack(f"{p}.{c}", entry, tensors, groups) for c, entry in enumerate(entries)]
    return calls


def is_text(text: str) -> bool:
    """Whether a text can be written to a file: half of a surrogate pair, which JSON can hold, cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _unpack(name: str, entry: dict[str, Any], tensors: StoredTensors, groups: list[Groups]) -> Observation:
    saved_calls = [_unpack_saved_call(f"{name}.kept.{i}", call, tensors) for i, call in enumerate(entry["kept"])]
    values: dict[str, Any] = {field: tensors.get(f"{name}.{field}") for field in TENSOR_FIELDS}
    if values["rows"] is None:
        raise KeyError(f"{name}.rows")
    observe = _unpack_observe(name, entry["observe"], groups)
    observation = Observation(observe=observe, n=entry["n"], m=entry["m"], saved_calls=tuple(saved_calls), **values)
    check_observation(name, observation)
    return observation


def _unpack_observe(name: str, entry: object, groups: list[Groups]) -> Observe:
    """The options of a call; ``Observe`` checks its numbers."""
    if not isinstance(entry, dict):
        raise RegardError(f"{name}.observe is {describe_value(entry)}, not an object with entries")
    options = dict(entry)
    # JSON has no tuples.
    for field in ("profile", "grid", "heads"):
        if isinstance(options.get(field), list):
            options[field] = tuple(options[field])
    for field in ("key_mass", "keep"):
        if not isinstance(options.get(field, False), bool):
            raise RegardError(f"{name}.observe.{field} is {describe_value(options[field])}, not true or false")
    if options.get("queries") is not None:
        raise RegardError(f"{name}.observe.queries is {describe_value(options['queries'])}, not null")
    if options.get("groups") is not None:
        if not groups:
            raise RegardError(f"{name}.observe names groups, but there are no key_groups")
        number = check_integer(f"{name}.observe.groups", options["groups"], most=len(groups) - 1)
        options["groups"] = groups[number]
    return Observe(**options)


def _unpack_saved_call(name: str, entry: dict[str, Any], tensors: StoredTensors) -> SavedCall:
    terms = []
    for i, first_offset in enumerate(entry["firsts"]):
        term: dict[str, Any] = {"first_offset": first_offset}
        for attribute, field in TERM_FIELDS.items():
            term[attribute] = tensors[f"{name}.term.{i}.{field}"]
        terms.append(RelativeTerm(**term))
    options: dict[str, Any] = {field: tensors.get(f"{name}.{field}") for field in SCORE_FIELDS}
    scores = Scores(float(entry["scale"]), float(entry["softcap"]), terms=tuple(terms), **options)
    q = tensors[f"{name}.q"]
    k = tensors[f"{name}.k"]
    # The saved call checks its tensors; its errors name them, and here they get the name of the call.
    try:
        return SavedCall(q, k, scores)
    except RegardError as error:
        raise RegardError(f"{name}: {error}") from None


# --- checks of what a file says --------------------------------------------------------------------------------------


def check_observation(name: str, observation: Observation) -> None:
    """Raise if tensors do not have the sizes, dtypes and ranges that pages, tables and figures rely on."""
    if observation.rows.ndim != 1 or len(observation.rows) == 0:
        raise RegardError(f"{name}.rows has shape {list(observation.rows.shape)}, not one number per head")
    heads = len(observation.rows)
    n = observation.n
    m = observation.m
    if len(observation.heads) != heads:
        raise RegardError(f"{name} has {len(observation.heads)} heads and {heads} counts")
    for size in (n, m):
        if size is not None:
            check_integer(f"{name}: n and m", size, most=LARGEST)
    # n without rows could be any number, and tables of that length would be made.
    if n is not None and observation.counted is None:
        raise RegardError(f"{name} has n = {n}, but no counted rows")
    grid = observation.observe.grid
    if grid is not None and m is not None and grid[0] * grid[1] > m:
        raise RegardError(f"{name} has a grid of {grid[0]} × {grid[1]} cells, but {m} keys")

    _check_dtypes(name, observation)
    batch = None
    if observation.counted is not None:
        batch = observation.counted.shape[0] if observation.counted.ndim else 0
    for field, expected in _expected_shapes(observation, batch, heads).items():
        value = getattr(observation, field)
        if value is not None and tuple(value.shape) != expected:
            raise RegardError(f"{name}.{field} has shape {list(value.shape)}, which does not fit its heads, n and m")

    present = {field for field in TENSOR_FIELDS if getattr(observation, field) is not None}
    for field, needed in NEEDED.items():
        if field in present and needed not in present:
            raise RegardError(f"{name} has {field}, but no {needed}")
    _check_ranges(name, observation)
    _check_group_entries(name, observation, batch)
    _check_saved_sizes(name, observation, batch, heads)


def _check_dtypes(name: str, observation: Observation) -> None:
    for field in TENSOR_FIELDS:
        value = getattr(observation, field)
        if value is None:
            continue
        accepted: tuple[torch.dtype, ...] = DTYPES
        if field in LEAST_INTEGERS:
            accepted = (torch.int64,)
        elif field == "counted":
            accepted = (torch.bool,)
        if value.dtype not in accepted:
            raise RegardError(f"{name}.{field} is {value.dtype}, not {' or '.join(map(str, accepted))}")


def _expected_shapes(observation: Observation, batch: int | None, heads: int) -> dict[str, tuple[int | None, ...]]:
    """The shape of each tensor. A size of None fits no tensor: without n, for example, there can be no row values."""
    observe = observation.observe
    n = observation.n
    m = observation.m
    offsets = [2 * radius + 1 for radius in observe.profile_radii()]
    shapes: dict[str, tuple[int | None, ...]] = dict.fromkeys((*ROW_VALUES, "counted"), (batch, heads, n))
    shapes["key_mass"] = (heads, m)
    shapes["value_norm"] = (batch, heads, m)
    shapes["top"] = (batch, heads, n, observe.top)
    shapes["top_at"] = (batch, heads, n, observe.top)
    # Without groups, None fits no tensor.
    shapes["groups"] = (batch, heads, n, len(observe.groups) if observe.groups is not None else None)
    shapes["map"] = (heads, observe.map, observe.map)
    shapes["map_rows"] = (heads, observe.map)
    shapes["profile"] = (heads, *offsets)
    shapes["profile_rows"] = (heads, *offsets)
    return shapes


def _check_ranges(name: str, observation: Observation) -> None:
    """Raise if a count is negative or a key does not exist."""
    for field, least in LEAST_INTEGERS.items():
        value = getattr(observation, field)
        if value is None or value.numel() == 0:
            continue
        smallest, largest = map(int, value.aminmax())
        most = 2**53  # counts are also computed as floats
        if field in ("peak_at", "top_at"):
            most = (observation.m or 0) - 1
        if smallest < least or largest > most:
            raise RegardError(f"{name}.{field} has numbers from {smallest} to {largest}, not from {least} to {most}")


def _check_group_entries(name: str, observation: Observation, batch: int | None) -> None:
    """Raise unless the labels of groups are for all batch entries, or for each call that was merged."""
    groups = observation.observe.groups
    if groups is None or groups.labels.ndim == 1 or not batch:
        return
    if batch % groups.labels.shape[0]:
        raise RegardError(f"{name} has groups of {groups.labels.shape[0]} batch entries, but it measured {batch}")


def _check_saved_sizes(name: str, observation: Observation, batch: int | None, heads: int) -> None:
    """Raise unless the saved calls are the calls that were measured."""
    calls = [call for call in observation.saved_calls if isinstance(call, SavedCall)]
    for call in calls:
        sizes = (call.q.shape[1], call.q.shape[2], call.k.shape[2])
        # Merged calls of unequal sizes have no common n and m.
        expected = (heads, observation.n, observation.m)
        if observation.n is None and observation.m is None:
            expected = (heads, *sizes[1:])
        if sizes != expected:
            raise RegardError(f"{name} keeps heads, n and m of {list(sizes)}, but it measured {list(expected)}")
    total = sum(call.batch_size for call in calls)
    if calls and batch is not None and total != batch:
        raise RegardError(f"{name} keeps {total} batch entries, but it measured {batch}")
