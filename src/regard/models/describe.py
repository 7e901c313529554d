"""A model as a table: layers, heads, dimensions and parameters, which add up to the real count."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from regard.nn import FeedForward, LayerNorm, MultiHeadAttention, RMSNorm
from regard.nn.stack import Tokens
from regard.positions import AddedToInput
from regard.positions.common import check_kind

__all__ = ["Description", "Row", "describe"]


@dataclass(frozen=True)
class Row:
    """One kind of part: where it stands, what it is, how many of it there are, and the parameters of each."""

    where: str
    what: str
    count: int
    each: int

    @property
    def parameters(self) -> int:
        """Of all of them together."""
        return self.count * self.each


@dataclass(frozen=True)
class Description:
    """The rows of a model; ``print`` shows a table. Shared parameters are counted once, where they first stand."""

    title: str
    rows: tuple[Row, ...]

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(row.parameters for row in self.rows)

    def __str__(self) -> str:
        groups: dict[str, list[tuple[str, str, str, str]]] = {}
        for row in self.rows:
            place, _, leaf = row.where.rpartition(".")
            cells = (f"  {leaf}" if place else leaf, row.what, f"{row.count:,}", f"{row.parameters:,}")
            groups.setdefault(place, []).append(cells)
        lines = [line for place, rows in groups.items() for line in ([(place, "", "", "")] if place else []) + rows]
        head, total = ("part", "what", "count", "parameters"), ("total", "", "", f"{self.parameters:,}")
        full = [line for line in (head, *lines, total) if line[3]]
        widths = [max(len(line[i]) for line in full) for i in range(4)]
        printed = {
            line: "  ".join(
                x.ljust(w) if i < 2 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in full
        }
        width = max(map(len, [*printed.values(), *(line[0] for line in lines)]))
        rule = "─" * width
        body = [printed.get(line, line[0]).ljust(width) for line in lines]
        return "\n".join([self.title, rule, printed[head].ljust(width), rule, *body, rule, printed[total].ljust(width)])


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
    check_kind("model", model, nn.Module)
    groups: dict[tuple[str, str, int], list[str]] = {}
    seen: set[int] = set()
    for name, what, each in _parts("", model, seen):
        groups.setdefault((re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), what, each), []).append(name)
    rows = [Row(_span(names), what, len(names), each) for (_, what, each), names in groups.items()]
    return Description(_title(model), tuple(rows))


def _parts(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, str, int]]:
    """(path, what it is, new parameters) of every part that has some, from the outside in."""
    what = _what(module)
    inside = [] if what is not None else list(module.named_children())
    if isinstance(module, MultiHeadAttention) and isinstance(module.position, nn.Module):
        inside = [("position", module.position)]  # often one for all layers, so a row of its own
    apart = {id(p) for _, child in inside for p in child.parameters()}
    listed = module.named_parameters(recurse=what is not None)
    own = {leaf: p for leaf, p in listed if id(p) not in seen | apart}
    seen |= {id(p) for p in own.values()}
    if own:
        names = ", ".join(f"{leaf} {' × '.join(map(str, p.shape))}" for leaf, p in own.items())
        yield name or type(module).__name__, what or names, sum(p.numel() for p in own.values())
    for child, part in inside:
        yield from _parts(f"{name}.{child}".lstrip("."), part, seen)


def _what(module: nn.Module) -> str | None:
    """One line on a part that is shown whole; None for what is only a box around others."""
    if isinstance(module, MultiHeadAttention):
        return _heads(module)
    if isinstance(module, FeedForward):
        return module.extra_repr()
    if isinstance(module, Tokens):
        head = "" if module.head is None and not module.tied else ", head tied" if module.tied else ", head of its own"
        return f"{module.vocab:,} × {module.d}{head}"
    if isinstance(module, LayerNorm | RMSNorm):
        return f"{type(module).__name__} {module.d}"
    if isinstance(module, AddedToInput | nn.Embedding | nn.Linear | nn.Conv2d):
        return " ".join([type(module).__name__, *(" × ".join(map(str, p.shape)) for p in _first(module))])
    return None


def _first(module: nn.Module) -> list[nn.Parameter]:
    """The first parameter, which says how large a part is; none where there is none."""
    return list(module.parameters())[:1]


def _heads(layer: MultiHeadAttention) -> str:
    width = str(layer.d_key) if layer.d_key == layer.d_value else f"{layer.d_key}, values {layer.d_value}"
    sizes = str(layer.d_in) if layer.d_in == layer.d_out else f"{layer.d_in} → {layer.d_out}"
    extra = [] if layer.kv_heads == layer.heads else [f"{layer.kv_heads} for keys"]
    extra += [type(layer.position).__name__] if layer.position is not None else []
    extra += ["normed"] if layer.q_norm is not None else []
    extra += str(layer.mask).splitlines()[:1] if layer.mask is not None else []  # the rest is a drawing
    return ", ".join([f"{sizes}: {layer.heads} heads × {width}", *extra])


def _span(names: list[str]) -> str:
    """``blocks.0.norm`` and ``blocks.1.norm`` as ``blocks.0–1.norm``."""
    first, last = names[0].split("."), names[-1].split(".")
    return ".".join(a if a == b else f"{a}–{b}" for a, b in zip(first, last, strict=True))


def _title(model: nn.Module) -> str:
    architecture = getattr(getattr(model, "config", None), "architecture", "")
    stored = list(model.parameters())
    size = sum(p.numel() * p.element_size() for p in stored)
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in stored}))
    name = f"{type(model).__name__} ({architecture})" if architecture else type(model).__name__
    if not stored:
        return name
    return f"{name}, {dtypes}, {f'{size / 1e6:,.1f} MB' if size >= 1e5 else f'{size / 1e3:,.1f} kB'}"
