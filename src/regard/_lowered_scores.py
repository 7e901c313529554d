"""The common input format of all kernels: mask, biases and positions of one call, converted to tensors and numbers.

The logit of query i and key j in head h of batch entry b is

    s = softcap·tanh(scale·q_i·k_j / softcap) + bias[b, h, i, j] + Σ_terms table[b, h, i, column(i, j)]

and the key is visible only if ``lo[b, i] ≤ j < hi[b, i]`` and ``mask[b, h, i, j]``. Nothing here has size n × m, except
tensors that the caller gave at that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import can_read_values, check_integer, check_number, check_probability, check_tensor
from regard._errors import RegardError, RegardTypeError
from regard._register_pytree import register_pytree
from regard._shapes import DTYPES, attention_shape, broadcasts, resolve_offset

# The coordinate of a token without a position (a class token on a grid). Relative terms add nothing for it.
NO_POSITION = -(2**30)


# --- biases ----------------------------------------------------------------------------------------------------------


@register_pytree
@dataclass(frozen=True)
class RelativeTerm:
    """A bias that depends on the offset between key and query, stored per offset instead of per pair.

        bias[b, h, i, j] += table[b, h, i, clamp(key_positions[j] − query_positions[i] − first_offset, 0, T − 1)]

    - ``table [B or 1, H or 1, n or 1, T]``: one column per offset.
    - ``query_positions [n]``, ``key_positions [m]``: integer coordinates on one axis. A pair with a token
      at ``NO_POSITION`` gets no bias.
    - ``first_offset``: the offset of the table's first column.

    ALiBi, T5 and clipped tables need one term. Shaw's relative keys need a term with one table row per query. A grid
    needs two terms, one per axis.
    """

    table: Tensor
    query_positions: Tensor
    key_positions: Tensor
    first_offset: int


def term_index(term: RelativeTerm, rows: slice | Tensor, keys: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Return the table column of each pair of a tile, and which pairs have a position, both ``[rows, keys]``."""
    query_positions = term.query_positions[rows].unsqueeze(-1)
    key_positions = term.key_positions[keys]
    index = (key_positions - query_positions - term.first_offset).clamp_(0, term.table.shape[-1] - 1)
    has_position = (key_positions != NO_POSITION) & (query_positions != NO_POSITION)
    return index, has_position


def term_tile(term: RelativeTerm, rows: slice | Tensor, keys: slice | Tensor) -> Tensor:
    """The term's bias on a tile: ``[B or 1, H or 1, rows, keys]``."""
    index, has_position = term_index(term, rows, keys)
    table = term.table
    if table.shape[2] != 1:
        table = table[:, :, rows]
    # If all queries share one table row, plain indexing copies less memory than gather.
    if table.shape[2] == 1:
        tile = table[:, :, 0][:, :, index]
    else:
        tile = table.gather(-1, index.expand(*table.shape[:3], index.shape[-1]))
    return torch.where(has_position, tile, 0)


def positions_1d(n: int, m: int, offset: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the coordinates of queries and keys on a line: query i is at i + offset, key j is at j."""
    return torch.arange(n, device=device) + resolve_offset(n, m, offset), torch.arange(m, device=device)


def positions_2d(
    n: int, m: int, height: int, width: int, offset: int | None, device: torch.device
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return ``((query_y, key_y), (query_x, key_x))`` of a ``height × width`` grid in row-major order.

    The grid is the last height·width keys. Keys before it (class tokens) have no position. Queries whose
    position i + offset is outside the grid have none either.
    """
    cells = height * width
    if m < cells:
        raise RegardError(f"a grid of {height} × {width} has {cells} cells; m must be at least {cells}, got {m}")

    def grid_cell(position: Tensor) -> tuple[Tensor, Tensor]:
        # The grid is at the end of the keys, so that class tokens come before it.
        cell = position - (m - cells)
        outside = (cell < 0) | (cell >= cells)
        y = torch.div(cell, width, rounding_mode="floor")
        x = torch.remainder(cell, width)
        return y.masked_fill(outside, NO_POSITION), x.masked_fill(outside, NO_POSITION)

    queries, keys = positions_1d(n, m, offset, device)
    query_y, query_x = grid_cell(queries)
    key_y, key_x = grid_cell(keys)
    return (query_y, key_y), (query_x, key_x)


class Bias:
    """Base class of the biases that are added to scores. ``a + b`` adds both.

    A subclass implements ``terms``. It may depend on q, but it never forms an n × m tensor.
    """

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        """Return the terms for ``q [B, H, n, d]`` and m keys; tables may require gradients."""
        raise RegardTypeError(f"{type(self).__name__} is not a bias on scores: it must implement terms(q, m)")

    def __add__(self, other: Bias) -> Bias:
        if not isinstance(other, Bias):
            return NotImplemented
        return SumOfBiases((self, other))

    def offset_repr(self) -> str:
        """The end of a ``repr``: the ``offset`` of the bias, if it is not the default."""
        offset = getattr(self, "offset", None)
        return "" if offset is None else f", offset={offset}"

    def dense(self, q: Tensor, m: int) -> Tensor:
        """The bias as one tensor ``[B or 1, H or 1, n, m]``, for small sizes, tests and figures.

        The dtype is float64 for float64 queries, else float32.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=q.device)
        for term in self.terms(q, m):
            total = total + term_tile(term, slice(0, q.shape[-2]), slice(0, m))
        return total.to(dtype)


class SumOfBiases(nn.Module, Bias):
    """``a + b``: both are added to the scores. It is a module, so that learned parts are trained and saved with it."""

    def __init__(self, parts: tuple[Bias, ...]) -> None:
        super().__init__()
        self.parts = parts
        # A module list registers the parameters of the parts as parameters of the sum.
        self.learned = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        terms: tuple[RelativeTerm, ...] = ()
        for part in self.parts:
            terms += part.terms(q, m)
        return terms


def check_bias_fits(bias: Bias, heads: int, d_key: int) -> None:
    """Raise if a bias was built for another number of heads, or another query width, than the layer has."""
    if isinstance(bias, SumOfBiases):
        for part in bias.parts:
            check_bias_fits(part, heads, d_key)
        return
    for attribute, name, expected in (("heads", "heads", heads), ("d", "d_key", d_key)):
        size = getattr(bias, attribute, None)
        if isinstance(size, int) and size != expected:
            made_for = f"{type(bias).__name__} is made for {attribute}={size}"
            raise RegardError(f"position {made_for}, but this layer has {name}={expected}")


# --- the lowered call ------------------------------------------------------------------------------------------------


@register_pytree
@dataclass(frozen=True)
class Scores:
    """The options of one call as tensors and numbers: everything that converts q·k to logits.

    This class is the single definition of the options of the ``torch.library`` operators: ``operator_schema`` is
    generated from its fields, ``pack`` turns an instance into operator arguments and ``unpack`` turns them back.

    - ``scale``: factor of q·k; 0 and inf are allowed.
    - ``softcap``: the cap c in c·tanh(x/c); 0 disables it.
    - ``lo``, ``hi``: int64 ``[B or 1, n]``: query i sees only keys lo ≤ j < hi. None: from 0, up to m.
    - ``mask``: bool ``[B or 1, H or 1, n or 1, m or 1]``, True = may attend, or None.
    - ``bias``: floating point ``[B or 1, H or 1, n or 1, m or 1]``, or None.
    - ``terms``: the relative terms.
    - ``sinks [H]``: one logit per head that is only in the denominator, or None.
    - ``dropout``, ``seed``: probability, and an int64 scalar tensor, which is None without dropout.
    """

    scale: float
    softcap: float = 0.0
    lo: Tensor | None = None
    hi: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    terms: tuple[RelativeTerm, ...] = ()
    sinks: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None

    def pack(self) -> list[Any]:
        """The arguments of the operators, in the order of ``operator_schema``."""
        arguments: list[Any] = []
        for name in _FIELDS:
            # Operators take no lists of objects, so each field of a term becomes one list.
            if name == "terms":
                for field in _TERM_FIELDS:
                    arguments.append([getattr(term, field) for term in self.terms])
            else:
                arguments.append(getattr(self, name))
        return arguments

    @staticmethod
    def unpack(arguments: Sequence[Any]) -> Scores:
        """The inverse of ``pack``."""
        first = _FIELDS.index("terms")
        end = first + len(_TERM_FIELDS)
        terms = tuple(RelativeTerm(*parts) for parts in zip(*arguments[first:end], strict=True))
        values = [*arguments[:first], terms, *arguments[end:]]
        return Scores(*values)

    def learned_tensors(self) -> list[Tensor | None]:
        """The tensors that gradients can reach: bias, sinks, then the table of each term."""
        return [self.bias, self.sinks, *[term.table for term in self.terms]]

    def detach(self) -> Scores:
        """Return the same options without gradients and dropout. Exact weights are the weights before dropout."""
        detached = self._map_tensors(lambda x, name: x.detach(), ("bias", "sinks"))
        return replace(detached, dropout=0.0, seed=None)

    def to(self, device: torch.device) -> Scores:
        """The same options with all tensors on a device."""

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        moved = {name: move(getattr(self, name)) for name in ("lo", "hi", "mask", "bias", "sinks", "seed")}
        terms = []
        for term in self.terms:
            positions = (term.query_positions.to(device), term.key_positions.to(device))
            terms.append(RelativeTerm(term.table.to(device), *positions, term.first_offset))
        return replace(self, **moved, terms=tuple(terms))  # type: ignore[arg-type]

    def select_entry(self, batch: int) -> Scores:
        """The same options for one entry of the batch."""

        def one_entry(x: Tensor, name: str) -> Tensor:
            return x if x.shape[0] == 1 else x[batch : batch + 1]

        return self._map_tensors(one_entry, ("lo", "hi", "mask", "bias"))

    def select_head(self, batch: int, head: int) -> Scores:
        """The same options for one head of one batch entry."""
        return self.select_heads([head]).select_entry(batch)

    def select_heads(self, heads: list[int]) -> Scores:
        """The same options for some heads, in this order."""
        # The hash of dropout depends on the number of the head, which changes here.
        assert self.dropout == 0

        def some_heads(x: Tensor, name: str) -> Tensor:
            if name == "sinks":
                return x[heads]
            return x if x.shape[1] == 1 else x[:, heads]

        return self._map_tensors(some_heads, ("mask", "bias", "sinks"))

    def select_rows(self, rows: slice) -> Scores:
        """Return the same options for consecutive queries. Each query keeps its position, visible keys and bias."""

        def some_rows(x: Tensor, name: str) -> Tensor:
            dim = 1 if name in ("lo", "hi") else 2
            return x if x.shape[dim] == 1 else x.narrow(dim, rows.start, rows.stop - rows.start)

        selected = self._map_tensors(some_rows, ("lo", "hi", "mask", "bias"))
        terms = tuple(replace(term, query_positions=term.query_positions[rows]) for term in selected.terms)
        return replace(selected, terms=terms)

    def _map_tensors(self, change: Callable[[Tensor, str], Tensor], names: tuple[str, ...]) -> Scores:
        """The same options with ``change(tensor, name)`` in place of the named tensors and of every term's table."""
        changed: dict[str, Any] = {}
        for name in names:
            tensor = getattr(self, name)
            if tensor is not None:
                changed[name] = change(tensor, name)
        changed["terms"] = tuple(replace(term, table=change(term.table, "table")) for term in self.terms)
        return replace(self, **changed)


_FIELDS = tuple(field.name for field in fields(Scores))
_TERM_FIELDS = tuple(field.name for field in fields(RelativeTerm))


def operator_schema() -> list[str]:
    """The parameters that ``Scores.pack`` fills, in the schema language of ``torch.library``.

    >>> from regard._lowered_scores import operator_schema
    >>> operator_schema()[:3]
    ['float scale', 'float softcap', 'Tensor? lo']
    """
    parameters = []
    for field in fields(Scores):
        if field.name == "terms":
            # One list per field of a term: operators take no lists of objects.
            for part in fields(RelativeTerm):
                kind = {"Tensor": "Tensor[]", "int": "SymInt[]"}[str(part.type)]
                parameters.append(f"{kind} term_{part.name}")
        else:
            kind = {"float": "float", "Tensor | None": "Tensor?"}[str(field.type)]
            parameters.append(f"{kind} {field.name}")
    return parameters


# --- checks ----------------------------------------------------------------------------------------------------------


def check_scores(q: Tensor, k: Tensor, scores: Scores) -> None:
    """Raise unless ``q [B, H, n, d]``, ``k [B, G, m, d]`` and the options fit together, as the kernels expect them.

    The tensors may come from a file of anyone. ``lo`` and ``hi`` must lie within 0 … m, which is checked on a CPU only:
    to read values from another device, the caller would wait for it.
    """
    # It checks ranks from 3 on, because batches may have any number of dimensions there.
    attention_shape(q, k, k)
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0]:
        shapes = f"{list(q.shape)} and {list(k.shape)}"
        raise RegardError(f"q and k must have shapes [B, H, n, d] and [B, G, m, d], got {shapes}")
    B, H, n, _ = q.shape
    m = k.shape[2]

    check_number("scale", scores.scale, least=0.0)
    if check_number("softcap", scores.softcap, least=0.0) == math.inf:
        raise RegardError("softcap must be a finite number ≥ 0, got inf")
    if scores.scale == math.inf and (scores.softcap or scores.sinks is not None):
        raise RegardError("scale must be finite with a softcap or sinks, got inf")
    check_probability("dropout", scores.dropout)
    if scores.seed is not None:
        _check_option("seed", scores.seed, (), q, integer=True)

    for name in ("lo", "hi"):
        bound = getattr(scores, name)
        if bound is None:
            continue
        _check_option(name, bound, (B, n), q, integer=True)
        if bound.shape[1] != n:
            raise RegardError(f"{name} must have one number per query, {n}, got shape {list(bound.shape)}")
        if bound.device.type == "cpu" and can_read_values(bound) and bool(((bound < 0) | (bound > m)).any()):
            raise RegardError(f"{name} must be between 0 and the {m} keys, got {int(bound.min())} … {int(bound.max())}")
    if scores.mask is not None:
        _check_option("mask", scores.mask, (B, H, n, m), q)
        if scores.mask.dtype != torch.bool:
            raise RegardTypeError(f"mask must be bool, got {scores.mask.dtype}")
    if scores.bias is not None:
        _check_option("bias", scores.bias, (B, H, n, m), q, floating=True)
    if scores.sinks is not None:
        _check_option("sinks", scores.sinks, (H,), q, floating=True)
        if scores.sinks.shape[0] != H:
            raise RegardError(f"sinks must have one number per head, {H}, got {scores.sinks.shape[0]}")
    for term in scores.terms:
        _check_term(term, q, m)


def _check_term(term: RelativeTerm, q: Tensor, m: int) -> None:
    check_tensor("table", term.table)
    columns = term.table.shape[-1] if term.table.ndim else 0
    _check_option("table", term.table, (*q.shape[:3], columns), q, floating=True)
    if columns == 0:
        raise RegardError(f"table must have at least 1 column, got shape {list(term.table.shape)}")
    for name, count in (("query_positions", q.shape[2]), ("key_positions", m)):
        positions = getattr(term, name)
        _check_option(name, positions, (count,), q, integer=True)
        if positions.shape[0] != count:
            raise RegardError(f"{name} must have {count} numbers, got {positions.shape[0]}")
    check_integer("first_offset", term.first_offset, least=-(2**63), most=2**63 - 1)


def _check_option(
    name: str, x: Tensor, shape: tuple[int, ...], q: Tensor, *, integer: bool = False, floating: bool = False
) -> None:
    """Raise unless a tensor is on q's device, broadcasts to ``shape``, and is int64 or floating if that is required."""
    check_tensor(name, x)
    if x.device != q.device:
        raise RegardError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if x.ndim != len(shape) or not all(map(broadcasts, x.shape, shape)):
        raise RegardError(f"{name} must broadcast to {list(shape)}, got shape {list(x.shape)}")
    if integer and x.dtype != torch.int64:
        raise RegardTypeError(f"{name} must be int64, got {x.dtype}")
    # The narrow floats of files (8 bits and fewer) have no arithmetic.
    if floating and x.dtype not in DTYPES:
        raise RegardTypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")


# --- dropout ---------------------------------------------------------------------------------------------------------

_WORD = 0xFFFFFFFF  # the low 32 bits


def _mix(x: Tensor) -> Tensor:
    """murmur3's 32-bit finaliser, on int64 tensors of 32-bit words. Products wrap around and are cut to 32 bits."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def dropout_keep(seed: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor, p: float) -> Tensor:
    """Return which weights survive dropout: a pure function of (seed, b, h, i, j), the same in every backend.

        r = mix(mix(mix(seed_lo ⊕ mix(seed_hi) ⊕ b·c₁) ⊕ h·c₂) ⊕ i·c₃);   keep ⇔ mix(r ⊕ mix(j + c₄)) ≥ p·2³²

    All words have 32 bits. The index tensors broadcast against each other.
    """
    seed = seed.to(torch.int64)
    r = _mix((seed & _WORD) ^ _mix((seed >> 32) & _WORD) ^ ((batch * 0x9E3779B1) & _WORD))
    r = _mix(r ^ ((head * 0x85EBCA77) & _WORD))
    r = _mix(r ^ ((i * 0xC2B2AE3D) & _WORD))
    return _mix(r ^ _mix((j + 0x27D4EB2F) & _WORD)) >= math.ceil(p * 2**32)
