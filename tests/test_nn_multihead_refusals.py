"""MultiHeadAttention: what it refuses, when it is built and when it is called."""

from __future__ import annotations

import math

import pytest
import torch

from regard.masks import Padding
from regard.nn import MultiHeadAttention
from regard.positions import ALiBi, Learned, RelativeKeys, RelativeTable, Rotary, Sinusoidal


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((7, 3), {}, ValueError, "heads=3 does not divide d_in=7; give d_key and d_value"),
        ((7, 3), {"d_key": 2}, ValueError, "heads=3 does not divide d_in=7"),
        ((6, 0), {}, ValueError, "heads must be at least 1, got 0"),
        ((6, 3), {"d_out": 0}, ValueError, "d_out must be at least 1, got 0"),
        ((6, 3), {"kv_heads": 2}, ValueError, "kv_heads=2 does not divide heads=3"),
        ((6.0, 3), {}, TypeError, "d_in must be an integer"),
        ((6, 3), {"scale": -1.0}, ValueError, "scale must be a number ≥ 0.0, got -1.0"),
        ((6, 3), {"scale": math.nan}, ValueError, "scale"),
        ((6, 3), {"dropout": 1.5}, ValueError, "dropout must be between 0 and 1, got 1.5"),
        ((6, 3), {"dropout": -0.5}, ValueError, "dropout must be a number ≥ 0.0, got -0.5"),
        ((6, 3), {"position": Sinusoidal(6)}, TypeError, "Sinusoidal is added to the input: call it before the first"),
        ((6, 3), {"position": Learned(5, 6)}, TypeError, "Learned is added to the input"),
        ((6, 3), {"position": "rotary"}, TypeError, "position must be a Rotary or a bias on scores .* got 'rotary'"),
        ((6, 3), {"dropout": math.nan}, ValueError, "dropout must be a number ≥ 0.0, got nan"),
        ((6, 3), {"softcap": 0.0}, ValueError, "softcap must be .* got 0.0"),
        ((6, 3), {"softcap": math.inf}, ValueError, "softcap must be a finite number > 0, got inf"),
        ((6, 3), {"softcap": "30"}, TypeError, "softcap must be a number, got '30'"),
        ((6, 3), {"sinks": 1}, TypeError, "sinks must be True .* or False, got 1"),
        ((6, 3), {"scale": math.inf, "softcap": 3.0}, ValueError, "scale=inf .* has no meaning with softcap"),
        ((6, 3), {"scale": math.inf, "sinks": True}, ValueError, "scale=inf .* has no meaning with sinks"),
        ((6, 3), {"backend": "fast"}, ValueError, "backend is 'fast'; known are 'auto'"),
        ((6, 3), {"position": ALiBi(heads=2)}, ValueError, "ALiBi is made for heads=2, but this layer has heads=3"),
        ((6, 3), {"position": ALiBi([1.0, 2.0])}, ValueError, "ALiBi is made for heads=2, .* heads=3"),
        ((6, 3), {"position": RelativeKeys(3, 2)}, ValueError, "RelativeKeys is made for d=3, .* has d_key=2"),
        ((6, 3), {"position": ALiBi() + RelativeTable(4, 2)}, ValueError, "RelativeTable is made for heads=4"),
        (
            (6, 3),
            {"position": Rotary(6)},
            ValueError,
            r"position Rotary\(6\) .* d_key=2",
        ),
    ],
)
def test_refused_when_built(args, options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        MultiHeadAttention(*args, **options)


def test_refused_when_called() -> None:
    layer = MultiHeadAttention(6, 3)
    x = torch.zeros(2, 5, 6)
    with pytest.raises(ValueError, match=r"x has shape \[2, 5, 7\]; this layer takes \[\*batch, n, 6\]"):
        layer(torch.zeros(2, 5, 7))
    with pytest.raises(ValueError, match=r"x has shape \[6\]"):
        layer(torch.zeros(6))
    with pytest.raises(ValueError, match=r"context has shape \[2, 5, 7\]; this layer takes \[\*batch, m, 6\]"):
        layer(x, torch.zeros(2, 5, 7))
    with pytest.raises(ValueError, match=r"context .* \[\*batch, m, 7\]"):
        MultiHeadAttention(6, 3, d_context=7)(x)
    with pytest.raises(ValueError, match="position is a Rotary"):
        MultiHeadAttention(6, 3, position=Rotary(2))(x, x)
    with pytest.raises(TypeError, match=r"mask must be bool .*torch.float32"):
        layer(x, mask=torch.zeros(5, 5))
    with pytest.raises(TypeError, match=r"mask must be bool .*torch.int64; .*mask.bool\(\)"):
        layer(x, mask=torch.ones(5, 5, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"mask must be a mask value .* got \[3, 4\]; .*Padding"):
        layer(x, mask=[3, 4])
    with pytest.raises(TypeError, match=r"x is torch.float32, but .* torch.bfloat16"):
        MultiHeadAttention(6, 3).bfloat16()(x)
    with pytest.raises(TypeError, match=r"context is torch.float64, but .* torch.float32"):
        layer(x, x.double())
    with pytest.raises(ValueError, match="position_ids"):
        layer(x, position_ids=torch.arange(5))
    with pytest.raises(ValueError, match=r"lengths must be at most .*got 6"):
        layer(x, mask=Padding([6, 1]))
    with pytest.raises(ValueError, match="scale"):
        layer(x, scale=-1.0)
