"""Checks how heads evolve: diffuse at first, and then which types come early or late, in training and in depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor

from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.models import bundled
from regard.training import Evolution, evolution, train

# Head types as ``Evolution.labels`` and the atlas name them.
LOCAL = ("previous", "positional", "convolution")  # types that attend by offset
CONTENT = ("content", "induction", "duplicate")  # types that attend by what the tokens are
SEEDS = 3  # number of trainings in the long version


class Arrival(NamedTuple):
    """When a head took a type: after the record of step ``after``, and at the latest at step ``step``."""

    step: int
    after: int
    layer: int
    head: int

    def __str__(self) -> str:
        return f"between steps {self.after} and {self.step}"


def train_models(
    learn: Callable[..., Any], task: str, first_seed: int, settings: Mapping[str, float]
) -> Iterator[tuple[int, Path]]:
    """Train models of several seeds; yield each seed with the folder of its run, which exists until the next one."""
    for seed in range(first_seed, first_seed + SEEDS):
        with TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            # Record every step: by default a busy machine skips records, and the history would then differ.
            learn(task, str(run), {"seed": seed, "record": 1.0, **settings})
            yield seed, run


def first_arrival(record: Evolution, types: Sequence[str]) -> Arrival | None:
    """The earliest head that took one of these types after step 0 and kept it; None if there is none."""
    for row in record.arrivals():  # the earliest first
        if row["kind"] in types and row["confirmed"] and row["after"] is not None:
            return Arrival(row["step"], row["after"], row["layer"], row["head"])
    return None


def heads_by_type(record: Evolution, types: Sequence[str]) -> dict[str, list[str]]:
    """The heads that have each of these types at the last record, as ``layer.head``; types without a head are left out.

    A head with several types is listed for each of them, as on all pages.
    """
    heads: dict[str, list[str]] = {}
    for head_type in types:
        for index, labels in enumerate(record.labels[-1]):
            if head_type in labels:
                heads.setdefault(head_type, []).append(record.head_label(index))
    return heads


def layers_of(record: Evolution, types: Sequence[str]) -> list[int]:
    """The layers that have heads of these types at the last record, from the lowest to the highest."""
    layers = set()
    for labels_of_head, (path, _) in zip(record.labels[-1], record.heads, strict=True):
        if not set(types).isdisjoint(labels_of_head):
            layers.add(record.paths.index(path))
    return sorted(layers)


def by_layer(record: Evolution, name: str) -> list[Tensor]:
    """The mean of a value over the heads of each layer, ``[steps]`` each."""
    values = record.value(name).double()
    means = []
    for path in record.paths:
        heads = [index for index, (head_path, _) in enumerate(record.heads) if head_path == path]
        means.append(values[:, heads].mean(-1))
    return means


def half_risen(record: Evolution, name: str, layer: int) -> int:
    """The first step after which a layer's mean stays past the midpoint between its first and its last value."""
    values = by_layer(record, name)[layer]
    # The product is positive past the half, both for rising and for falling values.
    past_half = (values - (values[0] + values[-1]) / 2) * (values[-1] - values[0]) > 0
    for index, step in enumerate(record.steps):
        if bool(past_half[index:].all()):
            return step
    return record.steps[-1]


def is_below(lower: Sequence[int], upper: Sequence[int]) -> bool:
    """Whether there are layers on both sides, and every layer in ``lower`` is below every layer in ``upper``."""
    return bool(lower and upper) and max(lower) < min(upper)


def check(
    *,
    seed: int = 0,
    full: bool = False,
    record: Callable[[], Evolution] = lambda: evolution(bundled()),
    learn: Callable[..., Any] = train,
) -> Evidence:
    """Read when, and in which layer, types of heads arose while the bundled model was trained.

    ``full``: do the same for three models that are trained here.
    """
    evidence = Evidence()
    _check_training(evidence, "the bundled model", record())
    if full:
        for model_seed, run in train_models(learn, "repeats", seed, {}):
            _check_training(evidence, f"repeats, seed {model_seed}", evolution(run))
    return evidence


def _check_training(evidence: Evidence, name: str, record: Evolution) -> None:
    """Check one training: the heads at step 0, the order in time, and the order in depth."""
    spread = float(record.value("spread")[0].min())
    evidence.add_statement(f"In {name}, all heads are diffuse at step 0.", spread > 0.9, f"H/ln(keys) ≥ {spread:.2f}")

    # Which type comes first: by the labels of heads, and without thresholds by the step at which scores are half risen.
    first_local = first_arrival(record, LOCAL)
    first_content = first_arrival(record, CONTENT)
    is_local_first = False
    distance = len(record.steps)  # in records; no pair of heads is so far apart
    if first_local is not None and first_content is not None:
        is_local_first = first_local.step < first_content.step
        distance = abs(record.steps.index(first_local.step) - record.steps.index(first_content.step))
    times = f"the first head that attends by content arises {_describe(first_content)}, the first local head "
    times += _describe(first_local)
    evidence.add_statement(
        f"In {name}, local heads come before content heads in training.",
        is_local_first,
        f"{name}: {times}",
    )
    convolution_step = half_risen(record, "convolution score", 0)
    content_step = half_risen(record, "content score", -1)
    evidence.add_statement(
        f"In {name}, the first layer's convolution score is half risen before the last layer's content score.",
        convolution_step < content_step,
        f"{name}: convolution is half risen at step {convolution_step}, content at step {content_step}",
    )
    averaging = []
    for labels_of_heads in record.labels:
        averaging.append(float(sum("averaging" in labels for labels in labels_of_heads)))
    averaging_heads = f"{averaging[0]:g} heads average at step 0, at most {max(averaging):g} later, {averaging[-1]:g} "
    averaging_heads += "at the end"
    evidence.add_statement(
        f"In {name}, some heads learn to average.", max(averaging) > averaging[0], f"{name}: {averaging_heads}"
    )

    # What is true instead: the order is one of layers.
    local_layers = layers_of(record, LOCAL)
    content_layers = layers_of(record, CONTENT)
    evidence.add_correction(
        f"In {name}, local heads are in lower layers than heads that attend by content.",
        is_below(local_layers, content_layers),
        f"the order is in depth, at step {record.steps[-1]}: {_list_heads(record, LOCAL)}; "
        f"{_list_heads(record, CONTENT)}",
    )
    gaps = {}
    pairs = zip(by_layer(record, "content score"), by_layer(record, "convolution score"), strict=True)
    for layer, (content_score, convolution_score) in enumerate(pairs):
        gaps[f"layer {layer}"] = (content_score - convolution_score).tolist()
    first_layer, *_, last_layer = gaps.values()
    evidence.add_correction(
        f"In {name}, convolution ends above content in the first layer, and content above convolution in the last.",
        last_layer[-1] > 0 > first_layer[-1],
        f"content minus convolution: {first_layer[-1]:.2f} in the first layer, {last_layer[-1]:.2f} in the last",
    )
    evidence.add_correction(
        f"In {name}, the first heads of both types arise within one record of each other.",
        distance <= 1,
        f"{name}: {times}; there are {len(record.steps)} records",
    )
    evidence.add_correction(
        f"In {name}, fewer heads average at the end than at step 0.",
        averaging[-1] < averaging[0],
        f"{name}: {averaging_heads}",
    )

    # Controls: their statements must be false.
    # At step 0 nothing has been learned. The reverse order of layers contradicts what was found.
    evidence.add_control(
        f"In {name}, content is above convolution in the last layer, and below in the first, at step 0 too.",
        last_layer[0] > 0 > first_layer[0],
        f"first layer: {first_layer[0]:.2f}, last layer: {last_layer[0]:.2f}",
    )
    evidence.add_control(
        f"In {name}, heads that attend by content are in lower layers than local heads.",
        is_below(content_layers, local_layers),
        f"{_name_layers(content_layers)} and {_name_layers(local_layers)}",
    )
    for family, first in (("local", first_local), ("content", first_content)):
        evidence.numbers[f"{name}, first {family} head by step"] = first.step if first is not None else "none"
    for head_type, heads in heads_by_type(record, LOCAL + CONTENT).items():
        evidence.numbers[f"{name}, {head_type} heads at the end"] = len(heads)
    evidence.numbers[f"{name}, records"] = len(record.steps)
    evidence.numbers[f"{name}, half risen"] = [float(convolution_step), float(content_step)]
    evidence.numbers[f"{name}, averaging heads"] = averaging
    steps = [1.0 + step for step in record.steps]  # a logarithmic axis has no 0
    title = f"{name}: content minus convolution, mean of a layer"
    evidence.add_curves(title, steps, gaps, x="step + 1", y="score", log="x")
    evidence.numbers[f"{name}, content minus convolution by layer"] = [gap[-1] for gap in gaps.values()]
    evidence.numbers[f"{name}, smallest spread at step 0"] = spread


def _describe(arrival: Arrival | None) -> str:
    return "never" if arrival is None else str(arrival)


def _list_heads(record: Evolution, types: Sequence[str]) -> str:
    """The layers of a family of types, and its heads by type: "layers 0, 1 (convolution 0.0, 1.3; previous 1.0)"."""
    parts = [f"{head_type} {_join(heads)}" for head_type, heads in heads_by_type(record, types).items()]
    return f"{_name_layers(layers_of(record, types))} ({'; '.join(parts)})"


def _name_layers(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {_join(layers)}"


def _join(items: Sequence[object]) -> str:
    return ", ".join(map(str, items)) or "none"


CLAIM = Claim(
    id="heads-evolve",
    title="Heads become local early in training and attend by content late",
    citations=(("assignment-6", "4.2"),),
    statement="Heads are diffuse at initialisation. Early in training (in lower layers) some become local and others "
    "average. Late in training (in higher layers) they attend by content.",
    formula=r"t_{local} < t_{content}, \qquad \ell_{local} < \ell_{content}",
    refuted_by="A training in which content heads arise no later than local ones, or are in no higher layers.",
    control="The same layers at step 0, and the reverse order of layers.",
    verdict=FALSE_AS_STATED,
    what_holds="Local heads are in lower layers and content heads in the last one. Both arise at about the same time.",
    correction="The order is one of layers, not of time. Heads are diffuse at step 0. At the end, local heads (types "
    "previous, positional and convolution) are in the lower layers, and heads that attend by content (types content, "
    "induction and duplicate) in the last one. In time, the first heads of both families arise within one record of "
    "each other, in either order. Averaging is not learned: heads start with it and leave it.",
    check=check,
)
