"""Attention at scale 0: entries of a batch with the same weights are computed as one, and nobody can tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operator_runs import assert_close
from torch import Tensor, nn

import regard
from regard import Causal, Observe, Padding
from regard.kernels import zero_scale
from regard.masks import Mask

GRID = (2, 3)
MASKS = ("none", "causal", "padding", "dense", "dense by entry", "nothing")
BIASES = ("none", "dense", "hiding", "by entry", "quadratic", "grid", "grid by query", "alibi")


def drawn(seed: int) -> Callable[..., Tensor]:
    """Numbers that float32 holds, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).double()


@dataclass
class Given:
    """One call: tensors, and options that may differ by entry."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | Tensor | None
    bias: Any
    sinks: Tensor | None
    learned: list[Tensor] = field(default_factory=list)

    def call(self, backend: str) -> Tensor:
        return regard.attention(
            self.q, self.k, self.v, mask=self.mask, bias=self.bias, sinks=self.sinks, scale=0.0, backend=backend
        )

    def one_by_one(self) -> Tensor:
        """Entry after entry in the reference."""

        def of(x: Any, b: int) -> Any:
            if isinstance(x, Padding):
                return Padding(x.keys[b : b + 1])
            return x[b : b + 1] if isinstance(x, Tensor) and x.ndim == 4 and x.shape[0] > 1 else x

        entries = [
            Given(*(of(x, b) for x in (self.q, self.k, self.v, self.mask, self.bias)), self.sinks)
            for b in range(len(self.v))
        ]
        return torch.cat([entry.call("reference") for entry in entries])

    def gradients(self, out: Tensor) -> list[Tensor]:
        """Of a weighted sum that is about as large for any number of outputs."""
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
        return list(torch.autograd.grad((out * weight).sum() / out.numel() ** 0.5, [self.v, *self.learned]))


def made(
    batch: int, key_heads: int, group: int, n: int, m: int, e: int, mask: str, bias: str, sinks: bool, seed: int
) -> Callable[[torch.dtype], Given]:
    """What makes the same call in any dtype."""
    m = max(m, GRID[0] * GRID[1]) if bias.startswith(("quadratic", "grid")) else m
    heads, d = key_heads * group, 3

    def build(dtype: torch.dtype) -> Given:
        some = drawn(seed)
        q, k, v = some(batch, heads, n, d), some(batch, key_heads, m, d), some(batch, key_heads, m, e)

        def learn(module: nn.Module) -> nn.Module:
            for p in module.parameters():
                p.data = some(*p.shape).to(dtype) / 2
            return module

        biases: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "dense": lambda: some(heads, n, m).to(dtype),
            "hiding": lambda: some(1, 1, n, m).to(dtype).masked_fill(some(n, m) < 0, -math.inf),
            "by entry": lambda: some(batch, 1, n, m).to(dtype),
            "quadratic": lambda: learn(regard.Quadratic(*GRID, heads)),
            "grid": lambda: learn(regard.Grid(*GRID, heads)),
            "grid by query": lambda: learn(regard.Grid(*GRID, heads, d=d)),
            "alibi": lambda: regard.ALiBi(),
        }
        masks: dict[str, Callable[[], Mask | Tensor | None]] = {
            "none": lambda: None,
            "causal": Causal,
            "padding": lambda: Padding((torch.arange(batch) * 5 + seed) % (m + 1)),
            "dense": lambda: some(heads, n, m) > -0.3,
            "dense by entry": lambda: some(batch, 1, n, m) > -0.3,
            "nothing": lambda: torch.zeros(n, m, dtype=torch.bool),
        }
        result = Given(
            *(x.to(dtype) for x in (q, k, v)),
            mask=masks[mask](),
            bias=biases[bias](),
            sinks=some(heads).to(dtype) if sinks else None,
        )
        learned = result.bias.parameters() if isinstance(result.bias, nn.Module) else (result.bias,)
        result.learned = [x for x in (*learned, result.sinks) if isinstance(x, Tensor)]
        for x in (result.v, *result.learned):
            x.requires_grad_()
        return result

    return build


CALLS = st.builds(
    made,
    batch=st.sampled_from([6, 4, 1, 2, 3, 5, 7]),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    n=st.integers(1, 7),
    m=st.integers(1, 9),
    e=st.sampled_from([300, 341, 400, 1, 2, 5, 513, 700]),
    mask=st.sampled_from(MASKS),
    bias=st.sampled_from(BIASES),
    sinks=st.booleans(),
    seed=st.integers(0, 2**20),
)


@pytest.mark.usefixtures("full_tiles")
@settings(max_examples=120)
@given(CALLS)
def test_a_batch_is_what_its_entries_are_one_by_one(build: Callable[[torch.dtype], Given]) -> None:
    truth = build(torch.float64)
    wanted = truth.one_by_one()
    slopes = truth.gradients(wanted)
    for dtype, backend, tolerance in ((torch.float64, "reference", 1e-12), (torch.float32, "auto", 1e-5)):
        ours = build(dtype)
        out = ours.call(backend)
        assert_close(out, wanted, tolerance)
        for mine, theirs in zip(ours.gradients(out), slopes, strict=True):
            assert_close(mine, theirs, tolerance)
        with torch.no_grad():
            assert_close(ours.call(backend), wanted, tolerance)


def shapes_of_v(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of v in every call of a kernel from now on."""
    found: list[tuple[int, ...]] = []
    through = zero_scale.ops.attention_output

    def run(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        assert len(q) == len(k) == len(v)
        found.append(tuple(v.shape))
        return through(q, k, v, *others)

    monkeypatch.setattr(zero_scale.ops, "attention_output", run)
    return found


@pytest.mark.parametrize(
    ("batch", "e", "many"),
    [
        *((7, 3, 7), (8, 128, 8), (12, 128, 6), (16, 128, 8), (6, 300, 3), (4, 300, 2), (6, 512, 2)),
        *((5, 300, 1), (6, 513, 1), (6, 700, 1), (6, 1024, 1), (6, 2000, 1), (1, 3, 1)),
    ],
)
def test_values_of_several_entries_lie_side_by_side(
    batch: int, e: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = made(batch, 2, 2, 3, 6, e, "causal", "quadratic", True, seed=0)(torch.float64)
    wanted = given.one_by_one()
    slopes = given.gradients(wanted)
    found = shapes_of_v(monkeypatch)
    out = given.call("auto")
    assert found == [(batch // many, 2, 6, many * e)]
    assert_close(out, wanted)
    for mine, theirs in zip(given.gradients(out), slopes, strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", BIASES)
def test_entries_become_one_where_they_share_bias_and_mask(
    mask: str, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = made(4, 2, 1, 3, 6, 2, mask, bias, False, seed=1)(torch.float32)
    found = shapes_of_v(monkeypatch)
    given.call("auto")
    differ = mask in ("padding", "dense by entry") or bias in ("by entry", "grid by query")
    assert found == [(4, 2, 6, 2) if differ else (1, 2, 6, 8)]


@pytest.mark.parametrize("options", [{"scale": 1.0}, {}, {"scale": math.inf}, {"scale": 0.0, "dropout": 0.5}])
def test_entries_stay_apart_where_their_weights_differ(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = drawn(2)
    found = shapes_of_v(monkeypatch)
    regard.attention(some(4, 2, 3, 5), some(4, 2, 6, 5), some(4, 2, 6, 2), **options)
    assert found == [(4, 2, 6, 2)]


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_leading_dimensions_are_those_of_the_call(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some = drawn(3)
    q, k, v, bias = some(2, 1, 4, 3, 5), some(3, 2, 6, 5), some(2, 3, 2, 6, 2), some(4, 3, 6)
    found = shapes_of_v(monkeypatch)
    out = regard.attention(q, k, v, bias=bias, scale=0.0, backend=backend)
    assert found == [(1, 2, 6, 12)]
    torch.testing.assert_close(out, bias.softmax(-1) @ v.repeat_interleave(2, -3), rtol=0, atol=1e-12)
    # Values that the batch shares, and a batch of no dimensions.
    shared = regard.attention(q, k, v[0, 0], bias=bias, scale=0.0, backend=backend)
    torch.testing.assert_close(shared, out[0, 0].expand(2, 3, 4, 3, 2), rtol=0, atol=1e-12)
    alone = regard.attention(q[0, 0], k[0], v[0, 0], bias=bias, scale=0.0, backend=backend)
    torch.testing.assert_close(alone, out[0, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rows_without_keys_are_zero_and_send_nothing(backend: str) -> None:
    v = drawn(4)(6, 1, 3, 2).float().requires_grad_()
    q = torch.zeros(6, 1, 5, 1)
    out = regard.attention(q, torch.zeros(6, 1, 3, 1), v, mask=Causal(), scale=0.0, backend=backend)
    assert bool((out[:, :, :2] == 0).all())
    assert bool((out[:, :, 2:] != 0).all())
    (slope,) = torch.autograd.grad(out[:, :, :2].sum(), v)
    assert bool((slope == 0).all())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_queries_and_keys_that_are_not_looked_at_may_be_anything(backend: str) -> None:
    some = drawn(5)
    v, bias = some(4, 2, 6, 3).float().requires_grad_(), some(2, 3, 6).float().requires_grad_()
    nothing = torch.full((4, 2, 6, 5), math.nan)
    results = []
    for x in (nothing, torch.zeros_like(nothing)):
        out = regard.attention(x[:, :, :3], x, v, bias=bias, scale=0.0, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (v, bias))))
    for mine, theirs in zip(*results, strict=True):
        assert bool(mine.isfinite().all())
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_wrong_in_one_entry_stays_there(backend: str, wrong: float) -> None:
    v = drawn(6)(6, 2, 4, 3).float()
    v[2, 1, 3, 0] = wrong  # the last key, which the last query alone sees
    v.requires_grad_()
    q = torch.zeros(6, 2, 4, 1)
    out = regard.attention(q, q, v, mask=Causal(), scale=0.0, backend=backend)
    assert (~out.isfinite()).nonzero().tolist() == [[2, 1, 3, 0]]
    (slope,) = torch.autograd.grad(out.sum(), v)
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_dropout_is_drawn_for_every_entry(backend: str) -> None:
    q, v = torch.zeros(4, 1, 8, 1), drawn(7)(1, 1, 8, 2).float().expand(4, 1, 8, 2)
    torch.manual_seed(0)
    out = regard.attention(q, q, v, scale=0.0, dropout=0.5, backend=backend)
    assert all(not torch.equal(out[a], out[b]) for a in range(4) for b in range(a))
    plain = regard.attention(q, q, v, scale=0.0, backend=backend)
    assert all(torch.equal(plain[0], plain[b]) for b in range(4))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("batch", "n", "m", "e"), [(0, 3, 6, 2), (4, 0, 6, 2), (4, 3, 6, 0), (4, 3, 0, 2), (4, 0, 0, 0)]
)
def test_sizes_of_zero_are_ordinary(batch: int, n: int, m: int, e: int, backend: str) -> None:
    some = drawn(8)
    leaves = [x.requires_grad_() for x in (some(batch, 2, n, 5), some(batch, 1, m, 5), some(batch, 1, m, e))]
    bias = some(2, n, m).requires_grad_()
    out = regard.attention(*leaves, bias=bias, scale=0.0, backend=backend)
    assert out.shape == (batch, 2, n, e)
    assert bool((out == 0).all())
    for x, slope in zip((*leaves, bias), torch.autograd.grad(out.sum(), (*leaves, bias)), strict=True):
        assert slope.shape == x.shape
        assert bool((slope == 0).all())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_queries_and_keys_get_gradients_of_zero(backend: str) -> None:
    some = drawn(9)
    q, k, v = some(6, 2, 3, 5).requires_grad_(), some(6, 2, 4, 5).requires_grad_(), some(6, 2, 4, 2)
    out = regard.attention(q, k, v, scale=0.0, backend=backend)
    for x, slope in zip((q, k), torch.autograd.grad(out.sum(), (q, k)), strict=True):
        assert torch.equal(slope, torch.zeros_like(x))


def test_observing_changes_no_output() -> None:
    given = made(6, 1, 2, 5, 6, 3, "causal", "quadratic", True, seed=10)(torch.float64)
    out, seen = regard.attention(
        *(given.q, given.k, given.v),
        **{"mask": given.mask, "bias": given.bias, "sinks": given.sinks, "scale": 0.0, "observe": Observe(keep=True)},
    )
    assert_close(given.call("auto"), out)
    assert torch.equal(seen.weights(1, batch=0), seen.weights(1, batch=5))


def test_a_compiled_call_is_the_same() -> None:
    torch._dynamo.reset()

    def call(given: Given, v: Tensor) -> Tensor:
        return regard.attention(given.q, given.k, v, mask=Causal(), bias=given.bias, scale=0.0)

    given = made(6, 2, 1, 3, 6, 2, "causal", "quadratic", False, seed=11)(torch.float64)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for f in (call, compiled):
        out = f(given, given.v)
        results.append([out, *given.gradients(out)])
    for mine, theirs in zip(*results, strict=True):
        assert_close(mine, theirs)
