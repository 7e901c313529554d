"""Records of a plan: the costs of one part, and of generating one more token."""

from __future__ import annotations

from dataclasses import dataclass

# How the figures of a plan were found: the value of `counted` in its dictionary.
COUNTED_BY_FORMULAS = "by formulas"
COUNTED_BY_WALKING = "by walking"


@dataclass(frozen=True)
class Row:
    """The costs of one part, summed over its `repeats` layers.

    - `share`: its share in the cost that `Plan.share_basis` names; None for the optimizer's update, which has none.
    """

    name: str
    repeats: int
    parameters: int
    flops: int
    saved_bytes: int
    seconds: float | None
    share: float | None


@dataclass(frozen=True)
class Decoding:
    """The costs of generating one more token for each sequence of the batch.

    - `bytes_read`: bytes of weights, keys and values that are read.
    - `max_batch`: the largest batch for which such a step fits into memory: weights, caches and the values of the step
      itself; 0 if none fits.
    """

    flops: int
    bytes_read: int
    cache_bytes: int
    seconds: float | None
    tokens_per_second: float | None
    max_batch: int | None
    max_batch_tokens_per_second: float | None


def add_rows(a: Row, b: Row) -> Row:
    """Sum the costs of two parts of the same name."""
    seconds = a.seconds
    if a.seconds is not None and b.seconds is not None:
        seconds = a.seconds + b.seconds
    share = a.share
    if a.share is not None and b.share is not None:
        share = a.share + b.share
    parameters = a.parameters + b.parameters
    saved_bytes = a.saved_bytes + b.saved_bytes
    return Row(a.name, a.repeats + b.repeats, parameters, a.flops + b.flops, saved_bytes, seconds, share)
