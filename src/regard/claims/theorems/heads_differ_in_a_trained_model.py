"""Heads of a trained model look at different things; those of an untrained one do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from regard.claims.claim import HOLDS, Claim, Evidence
from regard.claims.statistics import Interval, mean
from regard.claims.theorems.heads_evolve import WATCHED
from regard.models import bundled, create, load
from regard.models.model import Model
from regard.observables import Observe
from regard.training import Evolution, evolution, train
from regard.watching import watch
from regard.watching.probes import Reader, natural

SEEDS, STEPS = 3, 1500  # trainings of the long version


def untrained(folder: Path, seed: int) -> nn.Module:
    """A new model of the same config."""
    torch.manual_seed(seed)
    return create(json.loads((folder / "config.json").read_text()))


def maps(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Exact weights of each layer, ``[B, H, n, n]``."""
    model.eval()
    with torch.no_grad(), watch(model, Observe(keep=True)) as seen:
        model(ids)
    return [
        torch.stack([torch.stack([one.weights(h, batch=b) for h in one.heads]) for b in range(len(ids))])
        for one in seen.values()
    ]


def pairs_of(layer: Tensor) -> list[tuple[int, int]]:
    """All pairs of a layer's heads."""
    return list(combinations(range(layer.shape[1]), 2))


def apart(layers: list[Tensor]) -> Tensor:
    """``½ Σ_j |A^g_ij − A^h_ij|``, the mean over rows and over pairs of heads of a layer: one number a text."""
    pairs = [(layer[:, g] - layer[:, h]).abs().sum(-1).mean(-1) / 2 for layer in layers for g, h in pairs_of(layer)]
    return torch.stack(pairs).mean(0)


def kinds_of(record: Evolution, at: int) -> list[set[str]]:
    """What each head is sure to be, averaging left out: heads begin so."""
    return [set(one) - {"averaging"} for one in record.labels[at]]


def check(
    *,
    texts: int = 8,
    tokens: int = 64,
    least: float = 0.3,
    seed: int = 0,
    full: bool = False,
    trained: Callable[[], Model] = lambda: load(bundled()),
    record: Callable[[], Evolution] = lambda: evolution(bundled()),
    learn: Callable[..., Any] = train,
) -> Evidence:
    """Distances between the heads of the model that comes with the package, and of an untrained twin; what kinds
    its heads became. ``full``: the same of three models trained on the spot.
    """
    found = Evidence()
    model = trained()
    ids = natural(Reader(model.text), tokens, texts).ids
    _compare(found, "the bundled model", maps(model, ids), maps(untrained(bundled(), seed), ids), least)
    _kinds(found, "the bundled model", record())
    for other in range(seed, seed + SEEDS) if full else ():
        with TemporaryDirectory() as folder:
            learn("text", f"{folder}/run", {"seed": other, "steps": STEPS, **WATCHED})
            own = Path(folder) / "run" / "model"
            model = load(own)
            ids = natural(Reader(model.text), tokens, texts).ids
            _compare(found, f"text, seed {other}", maps(model, ids), maps(untrained(own, other), ids), least)
            _kinds(found, f"text, seed {other}", evolution(f"{folder}/run"))
    return found


def _compare(found: Evidence, name: str, after: list[Tensor], before: list[Tensor], least: float) -> None:
    far, near = mean(apart(after)), mean(apart(before))
    found.written(
        f"{name}: heads of a layer differ, by {least:g} of 1 at least, and more than untrained ones",
        far.low > max(least, near.high),
        f"{name}: two heads of a layer differ in {far.value:.2f} of their weight, untrained in {near.value:.3f}",
    )
    found.control(f"{name}, untrained: heads differ by {least:g} at least", near.low > least, f"they differ in {near}")
    least_apart = min(float(apart([layer[:, list(pair)]]).mean()) for layer in after for pair in pairs_of(layer))
    found.numbers |= {f"{name}, trained": far.value, f"{name}, untrained": near.value}
    found.numbers[f"{name}, the two heads of a layer that are most alike"] = least_apart
    lines = {title: _by_layer(layers) for title, layers in (("trained", after), ("untrained", before))}
    found.draw(f"{name}: the distance between two heads of a layer", lines, x="layer", y="½ Σ |A − A'|")


def _by_layer(layers: list[Tensor]) -> list[list[float]]:
    each: list[Interval] = [mean(apart([layer])) for layer in layers]
    return [[float(at) for at in range(len(layers))], *([float(x) for x in part] for part in zip(*each, strict=True))]


def _kinds(found: Evidence, name: str, record: Evolution) -> None:
    """Labels at the last record; at the first there are none."""
    last, first = kinds_of(record, -1), kinds_of(record, 0)
    all_of, at_first = set().union(*last), set().union(*first)
    found.written(
        f"{name}: heads took three kinds or more",
        len(all_of) >= 3,
        f"{name}: {', '.join(sorted(all_of)) or 'none'}",
    )
    sets = {frozenset(one) for one in last if one}
    found.written(f"{name}: and not all the same", len(sets) >= 2, f"{len(sets)} different sets of kinds")
    found.control(f"{name}, before training: three kinds or more", len(at_first) >= 3, f"{len(at_first)} at step 0")
    found.numbers |= {f"{name}, kinds": len(all_of), f"{name}, kinds at step 0": len(at_first)}


CLAIM = Claim(
    id="heads-differ-in-a-trained-model",
    sources=("001", "002"),
    statement="Different heads of a trained model learn different relations between positions.",
    formula=r"\frac{1}{2} \sum_j \left| A^{(g)}_{ij} - A^{(h)}_{ij} \right| \gg 0 \quad (g \ne h)",
    refuted="Heads of one layer whose weights differ no more than those of an untrained model, or all of one kind.",
    control="An untrained model with the same configuration, and the model's own heads at step 0.",
    verdict=HOLDS,
    check=check,
)
