"""The convolution that a layer is: given back as it was, or read off heads that stand at its taps."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import regard
from regard.convolution import to_attention, to_convolution
from regard.nn import MultiHeadAttention


@settings(max_examples=60)
@given(st.data())
def test_a_convolution_comes_back_as_it_was(data: st.DataObject) -> None:
    axes, groups = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2, 3]))
    kernel, dilation = (tuple(data.draw(st.integers(1, 3)) for _ in range(axes)) for _ in range(2))
    same = data.draw(st.booleans())
    stride = (1,) * axes if same else tuple(data.draw(st.integers(1, 3)) for _ in range(axes))
    conv = (nn.Conv1d if axes == 1 else nn.Conv2d)(
        groups * data.draw(st.integers(1, 2)),
        groups * data.draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        padding="same" if same else tuple(data.draw(st.integers(0, 2)) for _ in range(axes)),
        dilation=dilation,
        groups=groups,
        bias=data.draw(st.booleans()),
        padding_mode=data.draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    ).double()
    back = to_convolution(to_attention(conv))
    x = torch.randn(2, conv.in_channels, *(9,) * axes).double()
    assert type(back) is type(conv)
    assert torch.equal(back(x), conv(x))


def layer_at(centers: list[list[float]], alpha: float = 300.0, **more: object) -> MultiHeadAttention:
    position = regard.Quadratic(6, 7, len(centers), centers=centers, alpha=alpha)
    given = {"d_key": 1, "d_value": 3, "d_out": 4, "scale": 0.0, "qkv_bias": True, **more}
    layer = MultiHeadAttention(5, len(centers), position=position, **given).double()  # type: ignore[arg-type]
    nn.init.normal_(layer.v_proj.bias)
    return layer


@pytest.mark.parametrize("rows", [[0], [-1, 0, 1], [0, 1], [-2, 0, 2]])
@pytest.mark.parametrize("columns", [[0], [-1, 0, 1], [-2, -1, 0, 1, 2]])
@pytest.mark.parametrize("shared", [False, True])
def test_heads_at_all_taps_are_a_convolution(rows: list[int], columns: list[int], shared: bool) -> None:
    taps = [[float(y), float(x)] for y in rows for x in columns]
    random.Random(0).shuffle(taps)
    layer = layer_at(taps, kv_heads=1 if shared else None, out_bias=not shared)
    conv = to_convolution(layer)
    assert conv.kernel_size == (len(rows), len(columns))
    x = torch.randn(2, 42, 5).double()
    found = conv(x.mT.unflatten(-1, (6, 7))).flatten(2).mT
    torch.testing.assert_close(found, layer(x), rtol=0, atol=1e-12)
    layer.position.centers.data[0] += 1  # type: ignore[union-attr, operator]
    if len(taps) > 1:
        assert (layer(x) - found).abs().max() > 1e-2


NINE = [[y, x] for y in (-1.0, 0.0, 1.0) for x in (-1.0, 0.0, 1.0)]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (layer_at(NINE[:8]), "3 × 3 kernel needs .* 9 taps, got 8 heads at 8 offsets"),
        (layer_at([*NINE, [0.0, 0.0]]), "9 taps, got 10 heads at 9 offsets"),
        (layer_at([*NINE[:8], [0.2, 0.4]]), "got 9 heads at 8 offsets"),
        (layer_at([[0.0, x] for x in (-3.0, 0.0, 1.0)]), r"evenly spaced.* columns \[-3, 0, 1\]"),
        (layer_at([[y, 0.0] for y in (0.0, 1.0, 2.0)]), r"centred on the query.* rows \[0, 1, 2\]"),
        (layer_at(NINE, alpha=-1.0), "alpha must be above 0"),
        (layer_at(NINE, scale=1.0), "layer must depend on positions alone"),
        (layer_at(NINE, mask=regard.Causal()), "layer must depend on positions alone"),
        (layer_at(NINE, sinks=True), "layer must depend on positions alone"),
        (MultiHeadAttention(9, 9), "layer must depend on positions alone"),
    ],
)
def test_a_layer_that_is_no_convolution_is_refused(layer: MultiHeadAttention, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        to_convolution(layer)
    assert "\n" not in str(error.value)


def test_what_is_neither_layer_nor_observation_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^observed must be regard\.Observation, got Conv2d"):
        to_convolution(nn.Conv2d(1, 1, 1))  # type: ignore[call-overload]
