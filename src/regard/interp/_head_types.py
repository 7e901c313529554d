"""The types of heads, and the confidence that a head is of a type; a head may have several types.

    confidence = rest · max(0, (score − control) / (1 − control))

``score`` is measured without sinks, and ``rest`` is the share of the weight outside the sinks. ``control`` is the
largest of these: the score of a uniform map (sink, previous, induction, duplicate; the convolution score is already
reduced by it), the score of the same head on random tokens (induction, duplicate), and the score of the untrained head
(all types except averaging).

    sink         attends to the first token and to special tokens: in effect to nothing
    previous     attends to the previous token                    positional   attends to one fixed offset
    convolution  its weights depend on the offset alone           averaging    attends to all keys alike
    induction    attends to what followed this token before       duplicate    attends to earlier copies of this token
    content      neither offsets nor averaging explain what it attends to
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Scores = Mapping[str, Mapping[str, Mapping[str, float]]]  # probe → raw or clean → name → number
LEAST_CONFIDENCE = 0.2  # of a label


@dataclass(frozen=True)
class HeadType:
    """One type: the probe and the score that show it, the least score for a label, and its controls.

    - ``weights``: "raw" scores A, "clean" scores A without its sinks.
    - ``untrained``: whether the untrained head is a control.
    - ``random``: whether the head on random tokens is a control.
    """

    probe: str
    name: str
    least: float = 0.3
    weights: str = "clean"
    untrained: bool = True
    random: bool = False


HEAD_TYPES = {
    "sink": HeadType("natural", "sinks", weights="raw"),
    "previous": HeadType("natural", "previous"),
    "positional": HeadType("natural", "positional", least=0.9),
    "convolution": HeadType("natural", "convolution"),
    # An untrained head averages, so it cannot be the control for averaging.
    "averaging": HeadType("natural", "spread", least=0.9, untrained=False),
    "induction": HeadType("repeated", "induction", random=True),
    "duplicate": HeadType("repeated", "copied", random=True),
    "content": HeadType("natural", "content"),
}


def head_type_scores(scores: Scores, untrained: Scores | None) -> dict[str, dict[str, float]]:
    """``{type: {score, control, confidence}}`` of one head; types whose probe was not run are left out.

    - ``scores``: of the head, by probe.
    - ``untrained``: of the same head before training; None if it was not measured.
    """
    results = {}
    for type_name, head_type in HEAD_TYPES.items():
        score = _score(scores, head_type, head_type.probe)
        if score is None:
            continue
        controls: list[float | None] = [scores[head_type.probe][head_type.weights].get(f"{head_type.name} chance", 0.0)]
        if head_type.random:
            controls.append(_score(scores, head_type, "random"))
        if head_type.untrained and untrained is not None:
            controls.append(_score(untrained, head_type, head_type.probe))
        control = min(max(x for x in controls if x is not None), 1.0)

        # A head with most of its weight on sinks gets a low confidence.
        rest = 1.0
        if head_type.weights == "clean":
            rest = scores[head_type.probe]["clean"].get("rest", float("nan"))
            # A share that is not known, as in scores of other probes, is no evidence.
            if rest != rest:
                rest = 0.0
        above = 0.0
        if control < 1:
            above = (score - control) / (1 - control)
        confidence = rest * min(max(above, 0.0), 1.0)
        results[type_name] = {"score": score, "control": control, "confidence": confidence}
    return results


def head_type_labels(type_scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The types with a sufficient score and confidence, the highest confidence first."""
    labels = []
    for name, values in type_scores.items():
        if values["score"] >= HEAD_TYPES[name].least and values["confidence"] >= LEAST_CONFIDENCE:
            labels.append(name)
    return sorted(labels, key=lambda name: -type_scores[name]["confidence"])


def count_labels(labels_of_heads: Iterable[Sequence[str]]) -> dict[str, int]:
    """How many heads have each type; a head with several labels counts for each of them.

    >>> count_labels([["sink", "induction"], ["sink"], []])["sink"]
    2
    """
    counts = dict.fromkeys(HEAD_TYPES, 0)
    for labels in labels_of_heads:
        for label in labels:
            counts[label] += 1
    return counts


def describe_counts(labels_of_heads: Sequence[Sequence[str]]) -> str:
    """The counts of all labels as a line of text.

    >>> describe_counts([["sink", "induction"], ["sink"], []])
    'types of 3 heads: sink 2, induction 1, no clear type 1 (a head may have several types)'
    """
    parts = [f"{name} {count}" for name, count in count_labels(labels_of_heads).items() if count]
    unlabelled = sum(not labels for labels in labels_of_heads)
    if unlabelled:
        parts.append(f"no clear type {unlabelled}")
    return f"types of {len(labels_of_heads)} heads: {', '.join(parts)} (a head may have several types)"


def _score(scores: Scores, head_type: HeadType, probe: str) -> float | None:
    """The score of a type on a probe; None if the probe was not run or the score is NaN."""
    if probe not in scores:
        return None
    values = scores[probe][head_type.weights]
    if head_type.name == "content":
        value = (1 - values.get("fit", float("nan"))) * (1 - values.get("spread", float("nan")))
    else:
        value = values.get(head_type.name, float("nan"))
    return value if value == value else None
