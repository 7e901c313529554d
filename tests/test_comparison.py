"""The comparison table of README: what it says about other tools is run here; its figures are the benchmarks'."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "README.md").read_text(encoding="utf-8").split("## Comparison with other tools")[1].split("\n## ")[0]


@pytest.fixture
def qkv():
    return torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))


def row(name: str) -> str:
    """The line of the table that begins so."""
    return next(line for line in TABLE.splitlines() if line.startswith(f"| {name}"))


def test_a_row_without_keys(qkv):
    assert "`nn.MultiheadAttention` with weights: NaN" in row("a row that may attend to nothing")
    see = torch.ones(5, 5, dtype=torch.bool)
    see[2] = False
    x = torch.randn(1, 5, 16)
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    assert theirs(x, x, x, attn_mask=~see, need_weights=True)[0][0, 2].isnan().all()
    q, k, v = (t.clone().requires_grad_() for t in qkv)
    out = regard.attention(q, k, v, mask=see)
    out.sum().backward()
    assert (out[:, :, 2] == 0).all() and (q.grad[:, :, 2] == 0).all()


def test_a_hidden_key_that_is_nan(qkv):
    assert "SDPA and FlexAttention: NaN" in row("a hidden key that contains NaN")
    q, k, v = qkv
    k, v = k.clone(), v.clone()
    k[..., 4, :] = v[..., 4, :] = math.nan
    see = torch.ones(5, 5, dtype=torch.bool)
    see[:, 4] = False
    assert F.scaled_dot_product_attention(q, k, v, attn_mask=see).isnan().any()
    block = create_block_mask(lambda b, h, i, j: j != 4, None, None, 5, 5, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow where it is not compiled
        assert flex_attention(q, k, v, block_mask=block).isnan().any()
    assert regard.attention(q, k, v, mask=see).isfinite().all()


def test_an_infinite_scale(qkv):
    assert "SDPA: NaN" in row("`scale=inf`")
    q, k, v = qkv
    assert F.scaled_dot_product_attention(q, k, v, scale=math.inf).isnan().any()
    best = (q @ k.mT).argmax(-1)
    torch.testing.assert_close(regard.attention(q, k, v, scale=math.inf), torch.take_along_dim(v, best[..., None], 2))


def test_gradients_on_a_cpu(qkv):
    assert "FlexAttention: `NotImplementedError`" in row("gradients on a CPU")
    q, k, v = (t.clone().requires_grad_() for t in qkv)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        torch.compile(flex_attention)(q, k, v)
    bias = regard.T5Buckets(2)
    regard.attention(q, k, v, mask=regard.Causal(), bias=bias).sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v, *bias.parameters()))


def measured() -> dict[str, dict[str, Any]]:
    cases = json.loads((ROOT / "docs" / "benchmarks.json").read_text(encoding="utf-8"))["cases"]
    return {one["name"]: one for one in cases}


def test_the_kernels_page_has_the_benchmarks_figures():
    text = (ROOT / "docs" / "kernel.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (\d+\.\d\d) × \|$", text, re.MULTILINE)
    assert len(rows) == 5
    for name, ratio in rows:
        best = measured()[name]["best"]  # the page of benchmarks divides these times; the stored ratios are rounded
        assert f"{best['SDPA'] / best['regard']:.2f}" == ratio
    watched = measured()["8 heads on 4,096 tokens, rows and a map"]["ratios"]["not watched"]
    assert f"took {1 / watched:.2f} times as long" in text


@pytest.mark.parametrize(
    ("name", "case", "peers"),
    [
        ("causal attention", "causal 1×8×1024×64", ["SDPA"]),
        ("a window of", "window ±256, 1×8×16384×64", ["SDPA", "FlexAttention"]),
        ("entropy and other observables of all 48 heads", "GPT-2, 6 × 8 heads on 2,048 tokens", ["weights stored"]),
        ("generating one token with a Llama", "Llama 135M generates, per token", ["transformers"]),
    ],
)
def test_figures_are_those_of_the_benchmarks(name, case, peers):
    found = measured()[case]
    for peer in peers:
        assert f"{found['ratios'][peer]:.1f} ×" in row(name), f"{peer} takes {found['ratios'][peer]}"
    for who, size in found["bytes"].items():
        assert who == "not watched" or f"{size / 1e6:.0f} MB" in row(name), f"{who} allocates {size}"
