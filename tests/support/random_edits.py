"""Random edits of files, for fuzzing: most of values and tensors, some of bytes and whole files."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from support.mutations import (
    DTYPES,
    Content,
    Edit,
    EditError,
    Files,
    ValuePath,
    apply_edits,
    read_content,
    read_document,
    read_tensors,
)

ODD_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**12)
ODD_FLOATS = (0.5, -0.0, 1e-300, 1e300, -1e300, float("nan"), float("inf"), float("-inf"))
ODD_TEXTS = (
    "",
    " ",
    "x",
    "\x00",
    "\x1b[31mred\x07",
    "\x1b]0;title\x07",
    "\u202eabc",
    "\ud800",
    "a\nb\r\tc",
    "../../x",
    "/",
    "nan",
    "inf",
    "1e999",
    "<script>alert(1)</script>",
    "é" * 300,
    "[bold]x[/bold][/]",
)
ODD_VALUES: tuple[Any, ...] = (
    *ODD_NUMBERS,
    *ODD_FLOATS,
    *ODD_TEXTS,
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"$nest": 900},
    {"$nest": 100_000},
    {"$digits": 400},
    {"$digits": 5000},
    {"$text": 100_000},
    {"$numbers": 20_000},
)
TENSOR_NUMBERS = (*ODD_FLOATS, 0.0, 1.0, -1.0, 2.0, 7.0, 1e6, 2.0**31, 2.0**62, -(2.0**62), 3e38)
MAX_PATHS = 4000  # of a document; large ones repeat themselves


def value_paths(document: Any) -> list[ValuePath]:
    """Return the paths of all values of a document, and of the document itself."""
    paths: list[ValuePath] = [[]]
    for path in paths:
        if len(paths) > MAX_PATHS:
            break
        value = document
        for step in path:
            value = value[step]
        if isinstance(value, dict):
            paths += [[*path, name] for name in value]
        elif isinstance(value, list):
            paths += [[*path, index] for index in range(len(value))]
    return paths


def _documents(files: Mapping[str, Content], file: str) -> list[str]:
    """Return the documents in a file."""
    if file.endswith(".safetensors"):
        names = [f"{file}#header"]
        try:
            metadata = read_document(files, f"{file}#header").get("__metadata__")
        except EditError:
            return []
        # An earlier edit may have damaged the metadata.
        if isinstance(metadata, dict):
            names += [f"{file}#{name}" for name in metadata if str(metadata[name]).startswith("{")]
        return names
    if file.endswith((".json", ".toml", ".jsonl")):
        return [file]
    return []


def _near(rng: random.Random, value: Any) -> Any:
    """Return a value that is close to another one, so that the first checks pass."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, 2 * value, 1000 * value, str(value), value + 0.5))
    if isinstance(value, float):
        return rng.choice((-value, 1e30 * value, int(value) if abs(value) < 2**60 else 0, str(value)))
    if isinstance(value, str):
        return rng.choice((value[:-1], value + value, value + "\x1b[2J", value.upper(), [value], value + "\ud800"))
    if isinstance(value, list):
        return rng.choice((value[:-1], value + value, value[::-1], [value], dict(enumerate(map(str, value)))))
    if isinstance(value, dict):
        return rng.choice((list(value), list(value.values()), {}, {**value, "unknown": 1}))
    return 0


def _random_document_edit(rng: random.Random, files: Files, name: str) -> Edit:
    document = read_document(files, name)
    paths = value_paths(document)
    # The document itself is one path of many; its replacement is worth a try now and then.
    path = rng.choice(paths) if len(paths) == 1 or rng.random() < 0.02 else rng.choice(paths[1:])
    do = rng.choice(("set", "set", "set", "set", "set", "drop", "drop", "repeat", "swap", "add"))
    if not path or do == "set":
        value = document
        for step in path:
            value = value[step]
        new_value = _near(rng, value) if rng.random() < 0.4 else rng.choice(ODD_VALUES)
        return {"do": "set", "file": name, "path": path, "value": new_value}
    if do == "swap":
        return {"do": "swap", "file": name, "path": path, "other": rng.choice(paths[1:])}
    if do == "add":
        key = rng.choice(("x", "", "\x1b[1m", "model", "0", "n" * 300))
        return {"do": "set", "file": name, "path": [*path[:-1], key], "value": rng.choice(ODD_VALUES)}
    return {"do": do, "file": name, "path": path}


def _random_shape(rng: random.Random, shape: Sequence[int]) -> list[int]:
    """Return a shape near another one: a size changed, a dimension removed, added or moved."""
    new = list(shape)
    do = rng.choice(("size", "size", "size", "remove", "add", "move", "any"))
    if do == "any" or not new:
        return [rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randrange(6))]
    axis = rng.randrange(len(new))
    if do == "size":
        new[axis] = rng.choice((0, 1, 2, 3, 17, new[axis] + 1, max(0, new[axis] - 1), 2 * new[axis]))
    elif do == "remove":
        del new[axis]
    elif do == "add":
        new.insert(axis, rng.choice((0, 1, 2)))
    else:
        rng.shuffle(new)
    return new if torch.Size(new).numel() <= 100_000 else list(shape)


def _random_tensor_edit(rng: random.Random, files: Files, file: str) -> Edit:
    tensors, _ = read_tensors(files, file)
    if not tensors:
        raise EditError("there is no tensor")
    names = sorted(tensors)  # the order of a dictionary from Rust is another one every time
    name = rng.choice(names)
    other = rng.choice(names)
    edits: tuple[Edit, ...] = (
        {"do": "cast", "file": file, "name": name, "dtype": rng.choice(DTYPES)},
        {"do": "reshape", "file": file, "name": name, "shape": _random_shape(rng, tensors[name].shape)},
        {"do": "reshape", "file": file, "name": name, "shape": list(tensors[other].shape)},
        {"do": "fill", "file": file, "name": name, "value": rng.choice(TENSOR_NUMBERS)},
        {
            "do": "fill",
            "file": file,
            "name": name,
            "value": rng.choice(TENSOR_NUMBERS),
            "at": rng.randrange(max(1, tensors[name].numel())),
        },
        {"do": "drop tensor", "file": file, "name": name},
        {"do": "swap tensors", "file": file, "name": name, "other": other},
        {"do": "copy tensor", "file": file, "name": name, "to": other},
        {"do": "rename tensor", "file": file, "name": name, "to": rng.choice((name + "x", "", "x", "\x1b[31m", "é"))},
        {"do": "copy tensor", "file": file, "name": name, "to": rng.choice((name + ".0", "x", "__metadata__ "))},
    )
    return rng.choice(edits)


def _random_byte_edit(rng: random.Random, files: Files, file: str) -> Edit:
    size = len(read_content(files, file))
    # The beginning of a file says most about the rest of it.
    at = rng.randrange(size + 1) if rng.random() < 0.5 else rng.randrange(min(size, 64) + 1)
    edits: tuple[Edit, ...] = (
        {"do": "flip", "file": file, "at": at, "bit": rng.randrange(8)},
        {"do": "flip", "file": file, "at": at, "bit": rng.randrange(8)},
        {"do": "truncate", "file": file, "size": at},
        {"do": "insert", "file": file, "at": at, "hex": rng.randbytes(rng.choice((1, 2, 8, 200))).hex()},
        {"do": "replace", "file": file, "hex": rng.randbytes(rng.choice((0, 1, 8, 9, 100))).hex()},
        {"do": "replace", "file": file, "text": rng.choice(("", "{}", "[]", "null", "0", '{"a":' * 3000, "\ufeff{}"))},
    )
    return rng.choice(edits)


def _random_file_edit(rng: random.Random, files: Files, file: str) -> Edit:
    edits: tuple[Edit, ...] = (
        {"do": "remove", "file": file},
        {"do": "special", "file": file, "kind": rng.choice(("fifo", "folder", "loop"))},
        {"do": "special", "file": file, "kind": "sparse", "size": rng.choice((1, 10**6, 10**9, 10**13))},
        {"do": "copy file", "file": file, "source": rng.choice([*files, file])},
    )
    return rng.choice(edits)


def _draw_edit(rng: random.Random, files: Files, file: str) -> Edit:
    if rng.random() < 0.05:
        return _random_file_edit(rng, files, file)
    kinds = ["bytes"]
    documents = _documents(files, file)
    if documents:
        kinds += ["document"] * 4
    if file.endswith(".safetensors"):
        kinds += ["tensor"] * 8
    kind = rng.choice(kinds)
    if kind == "document":
        return _random_document_edit(rng, files, rng.choice(documents))
    if kind == "tensor":
        return _random_tensor_edit(rng, files, file)
    return _random_byte_edit(rng, files, file)


def random_edits(rng: random.Random, files: Mapping[str, Content], targets: Sequence[str]) -> list[Edit]:
    """Draw one to three edits of the target files."""
    edits: list[Edit] = []
    edited = dict(files)
    count = rng.choice((1, 1, 1, 2, 3))
    for _ in range(20):
        if len(edits) == count:
            break
        # An edit may be impossible after those before it, for example because they removed the file.
        try:
            edit = _draw_edit(rng, edited, rng.choice(targets))
            edited = apply_edits(edited, [edit], strict=True)
        except EditError:
            continue
        edits.append(edit)
    return edits
