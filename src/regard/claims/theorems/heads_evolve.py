"""How heads evolve: diffuse at first; what comes early and what late, in training and in depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.models import bundled
from regard.training import Evolution, evolution, train

LOCAL, CONTENT = {"previous", "positional", "convolution"}, {"content", "induction", "duplicate"}
Arrival = tuple[int, int, int]  # step, layer, head
SEEDS = 3  # trainings of the long version
WATCHED = {"record": 1.0}  # at every step that is due: else a busy machine would skip some, and see another history


def arrived(record: Evolution, kinds: set[str]) -> list[Arrival]:
    """(step, layer, head) of every head that took one of these kinds and kept it, the earliest first."""
    first: dict[tuple[int, int], int] = {}
    for row in record.arrivals():
        if row["kind"] in kinds:
            first.setdefault((row["layer"], row["head"]), row["step"])
    return sorted((step, *head) for head, step in first.items())


def by_layer(record: Evolution, name: str) -> list[Tensor]:
    """A number's mean over the heads of each layer, ``[steps]`` each."""
    values, paths = record.value(name).double(), [path for path, _ in record.heads]
    return [values[:, [at for at, here in enumerate(paths) if here == path]].mean(-1) for path in record.paths]


def half_risen(record: Evolution, name: str, layer: int) -> int:
    """The first record since when a layer's mean is past half of the way from its first value to its last."""
    values = by_layer(record, name)[layer]
    past = (values - (values[0] + values[-1]) / 2) * (values[-1] - values[0]) > 0
    return next((record.steps[at] for at in range(len(past)) if bool(past[at:].all())), record.steps[-1])


def apart(local: Iterable[Arrival], content: Iterable[Arrival]) -> bool:
    """Whether there are both, and local heads lie in lower layers than content heads."""
    low, high = [layer for _, layer, _ in local], [layer for _, layer, _ in content]
    return bool(low and high) and max(low) < min(high)


def check(
    *,
    seed: int = 0,
    full: bool = False,
    record: Callable[[], Evolution] = lambda: evolution(bundled()),
    learn: Callable[..., Any] = train,
) -> Evidence:
    """What was recorded while the model that comes with the package learned: when, and in which layer, kinds of heads
    arose. ``full``: three models trained on the spot beside it.
    """
    found = Evidence()
    _look(found, "the bundled model", record())
    for other in range(seed, seed + SEEDS) if full else ():
        with TemporaryDirectory() as folder:
            learn("repeats", f"{folder}/run", {"seed": other, **WATCHED})
            _look(found, f"repeats, seed {other}", evolution(f"{folder}/run"))
    return found


def _look(found: Evidence, name: str, record: Evolution) -> None:
    """One training: the order in time, the order in depth, and what was drawn."""
    local, content = arrived(record, LOCAL), arrived(record, CONTENT)
    gap = [a - b for a, b in zip(by_layer(record, "content score"), by_layer(record, "convolution score"), strict=True)]
    found.condition(
        f"{name}: in depth, local heads are below and content heads above",
        apart(local, content),
        f"by depth it holds: {len(local)} local heads in layers {_layers(local)}, {len(content)} content heads in "
        f"{_layers(content)}",
    )
    _in_time(found, name, record, local, content)
    least = float(record.value("spread")[0].min())
    found.condition(f"{name}: all heads are diffuse at step 0", least > 0.9, f"H/ln(keys) is {least:.2f} or more")
    ends = [float(one[-1]) for one in gap]
    found.condition(
        f"{name}: at the end convolution outweighs content in the first layer, content convolution in the last",
        ends[-1] > 0 > ends[0],
        f"content less convolution: {ends[0]:.2f} in the first layer, {ends[-1]:.2f} in the last",
    )
    at_first = float(gap[-1][0]) > 0 > float(gap[0][0])
    found.control(f"{name}: so at step 0 too", at_first, f"{float(gap[-1][0]):.2f} in the last layer at step 0")
    found.control(f"{name}: content heads are below and local heads above", apart(content, local))
    steps = [1.0 + step for step in record.steps]  # step 0 has a place on a logarithmic axis
    lines = {f"layer {layer}": (steps, one.tolist()) for layer, one in enumerate(gap)}
    found.draw(f"{name}: content less convolution, mean of a layer", lines, x="step + 1", y="score", log="x")
    found.numbers |= {f"{name}, content less convolution by layer": ends, f"{name}, least spread at step 0": least}


def _in_time(found: Evidence, name: str, record: Evolution, local: list[Arrival], content: list[Arrival]) -> None:
    """What comes first: by labels that heads took, and by scores' halves, which know no thresholds."""
    firsts = [rows[0][0] if rows else -1 for rows in (local, content)]
    found.written(
        f"{name}: local heads come before content heads in training",
        0 <= firsts[0] < firsts[1],
        f"{name}: the first content head is there at step {firsts[1]}, the first local one at step {firsts[0]}",
    )
    rises = [half_risen(record, "convolution score", 0), half_risen(record, "content score", -1)]
    found.written(
        f"{name}: the first layer's convolution score is half risen before the last layer's content score",
        rises[0] < rises[1],
        f"{name}: convolution is half risen at step {rises[0]}, content at step {rises[1]}",
    )
    at = [record.steps.index(step) if step >= 0 else -9 for step in firsts]
    found.condition(
        f"{name}: in time the first heads of both kinds arise together, within a record of each other",
        min(at) > 0 and abs(at[0] - at[1]) <= 1,
        f"{name}: step {firsts[0]} and step {firsts[1]}, records {at[0]} and {at[1]} of {len(record.steps) - 1}",
    )
    averaging = [float(sum("averaging" in one for one in step)) for step in record.labels]
    found.written(
        f"{name}: some heads learn to average",
        max(averaging) > averaging[0],
        f"{name}: {averaging[0]:g} heads average at step 0, never more, and {averaging[-1]:g} at the end",
    )
    found.numbers |= {f"{name}, first local": firsts[0], f"{name}, first content": firsts[1]}
    found.numbers |= {f"{name}, half risen": [float(x) for x in rises], f"{name}, averaging heads": averaging}


def _layers(rows: list[Arrival]) -> str:
    return ", ".join(str(layer) for layer in sorted({layer for _, layer, _ in rows})) or "none"


CLAIM = Claim(
    id="heads-evolve",
    sources=("000",),
    statement="Heads are diffuse at initialisation; early in training (in lower layers) some become local and others "
    "average; late in training (in higher layers) they go by content.",
    formula=r"t_{local} < t_{content}, \qquad \ell_{local} < \ell_{content}",
    refuted="A training in which content heads arise no later than local ones, or lie no higher.",
    control="The same layers at step 0, and the opposite order of layers.",
    verdict=HOLDS_IF,
    correction="Early and late must mean depth, not training time. Heads are diffuse at step 0; at the end local heads "
    "are in the lower layers and content heads in the last one. In time the first of both kinds arise together, within "
    "a record of each other and in either order. Averaging is not learned: it is how heads begin, and what they leave.",
    check=check,
)
