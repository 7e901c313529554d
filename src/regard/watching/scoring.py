"""The scores of heads, from exact weights; ``A'`` is A without its sinks, each row made to sum to 1 again.

    sink, sink4      mean_i Σ_{j < S} A_ij, S = 1 and 4         sinks        mean_i of the mass on all sink keys
    previous         mean_{i ≥ 1} A_{i, i−1}                    positional   share of rows whose largest weight lies at
    duplicate        mean_i Σ_{j < i, t_j = t_i} A_ij                        the one most frequent offset
    copied           mean_{i ∈ later} Σ_{j ∈ same} A_ij         induction    mean_{i ∈ later} Σ_{j ∈ followers} A_ij
    spread           mean_i H_i / ln(keys visible to i)         distance     mean_i Σ_j A_ij |j − i|, on a grid ‖δ‖
    fit              1 − Σ (A_ij − p(j − i))² / Σ A_ij²         convolution  fit less the fit of a uniform map
    centre, width    mean E[δ];  √mean Var[δ]                   p(δ)         mean of A_{i, i+δ} over rows that see it

``later`` are the rows of the second block of a repeated text and after; ``same`` the keys whole blocks before a query,
``followers`` the keys one after those: in a repeated text they hold the query's token, and the token that came next.
A' leaves out sink keys (the first token, and special tokens), and rows with less than ``LEAST`` on the others.
With learned sinks H_i is −Σ_j A ln A over the keys alone, and ``sinks`` holds their weight too.

Σ (A − p)² over visible pairs is Σ A² − Σ_δ c(δ) p(δ)², c counting the rows that see δ: one pass over A will do.
Sums by offset give ``previous``, ``distance``, ``centre`` and E[δ²] too. A' is A's rows divided by what is left of
them, so that both come from the same pass: sink keys are taken out of the weights, and added where A is meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.observables import Observation
from regard.watching.places import Where
from regard.watching.probes import Probe
from regard.watching.strips import Strip, strips

__all__ = ["NAMES", "Sums", "Tally", "score", "tally"]

SPECIAL = 8  # class, distillation and register tokens at most
CELLS = 2**19  # weights of all heads of a layer in hand at once
NAMES = (
    *("sink", "sink4", "sinks", "previous", "positional", "duplicate", "copied", "induction"),
    *("spread", "distance", "fit", "convolution", "width"),
)
LOOKED = ("duplicate", "copied", "induction")  # scores of keys that are told by their tokens


@dataclass
class Sums:
    """What adds up over rows, texts and processes, for each head; all float64."""

    offsets: Tensor  # [1 or 2, places] see Where
    total: dict[str, Tensor] = field(default_factory=dict)

    def scores(self) -> dict[str, Tensor]:
        """Every score of ``NAMES``, ``[H]``; NaN where no row could show it."""
        t, places = self.total, self.offsets.shape[1]
        rows, later, seen = t["rows"], t["later rows"], t["seen by place"][:, :places]  # the last place is nowhere
        A, U = (t[f"{name} by place"][:, :places] for name in ("A", "U"))
        fit, uniform = ((x**2 / seen.clamp(min=1)).sum(-1) / t[f"{y}²"] for x, y in ((A, "A"), (U, "U")))
        before = (self.offsets == -1).all(0) if len(self.offsets) == 1 else torch.zeros(places, dtype=torch.bool)
        second = A @ (self.offsets**2).sum(0)
        return {
            **{name: t[name] / rows for name in ("sink", "sink4", "duplicate", "spread")},
            "distance": A @ self.offsets.norm(dim=0) / rows,
            "previous": A[:, before].sum(-1) / t["previous rows"],
            "previous chance": U[:, before].sum(-1) / t["previous rows"],
            **{name: t[name] / later for name in ("copied", "induction", "copied chance", "induction chance")},
            "positional": t["peaks"][:, :places].amax(-1) / rows,
            "fit": fit,
            "convolution": fit - uniform,
            # On a grid: down, then across.
            **{f"centre {axis}": A @ delta / rows for axis, delta in enumerate(self.offsets)},
            "width": ((second - t["mean²"]).clamp(min=0) / rows).sqrt(),
        }

    def more(self, name: str, value: Tensor, where: slice | None = None) -> None:
        """Add ``[H]``, or ``[H, …]`` at some of the places."""
        if name not in self.total:
            size = value.shape if where is None else (len(value), self.offsets.shape[1] + 1)
            self.total[name] = torch.zeros(size, dtype=torch.float64)
        into = self.total[name]
        (into if where is None else into[:, where]).add_(value)


@dataclass
class Tally:
    """What adds up of A and of A'; ``moved`` is None where no values' norms were taken."""

    raw: Sums
    clean: Sums
    rest: Tensor  # [H]
    chance: Tensor  # [H]
    moved: Tensor | None  # [2, H] what sinks move, and what all keys do

    def tensors(self) -> list[Tensor]:
        """All of it, in an order that is the same for the same model and probe: what processes add up."""
        moved = [] if self.moved is None else [self.moved]
        return [*self.raw.total.values(), *self.clean.total.values(), self.rest, self.chance, *moved]

    def scores(self) -> dict[str, dict[str, Tensor]]:
        """``{"raw": …, "clean": …}``: the scores of A and of A', ``[H]`` each; see the module."""
        rows = self.raw.total["rows"]
        found = {"raw": self.raw.scores(), "clean": self.clean.scores()}
        found["raw"] |= {"sinks": 1 - self.rest / rows, "sinks chance": self.chance / rows}
        found["clean"]["rest"] = self.rest / rows
        if self.moved is not None:
            found["raw"]["moved"] = self.moved[0] / self.moved[1]
        return found

    def more(self, name: str, values: Tensor, where: slice | None = None) -> None:
        """``[2, H, …]`` of A and of A'."""
        self.raw.more(name, values[0], where)
        self.clean.more(name, values[1], where)


def score(observation: Observation, probe: Probe, grid: tuple[int, int] | None = None) -> dict[str, dict[str, Tensor]]:
    """``{"raw": …, "clean": …}``: the scores of A and of A' of all heads that were kept; see the module."""
    return tally(observation, probe, grid).scores()


def tally(observation: Observation, probe: Probe, grid: tuple[int, int] | None = None) -> Tally:
    """What ``score`` divides, before it is divided: of all heads that were kept, over all rows and texts."""
    n, m = observation.n, observation.m
    if n is None or m is None or observation.counted is None or not observation.kept:
        raise ValueError("scores need one call's q and k; observe with Observe(keep=True), and call the model once")
    if grid is not None and not 0 <= m - grid[0] * grid[1] <= SPECIAL:
        raise ValueError(
            f"grid is {grid}, {grid[0] * grid[1]} patches, but there are {m} keys: give the model's own (height, width)"
        )
    heads, where, norms = len(observation.heads), Where(n, m, grid), observation.value_norm
    if grid is not None:
        special = torch.arange(m) < m - grid[0] * grid[1]  # class tokens
    else:
        special = probe.special if len(probe.special) == m else torch.zeros(m, dtype=torch.bool)
    sinks = special.nonzero().flatten()
    moved = None if norms is None else torch.zeros(2, heads, dtype=torch.float64)
    zeros = torch.zeros(2, heads, dtype=torch.float64)
    found = Tally(Sums(where.offsets()), Sums(where.offsets()), zeros[0], zeros[1], moved)
    for batch in range(observation.counted.shape[0]):
        for strip in strips(observation, batch, where, sinks, CELLS):
            place = where.place(strip.rows)
            _add_rows(found, strip, where, sinks, place)
            _add_places(found, strip, where, sinks, place)
            _add_looked(found, strip, probe, batch, where, sinks)
            if norms is not None and moved is not None:
                norm, scale = norms[batch].cpu().double(), strip.scale[0].unsqueeze(1)  # [H, m], [H, 1, r]
                by_sinks = ((scale @ strip.sunk).squeeze(1) * norm[:, sinks]).sum(-1)
                moved += torch.stack([by_sinks, by_sinks + ((scale @ strip.rest).squeeze(1) * norm).sum(-1)])
    return found


def _add_rows(found: Tally, strip: Strip, where: Where, sinks: Tensor, place: Tensor) -> None:
    """What is said of single rows: the first keys, entropy, and where the mean and the peak stand."""
    counts, visible, rest, sunk = strip.counts, strip.visible, strip.rest, strip.sunk
    found.more("rows", counts.sum(-1))
    found.rest += (strip.scale[0] * strip.left).sum(-1)
    found.chance += (counts[0] * (1 - visible[1] / visible[0].clamp(min=1))).sum(-1)
    for name, first in (("sink", 1), ("sink4", 4)):
        found.more(name, strip.summed(rest[..., :first].sum(-1), sunk[..., sinks < first].sum(-1)))
    spread = torch.where(visible > 1, strip.entropy / visible.clamp(min=2).log(), 0.0)
    found.more("spread", torch.where(counts, spread, 0.0).sum(-1))
    query, key = where.coordinates()
    for at, axis in zip(query[strip.rows].T, key.T, strict=True):
        mean = rest @ axis - at * strip.left
        of_sinks = sunk @ axis[sinks] - at * strip.taken if where.grid is None else torch.zeros_like(mean)
        found.more("mean²", (torch.stack([mean + of_sinks, mean]) * strip.scale).square().sum(-1))
    highest, peak = rest.max(-1)
    peaks = torch.stack([peak, peak])
    if len(sinks):
        most, which = sunk.max(-1)
        peaks[0] = torch.where((most > highest) | ((most == highest) & (sinks[which] < peak)), sinks[which], peak)
    at = place.gather(1, peaks.permute(2, 0, 1).flatten(1)).unflatten(1, peaks.shape[:2])  # [r, 2, H]
    on = torch.zeros(*peaks.shape[:2], where.places + 1, dtype=torch.float64)
    found.more("peaks", on.scatter_add_(2, at.permute(1, 2, 0), counts.double()), slice(None))


def _add_places(found: Tally, strip: Strip, where: Where, sinks: Tensor, place: Tensor) -> None:
    """What is summed by offset: A, a uniform map U, how many rows see a key there; and Σ A², Σ U²."""
    rows, heads = strip.rows, len(strip.rest)
    span = where.span(rows)
    counts, uniform = strip.counts.double(), strip.counts / strip.visible.clamp(min=1)
    weights = strip.scale.transpose(0, 1) @ where.laid_out(strip.rest, rows, place)  # [H, 2, places]
    found.more("A by place", weights.transpose(0, 1), span)
    groups = strip.see.shape[1]
    seen = where.laid_out(strip.see[1].double(), rows, place)  # [1 or H, r, places]
    asked = torch.stack([counts, uniform], 2).permute(1, 0, 2, 3).reshape(groups, -1, seen.shape[1])
    by_place = (asked @ seen).reshape(heads, 2, 2, -1).permute(2, 1, 0, 3)
    for name, values in zip(("seen by place", "U by place"), by_place, strict=True):
        found.more(name, values, span)
    on = torch.zeros_like(strip.sunk[0]) if where.grid is not None else torch.ones_like(strip.sunk[0])
    squares = [torch.linalg.vecdot(strip.rest, strip.rest), (strip.sunk.square() * on).sum(-1)]
    raw, clean = strip.scale.square()
    found.more("A²", torch.stack([(raw * sum(squares)).sum(-1), (clean * squares[0]).sum(-1)]))
    many = strip.visible if where.grid is None else strip.visible[1].expand_as(strip.visible)
    found.more("U²", (uniform.square() * many).sum(-1))
    if len(sinks):  # of A, not of A'
        at = place[:, sinks].flatten()
        see = strip.see[0][..., sinks]
        for name, values in (
            ("A by place", strip.scale[0].unsqueeze(-1) * strip.sunk),
            ("seen by place", counts[0].unsqueeze(-1) * see),
            ("U by place", uniform[0].unsqueeze(-1) * see),
        ):
            found.raw.total[name].index_add_(1, at, values.flatten(1))


def _add_looked(found: Tally, strip: Strip, probe: Probe, batch: int, where: Where, sinks: Tensor) -> None:
    """What is told by tokens: earlier copies of a token, what followed them, and the token before."""
    at = torch.arange(where.n)[strip.rows]
    before = at + where.m - where.n - 1
    there = torch.stack([before >= 0, (before >= 0) & ~torch.isin(before, sinks)])  # a row after a sink has none
    there = there if where.grid is None else torch.zeros_like(there)
    found.more("previous rows", (strip.counts & there.unsqueeze(1)).sum(-1))
    ids = probe.ids[batch % len(probe.ids)]  # a layer that is called again (shared weights) has read the same texts
    text = where.grid is None and where.n == where.m == len(ids)
    later = probe.later()[at] if text and probe.block else torch.zeros(len(at), dtype=torch.bool)
    found.more("later rows", (strip.counts & later).sum(-1))
    for name in (*LOOKED, *(f"{name} chance" for name in LOOKED[1:])):
        found.more(name, torch.zeros_like(strip.scale[..., 0]))  # sums have the same names whatever is asked
    if not text:
        return
    copies = (ids[at].unsqueeze(-1) == ids) & (torch.arange(where.m) < at.unsqueeze(-1))
    told = [probe.earlier(shift, at) & later.unsqueeze(-1) for shift in (0, 1)] if probe.block else []
    keys = torch.stack([copies, *told])  # [K, r, m]
    looked = torch.einsum("hrm,krm->khr", strip.rest, keys.double())
    sunk = torch.einsum("hrs,krs->khr", strip.sunk, keys[..., sinks].double())
    for k, name in enumerate(LOOKED[: len(keys)]):
        found.more(name, strip.summed(looked[k], sunk[k]))
        if k:
            chance = strip.counts / strip.visible.clamp(min=1) * (strip.see & keys[k]).sum(-1)
            found.more(f"{name} chance", chance.sum(-1))
