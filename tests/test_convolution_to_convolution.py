"""The convolution nearest to a head: exact where the head is one, honest where it is none."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard._observables import Observation
from regard.convolution import HeadConvolution, to_convolution
from regard.nn import Encoder


def observed(bias: Tensor, *, grid: tuple[int, int] | None = None, mask: object = None) -> tuple[Tensor, Observation]:
    """Heads whose logits are a bias ``[H, n, m]``, and random values."""
    heads, n, m = bias.shape
    q, k, v = torch.zeros(1, heads, n, 1), torch.zeros(1, heads, m, 1), torch.randn(1, heads, m, 5).double()
    observe = regard.Observe(grid=grid, keep=True)
    out, seen = regard.attention(q.double(), k.double(), v, bias=bias, mask=mask, observe=observe)
    return v[0], seen


def of_offsets(kernel: Tensor, n: int) -> Tensor:
    """``log p(j − i)`` on a line, −inf further away."""
    radius, at = kernel.shape[-1] // 2, torch.arange(n)
    delta = at - at.unsqueeze(-1) + radius
    inside = (delta >= 0) & (delta < kernel.shape[-1])
    return torch.where(inside, kernel.log()[..., delta.clamp(0, kernel.shape[-1] - 1)], -torch.inf)


def on_grid(kernel: Tensor, height: int, width: int) -> Tensor:
    """The same in the plane."""
    radius = kernel.shape[-1] // 2
    cells = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    delta = cells - cells.unsqueeze(1) + radius
    inside = ((delta >= 0) & (delta <= 2 * radius)).all(-1)
    delta = delta.clamp(0, 2 * radius)
    return torch.where(inside, kernel.log()[..., delta[..., 0], delta[..., 1]], -torch.inf)


@settings(max_examples=60)
@given(st.integers(0, 3), st.integers(8, 20), st.booleans(), st.integers(0, 10**6))
def test_a_head_that_is_a_convolution_is_found_on_a_line(radius: int, n: int, causal: bool, seed: int) -> None:
    torch.manual_seed(seed)
    kernel = torch.rand(2, 2 * radius + 1).double() + 0.05
    if causal:
        kernel[:, radius + 1 :] = 0
    kernel /= kernel.sum(-1, keepdim=True)
    _, seen = observed(of_offsets(kernel, n), mask=regard.Causal() if causal else None)
    for head, found in enumerate(to_convolution(seen, radius=radius)):
        torch.testing.assert_close(found.kernel, kernel[head], rtol=0, atol=1e-12)
        assert found.head == head and found.kernel.shape == (2 * radius + 1,)
        assert math.isclose(found.fit, 1, abs_tol=1e-12) and found.row_error < 1e-12
        at = torch.arange(-radius, radius + 1).double()
        mean = float(kernel[head] @ at)
        assert math.isclose(found.centre[0], mean, abs_tol=1e-12)
        assert math.isclose(found.width, float(kernel[head] @ (at - mean) ** 2) ** 0.5, abs_tol=1e-6)
    # A kernel that is too large has zeros there; one that is too small misses what lies further.
    larger = to_convolution(seen, radius=radius + 1, heads=[1])
    torch.testing.assert_close(larger[0].kernel[1:-1], kernel[1], rtol=0, atol=1e-12)
    if radius:
        assert to_convolution(seen, radius=radius - 1)[0].row_error > 0.01


def test_a_head_that_is_a_convolution_is_found_in_the_plane() -> None:
    torch.manual_seed(0)
    kernel = torch.rand(3, 3, 3).double()
    kernel /= kernel.sum((-1, -2), keepdim=True)
    _, seen = observed(on_grid(kernel, 5, 7), grid=(5, 7))
    for head, found in enumerate(to_convolution(seen, radius=1)):
        torch.testing.assert_close(found.kernel, kernel[head], rtol=0, atol=1e-12)
        assert math.isclose(found.fit, 1, abs_tol=1e-12)
        down = float((kernel[head].sum(1) * torch.tensor([-1.0, 0, 1])).sum())
        assert math.isclose(found.centre[0], down, abs_tol=1e-12)
    flipped = to_convolution(observed(on_grid(kernel.flip(-1), 5, 7), grid=(5, 7))[1], radius=1)[0]
    assert not torch.allclose(flipped.kernel, kernel[0], atol=0.05)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 3), st.floats(0.0, 4.0))
def test_outputs_differ_by_the_bound_at_most(seed: int, radius: int, strength: float) -> None:
    torch.manual_seed(seed)
    v, seen = observed(strength * torch.randn(1, 12, 12).double() + of_offsets(torch.ones(23).double(), 12))
    found = to_convolution(seen, radius=radius)[0]
    A, P = seen.weights(0).double(), applied(found, 12)
    assert math.isclose(found.row_error, float((A - P).abs().sum(-1).max()), abs_tol=1e-12)
    assert math.isclose(found.fit, max(0.0, 1 - float((A - P).square().sum() / A.square().sum())), abs_tol=1e-12)
    change = ((A - P) @ v[0]).norm(dim=-1).max()
    assert change <= found.row_error * v[0].norm(dim=-1).max() + 1e-12
    assert found.output_bound is None


def applied(found: HeadConvolution, n: int) -> Tensor:
    """P, written out."""
    radius, P = len(found.kernel) // 2, torch.zeros(n, n).double()
    for i in range(n):
        for j in range(max(0, i - radius), min(n, i + radius + 1)):
            P[i, j] = found.kernel[j - i + radius]
    return P / P.sum(-1, keepdim=True).clamp(min=1e-300)


def test_a_uniform_head_is_told_from_a_convolution() -> None:
    _, seen = observed(torch.zeros(1, 30, 30).double())
    found = to_convolution(seen, radius=2)[0]
    assert math.isclose(found.fit, found.uniform_fit, abs_tol=1e-9)
    _, near = observed(of_offsets(torch.tensor([0.2, 0.6, 0.2]).double(), 30).clamp(min=-30).unsqueeze(0))
    assert to_convolution(near, radius=2)[0].uniform_fit < 0.2 < to_convolution(near, radius=2)[0].fit


def test_watched_values_give_a_bound_on_outputs() -> None:
    torch.manual_seed(0)
    model = Encoder(8, heads=2, layers=1)
    with torch.no_grad(), regard.watch(model, regard.Observe(keep=True), values=True) as seen:
        model(torch.randn(1, 9, 8))
    (path,) = seen
    for found in to_convolution(seen[path], radius=1):
        norms = seen[path].value_norm
        assert norms is not None and found.output_bound is not None
        assert math.isclose(found.output_bound, found.row_error * float(norms[:, found.head].max()), rel_tol=1e-12)


def test_class_tokens_stand_nowhere() -> None:
    kernel = torch.rand(1, 3, 3).double()
    bias = torch.full((1, 13, 13), -torch.inf).double()
    bias[:, 1:, 1:] = on_grid(kernel, 3, 4)
    bias[:, 0, 0] = 0.0
    _, seen = observed(bias, grid=(3, 4))
    found = to_convolution(seen, radius=1)[0]
    torch.testing.assert_close(found.kernel, kernel[0] / kernel.sum(), rtol=0, atol=1e-12)
    assert found.row_error < 1e-12
    bias[:, 1:, 0] = 0.0  # what patches give to the class token no convolution gives
    assert to_convolution(observed(bias, grid=(3, 4))[1], radius=1)[0].row_error > 0.1


def test_refusals() -> None:
    q = torch.randn(1, 1, 4, 2)
    _, seen = regard.attention(q, q, q, observe=regard.Observe())
    with pytest.raises(ValueError, match="Observe\\(keep=True\\)"):
        to_convolution(seen)
    _, seen = regard.attention(q, q, q, observe=regard.Observe(keep=True))
    with pytest.raises(ValueError, match="head is 3; this observation has heads 0"):
        to_convolution(seen, heads=[3])
    with pytest.raises(ValueError, match="radius"):
        to_convolution(seen, radius=-1)
