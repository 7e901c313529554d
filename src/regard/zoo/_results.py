"""The results of the check of all architectures: one JSON line per architecture."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from regard._errors import RegardError
from regard._files import read_regular
from regard._version import __version__
from regard.interp._recording_files import is_text

LARGEST_FILE = 2**26  # bytes
OUTCOMES = ("exact", "no attention", "other attention", "partly", "refused", "differs", "error", "not built")


def current_versions() -> dict[str, str]:
    """The versions that a result depends on.

    >>> sorted(current_versions())
    ['regard', 'torch', 'transformers']
    """
    import transformers

    return {"regard": __version__, "transformers": transformers.__version__, "torch": torch.__version__}


@dataclass
class Result:
    """What was found of one architecture.

    - ``outcome``: one of ``OUTCOMES``; ``reason``: why, in one line.
    - ``how``: how its attention is observed: ``"attention"`` by regard's kernels, ``"weights"`` from the model's own.
    - ``batches``: the batches that were exact, ``"plain"`` and ``"padded"``.
    - ``layers``: the number of recorded modules; ``unseen``: the paths of those that were not.
    - ``inputs``: the names of the model's inputs.

    >>> Result("gpt2", "GPT2Model").finished("exact", "").outcome
    'exact'
    """

    name: str
    class_name: str
    outcome: str = "error"
    reason: str = ""
    how: list[str] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    layers: int = 0
    unseen: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def finished(self, outcome: str, reason: str) -> Self:
        """Set the outcome, and return the result."""
        self.outcome = outcome
        self.reason = reason
        return self


def read_results(file: Path) -> dict[str, Result]:
    """The results of a file by architecture; none if there is no file.

    A last line that was not written completely is left out. Raises ``RegardError`` if the file holds anything else.

    >>> from pathlib import Path
    >>> read_results(Path("no-such-file.jsonl"))
    {}
    """
    results: dict[str, Result] = {}
    if not file.exists():
        return results
    *lines, last = read_regular(file, LARGEST_FILE).decode("utf-8", errors="replace").split("\n")
    # The process may have been killed while it wrote the last line.
    if last:
        lines.append(last)
    for number, line in enumerate(lines, 1):
        try:
            result = _checked(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            if number == len(lines) and last:
                break
            raise RegardError(
                f"{file} is not a file of results that regard zoo wrote (line {number}); give another name"
            ) from None
        results[result.name] = result
    return results


def _checked(values: Any) -> Result:
    """A result from the values of a line. Raises ``TypeError`` or ``ValueError`` if they are not those of a result."""
    result = Result(**values)
    texts = [result.name, result.class_name, result.reason, *result.how, *result.batches, *result.unseen]
    texts += [*result.inputs, *result.versions.keys(), *result.versions.values()]
    if not all(isinstance(text, str) and is_text(text) for text in texts) or result.outcome not in OUTCOMES:
        raise ValueError("not a result")
    if type(result.layers) is not int or type(result.seconds) not in (int, float):
        raise ValueError("not a result")
    return result


def drop_partial_line(file: Path) -> None:
    """Remove a last line that was not written completely, so that more lines can follow."""
    if not file.exists():
        return
    with file.open("rb+") as opened:
        content = opened.read()
        opened.truncate(content.rfind(b"\n") + 1)


def append_result(file: Path, result: Result) -> None:
    """Add one line to the file."""
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(dataclasses.asdict(result), ensure_ascii=False) + "\n")
