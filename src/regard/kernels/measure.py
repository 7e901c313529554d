"""Observables of the reference kernel: a second tiled pass over A = e^(s − high) / total, never n × n.

What each value means is in ``regard.observables``. Sums over rows are kept in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.kernels.tiles import Problem, best_products, pick, result_dtype, row_sums, score_tile, softmax_tile, tiles
from regard.observables import Observe
from regard.scores import NOWHERE, Scores, positions_1d, positions_2d

# The row values summed here as floats; lse comes from the forward pass.
_SUMS = ("entropy", "peak", "offset", "distance", "sink", "local")


def row_names() -> tuple[str, ...]:
    """The row values measured here."""
    return (*_SUMS, "peak_at", "visible", "counted")


def head_names(observe: Observe) -> tuple[str, ...]:
    """The values per head (and ``top``) that ``observe`` asks for, in the order ``measure`` returns them."""
    names: tuple[str, ...] = ("rows",)
    names += ("key_mass",) if observe.key_mass else ()
    names += ("map", "map_rows") if observe.map else ()
    names += ("profile", "profile_rows") if observe.profile is not None else ()
    names += ("top", "top_at") if observe.top else ()
    return names


class _Places:
    """Where queries and keys stand, and how far apart."""

    def __init__(self, problem: Problem, observe: Observe) -> None:
        _, _, n, m = problem.sizes
        device = problem.q.device
        self.line = positions_1d(n, m, observe.offset, device)
        self.axes = (
            [self.line] if observe.grid is None else list(positions_2d(n, m, *observe.grid, observe.offset, device))
        )

    def line_offset(self, rows: slice, keys: slice) -> Tensor:
        return self.line[1][keys] - self.line[0][rows].unsqueeze(-1)

    def offsets(self, rows: slice, keys: slice) -> tuple[list[Tensor], Tensor]:
        """δ along each axis for a tile, and which pairs stand somewhere."""
        query, key = self.axes[0][0][rows].unsqueeze(-1), self.axes[0][1][keys]
        somewhere = (query != NOWHERE) & (key != NOWHERE)
        return [key_at[keys] - query_at[rows].unsqueeze(-1) for query_at, key_at in self.axes], somewhere


class _Measurement:
    """The running sums of one pass."""

    def __init__(self, problem: Problem, observe: Observe, real: Tensor | None) -> None:
        B, H, n, m = problem.sizes
        self.problem, self.observe, self.real = problem, observe, real
        self.places = _Places(problem, observe)
        new = problem.q.new_zeros
        self.rows = {name: new(B, H, n, dtype=problem.dtype) for name in _SUMS}
        self.rows["peak_at"] = new(B, H, n, dtype=torch.int64)
        self.rows["visible"] = new(B, H, n, dtype=torch.int64)
        self.rows["counted"] = new(B, H, n, dtype=torch.bool)
        self.key_mass = new(H, m, dtype=torch.float64)
        g = observe.map
        self.map, self.map_rows = new(H, g, g, dtype=torch.float64), new(H, g, dtype=torch.int64)
        sides = [2 * r + 1 for r in observe.radii()]
        self.profile = new(H, math.prod(sides), dtype=torch.float64)
        self.profile_rows = torch.zeros_like(self.profile)
        self.sides = sides
        self.top = new(B, H, n, observe.top, dtype=problem.dtype)
        self.top_at = new(B, H, n, observe.top, dtype=torch.int64) - 1

    def query_tile(self, rows: slice, spans: list[slice], softmax: tuple[Tensor, Tensor] | None) -> None:
        """Measure the rows of one query tile, key tile by key tile."""
        problem = self.problem
        B, H, _, _ = problem.sizes
        height = rows.stop - rows.start
        best = best_products(problem, rows, spans)
        if softmax is None:
            high, total = row_sums(problem, rows, spans, best)
        else:
            high, total = (pick(x, rows).unsqueeze(-1) for x in softmax)
        safe, log_total = torch.where(total == 0, 0.0, high), torch.where(total == 0, 1.0, total).log()
        real = None if self.real is None else pick(self.real, rows, 1)[:, None, :]
        sums = {name: problem.q.new_zeros(B, H, height, dtype=problem.dtype) for name in _SUMS}
        sums["peak"] -= 1
        peak_at = problem.q.new_full((B, H, height), -1, dtype=torch.int64)
        visible = torch.zeros_like(peak_at)
        for keys in spans:
            tile = score_tile(problem, rows, keys, best)
            A = softmax_tile(tile.logits, high, total)
            see = torch.ones_like(A, dtype=torch.bool) if tile.visible is None else tile.visible.expand(A.shape)
            A = torch.where(see, A, 0.0)
            visible += see.sum(-1)
            sums["entropy"] += torch.where(A == 0, 0.0, A * (log_total - (tile.logits - safe))).sum(-1)
            peak, at = torch.where(see, A, -1.0).max(-1)  # −1: a visible weight of 0 still ranks above a hidden key
            higher = (peak > sums["peak"]) | (peak.isnan() & ~sums["peak"].isnan())
            peak_at = torch.where(higher, at + keys.start, peak_at)
            sums["peak"] = torch.where(higher, peak, sums["peak"])
            self._place_sums(sums, A, rows, keys)
            counted = see if real is None else see & real.unsqueeze(-1)
            self._head_sums(A, counted, real, rows, keys)
            self._top(A, see, rows, keys)
        sinks = problem.scores.sinks
        if sinks is not None:
            logit = sinks.to(problem.dtype).view(1, H, 1, 1) - safe - log_total
            sums["entropy"] -= torch.where(logit == -math.inf, 0.0, torch.exp(logit) * logit).squeeze(-1)
        sums["peak"] = torch.where(peak_at < 0, 0.0, sums["peak"])
        for name, x in sums.items():
            self.rows[name][:, :, rows] = x
        counted = visible > 0
        counted = counted if real is None else counted & real
        self.rows["peak_at"][:, :, rows] = peak_at
        self.rows["visible"][:, :, rows] = visible
        self.rows["counted"][:, :, rows] = counted
        if self.observe.map:
            bins = self._row_bins(rows)
            self.map_rows.index_add_(1, bins, counted.sum(0))

    def _row_bins(self, rows: slice) -> Tensor:
        n = self.problem.sizes[2]
        return torch.arange(rows.start, rows.stop, device=self.map.device) * self.observe.map // n

    def _place_sums(self, sums: dict[str, Tensor], A: Tensor, rows: slice, keys: slice) -> None:
        line = self.places.line_offset(rows, keys)
        sums["offset"] += (A * line).sum(-1)
        axes, somewhere = self.places.offsets(rows, keys)
        if self.observe.grid is None:
            distance = line.abs()
        else:
            distance = torch.sqrt(sum((axis.to(A.dtype) ** 2 for axis in axes), A.new_zeros(())))
        sums["distance"] += torch.where(somewhere, A * distance, 0.0).sum(-1)
        sums["local"] += torch.where(somewhere & (distance <= self.observe.local), A, 0.0).sum(-1)
        if keys.start < self.observe.sink:
            sums["sink"] += A[..., : self.observe.sink - keys.start].sum(-1)

    def _head_sums(self, A: Tensor, counted: Tensor, real: Tensor | None, rows: slice, keys: slice) -> None:
        observe = self.observe
        if not (observe.key_mass or observe.map or self.sides):
            return
        A = A if real is None else torch.where(real.unsqueeze(-1), A, 0.0)
        total = A.sum(0, dtype=torch.float64)  # [H, rows, keys]
        if observe.key_mass:
            self.key_mass[:, keys] += total.sum(1)
        if observe.map:
            m = self.problem.sizes[3]
            key_bins = torch.arange(keys.start, keys.stop, device=A.device) * observe.map // m
            by_key = total.new_zeros(*total.shape[:2], observe.map).index_add_(2, key_bins, total)
            self.map.index_add_(1, self._row_bins(rows), by_key)
        if self.sides:
            self._profile(total, counted.sum(0, dtype=torch.float64), rows, keys)

    def _profile(self, total: Tensor, seen: Tensor, rows: slice, keys: slice) -> None:
        axes, inside = self.places.offsets(rows, keys)
        index = torch.zeros_like(axes[0])
        for axis, radius, side in zip(axes, self.observe.radii(), self.sides, strict=True):
            inside = inside & (axis.abs() <= radius)
            index = index * side + (axis + radius)
        if not bool(inside.any()):
            return
        flat = index[inside]
        self.profile.index_add_(1, flat, total[:, inside])
        self.profile_rows.index_add_(1, flat, seen[:, inside])

    def _top(self, A: Tensor, see: Tensor, rows: slice, keys: slice) -> None:
        if not self.observe.top:
            return
        at = torch.where(see, torch.arange(keys.start, keys.stop, device=A.device), -1)
        best, best_at = self.top[:, :, rows], self.top_at[:, :, rows]
        # Hidden and missing places rank below a visible weight of 0; a stable sort keeps lower keys first.
        rank = torch.cat([torch.where(best_at < 0, -1.0, best), torch.where(see, A, -1.0)], -1)
        order = rank.sort(dim=-1, descending=True, stable=True).indices[..., : self.observe.top]
        self.top[:, :, rows] = torch.cat([best, A], -1).gather(-1, order)
        self.top_at[:, :, rows] = torch.cat([best_at, at], -1).gather(-1, order)

    def result(self) -> dict[str, Tensor]:
        counted = self.rows["counted"]
        rows = counted.sum((0, 2))
        exact = result_dtype(self.problem.q.dtype)
        values = {name: x.to(exact) if x.is_floating_point() else x for name, x in self.rows.items()} | {"rows": rows}
        values["key_mass"] = (self.key_mass / rows.clamp(min=1).unsqueeze(-1)).to(exact)
        values["map"] = (self.map / self.map_rows.clamp(min=1).unsqueeze(-1)).to(exact)
        values["map_rows"] = self.map_rows
        values["profile"] = (self.profile / self.profile_rows.clamp(min=1)).to(exact).unflatten(1, self.sides or [1])
        values["profile_rows"] = self.profile_rows.long().unflatten(1, self.sides or [1])
        values["top"], values["top_at"] = self.top.to(exact), self.top_at
        return {name: values[name] for name in (*row_names(), *head_names(self.observe))}


def measure(
    q: Tensor,
    k: Tensor,
    softmax: tuple[Tensor, Tensor] | None,
    scores: Scores,
    observe: Observe,
    real: Tensor | None,
) -> dict[str, Tensor]:
    """Every observable but lse, by name. ``real``: bool ``[B or 1, n]``, the query rows that are no padding.

    ``softmax``: ``high`` and ``total`` as the reference finds them; None, to find them here. A kernel with another
    arithmetic has other sums, and weights made of both would not add up to 1.
    """
    problem = Problem(q, k, scores)
    measurement = _Measurement(problem, observe, real)
    for span, keys in tiles(problem):
        measurement.query_tile(span, keys, softmax)
    return measurement.result()
