"""The measures of heads that a record holds: a group, a plain name and a one-line meaning for each.

``Evolution.value`` takes the raw names ("natural clean previous"); pages, figures and tables show the plain ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.interp._head_table import HEAD_COLUMNS
from regard.interp._head_types import HEAD_TYPES

ROW_VALUES = "row values"
# Row values whose entry in HEAD_COLUMNS is only a unit.
ROW_MEANINGS = {"entropy": "mean entropy of a row's weights in nats: 0 is one key, ln(n) is n keys alike"}
TYPES = "head types"
PROBE_GROUPS = {
    "natural": "scores on natural text",
    "repeated": "scores on repeated random tokens",
    "random": "scores on random tokens",
}
IMAGE_GROUP = "scores on the images"
TYPE_PARTS = {
    "score": "the score of this type, from 0 to 1",
    "confidence": "how far the score is above its controls, from 0 to 1",
}
# Score → its plain name, and what it means.
SCORES = {
    "sink": ("weight on the first token", "mean weight on the first key"),
    "sink4": ("weight on the first 4 tokens", "mean weight on the first four keys"),
    "sinks": ("weight on all sinks", "mean weight on the first token, special tokens and learned sinks"),
    "rest": ("weight outside the sinks", "mean weight that is not on sinks"),
    "value_weighted": ("value-weighted sinks", "share of weight × value size that falls on sinks"),
    "previous": ("weight on the previous token", "mean weight on the key one before the query"),
    "positional": ("rows with one offset", "share of rows whose largest weight is at the most frequent offset"),
    "duplicate": ("weight on the same token", "mean weight on earlier keys with the query's token"),
    "copied": ("weight on the same token, blocks before", "mean weight on the query's token in earlier blocks"),
    "induction": (
        "weight on the token after",
        "mean weight on the token that followed the query's token in earlier blocks",
    ),
    "spread": ("spread", "entropy over ln(visible keys): 0 is one key, 1 is all keys alike"),
    "distance": ("distance", "mean distance between query and key"),
    "fit": ("explained by offsets", "share of the squared weights that the mean weight at each offset explains"),
    "convolution": ("explained by offsets, above uniform", "the same share, minus that of uniform weights"),
    "width": ("width", "standard deviation of the offset around its mean"),
    "centre 0": ("mean offset", "mean offset from query to key; − is back"),
    "centre 1": ("mean offset across", "mean offset from query to key, across the image; − is left"),
}
IMAGE_CENTRE = ("mean offset down", "mean offset from query to key, down the image; − is up")


@dataclass(frozen=True)
class Measure:
    """A number that every head has at every record.

    - ``name``: the name that ``Evolution.value`` takes.
    - ``group``: the heading under which a menu lists it.
    - ``label``: its plain name.
    - ``meaning``: one line that says what it is.
    """

    name: str
    group: str
    label: str
    meaning: str


def describe_measure(name: str, on_grid: bool = False) -> Measure:
    """Return the group, the plain name and the meaning of a measure.

    - ``name``: a name of ``Evolution.names``.
    - ``on_grid``: whether the model reads images.

    A score that this version does not know keeps its raw name.

    >>> describe_measure("natural clean previous").label
    'weight on the previous token, without sinks'
    """
    if name in HEAD_COLUMNS:
        return Measure(name, ROW_VALUES, name, ROW_MEANINGS.get(name, HEAD_COLUMNS[name]))
    head_type, _, part = name.rpartition(" ")
    if head_type in HEAD_TYPES and part in TYPE_PARTS:
        return Measure(name, TYPES, name, TYPE_PARTS[part])

    # The rest are scores: probe, weights with or without sinks, score, and "chance" for uniform weights.
    probe, weights, score = _split_score(name)
    group = PROBE_GROUPS.get(probe, f"scores on {probe}")
    if on_grid and probe == "natural":
        group = IMAGE_GROUP
    base = score.removesuffix(" chance")
    label, meaning = SCORES.get(base, (base, f"the score {base!r} of this probe"))
    if on_grid and base == "centre 0":
        label, meaning = IMAGE_CENTRE
    # The weight outside the sinks is measured before they are left out.
    if weights == "clean" and base != "rest":
        label += ", without sinks"
        meaning += "; sinks left out, rows rescaled"
    if base != score:
        label += ", by chance"
        meaning += "; the value of uniform weights"
    return Measure(name, group, label, meaning)


def _split_score(name: str) -> tuple[str, str, str]:
    """Split "natural clean previous" into its probe, "raw" or "clean", and its score."""
    for weights in ("raw", "clean"):
        probe, separator, score = name.partition(f" {weights} ")
        if separator:
            return probe, weights, score
    return "other probes", "raw", name
