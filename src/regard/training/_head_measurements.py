"""Measure all heads of a model on the probes, as sums that add up over rows, texts and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import RegardError
from regard._observables import Observation, Observe
from regard.interp._head_scores import ScoreSums, sum_scores
from regard.interp._head_table import HEAD_COLUMNS
from regard.interp._probes import Probe
from regard.interp._records import WEIGHTS, AttentionLayer
from regard.interp._register_observers import NO_VISIBLE_ATTENTION
from regard.interp._token_labels import is_cross_attention
from regard.interp._watch import watch

Call = Callable[[nn.Module, Tensor], Any]


@dataclass
class ObservableSums:
    """Row values, map and profile of one layer, summed over the counted rows, and the numbers of these rows.

    A row counts if it is a real query, not padding, and sees at least one key.
    """

    values: Tensor  # [7, H]
    counts: Tensor  # [7, H]
    map: Tensor  # [H, g, g]
    map_rows: Tensor  # [H, g]
    profile: Tensor  # [H, 2r+1], on a grid [H, 2ry+1, 2rx+1]
    profile_rows: Tensor

    @classmethod
    def from_observation(cls, x: Observation) -> ObservableSums:
        """Turn the means of an observation back into sums, in float64."""
        assert x.counted is not None and x.visible is not None and x.entropy is not None
        assert x.map is not None and x.map_rows is not None and x.profile is not None and x.profile_rows is not None
        counted = x.counted.cpu()
        with_distance = counted
        if x.observe.grid is not None:
            with_distance = counted & x._on_grid().cpu()  # as in Observation.mean: a class token has no distance

        values = []
        counts = []
        for name in HEAD_COLUMNS:
            rows = with_distance if name == "distance" else counted
            if name == "spread":
                largest = x.visible.cpu().double().log()
                value = torch.where(largest > 0, x.entropy.cpu().double() / largest, 0.0)
            else:
                value = getattr(x, name).cpu().double()
            values.append(torch.where(rows, value, 0.0).sum((0, 2)))
            counts.append(rows.sum((0, 2)).double())

        map_rows = x.map_rows.cpu().double()
        map_sum = x.map.cpu().double() * map_rows.unsqueeze(-1)
        profile_rows = x.profile_rows.cpu().double()
        profile_sum = x.profile.cpu().double() * profile_rows
        return cls(torch.stack(values), torch.stack(counts), map_sum, map_rows, profile_sum, profile_rows)

    def tensors(self) -> list[Tensor]:
        return [self.values, self.counts, self.map, self.map_rows, self.profile, self.profile_rows]


@dataclass
class HeadSums:
    """The sums of all layers: observables on the first probe, and scores on every probe."""

    observables: dict[str, ObservableSums] = field(default_factory=dict)  # by path
    scores: dict[str, dict[str, ScoreSums]] = field(default_factory=dict)  # by probe and path
    layers: dict[str, AttentionLayer] = field(default_factory=dict)  # by path

    def tensors(self) -> list[Tensor]:
        """Return all sums, float64, in the same order in every process."""
        tensors: list[Tensor] = []
        for observables in self.observables.values():
            tensors += observables.tensors()
        for by_path in self.scores.values():
            for sums in by_path.values():
                tensors += sums.tensors()
        return tensors

    def means(self) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
        """Divide the sums: return the tensors of a record, and the names of its scores by table."""
        sums = list(self.observables.values())
        tensors = {
            "means": torch.cat([(x.values / x.counts).T for x in sums]),  # NaN for a head without rows
            "map": torch.cat([x.map / x.map_rows.clamp(min=1).unsqueeze(-1) for x in sums]),
            "profile": torch.cat([x.profile / x.profile_rows.clamp(min=1) for x in sums]),
        }
        names: dict[str, tuple[str, ...]] = {}
        for probe, by_path in self.scores.items():
            scores = [by_path[path].scores() for path in self.layers]
            for weights in WEIGHTS:
                table = f"{probe} {weights}"
                columns: dict[str, None] = {}  # a dictionary keeps the order of the names
                for layer_scores in scores:
                    columns |= dict.fromkeys(layer_scores[weights])
                names[table] = tuple(columns)
                tensors[table] = torch.cat([_score_table(x[weights], names[table]) for x in scores])
        return tensors, names


def measure_heads(
    model: nn.Module, probes: Sequence[Probe], call: Call, observe: Observe, *, rank: int = 0, ranks: int = 1
) -> HeadSums:
    """Compute this process's share of the sums: the texts ``rank``, ``rank + ranks`` … of each probe.

    A process without a text of its own runs the first text and adds nothing to the sums: if the model is sharded over
    the processes, all of them must run it.
    """
    sums = HeadSums()
    for probe in probes:
        is_first = probe is probes[0]
        idle = rank >= len(probe.ids)
        own = replace(probe, ids=probe.ids[rank::ranks])
        if idle:
            own = replace(probe, ids=probe.ids[:1])
        # Maps and profiles are those of the first probe, the natural text.
        options = observe
        if not is_first:
            options = replace(observe, map=0, profile=None)
        with watch(model, options, values=True) as recording:
            call(model, own.ids)
            if not recording:
                raise RegardError(f"{type(model).__name__} {NO_VISIBLE_ATTENTION}")

        scores = sums.scores.setdefault(probe.name, {})
        for path in recording:
            observation = recording[path]
            if is_first:
                cross = is_cross_attention(recording.metadata, path)
                sums.layers[path] = _attention_layer(path, observation, cross)
                sums.observables[path] = ObservableSums.from_observation(observation)
            # Every probe must reach the same layers, or the tables of scores would have gaps.
            elif path not in sums.layers:
                raise RegardError(f"{path} computed attention on the probe {probe.name!r}, not on {probes[0].name!r}")
            scores[path] = sum_scores(observation, own, observe.grid)
        if len(scores) < len(sums.layers):
            missing = min(sums.layers.keys() - scores.keys())
            raise RegardError(f"{missing} computed attention on the probe {probes[0].name!r}, not on {probe.name!r}")

        if idle:
            # The text belongs to another process, which adds it.
            for path, score_sums in scores.items():
                borrowed = score_sums.tensors()
                if is_first:
                    borrowed += sums.observables[path].tensors()
                for x in borrowed:
                    x.zero_()
    return sums


def _attention_layer(path: str, x: Observation, cross: bool) -> AttentionLayer:
    if x.n is None or x.m is None or x.map is None or x.profile is None:
        raise RegardError(f"{path} was called several times with different sizes on one probe; it must be called once")
    return AttentionLayer(path, tuple(x.heads), x.n, x.m, cross)


def _score_table(scores: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return ``[H, names]``; a score that a layer does not have is NaN."""
    missing = torch.full_like(next(iter(scores.values())), torch.nan)
    return torch.stack([scores.get(name, missing) for name in names], 1)
