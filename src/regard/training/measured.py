"""What all heads of a model do on the probes, as sums: over rows, texts and processes they add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.observables import Observation, Observe
from regard.training.records import WEIGHTS, Place
from regard.watching.probes import Probe
from regard.watching.scoring import Tally, tally
from regard.watching.table import COLUMNS
from regard.watching.visitor import UNSEEN
from regard.watching.watch import watch
from regard.watching.words import is_cross

__all__ = ["Measured", "measure"]

Call = Callable[[nn.Module, Tensor], Any]


@dataclass
class Habits:
    """Row values, map and profile of one place: sums over the rows that count, and how many rows there were."""

    values: Tensor  # [7, H]
    counts: Tensor  # [7, H]
    map: Tensor  # [H, g, g]
    map_rows: Tensor  # [H, g]
    profile: Tensor  # [H, 2r+1], on a grid [H, 2ry+1, 2rx+1]
    profile_rows: Tensor

    @classmethod
    def of(cls, x: Observation) -> Habits:
        assert x.counted is not None and x.visible is not None and x.entropy is not None
        assert x.map is not None and x.map_rows is not None and x.profile is not None and x.profile_rows is not None
        counted = x.counted.cpu()
        near = counted & x._on_grid().cpu() if x.observe.grid is not None else counted  # as Observation.mean counts
        values, counts = [], []
        for name in COLUMNS:
            rows = near if name == "distance" else counted
            if name == "spread":
                most = x.visible.cpu().double().log()
                value = torch.where(most > 0, x.entropy.cpu().double() / most, 0.0)
            else:
                value = getattr(x, name).cpu().double()
            values.append(torch.where(rows, value, 0.0).sum((0, 2)))
            counts.append(rows.sum((0, 2)).double())
        cells = [part.cpu().double() for part in (x.map, x.map_rows, x.profile, x.profile_rows)]
        map_sum, profile_sum = cells[0] * cells[1].unsqueeze(-1), cells[2] * cells[3]
        return cls(torch.stack(values), torch.stack(counts), map_sum, cells[1], profile_sum, cells[3])

    def tensors(self) -> list[Tensor]:
        return [self.values, self.counts, self.map, self.map_rows, self.profile, self.profile_rows]


@dataclass
class Measured:
    """The sums of every place: habits on the first probe, and what scores are made of on each."""

    habits: dict[str, Habits] = field(default_factory=dict)
    tallies: dict[str, dict[str, Tally]] = field(default_factory=dict)  # by probe and path
    places: dict[str, Place] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """All sums, float64, in the same order on every process."""
        found = [x for habits in self.habits.values() for x in habits.tensors()]
        return found + [x for by_path in self.tallies.values() for one in by_path.values() for x in one.tensors()]

    def values(self) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
        """The tensors of a record, and the names of its scores."""
        every = list(self.habits.values())
        tensors = {
            "means": torch.cat([(x.values / x.counts).T for x in every]),  # NaN for a head without rows
            "map": torch.cat([x.map / x.map_rows.clamp(min=1).unsqueeze(-1) for x in every]),
            "profile": torch.cat([x.profile / x.profile_rows.clamp(min=1) for x in every]),
        }
        names: dict[str, tuple[str, ...]] = {}
        for probe, by_path in self.tallies.items():
            scored = [by_path[path].scores() for path in self.places]
            for weights in WEIGHTS:
                table = f"{probe} {weights}"
                names[table] = tuple(dict.fromkeys(name for one in scored for name in one[weights]))
                tensors[table] = torch.cat([_columns(one[weights], names[table]) for one in scored])
        return tensors, names


def measure(
    model: nn.Module,
    probes: Sequence[Probe],
    call: Call,
    observe: Observe,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Measured:
    """This process's share of the sums: of each probe the texts ``rank``, ``rank + ranks`` …

    One that has no text of its own runs the first one with the others, for a model that is spread over processes is
    run by all of them, and adds nothing.
    """
    found = Measured()
    for at, probe in enumerate(probes):
        idle = rank >= len(probe.ids)
        mine = replace(probe, ids=probe.ids[:1] if idle else probe.ids[rank::ranks])
        asked = replace(observe, map=0, profile=None) if at else observe
        with watch(model, asked, values=True) as seen:
            call(model, mine.ids)
            if not seen:
                raise ValueError(f"{type(model).__name__} {UNSEEN}")
        sums: list[Tensor] = []
        for path in seen:
            observation = seen[path]
            if at == 0:
                _check(path, observation)
                found.habits[path] = Habits.of(observation)
                found.places[path] = _place(path, observation, is_cross(seen.about, path))
                sums += found.habits[path].tensors()
            elif path not in found.places:
                raise ValueError(f"{path} attended on the probe {probe.name!r} and not on {probes[0].name!r}")
            one = found.tallies.setdefault(probe.name, {})[path] = tally(observation, mine, observe.grid)
            sums += one.tensors()
        if len(found.tallies[probe.name]) < len(found.places):
            raise ValueError(f"some places attended on the probe {probes[0].name!r} and not on {probe.name!r}")
        for x in sums if idle else ():
            x.zero_()
    return found


def _check(path: str, x: Observation) -> None:
    if x.n is None or x.m is None or x.map is None or x.profile is None:
        raise ValueError(f"{path} was called several times on one probe, with unequal sizes; call the model once")


def _place(path: str, x: Observation, cross: bool) -> Place:
    assert x.n is not None and x.m is not None
    return Place(path, tuple(x.heads), x.n, x.m, cross)


def _columns(values: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """``[H, names]``; a score that was not taken at a place is NaN."""
    none = torch.full_like(next(iter(values.values())), torch.nan)
    return torch.stack([values.get(name, none) for name in names], 1)
