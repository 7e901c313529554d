"""Attention through layers: what of the first layer's input reaches a row of the last, if weights were all there is.

    R = Π_l (r I + (1 − r) Ā_l),   Ā_l = mean over heads of A,   r = 1/2 for the residual path

A product of n × n matrices, but never formed: a few rows of R are carried from the last layer down to the first,
``R_row ← r R_row + (1 − r) R_row Ā_l``, and Ā_l is used a strip at a time. Rollout is a reading of weights, not of what
they move (``Observation.moved``): take it as a sketch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.kept import places
from regard.observables import Observation, Where
from regard.watching.seen import Seen
from regard.watching.words import is_cross

__all__ = ["rollout"]

CELLS = 2**22


def rollout(
    seen: Seen,
    rows: Where = -1,
    *,
    layers: Sequence[str | int] | None = None,
    batch: int = 0,
    residual: float = 0.5,
    moved: bool = False,
) -> Tensor:
    """``R[rows] [rows, n]``: shares of the first layer's tokens in rows of the last one; each row sums to 1.

    ``layers``: paths of self-attention in order, first to last (all that was seen unless given); they must have been
    observed with ``keep=True``. ``moved=True`` uses A·‖v W_O‖ in place of A, each row made to sum to 1.

    >>> model = regard.models.load(regard.models.bundled())
    >>> seen = regard.watching.look(model, "a b c a b c", observe=regard.Observe(keep=True))
    >>> shares = rollout(seen)  # of the 7 tokens in what the last one became
    >>> shares.shape, round(shares.sum().item(), 6)
    (torch.Size([1, 7]), 1.0)
    """
    paths = list(seen) if layers is None else [seen.path(place) for place in layers]
    if not paths:
        raise ValueError("nothing was seen, so there is nothing to roll out")
    if not 0 <= residual <= 1:
        raise ValueError(f"residual is {residual}; it is a share between 0 and 1")
    found = [seen[path] for path in paths]
    n = found[-1].n
    for path, observation in zip(paths, found, strict=True):
        if is_cross(seen.about, path):
            raise ValueError(f"{path} looks at another sequence; a rollout needs self-attention: choose with layers=")
        if observation.n != n or observation.m != n or n is None:
            raise ValueError(
                f"{path} has {observation.n} queries and {observation.m} keys; a rollout needs layers of one sequence: "
                "choose them with layers="
            )
    assert n is not None
    at = places(rows, n, "rows")
    R = torch.zeros(len(at), n, dtype=torch.float64)
    R[torch.arange(len(at)), at] = 1
    for observation in reversed(found):
        R = residual * R + (1 - residual) * _through(R, observation, batch, moved)
    return R


def _through(R: Tensor, observation: Observation, batch: int, moved: bool) -> Tensor:
    """``R Ā``; a row that sees nothing keeps what it has."""
    assert observation.n is not None
    out = torch.zeros_like(R)
    step = max(1, CELLS // observation.n)
    for head in observation.heads:
        for i in range(0, observation.n, step):
            strip = range(i, min(i + step, observation.n))
            part = R[:, strip.start : strip.stop]
            if not part.any():  # causal rows far ahead, most often
                continue
            A = (observation.moved if moved else observation.weights)(head, strip, batch=batch).double().cpu()
            total = A.sum(-1, keepdim=True)
            empty = total == 0
            A = A / torch.where(empty, 1.0, total)
            out += part @ A
            out[:, strip.start : strip.stop] += part * empty.squeeze(-1)
    return out / len(observation.heads)
