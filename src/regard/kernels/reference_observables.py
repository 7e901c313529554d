"""Observables of the reference kernel: a second tiled pass over A = e^(s − row_max) / row_sum, never n × n.

``regard._observables`` defines each value. Sums over rows are kept in float64. A device without float64 sums in
float32: the relative error of a sum over T tiles of queries is then at most about T·2⁻²⁴. Counts are integers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._devices import widest_dtype
from regard._lowered_scores import NO_POSITION, Scores, positions_1d, positions_2d
from regard._observables import Observe
from regard.kernels.score_tiles import (
    Problem,
    convert_bias,
    iterate_tiles,
    largest_products,
    result_dtype,
    row_max_and_sum,
    score_tile,
    softmax_tile,
    take_span,
)

# The row values that are floating-point numbers, except lse, which comes from the forward pass.
FLOAT_ROWS = ("logit_max", "entropy", "peak", "offset", "distance", "sink", "local")


def observable_names(observe: Observe) -> tuple[str, ...]:
    """The observables that ``observe`` requests, in the order of ``measure``: row values, values per head, ``top``."""
    names = [*FLOAT_ROWS, "peak_at", "visible", "counted", "rows"]
    if observe.key_mass:
        names.append("key_mass")
    if observe.map:
        names += ["map", "map_rows"]
    if observe.profile is not None:
        names += ["profile", "profile_rows"]
    if observe.top:
        names += ["top", "top_at"]
    if observe.groups is not None:
        names.append("groups")
    return tuple(names)


def measure(
    q: Tensor,
    k: Tensor,
    softmax: tuple[Tensor, Tensor] | None,
    scores: Scores,
    observe: Observe,
    real_queries: Tensor | None,
) -> dict[str, Tensor]:
    """Every observable except lse, by name.

    - ``softmax``: row_max and row_sum of the reference's forward pass; None computes them here. Those of a kernel with
      another arithmetic would give weights that do not add up to 1.
    - ``observe``: its groups are those of this call (``Groups.for_call``).
    - ``real_queries``: bool ``[B or 1, n]``, the query rows that are not padding; None means all of them.
    """
    problem = Problem(q, k, scores)
    measurement = _Measurement(problem, observe, real_queries)
    for rows, spans in iterate_tiles(problem):
        measurement.add_rows(rows, spans, softmax)
    return measurement.result()


class _Offsets:
    """Offsets between queries and keys, on a line and on the axes of a grid."""

    def __init__(self, problem: Problem, observe: Observe) -> None:
        _, _, n, m = problem.sizes
        device = problem.q.device
        self.line = positions_1d(n, m, observe.offset, device)
        self.axes = [self.line]
        if observe.grid is not None:
            self.axes = list(positions_2d(n, m, *observe.grid, observe.offset, device))

    def on_line(self, rows: slice, keys: slice) -> Tensor:
        queries, key_positions = self.line
        return key_positions[keys] - queries[rows].unsqueeze(-1)

    def on_axes(self, rows: slice, keys: slice) -> tuple[list[Tensor], Tensor]:
        """δ along each axis for a tile, and which pairs have positions."""
        queries, key_positions = self.axes[0]
        has_position = (queries[rows].unsqueeze(-1) != NO_POSITION) & (key_positions[keys] != NO_POSITION)
        return [keys_on[keys] - queries_on[rows].unsqueeze(-1) for queries_on, keys_on in self.axes], has_position


class _Measurement:
    """The running sums of one pass over all tiles."""

    def __init__(self, problem: Problem, observe: Observe, real_queries: Tensor | None) -> None:
        B, H, n, m = problem.sizes
        self.problem = problem
        self.observe = observe
        self.real_queries = real_queries
        self.offsets = _Offsets(problem, observe)
        new = problem.q.new_zeros
        self.rows = {name: new(B, H, n, dtype=problem.dtype) for name in FLOAT_ROWS}
        self.rows["peak_at"] = new(B, H, n, dtype=torch.int64)
        self.rows["visible"] = new(B, H, n, dtype=torch.int64)
        self.rows["counted"] = new(B, H, n, dtype=torch.bool)
        self.wide = widest_dtype(problem.q.device)
        self.key_mass = new(H, m, dtype=self.wide)
        self.map = new(H, observe.map, observe.map, dtype=self.wide)
        self.map_rows = new(H, observe.map, dtype=torch.int64)
        self.profile_sides = [2 * radius + 1 for radius in observe.profile_radii()]
        self.profile = new(H, math.prod(self.profile_sides), dtype=self.wide)
        self.profile_rows = torch.zeros_like(self.profile, dtype=torch.int64)
        self.top = new(B, H, n, observe.top, dtype=problem.dtype)
        self.top_at = new(B, H, n, observe.top, dtype=torch.int64) - 1
        self.groups = new(B, H, n, len(observe.groups) if observe.groups is not None else 0, dtype=problem.dtype)

    def add_rows(self, rows: slice, spans: list[slice], softmax: tuple[Tensor, Tensor] | None) -> None:
        """Measure the rows of one tile of queries, key tile by key tile."""
        problem = self.problem
        B, H, _, _ = problem.sizes
        height = rows.stop - rows.start
        largest = largest_products(problem, rows, spans)
        if softmax is None:
            row_max, row_sum = row_max_and_sum(problem, rows, spans, largest)
        else:
            row_max = take_span(softmax[0], rows).unsqueeze(-1)
            row_sum = take_span(softmax[1], rows).unsqueeze(-1)
        # Rows without keys have row_max −inf and row_sum 0; these stand-ins keep their logarithms finite.
        safe_max = torch.where(row_sum == 0, 0.0, row_max)
        log_sum = torch.where(row_sum == 0, 1.0, row_sum).log()
        real = None
        if self.real_queries is not None:
            real = take_span(self.real_queries, rows, 1)[:, None, :]

        sums = {name: problem.q.new_zeros(B, H, height, dtype=problem.dtype) for name in FLOAT_ROWS}
        # −1: a visible weight of 0 ranks above a hidden key.
        sums["peak"] -= 1
        sums["logit_max"] -= math.inf
        peak_at = problem.q.new_full((B, H, height), -1, dtype=torch.int64)
        visible_keys = torch.zeros_like(peak_at)
        for keys in spans:
            tile = score_tile(problem, rows, keys, largest)
            A = softmax_tile(tile.logits, row_max, row_sum)
            if tile.visible is None:
                visible = torch.ones_like(A, dtype=torch.bool)
            else:
                visible = tile.visible.expand(A.shape)
            # 0 at hidden keys even if their weight is NaN.
            A = torch.where(visible, A, 0.0)
            visible_keys += visible.sum(-1)
            sums["entropy"] += torch.where(A == 0, 0.0, A * (log_sum - (tile.logits - safe_max))).sum(-1)

            peak, index = torch.where(visible, A, -1.0).max(-1)
            # Strictly larger: among equal weights the first tile, so the lowest key, wins. The first NaN wins over all.
            higher = (peak > sums["peak"]) | (peak.isnan() & ~sums["peak"].isnan())
            peak_at = torch.where(higher, index + keys.start, peak_at)
            sums["peak"] = torch.where(higher, peak, sums["peak"])
            logit_max = torch.where(visible, tile.logits, -math.inf).amax(-1)
            sums["logit_max"] = torch.maximum(sums["logit_max"], logit_max)
            self._add_offsets(sums, A, rows, keys)
            self._add_heads(A, visible, real, rows, keys)
            self._add_top(A, visible, rows, keys)
            self._add_groups(A, rows, keys)

        # A learned sink is one more outcome of the distribution.
        sinks = problem.scores.sinks
        if sinks is not None:
            log_weight = convert_bias(sinks, problem.dtype).view(1, H, 1, 1) - safe_max - log_sum
            weighted = torch.where(log_weight == -math.inf, 0.0, torch.exp(log_weight) * log_weight)
            sums["entropy"] -= weighted.squeeze(-1)
        sums["peak"] = torch.where(peak_at < 0, 0.0, sums["peak"])
        counted = visible_keys > 0
        if real is not None:
            counted = counted & real
        sums |= {"peak_at": peak_at, "visible": visible_keys, "counted": counted}
        for name, values in sums.items():
            self.rows[name][:, :, rows] = values
        if self.observe.map:
            self.map_rows.index_add_(1, self._row_bins(rows), counted.sum(0))

    def _row_bins(self, rows: slice) -> Tensor:
        n = self.problem.sizes[2]
        return torch.arange(rows.start, rows.stop, device=self.map.device) * self.observe.map // n

    def _add_offsets(self, sums: dict[str, Tensor], A: Tensor, rows: slice, keys: slice) -> None:
        """Row values that depend on where a key is relative to its query."""
        line = self.offsets.on_line(rows, keys)
        sums["offset"] += (A * line).sum(-1)
        axes, has_position = self.offsets.on_axes(rows, keys)
        if self.observe.grid is None:
            distance = line.abs()
        else:
            squares = [axis.to(A.dtype) ** 2 for axis in axes]
            distance = torch.sqrt(sum(squares, A.new_zeros(())))
        sums["distance"] += torch.where(has_position, A * distance, 0.0).sum(-1)
        sums["local"] += torch.where(has_position & (distance <= self.observe.local), A, 0.0).sum(-1)
        if keys.start < self.observe.sink:
            sums["sink"] += A[..., : self.observe.sink - keys.start].sum(-1)

    def _add_heads(self, A: Tensor, visible: Tensor, real: Tensor | None, rows: slice, keys: slice) -> None:
        """Values per head, summed over the rows that count."""
        observe = self.observe
        if not (observe.key_mass or observe.map or self.profile_sides):
            return
        if real is not None:
            A = torch.where(real.unsqueeze(-1), A, 0.0)
            visible = visible & real.unsqueeze(-1)
        total = A.sum(0, dtype=self.wide)  # [H, rows, keys]
        if observe.key_mass:
            self.key_mass[:, keys] += total.sum(1)
        if observe.map:
            m = self.problem.sizes[3]
            key_bins = torch.arange(keys.start, keys.stop, device=A.device) * observe.map // m
            by_key = total.new_zeros(*total.shape[:2], observe.map).index_add_(2, key_bins, total)
            self.map.index_add_(1, self._row_bins(rows), by_key)
        if self.profile_sides:
            self._add_profile(total, visible.sum(0), rows, keys)

    def _add_profile(self, total: Tensor, visible_rows: Tensor, rows: slice, keys: slice) -> None:
        axes, inside = self.offsets.on_axes(rows, keys)
        index = torch.zeros_like(axes[0])
        # One index over all axes, row-major.
        for axis, radius, side in zip(axes, self.observe.profile_radii(), self.profile_sides, strict=True):
            inside = inside & (axis.abs() <= radius)
            index = index * side + (axis + radius)
        if total.device.type != "cpu":
            self._add_profile_unselected(total, visible_rows, index, inside)
            return
        if not bool(inside.any()):
            return
        self.profile.index_add_(1, index[inside], total[:, inside])
        self.profile_rows.index_add_(1, index[inside], visible_rows[:, inside])

    def _add_profile_unselected(self, total: Tensor, visible_rows: Tensor, index: Tensor, inside: Tensor) -> None:
        """Add all pairs, with 0 for those outside: to select pairs, the CPU would wait for the device at every tile."""
        index = torch.where(inside, index, 0).flatten()
        self.profile.index_add_(1, index, torch.where(inside, total, 0.0).flatten(1))
        self.profile_rows.index_add_(1, index, torch.where(inside, visible_rows, 0).flatten(1))

    def _add_top(self, A: Tensor, visible: Tensor, rows: slice, keys: slice) -> None:
        if not self.observe.top:
            return
        indices = torch.where(visible, torch.arange(keys.start, keys.stop, device=A.device), -1)
        top = self.top[:, :, rows]
        top_at = self.top_at[:, :, rows]
        # Hidden and missing entries rank below a visible weight of 0; a stable sort keeps lower keys first.
        rank = torch.cat([torch.where(top_at < 0, -1.0, top), torch.where(visible, A, -1.0)], -1)
        order = rank.sort(dim=-1, descending=True, stable=True).indices[..., : self.observe.top]
        self.top[:, :, rows] = torch.cat([top, A], -1).gather(-1, order)
        self.top_at[:, :, rows] = torch.cat([top_at, indices], -1).gather(-1, order)

    def _add_groups(self, A: Tensor, rows: slice, keys: slice) -> None:
        """The weight of each row on each group: a product with a matrix of zeros and ones."""
        groups = self.observe.groups
        if groups is None:
            return
        numbers = torch.arange(len(groups), device=A.device)
        membership = (groups.labels[:, None, keys, None] == numbers).to(A.dtype)  # [B or 1, 1, keys, C]
        self.groups[:, :, rows] += A @ membership

    def result(self) -> dict[str, Tensor]:
        """Return all requested values, with means instead of sums."""
        rows = self.rows["counted"].sum((0, 2))
        # Without a profile these two are empty and not part of the result.
        sides = self.profile_sides or [1]
        values = self.rows | {
            "rows": rows,
            "key_mass": self.key_mass / rows.clamp(min=1).unsqueeze(-1),
            "map": self.map / self.map_rows.clamp(min=1).unsqueeze(-1),
            "map_rows": self.map_rows,
            "profile": (self.profile / self.profile_rows.clamp(min=1)).unflatten(1, sides),
            "profile_rows": self.profile_rows.unflatten(1, sides),
            "top": self.top,
            "top_at": self.top_at,
            "groups": self.groups,
        }
        exact = result_dtype(self.problem.q.dtype)
        results = {}
        for name in observable_names(self.observe):
            value = values[name]
            results[name] = value.to(exact) if value.is_floating_point() else value
        return results
