"""Checks that the heads of a trained model attend differently, unlike the heads of an untrained model."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._observables import Observe
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims._statistics import mean_interval
from regard.claims.theorems.heads_evolve import train_models
from regard.interp import watch
from regard.interp._probes import ProbeTokenizer, natural_probe
from regard.models import bundled, create, load
from regard.models._model import Model
from regard.training import Evolution, evolution, train


def untrained_model(folder: Path, seed: int) -> nn.Module:
    """A new model with the configuration of a saved one."""
    torch.manual_seed(seed)
    return create(json.loads((folder / "config.json").read_text()))


def attention_weights(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The exact weights of each layer, ``[B, H, n, n]``."""
    model.eval()
    with torch.no_grad(), watch(model, Observe(keep=True)) as recording:
        model(ids)
    layers = []
    for observation in recording.values():
        texts = []
        for text in range(len(ids)):
            texts.append(torch.stack([observation.weights(head, batch=text) for head in observation.heads]))
        layers.append(torch.stack(texts))
    return layers


def head_distances(layer: Tensor) -> Tensor:
    """``½ Σ_j |A^g_ij − A^h_ij|`` for all pairs of heads, averaged over rows: ``[pairs, B]``."""
    pairs = combinations(range(layer.shape[1]), 2)
    return torch.stack([(layer[:, g] - layer[:, h]).abs().sum(-1).mean(-1) / 2 for g, h in pairs])


def mean_distance(layers: list[Tensor]) -> Tensor:
    """The mean distance over all pairs of heads of a layer, one number per text."""
    return torch.cat(list(map(head_distances, layers))).mean(0)


def learned_types(record: Evolution, index: int) -> list[set[str]]:
    """The types of each head at one record, without "averaging", the type of untrained heads."""
    return [set(labels) - {"averaging"} for labels in record.labels[index]]


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
    """Compare the heads of the bundled model with those of an untrained copy, and list the types of its heads.

    ``full``: do the same for three models that are trained here.
    """
    evidence = Evidence()
    _compare(evidence, "the bundled model", trained(), untrained_model(bundled(), seed), (tokens, texts), least)
    _check_types(evidence, "the bundled model", record())
    if full:
        for model_seed, run in train_models(learn, "text", seed, {"steps": 1500}):
            name = f"text, seed {model_seed}"
            untrained = untrained_model(run / "model", model_seed)
            _compare(evidence, name, load(run / "model"), untrained, (tokens, texts), least)
            _check_types(evidence, name, evolution(run))
    return evidence


def _compare(
    evidence: Evidence, name: str, model: Model, untrained: nn.Module, size: tuple[int, int], least: float
) -> None:
    ids = natural_probe(ProbeTokenizer(model.tokenizer), *size).ids
    after = attention_weights(model, ids)
    before = attention_weights(untrained, ids)
    distance = mean_interval(mean_distance(after))
    untrained_distance = mean_interval(mean_distance(before))
    evidence.add_statement(
        f"In {name}, heads of a layer differ by at least {least:g} of 1, and by more than untrained ones.",
        distance.low > max(least, untrained_distance.high),
        f"{name}: two heads of a layer differ in {distance.value:.2f} of their weight, untrained ones in "
        f"{untrained_distance.value:.3f}",
    )
    # A control: its statement must be false. Untrained heads all spread their weight evenly, so they must be alike.
    evidence.add_control(
        f"In {name}, untrained heads differ by at least {least:g}.",
        untrained_distance.low > least,
        f"they differ in {untrained_distance}",
    )
    evidence.numbers |= {f"{name}, trained": distance.value, f"{name}, untrained": untrained_distance.value}
    most_alike = min(float(head_distances(layer).mean(-1).min()) for layer in after)
    evidence.numbers[f"{name}, the two heads of a layer that are most alike"] = most_alike
    lines = {"trained": _by_layer(after), "untrained": _by_layer(before)}
    evidence.add_series(f"{name}: the distance between two heads of a layer", lines, x="layer", y="½ Σ |A − A'|")


def _by_layer(layers: list[Tensor]) -> list[list[float]]:
    """Layer numbers, and the mean distance of each layer with its interval: four columns."""
    rows = []
    for index, layer in enumerate(layers):
        rows.append((float(index), *mean_interval(mean_distance([layer]))))
    return list(map(list, zip(*rows, strict=True)))


def _check_types(evidence: Evidence, name: str, record: Evolution) -> None:
    last = learned_types(record, -1)
    last_types = set().union(*last)
    first_types = set().union(*learned_types(record, 0))
    evidence.add_statement(
        f"In {name}, heads became three types or more.",
        len(last_types) >= 3,
        f"{name}: {', '.join(sorted(last_types))}",
    )
    combinations_of_types = set(map(frozenset, last)) - {frozenset()}  # heads without any type do not count
    evidence.add_statement(
        f"In {name}, not all heads became the same.",
        len(combinations_of_types) >= 2,
        f"{len(combinations_of_types)} different sets of types",
    )
    # A control: its statement must be false.
    evidence.add_control(
        f"In {name}, there were three types before training.", len(first_types) >= 3, f"{len(first_types)} at step 0"
    )
    evidence.numbers |= {f"{name}, types": len(last_types), f"{name}, types at step 0": len(first_types)}


CLAIM = Claim(
    id="heads-differ-in-a-trained-model",
    title="Different heads of a trained model learn different relations",
    citations=(("exam-answers", "2 (c)"), ("homework-3", "1.4 (c)")),
    papers=("vaswani-2017",),
    statement="Different heads of a trained model learn different relations between positions.",
    formula=r"\frac{1}{2} \sum_j \left| A^{(g)}_{ij} - A^{(h)}_{ij} \right| \gg 0 \quad (g \ne h)",
    refuted_by="Heads of one layer whose weights differ no more than those of an untrained model, or that all have one "
    "type.",
    control="An untrained model with the same configuration, and the model's own heads at step 0.",
    verdict=HOLDS,
    check=check,
)
