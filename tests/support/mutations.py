"""Damage files on purpose: edits of bytes, JSON, TOML and safetensors, as plain data that can be stored and repeated.

A folder is a dictionary from relative names to contents. An edit is a dictionary: ``{"do": "set", "file":
"config.json", "path": ["vocab_size"], "value": -1}``. ``apply_edits`` carries edits out.
Edits of values name a *document*: a JSON or TOML file, ``metrics.jsonl`` (a list of its lines), or a part of a
safetensors file, ``x.safetensors#header`` or the JSON text in its metadata, ``x.safetensors#regard``.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import tomli_w
import torch
from torch import Tensor


@dataclass(frozen=True)
class Special:
    """A file that is not a regular file with content: "fifo", "folder", "loop" (a link to itself), or "sparse"."""

    kind: str
    size: int = 0


Content = bytes | Special
Files = dict[str, Content]
Edit = dict[str, Any]
ValuePath = list[str | int]


class EditError(Exception):
    """An edit that cannot be carried out on these files, for example because an earlier edit removed the file."""


# Values that cannot be stored as they are, because they are too long or too deep: {"$nest": 9000} and the like.
LONG_VALUES: dict[str, Callable[[int], str]] = {
    "$nest": lambda depth: "[" * depth + "]" * depth,
    "$digits": lambda count: "9" * count,
    "$text": lambda count: json.dumps("A" * count),
    "$numbers": lambda count: "[" + ",".join("1" * count) + "]",
}


def apply_edits(files: Mapping[str, Content], edits: Sequence[Edit], *, strict: bool = False) -> Files:
    """Return the files after all edits. An edit that cannot be done is left out, or raises if ``strict`` is true."""
    edited = dict(files)
    for edit in edits:
        arguments = dict(edit)
        operation = OPERATIONS[arguments.pop("do")]
        try:
            operation(edited, **arguments)
        except EditError:
            if strict:
                raise
    return edited


def write_files(files: Mapping[str, Content], folder: Path) -> None:
    """Create the files in a folder."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            file.write_bytes(content)
        elif content.kind == "fifo":
            os.mkfifo(file)
        elif content.kind == "folder":
            file.mkdir()
        elif content.kind == "loop":
            file.symlink_to(file.name)
        else:
            file.touch()
            os.truncate(file, content.size)


def read_files(folder: Path) -> Files:
    """Return all regular files of a folder."""
    files: Files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            files[file.relative_to(folder).as_posix()] = file.read_bytes()
    return files


# Whole files


def read_content(files: Mapping[str, Content], file: str) -> bytes:
    """Return the bytes of a regular file."""
    content = files.get(file)
    if not isinstance(content, bytes):
        raise EditError(file)
    return content


def _remove(files: Files, file: str) -> None:
    read_content(files, file)
    del files[file]


def _special(files: Files, file: str, kind: str, size: int = 0) -> None:
    files[file] = Special(kind, size)


def _replace(files: Files, file: str, hex: str = "", text: str | None = None) -> None:
    files[file] = bytes.fromhex(hex) if text is None else text.encode()


def _copy_file(files: Files, file: str, source: str) -> None:
    files[file] = read_content(files, source)


def _flip(files: Files, file: str, at: int, bit: int) -> None:
    data = bytearray(read_content(files, file))
    if at >= len(data):
        raise EditError(file)
    data[at] ^= 1 << bit
    files[file] = bytes(data)


def _truncate(files: Files, file: str, size: int) -> None:
    files[file] = read_content(files, file)[:size]


def _insert(files: Files, file: str, at: int, hex: str, times: int = 1) -> None:
    data = read_content(files, file)
    files[file] = data[:at] + bytes.fromhex(hex) * times + data[at:]


# Documents


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the numbers of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise EditError(str(error)) from None
    if not isinstance(header, dict):
        raise EditError("the header is not an object")
    return header, data[8 + size :]


def _join_safetensors(header: str, numbers: bytes) -> bytes:
    data = header.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data + numbers


def read_document(files: Mapping[str, Content], name: str) -> Any:
    """Return the values of a document."""
    file, _, part = name.partition("#")
    data = read_content(files, file)
    try:
        if part == "header":
            return split_safetensors(data)[0]
        if part:
            return json.loads(split_safetensors(data)[0]["__metadata__"][part])
        if file.endswith(".toml"):
            return tomllib.loads(data.decode())
        if file.endswith(".jsonl"):
            return [json.loads(line) for line in data.decode().splitlines()]
        return json.loads(data)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise EditError(str(error)) from None


def write_document(files: Files, name: str, value: Any) -> None:
    """Replace the values of a document."""
    file, _, part = name.partition("#")
    try:
        if part == "header":
            _, numbers = split_safetensors(read_content(files, file))
            files[file] = _join_safetensors(_dump(value), numbers)
        elif part:
            header, numbers = split_safetensors(read_content(files, file))
            header["__metadata__"][part] = _dump(value)
            files[file] = _join_safetensors(json.dumps(header), numbers)
        elif file.endswith(".toml"):
            files[file] = _expand(tomli_w.dumps(value)).encode("utf-8", "surrogatepass")
        elif file.endswith(".jsonl"):
            lines = [_dump(line) + "\n" for line in value]
            files[file] = "".join(lines).encode()
        else:
            files[file] = _dump(value).encode()
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise EditError(str(error)) from None


def _mark(value: Any) -> Any:
    """Replace long values by texts that ``_expand`` finds again."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in LONG_VALUES:
        (kind, count), *_ = value.items()
        return f"@@{kind} {count}@@"
    return value


def _expand(text: str) -> str:
    for kind, make in LONG_VALUES.items():
        while f'"@@{kind} ' in text:
            before, _, rest = text.partition(f'"@@{kind} ')
            count, _, after = rest.partition('@@"')
            text = before + make(int(count)) + after
    return text


def _dump(value: Any) -> str:
    return _expand(json.dumps(value))


def _parent(document: Any, path: ValuePath) -> Any:
    """Return the container of the value at a path."""
    try:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]]
    except (LookupError, TypeError):
        raise EditError(f"there is nothing at {path}") from None
    return document


def _set(files: Files, file: str, path: ValuePath, value: Any) -> None:
    value = _mark(value)
    if not path:
        write_document(files, file, value)
        return
    document = read_document(files, file)
    *_, last = path
    if isinstance(last, str):  # a new entry of an object is allowed
        parent = document
        if path[:-1]:
            parent = _parent(document, path[:-1])[path[-2]]
        if not isinstance(parent, dict):
            raise EditError(f"{path[:-1]} is not an object")
    else:
        parent = _parent(document, path)
    if isinstance(parent, str):
        raise EditError(f"{path} is inside of a text")
    parent[last] = value
    write_document(files, file, document)


def _drop(files: Files, file: str, path: ValuePath) -> None:
    document = read_document(files, file)
    del _parent(document, path)[path[-1]]
    write_document(files, file, document)


def _repeat(files: Files, file: str, path: ValuePath) -> None:
    """Put an element of a list into it once more; an object gets the entry under another name."""
    document = read_document(files, file)
    parent = _parent(document, path)
    if isinstance(parent, list):
        parent.insert(int(path[-1]), parent[int(path[-1])])
    else:
        parent[f"{path[-1]} again"] = parent[path[-1]]
    write_document(files, file, document)


def _swap(files: Files, file: str, path: ValuePath, other: ValuePath) -> None:
    document = read_document(files, file)
    one_parent = _parent(document, path)
    other_parent = _parent(document, other)
    if path == other[: len(path)] or other == path[: len(other)]:
        raise EditError("one value is inside of the other")
    first = one_parent[path[-1]]
    one_parent[path[-1]] = other_parent[other[-1]]
    other_parent[other[-1]] = first
    write_document(files, file, document)


# Tensors: the file stays a valid safetensors file, so that the reader behind the parser is reached

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def read_tensors(files: Mapping[str, Content], file: str) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Return the tensors of a safetensors file and its metadata."""
    data = read_content(files, file)
    metadata = split_safetensors(data)[0].get("__metadata__")
    try:
        return safetensors.torch.load(data), metadata
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError) as error:
        raise EditError(str(error)) from None


def _edit_tensors(files: Files, file: str, name: str, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors, metadata = read_tensors(files, file)
    if name not in tensors:
        raise EditError(name)
    change(tensors)
    contiguous = {key: value.contiguous().clone() for key, value in tensors.items()}
    try:
        files[file] = safetensors.torch.save(contiguous, metadata)
    except (safetensors.SafetensorError, TypeError, ValueError) as error:
        raise EditError(str(error)) from None


def _cast(files: Files, file: str, name: str, dtype: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(getattr(torch, dtype))

    _edit_tensors(files, file, name, change)


def _reshape(files: Files, file: str, name: str, shape: list[int]) -> None:
    """Give a tensor another shape; its numbers are repeated or cut off."""

    def change(tensors: dict[str, Tensor]) -> None:
        count = int(torch.Size(shape).numel())
        numbers = tensors[name].flatten()
        if len(numbers) == 0:
            numbers = numbers.new_zeros(1)
        repeats = -(-count // len(numbers))
        tensors[name] = numbers.repeat(repeats)[:count].reshape(shape)

    _edit_tensors(files, file, name, change)


def _drop_tensor(files: Files, file: str, name: str) -> None:
    _edit_tensors(files, file, name, lambda tensors: tensors.__delitem__(name))


def _rename_tensor(files: Files, file: str, name: str, to: str) -> None:
    _edit_tensors(files, file, name, lambda tensors: tensors.__setitem__(to, tensors.pop(name)))


def _copy_tensor(files: Files, file: str, name: str, to: str) -> None:
    _edit_tensors(files, file, name, lambda tensors: tensors.__setitem__(to, tensors[name]))


def _swap_tensors(files: Files, file: str, name: str, other: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        if other not in tensors:
            raise EditError(other)
        first = tensors[name]
        tensors[name] = tensors[other]
        tensors[other] = first

    _edit_tensors(files, file, name, change)


def _fill(files: Files, file: str, name: str, value: float, at: int | None = None) -> None:
    """Set one number of a tensor, or all of them."""

    def change(tensors: dict[str, Tensor]) -> None:
        numbers = tensors[name].clone().flatten()
        converted = torch.tensor(value, dtype=torch.float64).to(numbers.dtype)
        if at is None:
            numbers[:] = converted
        elif at < len(numbers):
            numbers[at] = converted
        tensors[name] = numbers.reshape(tensors[name].shape)

    _edit_tensors(files, file, name, change)


OPERATIONS: dict[str, Callable[..., None]] = {
    "remove": _remove,
    "special": _special,
    "replace": _replace,
    "copy file": _copy_file,
    "flip": _flip,
    "truncate": _truncate,
    "insert": _insert,
    "set": _set,
    "drop": _drop,
    "repeat": _repeat,
    "swap": _swap,
    "cast": _cast,
    "reshape": _reshape,
    "drop tensor": _drop_tensor,
    "rename tensor": _rename_tensor,
    "copy tensor": _copy_tensor,
    "swap tensors": _swap_tensors,
    "fill": _fill,
}
