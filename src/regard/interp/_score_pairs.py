"""``ScoreParts``: a score of attention as a sum over pairs of parts of the model."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from regard._checks import check_integer
from regard._files import write_text
from regard._terminal import frameless_table, literal_text
from regard.interp._head_table import csv_text

PAIR_COLUMNS = ("query kind", "query path", "query head", "key kind", "key path", "key head", "value")
POSITION_BIAS = "position bias"


@dataclass(frozen=True)
class Component:
    """A part of the model that adds to a query or to a key; ``kind``, ``path`` and ``head`` as in ``LogitPart``.

    >>> Component("head", "blocks.0.attention", 3).name
    'blocks.0.attention head 3'
    """

    kind: str
    path: str
    head: int | None

    @property
    def name(self) -> str:
        """The path, with the number of the head."""
        if self.head is None:
            return self.path or self.kind
        return f"{self.path} head {self.head}".strip()


@dataclass(frozen=True)
class ScorePair:
    """One pair: the part of the query, the part of the key, and scale · ⟨q_a, k_b⟩.

    Both parts are None for the position bias.

    >>> tokens = Component("token embedding", "tokens", None)
    >>> ScorePair(tokens, tokens, 0.25).name
    'tokens · tokens'
    """

    query: Component | None
    key: Component | None
    value: float

    @property
    def name(self) -> str:
        """The names of both parts."""
        if self.query is None or self.key is None:
            return POSITION_BIAS
        return f"{self.query.name} · {self.key.name}"


@dataclass(frozen=True, eq=False)
class ScoreParts:
    """A score s_ij as a sum over pairs of parts. ``score_attribution`` makes it.

    - ``score``: scale · q_i·k_j + bias_ij; before the cap if the layer has one.
    - ``layer``, ``head``, ``row``, ``key``: the score's place; the layer is a path.
    - ``queries``, ``keys``: the parts of the query and of the key.
    - ``values [queries, keys]``: scale · ⟨q_a, k_b⟩ of each pair, in float64.
    - ``bias``: what positions add to the score (ALiBi, tables of relative positions); 0 if nothing is added.
    - ``softcap``: the cap of the layer's scores; None if it has none.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor(model.tokenizer.encode("import os; import o"))
    >>> parts = regard.interp.score_attribution(model, ids, layer=1, head=0, row=-1, key=-2)
    >>> parts
    ScoreParts of decoder.blocks.1.attention head 0, row 8, key 7: 8 parts of the query × 8 parts of the key
    >>> parts.table(3).row_count
    4
    """

    score: float
    layer: str
    head: int
    row: int
    key: int
    queries: tuple[Component, ...]
    keys: tuple[Component, ...]
    values: Tensor
    bias: float = 0.0
    softcap: float | None = None

    def __repr__(self) -> str:
        return (
            f"ScoreParts of {self.layer} head {self.head}, row {self.row}, key {self.key}: "
            f"{len(self.queries)} parts of the query × {len(self.keys)} parts of the key"
        )

    def sum(self) -> float:
        """The sum of all pairs and of the bias, which is the score up to rounding."""
        return math.fsum([self.bias, *self.values.reshape(-1).tolist()])

    def pairs(self) -> list[ScorePair]:
        """All pairs, the largest first, and the position bias if there is one."""
        order = self.values.reshape(-1).abs().argsort(descending=True).tolist()
        pairs = []
        for place in order:
            query, key = divmod(place, len(self.keys))
            pairs.append(ScorePair(self.queries[query], self.keys[key], float(self.values[query, key])))
        if self.bias:
            pairs.append(ScorePair(None, None, self.bias))
            pairs.sort(key=lambda pair: -abs(pair.value))
        return pairs

    def top(self, n: int = 10) -> list[ScorePair]:
        """The ``n`` pairs of the largest size, with either sign."""
        return self.pairs()[: check_integer("n", n, least=1)]

    def of_query(self) -> dict[Component, float]:
        """What each part of the query adds, summed over the parts of the key."""
        return dict(zip(self.queries, self.values.sum(1).tolist(), strict=True))

    def of_key(self) -> dict[Component, float]:
        """What each part of the key adds, summed over the parts of the query."""
        return dict(zip(self.keys, self.values.sum(0).tolist(), strict=True))

    def table(self, limit: int = 20) -> Table:
        """The largest pairs as a table for the terminal: ``rich.print(parts.table())``.

        - ``limit``: how many.
        """
        pairs = self.pairs()
        shown = pairs[: check_integer("limit", limit, least=1)]
        title = f"score {self.score:.4f} of row {self.row} and key {self.key} = sum of {len(pairs)} pairs"
        if self.softcap is not None:
            title += f", before the cap {self.softcap:g}"
        table = frameless_table(title)
        table.add_column("query", overflow="fold")
        table.add_column("key", overflow="fold")
        table.add_column("value", justify="right", no_wrap=True)
        for pair in shown:
            query = POSITION_BIAS if pair.query is None else pair.query.name
            key = "" if pair.key is None else pair.key.name
            table.add_row(literal_text(query), literal_text(key), f"{pair.value:+.4f}")
        if len(shown) < len(pairs):
            rest = self.score - math.fsum(pair.value for pair in shown)
            table.add_row(f"{len(pairs) - len(shown)} more", "", f"{rest:+.4f}")
        return table

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """The pairs as comma-separated text, the largest first; also written to ``file`` if one is given."""
        rows = []
        for pair in self.pairs():
            row: dict[str, Any] = {"value": pair.value, "query kind": POSITION_BIAS}
            for side, part in (("query", pair.query), ("key", pair.key)):
                if part is not None:
                    row |= {f"{side} kind": part.kind, f"{side} path": part.path, f"{side} head": part.head}
            rows.append(row)
        return write_text(csv_text(PAIR_COLUMNS, rows), file)
