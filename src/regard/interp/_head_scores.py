"""Score heads from their exact weights A, and from A', which is A without its sinks, with rows rescaled to sum to 1.

    sink, sink4      mean_i Σ_{j < S} A_ij, S = 1 and 4         sinks        mean_i of the weight on all sink keys
    previous         mean_{i ≥ 1} A_{i, i−1}                    positional   share of rows whose largest weight lies at
    duplicate        mean_i Σ_{j < i, t_j = t_i} A_ij                        the most frequent offset
    copied           mean_{i ∈ later} Σ_{j ∈ same} A_ij         induction    mean_{i ∈ later} Σ_{j ∈ followers} A_ij
    spread           mean_i H_i / ln(keys visible to i)         distance     mean_i Σ_j A_ij |j − i|, on a grid ‖δ‖
    fit              1 − Σ (A_ij − p(j − i))² / Σ A_ij²         convolution  fit minus the fit of a uniform map
    centre, width    mean E[δ];  √mean Var[δ]                   p(δ)         mean of A_{i, i+δ} over rows that see it

``later`` are the rows of a repeated text from its second block on. ``same`` are the keys one or more blocks before a
query: they hold the query's token. ``followers`` are the keys directly after those.
A' leaves out the sink keys (the first token and special tokens), and rows with less than ``LEAST_REST`` on other keys.
With learned sinks, H_i is −Σ_j A ln A over the keys alone, and ``sinks`` includes the weight of the learned sinks.

One pass over A is enough: Σ (A − p)² over visible pairs is Σ A² − Σ_δ c(δ) p(δ)², where c counts the rows that see δ.
Sums by offset also give ``previous``, ``distance``, ``centre`` and E[δ²]. A' comes from the same pass: the sums leave
out the sink keys, and for A their part is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard._errors import RegardError
from regard._observables import Observation
from regard.interp._probes import Probe
from regard.interp._weight_rows import KeyOffsets, WeightRows, weight_rows

MOST_SPECIAL = 8  # class, distillation and register tokens of an image model
CELLS = 2**19  # weights of all heads of a layer that are in memory at once
SCORE_NAMES = (
    *("sink", "sink4", "sinks", "previous", "positional", "duplicate", "copied", "induction"),
    *("spread", "distance", "fit", "convolution", "width"),
)
TOKEN_SCORES = ("duplicate", "copied", "induction")  # scores of keys that are chosen by their tokens
# The scores that have a meaning between two sequences: there is no "previous" token in the other one.
CROSS_ATTENTION_SCORES = ("sink", "sink4", "sinks", "sinks chance", "value_weighted", "spread", "rest")
CHANCE_SCORES = ("copied chance", "induction chance")  # the same scores of a uniform map


@dataclass
class WeightSums:
    """Sums over rows, texts and processes for each head, of A or of A'; all float64."""

    offsets: Tensor  # [1 or 2, offsets] see KeyOffsets
    total: dict[str, Tensor] = field(default_factory=dict)

    def scores(self) -> dict[str, Tensor]:
        """Every score of ``SCORE_NAMES``, ``[H]``; NaN if no row can have this score."""
        t = self.total
        count = self.offsets.shape[1]  # the last column, of pairs without an offset, is left out
        rows = t["rows"]
        visible = t["visible by offset"][:, :count]
        A = t["A by offset"][:, :count]
        U = t["U by offset"][:, :count]
        fit = (A**2 / visible.clamp(min=1)).sum(-1) / t["A²"]
        uniform_fit = (U**2 / visible.clamp(min=1)).sum(-1) / t["U²"]
        is_previous = torch.zeros(count, dtype=torch.bool)
        if len(self.offsets) == 1:
            is_previous = self.offsets[0] == -1
        mean_square = A @ (self.offsets**2).sum(0)
        # Records of a training run store the scores in this order.
        scores = {name: t[name] / rows for name in ("sink", "sink4", "duplicate", "spread")}
        scores["distance"] = A @ self.offsets.norm(dim=0) / rows
        scores["previous"] = A[:, is_previous].sum(-1) / t["previous rows"]
        scores["previous chance"] = U[:, is_previous].sum(-1) / t["previous rows"]
        for name in ("copied", "induction", *CHANCE_SCORES):
            scores[name] = t[name] / t["later rows"]
        scores["positional"] = t["peaks"][:, :count].amax(-1) / rows
        scores["fit"] = fit
        scores["convolution"] = fit - uniform_fit
        # On a grid axis 0 goes down, and axis 1 across.
        for axis, delta in enumerate(self.offsets):
            scores[f"centre {axis}"] = A @ delta / rows
        scores["width"] = ((mean_square - t["mean²"]).clamp(min=0) / rows).sqrt()
        return scores

    def add(self, name: str, value: Tensor, span: slice | None = None) -> None:
        """Add ``[H]``, or ``[H, …]`` at a span of the offset indices."""
        if span is None:
            self.total.setdefault(name, torch.zeros_like(value, dtype=torch.float64)).add_(value)
            return
        # The last column is for pairs without an offset.
        zeros = torch.zeros(len(value), self.offsets.shape[1] + 1, dtype=torch.float64)
        self.total.setdefault(name, zeros)[:, span].add_(value)


@dataclass
class ScoreSums:
    """The sums of A (``raw``) and of A' (``clean``); ``value_weighted`` is None if no value norms were measured."""

    raw: WeightSums
    clean: WeightSums
    rest: Tensor  # [H] weight outside the sinks
    chance: Tensor  # [H] weight of a uniform map on the sinks
    value_weighted: Tensor | None  # [2, H] A·‖v W_O‖ on the sinks, and on all keys

    def tensors(self) -> list[Tensor]:
        """All sums, in an order that depends only on the model and the probe; processes add these up."""
        tensors = [*self.raw.total.values(), *self.clean.total.values(), self.rest, self.chance]
        if self.value_weighted is not None:
            tensors.append(self.value_weighted)
        return tensors

    def scores(self) -> dict[str, dict[str, Tensor]]:
        """``{"raw": …, "clean": …}``: the scores of A and of A', ``[H]`` each."""
        rows = self.raw.total["rows"]
        raw = self.raw.scores()
        raw["sinks"] = 1 - self.rest / rows
        raw["sinks chance"] = self.chance / rows
        if self.value_weighted is not None:
            raw["value_weighted"] = self.value_weighted[0] / self.value_weighted[1]
        clean = self.clean.scores()
        clean["rest"] = self.rest / rows
        return {"raw": raw, "clean": clean}

    def add(self, name: str, values: Tensor, span: slice | None = None) -> None:
        """Add ``[2, H, …]``, of A and of A'."""
        self.raw.add(name, values[0], span)
        self.clean.add(name, values[1], span)


def head_scores(
    observation: Observation, probe: Probe, grid: tuple[int, int] | None = None
) -> dict[str, dict[str, Tensor]]:
    """``{"raw": …, "clean": …}``: the scores of A and of A' of all observed heads, ``[H]`` each.

    - ``observation``: of one call, observed with ``Observe(keep=True)``.
    - ``probe``: the text that the model has read.
    - ``grid``: (height, width) of the patches of an image model.
    """
    return sum_scores(observation, probe, grid).scores()


def sum_scores(observation: Observation, probe: Probe, grid: tuple[int, int] | None = None) -> ScoreSums:
    """The sums from which ``head_scores`` computes its means, over all rows and texts."""
    n = observation.n
    m = observation.m
    if n is None or m is None or observation.counted is None or not observation.saved_calls:
        raise RegardError("scores need q and k of one call; observe with Observe(keep=True), and call the model once")
    if grid is not None and not 0 <= m - grid[0] * grid[1] <= MOST_SPECIAL:
        raise RegardError(
            f"grid is {grid}, which makes {grid[0] * grid[1]} patches, but there are {m} keys; "
            "give the model's own (height, width)"
        )
    heads = len(observation.heads)
    key_offsets = KeyOffsets(n, m, grid)
    norms = observation.value_norm

    # The sink keys: the special tokens of a text, or the tokens of an image model that are not patches.
    is_sink = torch.zeros(m, dtype=torch.bool)
    if grid is not None:
        is_sink[: m - grid[0] * grid[1]] = True
    elif len(probe.special) == m:
        is_sink = probe.special
    sinks = is_sink.nonzero().flatten()

    value_weighted = None
    if norms is not None:
        value_weighted = torch.zeros(2, heads, dtype=torch.float64)
    sums = ScoreSums(
        raw=WeightSums(key_offsets.offsets()),
        clean=WeightSums(key_offsets.offsets()),
        rest=torch.zeros(heads, dtype=torch.float64),
        chance=torch.zeros(heads, dtype=torch.float64),
        value_weighted=value_weighted,
    )
    with _single_thread():
        for batch in range(observation.counted.shape[0]):
            for rows in weight_rows(observation, batch, key_offsets, sinks, CELLS):
                indices = key_offsets.indices(rows.rows)
                _add_row_values(sums, rows, key_offsets, sinks, indices)
                _add_offsets(sums, rows, key_offsets, sinks, indices)
                _add_token_scores(sums, rows, probe, batch, key_offsets, sinks)
                if norms is not None:
                    _add_value_weighted(sums, rows, norms[batch].cpu().double(), sinks)
    return sums


@contextmanager
def _single_thread() -> Iterator[None]:
    """Run torch in one thread within the context.

    The tensors of one step are small. On a busy machine, threads that wait for each other at each of hundreds of small
    operations take ten times as long as one thread.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _add_value_weighted(sums: ScoreSums, rows: WeightRows, norm_HM: Tensor, sinks: Tensor) -> None:
    """Add A·‖v W_O‖ on the sinks, and on all keys."""
    assert sums.value_weighted is not None
    scale_H1R = rows.scale[0].unsqueeze(1)
    on_sinks = ((scale_H1R @ rows.sunk).squeeze(1) * norm_HM[:, sinks]).sum(-1)
    on_rest = ((scale_H1R @ rows.rest).squeeze(1) * norm_HM).sum(-1)
    sums.value_weighted += torch.stack([on_sinks, on_sinks + on_rest])


def _add_row_values(sums: ScoreSums, rows: WeightRows, key_offsets: KeyOffsets, sinks: Tensor, indices: Tensor) -> None:
    """Add the values of single rows: the weight on the first keys, the entropy, the mean offset, the peak's offset."""
    counts = rows.counts
    visible = rows.visible
    sums.add("rows", counts.sum(-1))
    sums.rest += (rows.scale[0] * rows.rest_sum).sum(-1)
    sums.chance += (counts[0] * (1 - visible[1] / visible[0].clamp(min=1))).sum(-1)
    for name, first in (("sink", 1), ("sink4", 4)):
        sums.add(name, rows.sums(rows.rest[..., :first].sum(-1), rows.sunk[..., sinks < first].sum(-1)))
    spread = torch.where(visible > 1, rows.entropy / visible.clamp(min=2).log(), 0.0)
    sums.add("spread", torch.where(counts, spread, 0.0).sum(-1))

    # The square of each row's mean offset; tokens outside of a grid have no offset.
    query, key = key_offsets.coordinates()
    for query_axis, key_axis in zip(query[rows.rows].T, key.T, strict=True):
        mean = rows.rest @ key_axis - query_axis * rows.rest_sum
        sinks_mean = torch.zeros_like(mean)
        if key_offsets.grid is None:
            sinks_mean = rows.sunk @ key_axis[sinks] - query_axis * rows.sunk_sum
        sums.add("mean²", (torch.stack([mean + sinks_mean, mean]) * rows.scale).square().sum(-1))

    # How often the largest weight of a row lies at each offset. The lowest of tied keys counts.
    largest, peak = rows.rest.max(-1)
    peaks = torch.stack([peak, peak])
    if len(sinks):
        largest_sink, which = rows.sunk.max(-1)
        sink = sinks[which]
        sink_wins = (largest_sink > largest) | ((largest_sink == largest) & (sink < peak))
        peaks[0] = torch.where(sink_wins, sink, peak)
    peak_indices = indices.gather(1, peaks.permute(2, 0, 1).flatten(1)).unflatten(1, peaks.shape[:2])  # [r, 2, H]
    histogram = torch.zeros(*peaks.shape[:2], key_offsets.count + 1, dtype=torch.float64)
    histogram.scatter_add_(2, peak_indices.permute(1, 2, 0), counts.double())
    sums.add("peaks", histogram, slice(None))


def _add_offsets(sums: ScoreSums, rows: WeightRows, key_offsets: KeyOffsets, sinks: Tensor, indices: Tensor) -> None:
    """Add sums by offset of A, of a uniform map U, and of the rows that see a key there; and Σ A², Σ U²."""
    heads = len(rows.rest)
    span = key_offsets.index_span(rows.rows)
    counts = rows.counts.double()
    uniform = rows.counts / rows.visible.clamp(min=1)
    weights = rows.scale.transpose(0, 1) @ key_offsets.by_offset(rows.rest, rows.rows, indices)  # [H, 2, offsets]
    sums.add("A by offset", weights.transpose(0, 1), span)

    # One product gives both sums over the visible keys outside the sinks: of counts, and of uniform weights.
    groups = rows.visible_keys.shape[1]
    visible = key_offsets.by_offset(rows.visible_keys[1].double(), rows.rows, indices)  # [1 or H, r, offsets]
    factors = torch.stack([counts, uniform], 2).permute(1, 0, 2, 3).reshape(groups, -1, visible.shape[1])
    count_sums, uniform_sums = (factors @ visible).reshape(heads, 2, 2, -1).permute(2, 1, 0, 3)
    sums.add("visible by offset", count_sums, span)
    sums.add("U by offset", uniform_sums, span)

    # On a grid the sinks have no offset, so the squares do not include them.
    rest_squares = torch.linalg.vecdot(rows.rest, rows.rest)
    sunk_squares = rows.sunk.square().sum(-1)
    visible_counts = rows.visible
    if key_offsets.grid is not None:
        sunk_squares = torch.zeros_like(rest_squares)
        visible_counts = rows.visible[1].expand_as(rows.visible)
    raw, clean = rows.scale.square()
    sums.add("A²", torch.stack([(raw * (rest_squares + sunk_squares)).sum(-1), (clean * rest_squares).sum(-1)]))
    sums.add("U²", (uniform.square() * visible_counts).sum(-1))

    # The sink keys belong to A alone.
    if len(sinks):
        sink_indices = indices[:, sinks].flatten()
        visible_sinks = rows.visible_keys[0][..., sinks]
        total = sums.raw.total
        total["A by offset"].index_add_(1, sink_indices, (rows.scale[0].unsqueeze(-1) * rows.sunk).flatten(1))
        total["visible by offset"].index_add_(1, sink_indices, (counts[0].unsqueeze(-1) * visible_sinks).flatten(1))
        total["U by offset"].index_add_(1, sink_indices, (uniform[0].unsqueeze(-1) * visible_sinks).flatten(1))


def _add_token_scores(
    sums: ScoreSums, rows: WeightRows, probe: Probe, batch: int, key_offsets: KeyOffsets, sinks: Tensor
) -> None:
    """Add the weights on keys that are chosen by their tokens: earlier copies of a token, and what followed them."""
    n = key_offsets.n
    m = key_offsets.m
    queries = torch.arange(n)[rows.rows]

    # The rows that have a previous token; in A' it must not be a sink.
    previous = queries + m - n - 1
    has_previous = torch.stack([previous >= 0, (previous >= 0) & ~torch.isin(previous, sinks)])
    if key_offsets.grid is not None:
        has_previous = torch.zeros_like(has_previous)
    sums.add("previous rows", (rows.counts & has_previous.unsqueeze(1)).sum(-1))

    # A layer that is called several times (shared weights) has read the same texts each time.
    ids = probe.ids[batch % len(probe.ids)]
    is_text = key_offsets.grid is None and n == m == len(ids)
    later = torch.zeros(len(queries), dtype=torch.bool)
    if is_text and probe.block:
        later = probe.later_rows()[queries]
    sums.add("later rows", (rows.counts & later).sum(-1))

    # Processes add up their sums by position, so every sum exists even if it stays 0.
    for name in (*TOKEN_SCORES, *CHANCE_SCORES):
        sums.add(name, torch.zeros_like(rows.scale[..., 0]))
    if not is_text:
        return
    copies = (ids[queries].unsqueeze(-1) == ids) & (torch.arange(m) < queries.unsqueeze(-1))
    chosen = [copies]
    if probe.block:
        chosen += [probe.matching_keys(shift, queries) & later.unsqueeze(-1) for shift in (0, 1)]
    keys_KRM = torch.stack(chosen)
    on_rest = torch.einsum("hrm,krm->khr", rows.rest, keys_KRM.double())
    on_sinks = torch.einsum("hrs,krs->khr", rows.sunk, keys_KRM[..., sinks].double())
    for k, name in enumerate(TOKEN_SCORES[: len(keys_KRM)]):
        sums.add(name, rows.sums(on_rest[k], on_sinks[k]))
        if k:
            chance = rows.counts / rows.visible.clamp(min=1) * (rows.visible_keys & keys_KRM[k]).sum(-1)
            sums.add(f"{name} chance", chance.sum(-1))
