"""Corners that were decided aloud, each held against what it should be, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.attention import attention
from regard.masks import Causal, Padding

__all__ = ["CORNERS", "attempt"]


def attempt(check: Callable[[str], bool], backend: str) -> str:
    """What is wrong with a corner; nothing where it is as it should be."""
    try:
        return "" if check(backend) else "it is not so"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _empty_rows(backend: str) -> bool:
    q = _some(1, 2, 7, 5).requires_grad_()
    out = attention(q, _some(1, 2, 3, 5), _some(1, 2, 3, 5), mask=Causal(), backend=backend)  # 4 rows see nothing
    (grad,) = torch.autograd.grad(out.sum(), q)
    return not out[:, :, :4].any() and not grad[:, :, :4].any() and bool(out[:, :, 4:].all())


def _hidden_nan(backend: str) -> bool:
    q, k, v = _some(1, 1, 5, 3), _some(1, 1, 5, 3), _some(1, 1, 5, 3)
    seen = attention(q, k[:, :, :4], v[:, :, :4], backend=backend)
    k[:, :, 4] = v[:, :, 4] = math.nan
    hidden = attention(q, k, v, mask=Padding([4]), backend=backend)
    return bool((hidden - seen).abs().max() <= 8 * torch.finfo(torch.float32).eps * seen.abs().max())


def _ties(backend: str) -> bool:
    keys = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]]])
    q, v = torch.tensor([[[[2.0, 1.0]]]]), torch.eye(3).view(1, 1, 3, 3)
    out = attention(q, keys, v, scale=math.inf, backend=backend)
    return out.flatten().tolist() == [0.5, 0.0, 0.5]


def _threads(backend: str) -> bool:
    q, found = _some(1, 4, 200, 32), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(attention(q, q, q, mask=Causal(), backend=backend))
    torch.set_num_threads(1)
    return all(torch.equal(one, found[0]) for one in found)


CORNERS: dict[str, Callable[[str], bool]] = {
    "rows without keys are 0": _empty_rows,
    "hidden NaN stays hidden": _hidden_nan,
    "ties share at scale ∞": _ties,
    "threads change no bit": _threads,
}
