"""The vision transformer: patches as a convolution, a class token, learned positions, two heads."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

import regard
from regard.nn import LayerNorm, VisionTransformer
from regard.positions import Grid, Learned, Quadratic

pytestmark = pytest.mark.usefixtures("full_tiles")
F64 = torch.float64


def model(**options) -> VisionTransformer:
    torch.manual_seed(0)
    sizes = {
        "image": (6, 10),
        "patch": (2, 5),
        "classes": 7,
        "d": 12,
        "heads": 3,
        "layers": 2,
        "hidden": 11,
        "channels": 5,
    }
    return VisionTransformer(**{**sizes, **options}).to(F64)


def images(b: int = 2) -> torch.Tensor:
    return torch.randn(b, 5, 6, 10, dtype=F64)


def test_patches_are_one_matrix_applied_to_each() -> None:
    vit, x = model(), images()
    assert vit.grid == (3, 2)
    cut = x.unfold(2, 2, 2).unfold(3, 5, 5)  # [B, C, 3, 2, 2, 5]
    flat = cut.permute(0, 2, 3, 1, 4, 5).reshape(2, 6, 5 * 2 * 5)
    expected = flat @ vit.patches.weight.reshape(12, -1).T + vit.patches.bias
    y = vit.patch_tokens(x)
    torch.testing.assert_close(y[:, 1:], expected, rtol=0, atol=1e-12)
    assert bool((y[:, 0] == vit.class_token).all())


def test_forward_is_the_formula() -> None:
    vit, x = model(), images()
    y = vit.encoder.position(vit.patch_tokens(x))
    for block in vit.encoder.blocks:
        y = block(y)
    y = vit.encoder.norm(y)
    torch.testing.assert_close(vit.features(x), y, rtol=0, atol=0)
    first, _, last = vit.head
    torch.testing.assert_close(vit(x), last(torch.tanh(first(y[:, 0]))), rtol=0, atol=1e-12)
    assert all(block.order == "pre" and block.attention.q_proj.bias is not None for block in vit.encoder.blocks)
    assert isinstance(vit.encoder.position, Learned) and vit.encoder.position.weight.shape == (7, 12)


def test_heads_for_pre_training_and_fine_tuning() -> None:
    vit, x = model(), images()
    features = vit.features(x)
    assert vit.fine_tune(3) is vit and isinstance(vit.head, nn.Linear)
    assert vit(x).shape == (2, 3) and vit(x).dtype == F64 and bool((vit(x) == 0).all())
    torch.testing.assert_close(vit.features(x), features, rtol=0, atol=0)
    vit(x).sum().backward()
    assert vit.head.weight.grad is not None and bool((vit.head.weight.grad != 0).any())
    assert isinstance(model(head="linear").head, nn.Linear)
    assert bool((model(head="linear")(x) != 0).all())


def test_everything_learns() -> None:
    vit = model()
    vit(images()).square().sum().backward()
    for name, p in vit.named_parameters():
        assert p.grad is not None and bool((p.grad != 0).any()) and bool(p.grad.isfinite().all()), name


def test_options_reach_the_blocks() -> None:
    vit = model(norm=partial(LayerNorm, eps=1e-12), qkv_bias=False, activation="relu", dropout=0.1)
    block = vit.encoder.blocks[1]
    assert block.attention_norm.eps == vit.encoder.norm.eps == 1e-12 and block.attention.q_proj.bias is None
    assert block.feedforward.activation == "relu" and block.dropout.p == 0.1 and vit.encoder.dropout.p == 0.1


@pytest.mark.parametrize("make", [lambda: Grid(3, 2, 3), lambda: Grid(3, 2, 3, d=4), lambda: Quadratic(3, 2, 3)])
def test_a_bias_on_the_grid_beside_the_learned_positions(make) -> None:
    bias, x = make().to(F64), images()
    vit = model(position=bias)
    assert isinstance(vit.encoder.position, Learned) and vit.encoder.position.weight.shape == (7, 12)
    y = vit.encoder.position(vit.patch_tokens(x))
    for block in vit.encoder.blocks:
        assert block.attention.position is bias
        y = block(y)
    torch.testing.assert_close(vit.features(x), vit.encoder.norm(y), rtol=0, atol=0)
    assert not torch.allclose(vit(x), model()(x))
    vit(x).square().sum().backward()
    assert all(p.grad is not None for p in bias.parameters())


def test_a_position_added_to_the_input_replaces_the_learned_one() -> None:
    position = Learned((3, 2), 12)
    assert model(position=position).encoder.position is position


def test_square_sizes_and_defaults() -> None:
    vit = VisionTransformer(6, 3, classes=2, d=6, heads=3, layers=1)
    assert vit.image == (6, 6) and vit.patch == (3, 3) and vit.encoder.blocks[0].feedforward.hidden == 24
    assert vit(torch.zeros(1, 3, 6, 6)).shape == (1, 2)


def test_observing() -> None:
    vit, x = model(), images()
    logits, seen = vit(x, observe=regard.Observe(grid=vit.grid, profile=1))
    torch.testing.assert_close(logits, vit(x), rtol=0, atol=0)
    assert list(seen) == ["encoder.blocks.0.attention", "encoder.blocks.1.attention"]
    assert seen["encoder.blocks.0.attention"].profile.shape == (3, 3, 3)
    assert set(seen) <= set(dict(vit.named_modules()))


def test_state_dict_round_trip_and_deep_copies() -> None:
    vit, x = model(), images()
    torch.manual_seed(1)
    other = model(classes=7)
    nn.init.zeros_(other.class_token)
    other.load_state_dict(vit.state_dict())
    for same in (other, copy.deepcopy(vit)):
        torch.testing.assert_close(same(x), vit(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": (7, 10)}, "image height 7 is not divisible by patch 2; patches must tile the image"),
        ({"image": (6, 11)}, "image width 11 is not divisible by patch 5"),
        ({"patch": 0}, "patch must be at least 1, got 0"),
        ({"classes": 0}, "classes must be at least 1, got 0"),
        ({"head": "mlp"}, 'head must be "hidden" .one hidden layer. or "linear", got \'mlp\''),
        ({"image": (6, 10, 3)}, r"image must be one integer or .height, width., got \(6, 10, 3\); colours"),
        ({"heads": 5}, "heads=5 does not divide d_in=12"),
    ],
)
def test_refused_when_built(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**options)


@pytest.mark.parametrize("shape", [(2, 3, 6, 10), (2, 5, 6, 6), (5, 6, 10), (2, 5, 10, 6)])
def test_refused_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images have shape .*; this model takes \[batch, 5, 6, 10\]"):
        model()(torch.zeros(shape, dtype=F64))
