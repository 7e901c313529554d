"""``LogitParts``: a logit as a sum of parts, with its table, its CSV, and the tokens behind a head's part."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from regard._checks import check_integer
from regard._devices import on_cpu_in_float64
from regard._errors import RegardError
from regard._files import write_text
from regard._terminal import frameless_table, literal_text
from regard.interp._head_table import csv_text
from regard.interp._model_blocks import CONSTANT, EMBEDDING, FEED_FORWARD, HEAD, OTHER, POSITIONS, TOKENS
from regard.interp._register_observers import list_paths

KINDS = (TOKENS, POSITIONS, EMBEDDING, HEAD, FEED_FORWARD, OTHER, CONSTANT)
COLUMNS = ("kind", "path", "head", "value", "share")
SOURCE_TOLERANCE = 1e-3  # of the sum over source tokens, relative to the largest of them


@dataclass(frozen=True)
class LogitPart:
    """One part of a logit.

    - ``kind``: ``"token embedding"``, ``"position embedding"``, ``"embedding"`` (of token types), ``"head"``,
      ``"feed-forward"`` (experts too), ``"other"`` (a layer that is neither) or ``"constant"`` (biases).
    - ``path``: the module, or the name of the bias.
    - ``head``: the number of the head; None for other parts.
    - ``value``: what it adds to the logit.

    >>> LogitPart("head", "blocks.1.attention", 2, 0.5).name
    'blocks.1.attention head 2'
    """

    kind: str
    path: str
    head: int | None
    value: float

    @property
    def name(self) -> str:
        """The path, with the number of the head."""
        if self.head is None:
            return self.path or self.kind
        return f"{self.path} head {self.head}".strip()


@dataclass(frozen=True, eq=False)
class HeadReading:
    """What one row of an attention layer read.

    - ``row``: the query row.
    - ``weights [H, m]``: its weights A_ij; ``v [G, m, E]``: the values.
    - ``direction [H, E]``: ∂logit/∂z of the outputs z of the heads, which is W_O times the direction of the logit.
    """

    row: int
    weights: Tensor
    v: Tensor
    direction: Tensor

    def by_source(self, head: int) -> Tensor:
        """A_ij · (v_j · direction) of one head, ``[m]`` in float64."""
        v_ME = self.v[head * self.v.shape[0] // len(self.weights)]
        products = on_cpu_in_float64(v_ME) @ on_cpu_in_float64(self.direction[head])
        weights = on_cpu_in_float64(self.weights[head])
        # A key that is not seen adds nothing, even if its value is NaN.
        return torch.where(weights == 0, 0.0, weights * products)


@dataclass(frozen=True, eq=False)
class LogitParts:
    """A logit as a sum of parts, in the order of the model. ``logit_attribution`` makes it.

    - ``logit``: the logit, or the difference of two; before the cap if the model has one.
    - ``target``: the token id and the other id (None for one logit); ``position``: the row of the logits.
    - ``parts``: all parts with a direct path to the logit.
    - ``softcap``: the cap of the model's logits; None if it has none.
    - ``layers``: the paths of all attention layers, with their numbers; ``readings``: what their heads read.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor(model.tokenizer.encode("import os; import o"))
    >>> parts = regard.interp.logit_attribution(model, ids, target=model.tokenizer.encode("s")[-1])
    >>> parts
    LogitParts of token 83 at row 8: 12 heads, 3 feed-forwards, 1 embedding, 3 constants
    >>> parts.table(3).row_count  # three parts, and the sum of all others
    4
    """

    logit: float
    target: tuple[int, int | None]
    position: int
    parts: tuple[LogitPart, ...]
    softcap: float | None = None
    layers: Mapping[str, int] = field(default_factory=dict, repr=False)
    readings: Mapping[str, HeadReading | None] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        counts = []
        for name in (HEAD, FEED_FORWARD, OTHER, EMBEDDING, CONSTANT):
            # Embeddings of tokens, positions and types are counted together.
            count = sum(part.kind.endswith(name) for part in self.parts)
            if count:
                counts.append(f"{count} {name}{'s' * (count != 1)}")
        return f"LogitParts of {self.target_name} at row {self.position}: {', '.join(counts)}"

    @property
    def target_name(self) -> str:
        """The target in words, for titles."""
        first, second = self.target
        if second is None:
            return f"token {first}"
        return f"token {first} minus token {second}"

    def sum(self) -> float:
        """The sum of all parts, which is the logit up to rounding."""
        return math.fsum(part.value for part in self.parts)

    def largest(self) -> float:
        """The size of the largest part."""
        return max((abs(part.value) for part in self.parts), default=0.0)

    def of(self, kind: str) -> tuple[LogitPart, ...]:
        """The parts of one kind, for example ``"head"``."""
        if kind not in KINDS:
            raise RegardError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        return tuple(part for part in self.parts if part.kind == kind)

    def total(self, kind: str) -> float:
        """The sum of the parts of one kind."""
        return math.fsum(part.value for part in self.of(kind))

    def top(self, n: int = 10) -> tuple[LogitPart, ...]:
        """The ``n`` parts of the largest size, with either sign."""
        n = check_integer("n", n, least=1)
        return tuple(sorted(self.parts, key=lambda part: -abs(part.value))[:n])

    def by_source(self, layer: int | str, head: int) -> Tensor:
        """A head's part split over the tokens that it read: ``A_ij (v_j · ∂logit/∂z_i)``, ``[m]`` in float64.

        - ``layer``: the path of the attention layer, or its number in the order of the calls.
        - ``head``: the number of the head.

        Sums to the part of the head. Raises ``RegardError`` if the head has no direct path to the logit, or if its
        weights are not known.
        """
        path = self._path(layer)
        values = {part.head: part.value for part in self.of("head") if part.path == path}
        head = check_integer("head", head, least=0)
        if not values:
            raise RegardError(f"{path} has no direct path to the logit; only heads that add to its row have one")
        if head not in values:
            raise RegardError(f"head must be between 0 and {len(values) - 1} in {path}, got {head}")
        reading = self.readings.get(path)
        if reading is None:
            raise RegardError(f"{path} ran several times, or reads rows that are not known; it has no split by tokens")
        shares = reading.by_source(head)
        bound = SOURCE_TOLERANCE * max(abs(values[head]), float(shares.abs().sum()))
        if not abs(float(shares.sum()) - values[head]) <= bound:
            raise RegardError(f"the output of head {head} of {path} is not the weighted sum of its values alone")
        return shares

    def rows(self) -> list[dict[str, Any]]:
        """One dict per part: kind, path, head, value, and its share of the logit."""
        rows = []
        for part in self.parts:
            share = part.value / self.logit if self.logit else math.nan
            rows.append({"kind": part.kind, "path": part.path, "head": part.head, "value": part.value, "share": share})
        return rows

    def table(self, limit: int | None = 20) -> Table:
        """The largest parts as a table for the terminal: ``rich.print(parts.table())``.

        - ``limit``: how many; None for all of them.
        """
        shown = self.top(limit if limit is not None else max(1, len(self.parts)))
        title = f"{self.target_name}: {self.logit:.4f} = sum of {len(self.parts)} parts"
        if self.softcap is not None:
            title += f", before the cap {self.softcap:g}"
        table = frameless_table(title)
        table.add_column("part", overflow="fold")
        for name in ("kind", "head", "value"):
            table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
        for part in shown:
            head = "" if part.head is None else str(part.head)
            table.add_row(literal_text(part.path or part.kind), part.kind, head, f"{part.value:+.4f}")
        rest = self.logit - math.fsum(part.value for part in shown)
        if len(shown) < len(self.parts):
            table.add_row(f"{len(self.parts) - len(shown)} more", "", "", f"{rest:+.4f}")
        return table

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """The parts as comma-separated text; also written to ``file`` if one is given."""
        return write_text(csv_text(COLUMNS, self.rows()), file)

    def _path(self, layer: int | str) -> str:
        for path, number in self.layers.items():
            if layer in (path, number):
                return path
        raise RegardError(f"layer must be one of {list_paths(self.layers)} or its number, got {layer!r}")
