"""A head's map at every zoom, against its exact weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.kernels import native, tiles
from regard.lab import pyramid
from regard.lab.pyramid import Pyramid
from regard.lab.variant import Variant, changed
from regard.positions import Rotary

MASKS = {"none": lambda n, m: None, "causal": lambda n, m: regard.Causal(), "window": lambda n, m: regard.Window(5, 2)}


def seen(n, m, mask=None, bias=None, dtype=torch.float32, heads=2, **options):
    torch.manual_seed(n * 1000 + m)
    q, k = torch.randn(1, heads, n, 8, dtype=dtype), torch.randn(1, 1, m, 8, dtype=dtype)
    observe = regard.Observe(keep=True)
    return regard.attention(q, k, k, mask=mask, bias=bias, observe=observe, **options)[1]


def cells(weights, counted, level):
    """The plain formula: rows by mean, keys by sum."""
    size, (n, m) = 2**level, weights.shape
    found = torch.zeros(-(-n // size), -(-m // size), dtype=torch.float64)
    for r in range(found.shape[0]):
        rows = [i for i in range(r * size, min(n, (r + 1) * size)) if counted[i]]
        for c in range(found.shape[1]):
            found[r, c] = weights[rows, c * size : (c + 1) * size].double().sum() / max(1, len(rows))
    return found


@settings(max_examples=40)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(sorted(MASKS)),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 3.0, math.inf]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_every_tile_is_the_plain_formula(n, m, mask, slopes, scale, dtype):
    with pytest.MonkeyPatch.context() as patch:  # small tiles, so that there are many, and levels that are kept
        patch.setattr(pyramid, "TILE", 4)
        patch.setattr(pyramid, "COARSE", 16)
        patch.setattr(pyramid, "STRIP", 8)
        patch.setattr(tiles, "TILE_ELEMENTS", 2**12)  # of the reference, which is what is compared with
        observation = seen(n, m, MASKS[mask](n, m), regard.ALiBi() if slopes else None, dtype, scale=scale)
        counted = observation.counted[0, 1]
        found = Pyramid(observation.kept[0], 0, 1, counted)
        weights = observation.weights(1)
        # The kernel's logits are float32: each is off by a part of its own size, and so is its weight.
        call = observation.kept[0]
        most = 0.0 if scale == math.inf else scale * float((call.q.float() @ call.k.float().mT).abs().max())
        off = 1e-6 + 3 * torch.finfo(torch.float32).eps * most
        assert found.top == max(0, math.ceil(math.log2(max(n, m) / 4)))
        for level in range(found.top + 1):
            expected = cells(weights, counted, level)
            rows, columns = -(-expected.shape[0] // 4), -(-expected.shape[1] // 4)
            strips = [torch.cat([found.tile(level, x, y) for x in range(columns)], 1) for y in range(rows)]
            torch.testing.assert_close(torch.cat(strips).double(), expected, rtol=0, atol=off)
        assert len(found.darkest()) == found.top + 1 and all(x > 0 for x in found.darkest())
        for key in {0, m // 2, m - 1}:
            torch.testing.assert_close(found.column(key).double(), weights[:, key].double(), rtol=0, atol=off)


def test_without_the_native_kernel_the_reference_answers(monkeypatch):
    observation = seen(37, 41, regard.Causal())
    expected = Pyramid(observation.kept[0], 0, 0, observation.counted[0, 0])
    monkeypatch.setattr(native, "refusal", lambda q: "not built")
    found = Pyramid(observation.kept[0], 0, 0, observation.counted[0, 0])
    assert found.sums is None
    torch.testing.assert_close(found.tile(0, 0, 0), expected.tile(0, 0, 0), rtol=0, atol=1e-6)


def test_what_is_not_there_is_refused():
    observation = seen(10, 12)
    found = Pyramid(observation.kept[0], 0, 0, observation.counted[0, 0])
    for wrong in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="there is no tile"):
            found.tile(*wrong)


def test_a_changed_head_is_the_operator_with_those_options():
    torch.manual_seed(0)
    turn = Rotary(8)
    q, k = torch.randn(2, 1, 2, 23, 8)
    keep, slopes = regard.Observe(keep=True), regard.ALiBi()
    _, observation = regard.attention(turn(q), turn(k), k, mask=regard.Causal(), bias=slopes, observe=keep)
    call = observation.kept[0]
    assert changed(call, Variant(), turn) is call
    asked = {
        Variant(beta=2.5): {"q": turn(q), "k": turn(k), "mask": regard.Causal(), "bias": slopes, "scale": 2.5 / 8**0.5},
        Variant(beta=0): {"q": turn(q), "k": turn(k), "mask": regard.Causal(), "bias": slopes, "scale": 0.0},
        Variant(hard=True): {"q": turn(q), "k": turn(k), "mask": regard.Causal(), "bias": slopes, "scale": math.inf},
        Variant(mask=False): {"q": turn(q), "k": turn(k), "bias": slopes},
        Variant(position=False): {"q": q, "k": k, "mask": regard.Causal()},
    }
    for variant, options in asked.items():
        _, expected = regard.attention(v=k, observe=keep, **options)
        found = changed(call, variant, turn).weights(0, 1, None, None)
        torch.testing.assert_close(found, expected.weights(1), rtol=0, atol=2e-6)


def test_hard_attention_takes_no_softcap():
    call = seen(5, 5, softcap=3.0).kept[0]
    with pytest.raises(ValueError, match="softcap"):
        changed(call, Variant(hard=True), None)
