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
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regard.observables import Observation
from regard.watching.probes import Probe

__all__ = ["NAMES", "Sums", "Tally", "score", "tally"]

LEAST = 1e-3  # of a row's weight must lie outside the sinks for the rest to mean anything
SPECIAL = 8  # class, distillation and register tokens at most
CELLS = 2**22  # weights of all heads of a layer in memory at once
NAMES = (
    *("sink", "sink4", "sinks", "previous", "positional", "duplicate", "copied", "induction"),
    *("spread", "distance", "fit", "convolution", "width"),
)


@dataclass(frozen=True)
class Asked:
    """What is known of the rows ``at`` of one text before any weight is: who may be looked at, and who is who."""

    counted: Tensor  # [r]
    see: Tensor  # [H or 1, r, m]
    place: Tensor  # [r, m] the number of a pair's offset
    distance: Tensor  # [r, m]
    delta: Tensor  # [1 or 2, r, m] where a key stands relative to its query, on a line or on a grid
    previous: Tensor  # [r, m] bool
    duplicate: Tensor
    later: Tensor  # [r] bool
    same: Tensor  # [r, m] bool
    followers: Tensor


@dataclass
class Sums:
    """What adds up over rows and texts, for each head."""

    heads: int
    places: int
    total: dict[str, Tensor] = field(default_factory=dict)

    def add(self, A: Tensor, see: Tensor, rows: Tensor, asked: Asked) -> None:
        """``A [H, r, m]`` in float64, 0 where not seen; ``rows [H, r]`` those that count."""
        A = torch.where(rows.unsqueeze(-1), A, 0.0)
        seen = see & rows.unsqueeze(-1)
        visible = seen.sum(-1).double()
        uniform = torch.where(seen, 1 / visible.clamp(min=1).unsqueeze(-1), 0.0)
        keys = A.shape[-1]
        self._more("rows", rows.sum(-1))
        self._more("sink", A[..., :1].sum((-1, -2)))
        self._more("sink4", A[..., : min(4, keys)].sum((-1, -2)))
        self._more("previous", (A * asked.previous).sum((-1, -2)))
        self._more("previous rows", (rows & asked.previous.any(-1)).sum(-1))
        self._more("duplicate", (A * asked.duplicate).sum((-1, -2)))
        later = rows & asked.later
        self._more("later rows", later.sum(-1))
        for name, keys_of in (("copied", asked.same), ("induction", asked.followers)):
            self._more(name, (A * (keys_of & asked.later.unsqueeze(-1))).sum((-1, -2)))
            self._more(f"{name} chance", (uniform * (keys_of & asked.later.unsqueeze(-1))).sum((-1, -2)))
        self._more("previous chance", (uniform * asked.previous).sum((-1, -2)))
        entropy = -torch.special.xlogy(A, A).sum(-1)
        self._more("spread", torch.where(visible > 1, entropy / visible.clamp(min=2).log(), 0.0).sum(-1))
        self._more("distance", (A * asked.distance).sum((-1, -2)))
        for axis, delta in enumerate(asked.delta):
            mean = (A * delta).sum(-1)
            self._more(f"centre {axis}", mean.sum(-1))
            self._more("variance", ((A * delta**2).sum(-1) - mean**2).clamp(min=0).sum(-1))
        peaks = asked.place.expand_as(A).gather(-1, A.argmax(-1, keepdim=True)).squeeze(-1)
        on = torch.zeros(self.heads, self.places + 1, dtype=torch.float64, device=A.device)
        self._more("peaks", on.scatter_add(1, peaks, rows.double()))
        for name, map_ in (("A", A), ("U", uniform)):
            self._more(f"{name} by place", self._by_place(map_, asked))
            self._more(f"{name}²", (map_ * map_ * (asked.place < self.places)).sum((-1, -2)))
        self._more("seen by place", self._by_place(seen.double(), asked))

    def scores(self) -> dict[str, Tensor]:
        """Every score of ``NAMES``, ``[H]``; NaN where no row could show it."""
        t = self.total
        rows = t["rows"].double()
        fits = {}
        for name in ("A", "U"):
            mean = t[f"{name} by place"] / t["seen by place"].clamp(min=1)
            explained = (t["seen by place"] * mean**2)[:, : self.places].sum(-1)  # the last place is nowhere
            fits[name] = explained / t[f"{name}²"]
        later = t["later rows"].double()
        return {
            **{name: t[name] / rows for name in ("sink", "sink4", "duplicate", "spread", "distance")},
            "previous": t["previous"] / t["previous rows"],
            "previous chance": t["previous chance"] / t["previous rows"],
            **{name: t[name] / later for name in ("copied", "induction", "copied chance", "induction chance")},
            "positional": t["peaks"][:, : self.places].amax(-1) / rows,
            "fit": fits["A"],
            "convolution": fits["A"] - fits["U"],
            # On a grid: down, then across.
            **{name: x / rows for name, x in t.items() if name.startswith("centre")},
            "width": (t["variance"] / rows).sqrt(),
        }

    def _more(self, name: str, value: Tensor) -> None:
        value = value.double()
        self.total[name] = self.total[name] + value if name in self.total else value

    def _by_place(self, x: Tensor, asked: Asked) -> Tensor:
        found = torch.zeros(self.heads, self.places + 1, dtype=torch.float64, device=x.device)
        return found.index_add_(1, asked.place.flatten(), x.expand(self.heads, -1, -1).flatten(1))


@dataclass
class Tally:
    """What adds up of A and of A', over rows, texts and processes; ``moved`` is None where no values' norms were taken."""

    raw: Sums
    clean: Sums
    rest: Tensor  # [H]
    chance: Tensor
    moved: Tensor | None  # [2, H] what sinks move, and what all keys do

    def tensors(self) -> list[Tensor]:
        """All of it, float64, in an order that is the same for the same model and probe: what processes add up."""
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


def score(observation: Observation, probe: Probe, grid: tuple[int, int] | None = None) -> dict[str, dict[str, Tensor]]:
    """``{"raw": …, "clean": …}``: the scores of A and of A' of all heads that were kept; see the module."""
    return tally(observation, probe, grid).scores()


def tally(observation: Observation, probe: Probe, grid: tuple[int, int] | None = None) -> Tally:
    """What ``score`` divides, before it is divided: of all heads that were kept, over all rows and texts."""
    n, m = observation.n, observation.m
    if n is None or m is None or observation.counted is None or not observation.kept:
        raise ValueError("scores need one call's q and k; observe with Observe(keep=True), and call the model once")
    heads = len(observation.heads)
    if grid is not None and not 0 <= m - grid[0] * grid[1] <= SPECIAL:
        raise ValueError(
            f"grid is {grid}, {grid[0] * grid[1]} patches, but there are {m} keys: give the model's own (height, width)"
        )
    places = n + m - 1 if grid is None else (2 * grid[0] - 1) * (2 * grid[1] - 1)
    raw, clean = Sums(heads, places), Sums(heads, places)
    rest_sum, chance = torch.zeros(2, heads, dtype=torch.float64)
    if grid is not None:
        special = torch.arange(m) < m - grid[0] * grid[1]  # class tokens
    else:
        special = probe.special if len(probe.special) == m else torch.zeros(m, dtype=torch.bool)
    moved = torch.zeros(2, heads, dtype=torch.float64)
    for batch in range(observation.counted.shape[0]):
        for at, asked in _strips(observation, probe, batch, grid, places):
            A = torch.stack([observation.weights(h, at, batch=batch) for h in observation.heads]).double().cpu()
            rows = asked.counted.expand(heads, -1) & asked.see.any(-1)
            raw.add(A, asked.see.expand(heads, -1, -1), rows, asked)
            rest = A.masked_fill(special, 0.0)
            mass = rest.sum(-1, keepdim=True)
            chance += (asked.see & special).sum(-1).div(asked.see.sum(-1).clamp(min=1)).mul(rows).sum(-1).double()
            rest_sum += torch.where(rows, mass.squeeze(-1), 0.0).sum(-1)
            some = rows & (mass.squeeze(-1) >= LEAST)
            others = replace(asked, previous=asked.previous & ~special)  # a row after a sink has no token before it
            clean.add(rest / mass.clamp(min=LEAST), (asked.see & ~special).expand(heads, -1, -1), some, others)
            if observation.value_norm is not None:
                weighed = torch.where(rows, A.transpose(0, 2).transpose(1, 2), 0.0)  # [m, H, r]
                norms = observation.value_norm[batch].double().cpu().T.unsqueeze(-1)  # [m, H, 1]
                moved += torch.stack([(weighed * norms)[special].sum((0, 2)), (weighed * norms).sum((0, 2))])
    return Tally(raw, clean, rest_sum, chance, None if observation.value_norm is None else moved)


def _strips(
    observation: Observation, probe: Probe, batch: int, grid: tuple[int, int] | None, places: int
) -> Iterator[tuple[Tensor, Asked]]:
    n, m, heads = observation.n, observation.m, len(observation.heads)
    assert n is not None and m is not None and observation.counted is not None
    ids = probe.ids[batch % len(probe.ids)]  # a layer that is called again (shared weights) has read the same texts
    step = max(1, CELLS // (heads * m))
    for i in range(0, n, step):
        at = torch.arange(i, min(i + step, n))
        see = torch.stack([observation.sees(h, at, batch=batch) for h in observation.heads]).cpu()
        delta, distance, place = _offsets(at, n, m, grid, places)
        none = torch.zeros(len(at), m, dtype=torch.bool)
        same = duplicate = followers = none
        later = torch.zeros(len(at), dtype=torch.bool)
        text = grid is None and n == m == len(ids)
        if text:
            duplicate = (ids[at].unsqueeze(-1) == ids) & (delta[0] < 0)
        if text and probe.block:
            same, followers, later = probe.earlier(0, at), probe.earlier(1, at), probe.later()[at]
        counted = observation.counted[batch].any(0).cpu()[at]  # a head's own empty rows are told by what it sees
        if grid is not None:
            counted = counted & (place < places).any(-1)  # a class token stands nowhere
        previous = delta[0] == -1 if grid is None else none
        yield at, Asked(counted, see, place, distance, delta, previous, duplicate, later, same, followers)


def _offsets(at: Tensor, n: int, m: int, grid: tuple[int, int] | None, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """``delta, distance, place``; a pair that stands nowhere on the grid has the place behind the last."""
    query, key = at.unsqueeze(-1) + m - n, torch.arange(m)
    if grid is None:
        delta = key - query
        return delta.unsqueeze(0), delta.abs(), delta + m - 1
    height, width = grid
    first = m - height * width
    on = (query >= first) & (key >= first)
    down = torch.div(key - first, width, rounding_mode="floor") - torch.div(query - first, width, rounding_mode="floor")
    across = (key - first) % width - (query - first) % width
    place = torch.where(on, (down + height - 1) * (2 * width - 1) + across + width - 1, places)
    delta = torch.where(on, torch.stack([down, across]), 0)
    return delta, (delta**2).sum(0).double().sqrt(), place
