"""Describes a model as a table of its parts, whose parameters add up to the total."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from regard._checks import check_instance
from regard.nn import FeedForward, LayerNorm, MultiHeadAttention, RMSNorm
from regard.nn._stack import TokenEmbedding
from regard.positions import AddedToInput


@dataclass(frozen=True)
class Row:
    """One kind of part: its path, a short summary, how many there are, and the parameters of each."""

    path: str
    summary: str
    count: int
    parameters_each: int

    @property
    def parameters(self) -> int:
        """Parameters of all of them together."""
        return self.count * self.parameters_each


@dataclass(frozen=True)
class Description:
    """The rows of a model; ``print`` shows a table. Shared parameters are counted once, where they first occur."""

    title: str
    rows: tuple[Row, ...]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(row.parameters for row in self.rows)

    def __str__(self) -> str:
        # Rows with the same parent form a group under its path.
        groups: dict[str, list[list[str]]] = {}
        for row in self.rows:
            parent, _, name = row.path.rpartition(".")
            cells = [f"  {name}" if parent else name, row.summary, f"{row.count:,}", f"{row.parameters:,}"]
            groups.setdefault(parent, []).append(cells)

        header = ["part", "what", "count", "parameters"]
        total = ["total", "", "", f"{self.parameters:,}"]
        table = [header, total]
        for cells_of_group in groups.values():
            table += cells_of_group
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]

        def align(cells: list[str]) -> str:
            left = [cells[0].ljust(widths[0]), cells[1].ljust(widths[1])]
            return "  ".join([*left, cells[2].rjust(widths[2]), cells[3].rjust(widths[3])])

        body = []
        for parent, cells_of_group in groups.items():
            if parent:
                body.append(parent)
            body += map(align, cells_of_group)
        # A long path of a group may be wider than the columns.
        width = max(map(len, [align(header), *body]))
        rule = "─" * width
        lines = [rule, align(header), rule, *body, rule, align(total)]
        return "\n".join([self.title, *(line.ljust(width) for line in lines)])


def describe(model: nn.Module) -> Description:
    """Layers, heads, dimensions and parameters of a model; equal layers share a row.

    >>> from regard.nn import Decoder
    >>> print(describe(Decoder(12, heads=3, layers=2, vocab=37)))
    Decoder, float32, 16.7 kB
    ─────────────────────────────────────────────────────────
    part                what                count  parameters
    ─────────────────────────────────────────────────────────
    blocks.0–1
      attention         12: 3 heads × 4         2       1,176
      attention_norm    LayerNorm 12            2          48
      feedforward       12 → 48 → 12, gelu      2       2,424
      feedforward_norm  LayerNorm 12            2          48
    tokens              37 × 12, head tied      1         444
    norm                LayerNorm 12            1          24
    ─────────────────────────────────────────────────────────
    total                                               4,164
    """
    check_instance("model", model, nn.Module)
    # Parts are equal if they differ only in the numbers in their paths.
    groups: dict[tuple[str, str, int], list[str]] = {}
    for path, summary, parameters in _walk("", model, set()):
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
        groups.setdefault((pattern, summary, parameters), []).append(path)
    rows = []
    for (_, summary, parameters), paths in groups.items():
        rows.append(Row(_path_range(paths), summary, len(paths), parameters))
    return Description(_title(model), tuple(rows))


def _walk(path: str, module: nn.Module, counted: set[int]) -> Iterator[tuple[str, str, int]]:
    """(path, summary, new parameters) of every part that has some; ``counted`` has the ids of earlier parameters."""
    summary = _summary(module)
    children: list[tuple[str, nn.Module]] = []
    if summary is None:
        children = list(module.named_children())
    elif isinstance(module, MultiHeadAttention) and isinstance(module.position, nn.Module):
        children = [("position", module.position)]  # often shared by all layers, so it has a row of its own

    # The parameters of this row: not counted before, and not those of a child with its own row.
    in_children: set[int] = set()
    for _, child in children:
        in_children |= {id(p) for p in child.parameters()}
    own = {}
    for name, parameter in module.named_parameters(recurse=summary is not None):
        if id(parameter) not in counted | in_children:
            own[name] = parameter
    counted |= {id(p) for p in own.values()}

    if own:
        if summary is None:
            summary = ", ".join(f"{name} {_shape(p)}" for name, p in own.items())
        yield path or type(module).__name__, summary, sum(p.numel() for p in own.values())
    for name, child in children:
        yield from _walk(f"{path}.{name}".lstrip("."), child, counted)


def _summary(module: nn.Module) -> str | None:
    """One line about a part that is shown as one row; None for a container."""
    if isinstance(module, MultiHeadAttention):
        return _attention_summary(module)
    if isinstance(module, FeedForward):
        return module.extra_repr()
    if isinstance(module, TokenEmbedding):
        summary = f"{module.vocab:,} × {module.d}"
        if module.tied:
            return summary + ", head tied"
        if module.head is not None:
            return summary + ", separate head"
        return summary
    if isinstance(module, LayerNorm | RMSNorm):
        return f"{type(module).__name__} {module.d}"
    if isinstance(module, AddedToInput | nn.Embedding | nn.Linear | nn.Conv2d):
        sizes = [_shape(p) for p in module.parameters()][:1]  # the first parameter shows how large the part is
        return " ".join([type(module).__name__, *sizes])
    return None


def _shape(parameter: nn.Parameter) -> str:
    return " × ".join(map(str, parameter.shape))


def _attention_summary(layer: MultiHeadAttention) -> str:
    sizes = str(layer.d_in)
    if layer.d_out != layer.d_in:
        sizes = f"{layer.d_in} → {layer.d_out}"
    width = str(layer.d_key)
    if layer.d_value != layer.d_key:
        width = f"{layer.d_key}, values {layer.d_value}"
    words = [f"{sizes}: {layer.heads} heads × {width}"]
    if layer.kv_heads != layer.heads:
        words.append(f"{layer.kv_heads} for keys")
    if layer.position is not None:
        words.append(type(layer.position).__name__)
    if layer.q_norm is not None:
        words.append("normed")
    if layer.mask is not None:
        words += str(layer.mask).splitlines()[:1]  # the other lines are a drawing
    return ", ".join(words)


def _path_range(paths: list[str]) -> str:
    """``blocks.0.norm`` and ``blocks.1.norm`` as ``blocks.0–1.norm``."""
    parts = []
    for first, last in zip(paths[0].split("."), paths[-1].split("."), strict=True):
        if first != last:  # a number
            first = f"{first}–{last}"
        parts.append(first)
    return ".".join(parts)


def _title(model: nn.Module) -> str:
    """The class, the architecture, the dtypes and the size in memory."""
    architecture = getattr(getattr(model, "config", None), "architecture", "")
    name = type(model).__name__
    if architecture:
        name += f" ({architecture})"
    parameters = list(model.parameters())
    if not parameters:
        return name
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
    size = sum(p.numel() * p.element_size() for p in parameters)
    if size < 1e5:
        return f"{name}, {dtypes}, {size / 1e3:,.1f} kB"
    return f"{name}, {dtypes}, {size / 1e6:,.1f} MB"
