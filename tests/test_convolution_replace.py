"""Heads replaced by convolutions: what is kept is exact, what is replaced is the stated sum, and models still run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.convolution import ConvolvedAttention, HeadConvolution, compare, replace, swap
from regard.convolution._head_subset import layer_of_heads
from regard.models import bundled, load
from regard.nn import Encoder, MultiHeadAttention, RMSNorm, VisionTransformer

POSITIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "rotary": lambda: regard.Rotary(4),
    "quadratic": lambda: regard.Quadratic(3, 4, heads=6),
    "grid": lambda: regard.Grid(3, 4, heads=6, d=4),
    "alibi": lambda: regard.ALiBi(heads=6),
    "t5": lambda: regard.T5Buckets(heads=6),
    "shaw": lambda: regard.RelativeKeys(4, max_distance=3, heads=6),
    "sum": lambda: regard.Quadratic(3, 4, heads=6) + regard.ALiBi(heads=6),
}


def head(number: int, kernel: Tensor) -> HeadConvolution:
    return HeadConvolution(number, kernel, (0.0,) * kernel.ndim, 0.0, 1.0, 0.0, 0.0, None)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(
    "more", [{}, {"kv_heads": 2, "sinks": True}, {"kv_heads": 3, "qk_norm": RMSNorm, "softcap": 2.0}]
)
def test_parts_of_a_layer_add_up_to_it(position: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(
        5,
        6,
        d_key=4,
        d_value=3,
        d_out=7,
        qkv_bias=True,
        position=POSITIONS[position](),
        mask=regard.Window(6, 6),
        **more,
    ).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 12, 5).double()
    parts = [layer_of_heads(layer, heads) for heads in ([0, 1], [2], [3, 4, 5])]
    assert [part.kv_heads for part in parts] == {None: [2, 1, 3], 2: [1, 1, 1], 3: [1, 1, 3]}[more.get("kv_heads")]
    bias = layer.out_proj.bias
    summed = sum(part(x, mask=regard.Causal()) - bias for part in parts) + bias
    torch.testing.assert_close(summed, layer(x, mask=regard.Causal()), rtol=0, atol=1e-12)


def stochastic(p: Tensor, sees: Tensor) -> Tensor:
    weights = p * sees
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, weights / torch.where(total == 0, 1.0, total))


def dense(kernel: Tensor, delta: Tensor, sees: Tensor) -> Tensor:
    """``P_ij = p(j − i) / Σ_{j' seen} p(j' − i)`` from offsets ``[n, n, axes]``, by definition."""
    radius = kernel.shape[-1] // 2
    inside = (delta.abs() <= radius).all(-1)
    at = (delta + radius).clamp(0, 2 * radius)
    return stochastic(torch.where(inside, kernel[tuple(at.unbind(-1))], 0.0), sees)


MASKS: dict[str, Any] = {
    "none": None,
    "causal": regard.Causal(),
    "window": regard.Window(2, 1),
    "lengths": regard.Padding([4, 9]),
    "both": regard.Causal() & regard.Padding([7, 3]),
}


@settings(max_examples=60)
@given(
    st.sampled_from(list(MASKS)),
    st.integers(0, 4),
    st.lists(st.integers(0, 3), unique=True, min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 10**6),
)
def test_replaced_heads_on_a_line_give_the_stated_sum(
    mask: str, radius: int, heads: list[int], groups: int, seed: int
) -> None:
    torch.manual_seed(seed)
    n = 9
    layer = MultiHeadAttention(5, 4, d_key=2, d_value=3, kv_heads=groups, qkv_bias=True).double()
    torch.nn.init.normal_(layer.v_proj.bias)
    kernels = torch.rand(4, 2 * radius + 1).double() * (torch.rand(4, 2 * radius + 1) > 0.3)
    instead = ConvolvedAttention(layer, [head(h, kernels[h]) for h in heads])
    x = torch.randn(2, n, 5).double()
    sees = torch.ones(n, n, dtype=torch.bool) if mask == "none" else MASKS[mask].dense(n, n)
    sees = sees if sees.ndim == 2 else sees.squeeze(-3)
    at = torch.arange(n)
    _, seen = layer(x, mask=MASKS[mask], observe=regard.Observe(keep=True))
    wanted = layer.out_proj.bias.expand(2, n, 5)
    for h in range(4):
        group = h * groups // 4
        v = layer.v_proj(x).unflatten(-1, (groups, 3))[:, :, group]
        if h in heads:
            A = dense(kernels[h], (at - at.unsqueeze(-1)).unsqueeze(-1), sees).expand(2, n, n)
        else:
            A = torch.stack([seen.weights(h, at, batch=b) for b in range(2)])
        wanted = wanted + A @ v @ layer.out_proj.weight[:, 3 * h : 3 * h + 3].T
    torch.testing.assert_close(instead(x, mask=MASKS[mask]), wanted, rtol=0, atol=1e-12)


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.integers(0, 10**6))
def test_replaced_heads_on_a_grid_give_the_stated_sum(height: int, width: int, radius: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer = MultiHeadAttention(4, 2, d_value=3, out_bias=False).double()
    kernels = torch.rand(2, 2 * radius + 1, 2 * radius + 1).double() * (
        torch.rand(2, 2 * radius + 1, 2 * radius + 1) > 0.4
    )
    instead = ConvolvedAttention(layer, [head(h, kernels[h]) for h in (1, 0)], (height, width))
    assert instead.attention is None
    cells = torch.cartesian_prod(torch.arange(height), torch.arange(width)).view(-1, 2)
    x = torch.randn(3, height * width, 4).double()
    v = layer.v_proj(x).unflatten(-1, (2, 3))
    everything = torch.ones(len(cells), len(cells), dtype=torch.bool)
    parts = [dense(kernels[h], cells - cells.unsqueeze(1), everything) @ v[:, :, h] for h in range(2)]
    torch.testing.assert_close(instead(x), layer.out_proj(torch.cat(parts, -1)), rtol=0, atol=1e-12)


def test_a_layer_of_convolutions_is_replaced_without_a_change() -> None:
    torch.manual_seed(0)
    near = regard.Quadratic(7, 6, heads=3, centers=[[0.0, 1.0], [-1.0, 0.3], [1.6, -0.5]], alpha=[9.0, 5.0, 0.01])
    layer = MultiHeadAttention(6, 3, scale=0.0, position=near).double()
    done = replace(layer, 0.99, inputs=torch.randn(2, 42, 6).double(), radius=3, grid=(7, 6))
    assert isinstance(done.model, ConvolvedAttention) and isinstance(layer, MultiHeadAttention)
    assert done.model.convolved == [0, 1] and done.heads == (2, 3)
    x = torch.randn(2, 42, 6).double()
    assert compare(layer, done.model, x, repeat=1).error < 1e-4
    # Larger pictures, with the kernels found on small ones.
    larger = MultiHeadAttention(6, 3, scale=0.0, position=regard.Quadratic(9, 11, heads=3)).double()
    larger.load_state_dict(layer.state_dict())
    other = swap(larger, done.replaced, grid=(9, 11))
    assert compare(larger, other, torch.randn(2, 99, 6).double(), repeat=1).error < 1e-4
    wrong = swap(layer, {"": [head(0, done.replaced[""][0].kernel.flip(-1))]}, grid=(7, 6))
    assert compare(layer, wrong, x, repeat=1).error > 1e-2


def test_a_language_model_s_local_heads_are_replaced() -> None:
    model = load(bundled())
    ids = torch.tensor([model.tokenizer.encode("Return the number of items in a container, and the items of it. " * 3)])
    before = model(ids).detach().clone()
    nothing = replace(model, 1.0, inputs=ids, radius=4)
    assert nothing.heads == (0, 12) and nothing.comparison.error == 0
    done = replace(model, 0.9, inputs=ids, radius=4)
    many, of = done.heads
    assert 0 < many < of == 12
    assert all(one.fit >= 0.9 for heads in done.replaced.values() for one in heads)
    assert 0 < done.comparison.relative < 0.05
    assert done.comparison.speedup == done.comparison.before / done.comparison.after
    assert torch.equal(model(ids), before)  # a copy was changed, not this one
    less = replace(model, 0.5, inputs=ids, radius=4)
    assert less.heads[0] > many and less.comparison.relative > done.comparison.relative
    path = next(iter(done.replaced))
    assert isinstance(done.model.get_submodule(path), ConvolvedAttention)
    with torch.no_grad(), regard.watch(done.model) as seen:
        done.model(ids)
    assert f"{path}.attention" in seen
    with pytest.raises(ValueError, match="cache must be None"):
        done.model.generate(ids[:, :5])


def test_replaced_heads_can_be_trained() -> None:
    torch.manual_seed(0)
    encoder = Encoder(6, heads=3, layers=2, position=regard.Quadratic(4, 4, heads=3, alpha=4.0), hidden=8)
    done = replace(encoder, 0.5, inputs=torch.randn(2, 16, 6), radius=2, grid=(4, 4))
    assert done.heads[0] > 0
    done.model.train()
    done.model(torch.randn(2, 16, 6)).square().sum().backward()
    kernels = {name: p.grad for name, p in done.model.named_parameters() if name.endswith("attention.kernel")}
    assert kernels and all(grad is not None and bool(grad.any()) for grad in kernels.values())
    assert done.model.training and replace(encoder.eval(), inputs=torch.randn(2, 16, 6)).model.training is False


def test_what_cannot_be_replaced_is_refused_in_one_line() -> None:
    layer = MultiHeadAttention(4, 2)
    x, kernel = torch.randn(1, 5, 4), torch.ones(3)
    line = ConvolvedAttention(layer, [head(0, kernel)])
    plane = ConvolvedAttention(layer, [head(0, torch.ones(3, 3))], (2, 3))
    both = ConvolvedAttention(layer, [head(0, kernel), head(1, kernel)])
    image = VisionTransformer(image=6, patch=2, classes=2, d=6, heads=3, layers=1, channels=1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: replace(layer, 1.5, inputs=x), "threshold must be .* got 1.5"),
        (lambda: replace(torch.nn.Linear(4, 4), inputs=x), "model must contain .* got Linear"),
        (
            lambda: replace(image, inputs=torch.randn(1, 1, 6, 6), grid=(3, 3)),
            "grid must have .* for 10 rows",
        ),
        (lambda: line(x, mask=torch.ones(5, 5, dtype=torch.bool)), "mask must let each query"),
        (lambda: line(x, torch.randn(1, 3, 4)), "context must be None"),
        (lambda: line(x, scale=2.0), "scale must be None"),
        (lambda: line(torch.randn(1, 5, 3)), r"x must be .* got shape \[1, 5, 3\]"),
        (lambda: plane(x), "x must have one row per cell .* 2 × 3, got 5 rows"),
        (lambda: plane(torch.randn(1, 6, 4), mask=regard.Causal()), "mask must be None"),
        (lambda: both(x, observe=regard.Observe()), "observe must be None"),
        (lambda: ConvolvedAttention(layer, []), r"convolutions must be of one or more .* got heads \[\]"),
        (lambda: ConvolvedAttention(layer, [head(2, kernel)]), "0 … 1, got heads"),
        (lambda: ConvolvedAttention(layer, [head(0, kernel), head(0, kernel)]), "different"),
        (lambda: ConvolvedAttention(layer, [head(0, kernel)], (1, 5)), "convolutions must have kernels .* 2 axes"),
        (
            lambda: ConvolvedAttention(layer, [head(0, kernel), head(1, torch.ones(5))]),
            "kernels of one shape",
        ),
        (
            lambda: ConvolvedAttention(MultiHeadAttention(4, 2, d_context=3), [head(0, kernel)]),
            "layer must be",
        ),
        (lambda: swap(torch.nn.Sequential(torch.nn.Linear(4, 4)), {"0": [head(0, kernel)]}), "0 must be .* got Linear"),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_a_hidden_value_that_is_no_number_changes_nothing() -> None:
    torch.manual_seed(0)
    layer = ConvolvedAttention(MultiHeadAttention(4, 2), [head(0, torch.ones(3)), head(1, torch.ones(3))])
    x = torch.randn(1, 6, 4)
    wanted = layer(x, mask=regard.Padding([4]))[:, :4]
    x[:, 4:] = torch.nan
    assert torch.equal(layer(x, mask=regard.Padding([4]))[:, :4], wanted)
