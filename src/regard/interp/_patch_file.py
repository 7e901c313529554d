"""The file of a sweep: one JSON object per line, so that a sweep that was stopped can continue.

The first line says what was measured: fingerprints of the model, the inputs, the source, the metric and the sites, and
the metric of the base run and of the source. Each further line is one site. A last line that was not written
completely is dropped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import RegardError
from regard._files import MAX_EXACT, check_output_file, json_safe, read_regular
from regard.interp._patch_capture import Captured, CapturedQuery, Value

SiteKey = tuple[str, int, str, int | None]  # path, head, part, position

FORMAT = "regard patch sweep 1"
LARGEST_FILE = 2**29  # bytes; a line has about 100
SAMPLE = 4096  # numbers of each parameter that enter the fingerprint of a model
# Runs on another machine differ by rounding.
RELATIVE_TOLERANCE = 1e-3
ABSOLUTE_TOLERANCE = 1e-4

# What the fields of the first line are, for the message about a file of another sweep.
_MEANINGS = {
    "model": "model",
    "inputs": "inputs",
    "source": "source",
    "metric": "metric",
    "sites": "set of sites",
    "before": "base run",
    "source_value": "source",
}


def sweep_header(
    model: nn.Module,
    inputs: Any,
    source: Any,
    metric: str,
    keys: list[SiteKey],
    before: float,
    source_value: float | None,
) -> dict[str, Any]:
    """The first line of the file of a sweep.

    What a function does cannot be read, so runs of functions are told apart by the metric that they give.
    """
    return {
        "format": FORMAT,
        "model": model_numbers_fingerprint(model),
        "inputs": _fingerprint_of(inputs),
        "source": _fingerprint_of(source),
        "metric": metric,
        "sites": _hash([json.dumps(keys).encode()]),
        "before": before,
        "source_value": source_value,
    }


def model_numbers_fingerprint(model: nn.Module) -> str:
    """A hash of a model's class, and of the names, shapes and a sample of the numbers of all its tensors."""
    parts = [type(model).__name__.encode()]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts.append(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        parts.append(_sampled_bytes(tensor))
    return _hash(parts)


class SweepFile:
    """The finished sites of a sweep, in a file that grows by one line per site.

    Raises ``RegardError`` if the file holds another sweep, or something else.
    """

    def __init__(self, file: Path, header: dict[str, Any], keys: Iterable[SiteKey]) -> None:
        self.file = file
        self.finished: dict[SiteKey, float] = {}
        target = check_output_file(file)
        content = b""
        if target.exists():
            content = read_regular(target, LARGEST_FILE)
        # A process that was killed may have left a part of a line.
        complete = content[: content.rfind(b"\n") + 1]
        lines = complete.decode("utf-8", errors="replace").split("\n")[:-1]
        if lines:
            _check_header(file, _parsed(file, 1, lines[0]), header)
            self._read(lines[1:], set(keys))
        elif not _line(header).encode().startswith(content):
            raise RegardError(f"{file} is not the file of a sweep; give another name")
        if content:
            # What follows must begin a line of its own.
            with target.open("rb+") as opened:
                opened.truncate(len(complete))
        if not lines:
            self._append(header)

    def add(self, key: SiteKey, after: float) -> None:
        """Write the metric of one patched run."""
        path, head, part, position = key
        self._append({"path": path, "head": head, "part": part, "position": position, "after": after})
        self.finished[key] = after

    def _append(self, line: dict[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as opened:
            opened.write(_line(line))

    def _read(self, lines: list[str], keys: set[SiteKey]) -> None:
        for number, line in enumerate(lines, 2):
            values = _parsed(self.file, number, line)
            key = (values.get("path"), values.get("head"), values.get("part"), values.get("position"))
            after = values.get("after", "missing")
            # JSON has no NaN: a metric without a number is null.
            after = math.nan if after is None else after
            # An integer may be beyond the range of floats.
            is_number = isinstance(after, float) or (type(after) is int and abs(after) < MAX_EXACT)
            is_plain = all(x is None or isinstance(x, str | int) for x in key)
            if not is_number or not is_plain or key not in keys:
                raise RegardError(f"{self.file} has no site of this sweep in line {number}; give another name")
            self.finished[key] = float(after)


def _line(values: dict[str, Any]) -> str:
    return json.dumps(json_safe(values), ensure_ascii=False, allow_nan=False) + "\n"


def _parsed(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RegardError(f"{file} is not the file of a sweep (line {number}); give another name")
    return values


def _check_header(file: Path, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    if stored.get("format") != FORMAT:
        raise RegardError(f"{file} is not the file of a sweep; give another name")
    for name, meaning in _MEANINGS.items():
        if not _agrees(stored.get(name), json_safe(expected[name])):
            raise RegardError(f"{file} holds the sweep of another {meaning}; give another name")


def _agrees(stored: Any, expected: Any) -> bool:
    if isinstance(stored, float) and isinstance(expected, float):
        return math.isclose(stored, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    return bool(stored == expected)


def _fingerprint_of(value: Any) -> str | None:
    """A hash of inputs or of a source; the name of a function."""
    if isinstance(value, Tensor):
        return _hash([f"{list(value.shape)} {value.dtype}".encode(), _bytes(value)])
    if isinstance(value, Captured):
        parts = []
        for key in sorted(value.values):
            parts.append(repr(key).encode())
            parts += [_sampled_bytes(_main_tensor(call)) for call in value.values[key]]
        return _hash(parts)
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__name__


def _main_tensor(value: Value) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, CapturedQuery):
        return value.q
    return torch.cat([value.q.flatten(), value.k.flatten()])


def _sampled_bytes(tensor: Tensor) -> bytes:
    """The bytes of at most ``SAMPLE`` numbers at regular steps; none of a tensor without numbers here."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel():
        return b""
    step = -(-tensor.numel() // SAMPLE)
    return _bytes(tensor.detach().reshape(-1)[::step])


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # The length keeps two parts apart.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:24]
