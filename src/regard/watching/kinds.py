"""What kinds of head there are, and how sure one can be: several labels a head, each held against its controls.

    confidence = rest · max(0, (score − control) / (1 − control))

``score`` is taken after sinks are removed, ``rest`` is the share of the weight that was left then, and ``control`` the
largest of: the same score of a uniform map (sink, previous, induction, duplicate; that of convolution is taken off the
score itself), of the same head on random tokens (induction, duplicate), of the same head untrained (all but averaging).

    sink         gives its weight to the first token and to special tokens: to nothing in particular
    previous     looks at the token before                    positional   looks at one fixed offset
    convolution  its weights go by offset alone               averaging    looks at everything alike
    induction    looks at what followed this token before     duplicate    looks at this token's earlier copies
    content      neither position nor average explains where it looks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["KINDS", "Kind", "kinds", "labels"]

Scores = Mapping[str, Mapping[str, Mapping[str, float]]]  # probe → raw or clean → name → number
SURE = 0.2  # the least confidence of a label


@dataclass(frozen=True)
class Kind:
    """One kind: the probe and score that show it, the least score of a label, and which controls it has."""

    probe: str
    name: str
    least: float = 0.3
    weights: str = "clean"
    untrained: bool = True
    random: bool = False


KINDS = {
    "sink": Kind("natural", "sinks", weights="raw"),
    "previous": Kind("natural", "previous"),
    "positional": Kind("natural", "positional", least=0.9),
    "convolution": Kind("natural", "convolution"),
    # Heads begin by averaging, so that an untrained one is no control.
    "averaging": Kind("natural", "spread", least=0.9, untrained=False),
    "induction": Kind("repeated", "induction", random=True),
    "duplicate": Kind("repeated", "copied", random=True),
    "content": Kind("natural", "content"),
}


def kinds(scores: Scores, untrained: Scores | None) -> dict[str, dict[str, float]]:
    """``{kind: {score, control, confidence}}`` of one head; kinds whose probe was not run are left out."""
    found = {}
    for name, kind in KINDS.items():
        score = _of(scores, kind, kind.probe)
        if score is None:
            continue
        chance = scores[kind.probe][kind.weights].get(f"{kind.name} chance", 0.0)
        controls = [chance, _of(scores, kind, "random") if kind.random else None]
        controls += [_of(untrained, kind, kind.probe) if untrained is not None and kind.untrained else None]
        control = min(max(x for x in controls if x is not None), 1.0)
        rest = 1.0 if kind.weights == "raw" else scores[kind.probe]["clean"]["rest"]
        above = (score - control) / (1 - control) if control < 1 else 0.0
        found[name] = {"score": score, "control": control, "confidence": rest * min(max(above, 0.0), 1.0)}
    return found


def labels(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The kinds one can be sure of, the surest first."""
    sure = [k for k, x in found.items() if x["score"] >= KINDS[k].least and x["confidence"] >= SURE]
    return sorted(sure, key=lambda k: -found[k]["confidence"])


def _of(scores: Scores, kind: Kind, probe: str) -> float | None:
    if probe not in scores:
        return None
    values = scores[probe][kind.weights]
    if kind.name == "content":
        value = (1 - values.get("fit", float("nan"))) * (1 - values["spread"])
    else:
        value = values.get(kind.name, float("nan"))
    return value if value == value else None
