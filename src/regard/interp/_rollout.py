"""Attention rollout: how much of each input token would reach a row of the last layer if weights were all that counts.

    R = Π_l (r I + (1 − r) Ā_l),   Ā_l = mean over heads of A,   r = 1/2 for the residual path

The n × n product is never formed. A few rows of R are carried from the last layer down to the first,
``R_row ← r R_row + (1 − r) R_row Ā_l``, and Ā_l is computed a few rows at a time. Rollout uses the weights
and ignores the size of the values (unless ``value_weighted=True``), so it is only a rough picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard._errors import RegardError
from regard._observables import Index, Observation, index_tensor
from regard.interp._recording import Recording
from regard.interp._token_labels import is_cross_attention

CELLS = 2**22  # weights that are in memory at once


def rollout(
    recording: Recording,
    rows: Index = -1,
    *,
    layers: Sequence[str | int] | None = None,
    batch: int = 0,
    residual: float = 0.5,
    value_weighted: bool = False,
) -> Tensor:
    """``R[rows] [rows, n]``: the shares of the input tokens in rows of the last layer; each row sums to 1.

    - ``recording``: of self-attention layers, observed with ``Observe(keep=True)``.
    - ``rows``: rows of the last layer; the last row by default.
    - ``layers``: paths or numbers of layers, first to last; all recorded layers by default.
    - ``batch``: the batch entry.
    - ``residual``: the share r of the residual path, 1/2 by default.
    - ``value_weighted``: use A·‖v W_O‖, divided by its row sums, in place of A; False by default.

    >>> model = regard.models.load(regard.models.bundled())
    >>> recording = regard.interp.look(model, "a b c a b c", observe=regard.Observe(keep=True))
    >>> shares = rollout(recording)  # of the 7 tokens in the last row
    >>> shares.shape, round(shares.sum().item(), 6)
    (torch.Size([1, 7]), 1.0)
    """
    paths = [recording.path(layer) for layer in (layers if layers is not None else recording)]
    if not paths:
        raise RegardError("the recording is empty; a rollout needs at least one layer")
    if not 0 <= residual <= 1:
        raise RegardError(f"residual must be between 0 and 1, got {residual}")
    observations = [recording[path] for path in paths]
    n = observations[-1].n
    for path, observation in zip(paths, observations, strict=True):
        if is_cross_attention(recording.metadata, path):
            raise RegardError(f"{path} is cross-attention; a rollout needs self-attention: choose with layers=")
        if observation.n != n or observation.m != n or n is None:
            raise RegardError(
                f"{path} has {observation.n} queries and {observation.m} keys; a rollout needs layers of one sequence: "
                "choose them with layers="
            )
    assert n is not None
    row_indices = index_tensor(rows, n, "rows")
    # Every row starts with all of its share at itself.
    R = torch.zeros(len(row_indices), n, dtype=torch.float64)
    R[torch.arange(len(row_indices)), row_indices] = 1
    for observation in reversed(observations):
        R = residual * R + (1 - residual) * _times_mean_weights(R, observation, batch, value_weighted)
    return R


def _times_mean_weights(R: Tensor, observation: Observation, batch: int, value_weighted: bool) -> Tensor:
    """``R Ā``; a row that attends to nothing keeps its share."""
    assert observation.n is not None
    weights = observation.weights
    if value_weighted:
        weights = observation.value_weighted
    out = torch.zeros_like(R)
    step = max(1, CELLS // observation.n)
    for head in observation.heads:
        for start in range(0, observation.n, step):
            stop = min(start + step, observation.n)
            part = R[:, start:stop]
            # Later rows of a causal model are often 0, and their weights need not be computed.
            if not part.any():
                continue
            A = weights(head, range(start, stop), batch=batch).cpu().double()
            total = A.sum(-1, keepdim=True)
            empty = total == 0
            out += part @ (A / torch.where(empty, 1.0, total))
            out[:, start:stop] += part * empty.squeeze(-1)
    return out / len(observation.heads)
