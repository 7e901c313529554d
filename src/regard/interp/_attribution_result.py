"""``Attribution``: how much every head, key, row and token contributes to one number of a model's output."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from regard._checks import check_integer
from regard._errors import RegardError
from regard._files import write_text
from regard._terminal import frameless_table, literal_text
from regard.interp._head_table import csv_text, shorten_paths
from regard.interp._register_observers import list_paths

# Column → what it is.
ATTRIBUTION_COLUMNS = {
    "contribution": "Σ A_ij (g_i·v_j) over all queries and keys",
    "absolute": "Σ_j |Σ_i A_ij (g_i·v_j)|: larger than the contribution where keys act against each other",
}


@dataclass(frozen=True, eq=False)
class LayerAttribution:
    """The contributions ``c_ij = A_ij (g_i·v_j)`` of one attention layer; g is ∂target/∂out.

    - ``keys [B, H, m]``: Σ_i c_ij, the contribution of each key.
    - ``rows [B, H, n]``: Σ_j c_ij = g_i·out_i, the contribution of each query row; in half precision with the rounding
      error of the output.
    - ``map [B, H, g, g]``: sums over bins of rows and keys, row bin ⌊i·g/n⌋, key bin ⌊j·g/m⌋; None without a map.

    >>> keys = torch.tensor([[[0.5, -0.25], [1.0, 2.0]]])  # 2 heads, 2 keys
    >>> LayerAttribution(keys, rows=keys).heads
    tensor([[0.2500, 3.0000]])
    """

    keys: Tensor
    rows: Tensor
    map: Tensor | None = None

    @property
    def heads(self) -> Tensor:
        """``[B, H]``: Σ_ij c_ij."""
        return self.keys.sum(-1)


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Mapping[str, LayerAttribution]):
    """How much every head, key, row and token contributes to one number, the target.

    ``attribution[layer]`` is the ``LayerAttribution`` of a layer: its module path, or its number in the order of the
    calls.

    - ``model``: the class of the model.
    - ``value``: the target's number; with several batch entries, the sum of their numbers.
    - ``tokens [B, n]``: embedding × gradient, summed over features. With ``steps > 1`` the gradient is the mean along
      the path from zero embeddings, and the sum of all tokens approaches ``value − baseline`` with more steps.
    - ``baseline``: the target's number for zero embeddings; None with ``steps=1``.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor([model.tokenizer.encode("import os.")])
    >>> attribution = regard.interp.attribute(model, ids, int(model(ids)[0, -1].argmax()))
    >>> attribution
    Attribution of TextDecoder: 3 layers, 12 heads, 7 tokens
    >>> attribution[1].heads.shape, attribution[1].keys.shape
    (torch.Size([1, 4]), torch.Size([1, 4, 7]))
    """

    model: str
    value: float
    tokens: Tensor
    layers: dict[str, LayerAttribution]
    baseline: float | None = None

    def path(self, layer: str | int) -> str:
        """The module path of a layer, which may be given by its number in the order of the calls."""
        path = str(layer)
        if isinstance(layer, int) and 0 <= layer < len(self.layers):
            path = list(self.layers)[layer]
        if path not in self.layers:
            known = f"it has {len(self.layers)}: {list_paths(self.layers)}"
            raise KeyError(f"the attribution has no layer {path!r}; {known}")
        return path

    def __getitem__(self, layer: str | int) -> LayerAttribution:
        return self.layers[self.path(layer)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        heads = sum(layer.keys.shape[1] for layer in self.layers.values())
        return f"Attribution of {self.model}: {len(self)} layers, {heads} heads, {self.tokens.shape[-1]} tokens"

    def heads(self) -> list[dict[str, Any]]:
        """One row per head: path, head, its contribution, and the sum of the absolute contributions of its keys.

        Contributions of several batch entries are added, as in ``value``.
        """
        rows = []
        for path, layer in self.layers.items():
            contributions = layer.heads.sum(0).tolist()
            absolute = layer.keys.abs().sum((0, 2)).tolist()
            for head, contribution in enumerate(contributions):
                rows.append({"path": path, "head": head, "contribution": contribution, "absolute": absolute[head]})
        return rows

    def top(self, n: int = 10) -> list[tuple[str, int, float]]:
        """The ``n`` heads with the largest absolute contribution: (path, head, contribution), the largest first.

        >>> model = regard.models.load(regard.models.bundled())
        >>> ids = torch.tensor([model.tokenizer.encode("import os.")])
        >>> [len(entry) for entry in regard.interp.attribute(model, ids, 5).top(2)]
        [3, 3]
        """
        check_integer("n", n)
        entries = [(row["path"], row["head"], row["contribution"]) for row in self.heads()]
        return sorted(entries, key=lambda entry: -abs(entry[2]))[:n]

    def table(self, sort: str | None = None, limit: int | None = None) -> Table:
        """The heads as a table for the terminal (``rich.print(attribution.table("contribution", 10))``).

        - ``sort``: the column to sort by, the largest absolute number first; by default the order of the calls.
        - ``limit``: how many heads; all by default.
        """
        rows = self.heads()
        if sort is not None:
            if sort not in ATTRIBUTION_COLUMNS:
                raise RegardError(f"sort must be one of {', '.join(ATTRIBUTION_COLUMNS)}, got {sort!r}")
            rows.sort(key=lambda row: -abs(row[sort]))
        pattern, names = shorten_paths([row["path"] for row in rows])
        title = f"{len(rows)} heads"
        if pattern:
            title += f" of {pattern}"
        table = frameless_table(title)
        table.min_width = len(title)  # the title would be folded at the width of the columns
        table.add_column("layer", overflow="fold")
        for name in ("head", *ATTRIBUTION_COLUMNS):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows[:limit]:
            numbers = [f"{row[name]:.4g}" for name in ATTRIBUTION_COLUMNS]
            table.add_row(literal_text(names[row["path"]]), str(row["head"]), *numbers)
        return table

    def to_csv(self, file: str | os.PathLike[str] | None = None) -> str:
        """The heads as comma-separated text; also written to ``file`` if one is given.

        >>> model = regard.models.load(regard.models.bundled())
        >>> ids = torch.tensor([model.tokenizer.encode("import os.")])
        >>> regard.interp.attribute(model, ids, 5).to_csv().splitlines()[0]
        'path,head,contribution,absolute'
        """
        return write_text(csv_text(["path", "head", *ATTRIBUTION_COLUMNS], self.heads()), file)
