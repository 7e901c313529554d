"""A head's map at every zoom level, compared with its exact weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.kernels import native
from regard.kernels import score_tiles as tiles
from regard.lab.look import map_pyramid as pyramid
from regard.lab.look.changed_scores import Variant, apply_variant
from regard.lab.look.map_pyramid import Pyramid
from regard.positions import Rotary

MASKS = {"none": lambda n, m: None, "causal": lambda n, m: regard.Causal(), "window": lambda n, m: regard.Window(5, 2)}


def observe(n, m, mask=None, bias=None, dtype=torch.float32, heads=2, **options):
    torch.manual_seed(n * 1000 + m)
    q, k = torch.randn(1, heads, n, 8, dtype=dtype), torch.randn(1, 1, m, 8, dtype=dtype)
    observe = regard.Observe(keep=True)
    return regard.attention(q, k, k, mask=mask, bias=bias, observe=observe, **options)[1]


def cells(weights, counted, level):
    """The plain formula: rows by mean, keys by sum."""
    size, (n, m) = 2**level, weights.shape
    result = torch.zeros(-(-n // size), -(-m // size), dtype=torch.float64)
    for r in range(result.shape[0]):
        rows = [i for i in range(r * size, min(n, (r + 1) * size)) if counted[i]]
        for c in range(result.shape[1]):
            result[r, c] = weights[rows, c * size : (c + 1) * size].double().sum() / max(1, len(rows))
    return result


@settings(max_examples=40)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(sorted(MASKS)),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 3.0, math.inf]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_every_tile_equals_the_formula(n, m, mask, slopes, scale, dtype):
    with pytest.MonkeyPatch.context() as patch:  # small tiles, so that there are many, and levels that are kept
        patch.setattr(pyramid, "TILE", 4)
        patch.setattr(pyramid, "COARSE", 16)
        patch.setattr(pyramid, "STRIP", 8)
        patch.setattr(tiles, "TILE_ELEMENTS", 2**12)  # of the reference, which is what is compared with
        observation = observe(n, m, MASKS[mask](n, m), regard.ALiBi() if slopes else None, dtype, scale=scale)
        counted = observation.counted[0, 1]
        result = Pyramid(observation.saved_calls[0], 0, 1, counted)
        weights = observation.weights(1)
        # The kernel's logits are float32: each is off by a part of its own size, and so is its weight.
        call = observation.saved_calls[0]
        largest_logit = 0.0 if scale == math.inf else scale * float((call.q.float() @ call.k.float().mT).abs().max())
        tolerance = 1e-6 + 3 * torch.finfo(torch.float32).eps * largest_logit
        assert result.top == max(0, math.ceil(math.log2(max(n, m) / 4)))
        for level in range(result.top + 1):
            expected = cells(weights, counted, level)
            rows, columns = -(-expected.shape[0] // 4), -(-expected.shape[1] // 4)
            strips = [torch.cat([result.tile(level, x, y) for x in range(columns)], 1) for y in range(rows)]
            torch.testing.assert_close(torch.cat(strips).double(), expected, rtol=0, atol=tolerance)
        assert len(result.darkest()) == result.top + 1 and all(x > 0 for x in result.darkest())
        for key in {0, m // 2, m - 1}:
            torch.testing.assert_close(result.column(key).double(), weights[:, key].double(), rtol=0, atol=tolerance)


def test_without_the_native_kernel_the_reference_computes(monkeypatch):
    observation = observe(37, 41, regard.Causal())
    expected = Pyramid(observation.saved_calls[0], 0, 0, observation.counted[0, 0])
    monkeypatch.setattr(native, "refusal", lambda q: "not built")
    result = Pyramid(observation.saved_calls[0], 0, 0, observation.counted[0, 0])
    assert result.row_max_and_sum is None
    torch.testing.assert_close(result.tile(0, 0, 0), expected.tile(0, 0, 0), rtol=0, atol=1e-6)


def test_indices_out_of_range_are_refused():
    observation = observe(10, 12)
    result = Pyramid(observation.saved_calls[0], 0, 0, observation.counted[0, 0])
    for wrong in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="no tile"):
            result.tile(*wrong)


def test_a_variant_equals_the_operator_with_those_options():
    torch.manual_seed(0)
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 2, 23, 8)
    keep, slopes = regard.Observe(keep=True), regard.ALiBi()
    _, observation = regard.attention(rotary(q), rotary(k), k, mask=regard.Causal(), bias=slopes, observe=keep)
    call = observation.saved_calls[0]
    assert apply_variant(call, Variant(), rotary) is call
    variants = {
        Variant(beta=2.5): {
            "q": rotary(q),
            "k": rotary(k),
            "mask": regard.Causal(),
            "bias": slopes,
            "scale": 2.5 / 8**0.5,
        },
        Variant(beta=0): {"q": rotary(q), "k": rotary(k), "mask": regard.Causal(), "bias": slopes, "scale": 0.0},
        Variant(hard=True): {
            "q": rotary(q),
            "k": rotary(k),
            "mask": regard.Causal(),
            "bias": slopes,
            "scale": math.inf,
        },
        Variant(mask=False): {"q": rotary(q), "k": rotary(k), "bias": slopes},
        Variant(position=False): {"q": q, "k": k, "mask": regard.Causal()},
    }
    for variant, options in variants.items():
        _, expected = regard.attention(v=k, observe=keep, **options)
        result = apply_variant(call, variant, rotary).weights(0, 1, None, None)
        torch.testing.assert_close(result, expected.weights(1), rtol=0, atol=2e-6)


def test_hard_attention_refuses_a_softcap():
    call = observe(5, 5, softcap=3.0).saved_calls[0]
    with pytest.raises(ValueError, match="softcap"):
        apply_variant(call, Variant(hard=True), None)
