"""Scores of all pairs of heads, computed for a pair of layers at a time and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.interp._circuits_scores import Ends, Kind, LayerFactors, MatchEnds, composition_scores, match_scores
from regard.interp._circuits_tokens import TokenVectors

KINDS: tuple[Kind, ...] = ("q", "k", "v")


@dataclass(frozen=True)
class Edge:
    """The composition of two heads.

    - ``kind``: "q", "k" or "v": what of the later head reads the output of the earlier one.
    - ``earlier``, ``later``: the heads as "layer.head".
    - ``value``: ‖OV₁ W₂‖ / (‖OV₁‖ ‖W₂‖), from 0 to 1. ``baseline``: its root mean square if the output of the earlier
      head is turned at random, 1/√D.
    - ``z``: how many standard deviations value² is above the mean of such turns.
    """

    kind: Kind
    earlier: str
    later: str
    value: float
    baseline: float
    z: float

    @property
    def excess(self) -> float:
        """``value − baseline``."""
        return self.value - self.baseline

    @property
    def ends(self) -> tuple[int, int, int, int]:
        """Layer and head of both ends."""
        layer, head = map(int, self.earlier.split("."))
        later, later_head = map(int, self.later.split("."))
        return layer, head, later, later_head


@dataclass(frozen=True)
class InductionPair:
    """A possible induction circuit: the earlier head moves each token one position on, the later one looks it up.

    - ``earlier``, ``later``: the heads as "layer.head".
    - ``previous``: the previous score of the earlier head. ``copying``: the copying score of the later one.
    - ``match``: how far the later head's score is above others, in deviations, where the earlier head has put the
      query's own token.
    - ``score``: their product, see ``Circuits.induction``.
    """

    earlier: str
    later: str
    previous: float
    match: float
    copying: float | None
    score: float


class PairScores:
    """The scores of all pairs of heads of which the later one reads the stream that the earlier one writes to."""

    def __init__(self, layers: Sequence[LayerFactors], tokens: TokenVectors | None) -> None:
        self.layers = layers
        self.tokens = tokens
        self._compositions: dict[Kind, list[Edge]] = {}

    def edges(self, kind: Kind, limit: int | None) -> list[Edge]:
        if kind not in self._compositions:
            self._compositions[kind] = self._compute_edges(kind)
        return self._compositions[kind][:limit]

    @torch.no_grad()
    def _compute_edges(self, kind: Kind) -> list[Edge]:
        edges = []
        for i, j in self._layer_pairs(kind):
            values, z = composition_scores(self._ends[i], self._ends[j], kind)
            baseline = self._ends[i].writes.shape[-1] ** -0.5
            for g, (row, z_row) in enumerate(zip(values.tolist(), z.tolist(), strict=True)):
                for h, value in enumerate(row):
                    edges.append(Edge(kind, f"{i}.{g}", f"{j}.{h}", value, baseline, z_row[h]))
        return sorted(edges, key=lambda edge: -edge.z)

    def induction(
        self,
        previous: Sequence[Tensor | None],
        copying: Sequence[Tensor | None],
        limit: int | None,
        with_copying: bool,
    ) -> list[InductionPair]:
        pairs = []
        for (i, j), matches in self._matches.items():
            moves = previous[i]
            if moves is None or previous[j] is None:
                continue
            copies = copying[j]
            copy_row = [None] * matches.shape[1]
            if copies is not None:
                copy_row = copies.tolist()
            for g, row in enumerate(matches.tolist()):
                for h, match in enumerate(row):
                    score = max(float(moves[g]), 0.0) * max(match, 0.0)
                    if with_copying:
                        score *= max(copy_row[h] or 0.0, 0.0)
                    pairs.append(InductionPair(f"{i}.{g}", f"{j}.{h}", float(moves[g]), match, copy_row[h], score))
        return sorted(pairs, key=lambda pair: -pair.score)[:limit]

    @cached_property
    def _ends(self) -> list[Ends]:
        return [Ends.of(factors) for factors in self.layers]

    @cached_property
    def _matches(self) -> dict[tuple[int, int], Tensor]:
        """The match scores of all pairs of self-attention layers."""
        found: dict[tuple[int, int], Tensor] = {}
        if self.tokens is None:
            return found
        with torch.no_grad():
            ends = [MatchEnds.of(factors, self.tokens) for factors in self.layers]
            for i, j in self._layer_pairs("k"):
                if not self.layers[i].layer.cross and not self.layers[j].layer.cross:
                    found[i, j] = match_scores(ends[i], ends[j])
        return found

    def _layer_pairs(self, kind: Kind) -> Iterator[tuple[int, int]]:
        """Pairs of layers of which the later one reads, as ``kind``, the stream that the earlier one writes to."""
        stacks = [stack_of(factors.layer.path) for factors in self.layers]
        for j, factors in enumerate(self.layers):
            read = stacks[j]
            if factors.layer.cross and kind != "q":
                # Keys and values of cross-attention come from the last stack before this one.
                others = [stack for stack in stacks[:j] if stack != stacks[j]]
                read = ""
                if others:
                    read = others[-1]
            for i in range(j):
                if stacks[i] == read:
                    yield i, j


def stack_of(path: str) -> str:
    """The stack that a layer belongs to: its path up to the first number.

    >>> stack_of("model.layers.3.self_attn")
    'model.layers'
    """
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:index])
    return ""
