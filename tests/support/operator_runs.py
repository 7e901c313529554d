"""Runs of the attention operator on a ``Case``, with gradients, and comparison with the plain formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import regard
from support import dense_attention
from support.cases import Case


def draw_dropout_seed(seed: int = 5) -> torch.Tensor:
    """The dropout seed that the operator draws next."""
    torch.manual_seed(seed)
    dropout_seed = torch.randint(2**63 - 1, (), dtype=torch.int64)
    torch.manual_seed(seed)
    return dropout_seed


def with_gradients(case: Case) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The options of a case with fresh leaves for sinks and bias, and the list of all learned tensors."""
    options = dict(case.options)
    learned = []
    for name in ("sinks", "bias"):
        if isinstance(options.get(name), torch.Tensor):
            options[name] = options[name].detach().requires_grad_()
            learned.append(options[name])
    if isinstance(options["bias"], torch.nn.Module):
        learned += list(options["bias"].parameters())
    return options, learned


def gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of a weighted sum of out; zeros for a leaf that out does not depend on."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    grads = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, leaves, strict=True)]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-12) -> None:
    """Finite, of the same shape, and equal up to ``tolerance`` of the largest number."""
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    if ours.numel():
        scale = 1 + theirs.abs().max()
        assert (ours - theirs).abs().max() <= tolerance * scale


def attention_on(
    device: str, backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> torch.Tensor:
    """``regard.attention`` on a device, with inputs and the result on the CPU. Gradients pass through the copies."""
    moved = {name: to_device(value, device) for name, value in options.items()}
    return regard.attention(q.to(device), k.to(device), v.to(device), **moved, backend=backend).cpu()


def to_device(value: Any, device: str) -> Any:
    """A tensor or module on a device, or the value itself. A mask converts its own tensors."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, torch.nn.Module) and device != "cpu":
        return value.to(device)
    return value


def run_float32_case(case: Case, dtype: torch.dtype, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of ``call`` in ``dtype``, on inputs that were rounded to float32."""
    return run_rounded_case(case, torch.float32, dtype, call)


def run_rounded_case(
    case: Case, rounded: torch.dtype, dtype: torch.dtype, call: Callable[..., torch.Tensor]
) -> list[torch.Tensor]:
    """Output and gradients of ``call`` in ``dtype``, on inputs that were rounded to the dtype ``rounded``."""
    leaves = [x.detach().to(rounded).to(dtype).requires_grad_() for x in (case.q, case.k, case.v)]
    options, learned = with_gradients(case)
    out = call(*leaves, **options)
    return [out, *gradients(out, leaves + learned)]


def check_native(case: Case) -> None:
    """``check_backend`` for the native kernel."""
    check_backend(case, "native")


def check_backend(case: Case, backend: str, device: str = "cpu") -> None:
    """``check_in_float32`` for a backend on a device."""
    check_in_float32(case, partial(attention_on, device, backend))


def check_in_float32(case: Case, call: Callable[..., torch.Tensor]) -> None:
    """Output and all gradients of ``call`` in float32 are within a few roundings of float64.

    A weight is e^(s − row_max) / row_sum, so its relative error is the absolute error of s. That is a few roundings of
    the largest |s|, and of the largest terms of q·k, which may be much larger than q·k or its softcap.
    """
    if case.options["scale"] == math.inf:  # on a grid, so that no rounding decides which of two products is larger
        case = replace(case, q=dense_attention.on_grid(case.q), k=dense_attention.on_grid(case.k))
    seed = draw_dropout_seed() if case.options["dropout"] else None
    ours = run_float32_case(case, torch.float32, call)
    logits: list[torch.Tensor] = []

    def formula(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        out, _, _, s = dense_attention.attention(*args, **options, seed=seed)
        logits.append(s.detach())
        return out

    exact = run_float32_case(case, torch.float64, formula)
    visible = logits[0][logits[0] > -math.inf]
    largest_logit = visible.abs().max().item() if visible.numel() else 0.0
    largest = max((x.abs().max().item() for x in exact if x.numel()), default=0.0)
    scale = case.q.shape[-1] ** -0.5 if case.options["scale"] is None else case.options["scale"]
    terms = 0.0
    if scale not in (0, math.inf) and case.q.numel() and case.k.numel():
        terms = scale * (case.q.norm(dim=-1).max() * case.k.norm(dim=-1).max()).item()
    rows = case.q.numel() / case.q.shape[-1]  # the gradient of a value that all rows share is a sum over them
    roundings = 8 * largest_logit + terms + rows / 4
    tolerance = (2e-5 + torch.finfo(torch.float32).eps * roundings) * (1 + largest)
    for index, (a, b) in enumerate(zip(ours, exact, strict=True)):
        assert a.isfinite().all()
        if a.numel() and (a - b).abs().max() > tolerance:
            # Large sums may cancel over a broadcast batch. The formula in float32 then has a similar error.
            in_float32 = run_float32_case(
                case, torch.float32, lambda *a, **o: dense_attention.attention(*a, **o, seed=seed)[0]
            )[index]
            assert (a - b).abs().max() <= 2 * (in_float32 - b).abs().max()
