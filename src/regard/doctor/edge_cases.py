"""Edge cases with documented behaviour, each compared with its exact result."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.masks import Causal, Padding


def find_problem(check: Callable[[str], bool], backend: str) -> str:
    """What is wrong with an edge case; "" if nothing is."""
    try:
        return "" if check(backend) else "wrong result"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _empty_rows(backend: str) -> bool:
    q = _random(1, 2, 7, 5).requires_grad_()
    # With 7 queries and 3 keys, the first 4 queries see no key.
    out = attention(q, _random(1, 2, 3, 5), _random(1, 2, 3, 5), mask=Causal(), backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), q)
    return not out[:, :, :4].any() and not grad[:, :, :4].any() and bool(out[:, :, 4:].all())


def _hidden_nan(backend: str) -> bool:
    q = _random(1, 1, 5, 3)
    k = _random(1, 1, 5, 3)
    v = _random(1, 1, 5, 3)
    expected = attention(q, k[:, :, :4], v[:, :, :4], backend=backend)
    k[:, :, 4] = v[:, :, 4] = math.nan
    out = attention(q, k, v, mask=Padding([4]), backend=backend)
    return bool((out - expected).abs().max() <= 8 * torch.finfo(torch.float32).eps * expected.abs().max())


def _ties(backend: str) -> bool:
    # The first and the third key have the same, largest product with q.
    keys = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]]])
    q = torch.tensor([[[[2.0, 1.0]]]])
    v = torch.eye(3).view(1, 1, 3, 3)
    out = attention(q, keys, v, scale=math.inf, backend=backend)
    return out.flatten().tolist() == [0.5, 0.0, 0.5]


def _threads(backend: str) -> bool:
    q = _random(1, 4, 200, 32)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(attention(q, q, q, mask=Causal(), backend=backend))
    torch.set_num_threads(1)
    return all(torch.equal(out, results[0]) for out in results)


EDGE_CASES: dict[str, Callable[[str], bool]] = {
    "rows without keys are 0": _empty_rows,
    "hidden NaN stays hidden": _hidden_nan,
    "ties share at scale ∞": _ties,
    "threads change no bit": _threads,
}
