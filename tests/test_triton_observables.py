"""Observables of the Triton kernels against the reference, in the interpreter or on a GPU."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense_attention
from support.cases import CHOICES, Case, build
from support.key_groups import GROUPS
from support.operator_runs import to_device
from support.triton_device import DEVICES

import regard
from regard import Causal, Observe, Padding, Window
from regard._observables import Observation
from regard._saved_call import SavedCall
from regard.kernels import triton as kernels

pytest.importorskip("triton")

from regard.kernels.triton import _launch, _tile_sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = st.sampled_from([0, 1, 3, 7, 17, 19, 33])
WIDTHS = st.sampled_from([1, 3, 5])
CASES = st.builds(
    build,
    # Many heads and entries only repeat the same kernel.
    st.fixed_dictionaries(
        {name: st.sampled_from(values) for name, values in CHOICES.items()}
        | {"heads": st.sampled_from(("one", "shared")), "batch": st.sampled_from(("one", "two"))}
    ),
    SIZES,
    SIZES,
    WIDTHS,
    WIDTHS,
    st.integers(0, 2**31),
).filter(lambda case: case.choice["values"] != "large")
OBSERVE = st.builds(
    Observe,
    map=st.sampled_from([0, 1, 3, 20]),
    sink=st.sampled_from([0, 1, 4]),
    local=st.sampled_from([0, 1, 5]),
    offset=st.sampled_from([None, 0, 2, -3]),
    profile=st.sampled_from([None, 0, 3]),
    key_mass=st.booleans(),
    top=st.sampled_from([0, 1, 3]),
    groups=st.sampled_from([None, *GROUPS]),
)
ROWS = ("lse", "logit_max", "entropy", "peak", "offset", "distance", "sink", "local", "groups")
FLOATS = (*ROWS, "map", "key_mass", "profile", "top")
INTEGERS = ("visible", "counted", "rows", "map_rows", "profile_rows")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 × 16: a few dozen keys cross their borders."""
    monkeypatch.setattr(_launch, "tile_size", lambda *arguments: _tile_sizes.TileSize(16, 16))


def observe_on(device: str, observe: Observe, q, k, v, **options) -> tuple[torch.Tensor, Observation]:
    moved = {name: to_device(value, device) for name, value in options.items()}
    return regard.attention(q.to(device), k.to(device), v.to(device), observe=observe, backend="triton", **moved)


def check_observables(case: Case, observe: Observe, device: str) -> None:
    options = case.options | {"dropout": 0.0}
    q, k, v = (x.float() for x in (case.q, case.k, case.v))
    if case.options["scale"] == math.inf:
        # On a grid no rounding decides which of two products is larger.
        q, k = dense_attention.on_grid(q), dense_attention.on_grid(k)
    exact = (q.double(), k.double(), v.double())
    _, theirs = regard.attention(*exact, observe=observe, backend="reference", **options)
    A = dense_attention.attention(*exact, **options)[1]
    _, ours = observe_on(device, observe, q, k, v, **options)
    for name in FLOATS:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert torch.allclose(a.cpu().double(), b, rtol=2e-4, atol=2e-4), name
    for name in INTEGERS:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a.cpu(), b), name

    # A key of the largest weight: where scores differ by rounding alone, another key may be named.
    for name, weight in (("peak_at", "peak"), ("top_at", "top")):
        at = getattr(ours, name)
        if at is None or not at.numel() or not A.shape[-1]:
            continue
        at = at.cpu()
        exact_at = getattr(theirs, name)
        assert torch.equal(at < 0, exact_at < 0), name
        keys = at.clamp(min=0).reshape(*A.shape[:3], -1)
        there = A.gather(-1, keys).reshape(at.shape) * (at >= 0)
        assert torch.allclose(there, getattr(theirs, weight), atol=2e-4), name


@given(case=CASES, observe=OBSERVE)
@settings(max_examples=25)
def test_observables_are_the_references(device: str, case: Case, observe: Observe) -> None:
    check_observables(case, observe, device)


@given(case=CASES, observe=OBSERVE)
@settings(max_examples=25)
def test_observables_are_the_references_across_tiles(
    tiny_tiles: None, device: str, case: Case, observe: Observe
) -> None:
    check_observables(case, observe, device)


@pytest.mark.full
@given(case=CASES, observe=OBSERVE)
@settings(max_examples=1000)
def test_observables_are_the_references_often(tiny_tiles: None, device: str, case: Case, observe: Observe) -> None:
    check_observables(case, observe, device)


def test_equal_logits_name_the_lowest_keys(tiny_tiles: None, device: str) -> None:
    """Over several blocks of keys; with scale inf, the keys that lost follow in order with weight 0."""
    k = torch.zeros(1, 1, 50, 1)
    k[0, 0, [5, 18, 37], 0] = 1.0
    q = torch.ones(1, 1, 3, 1)
    for scale in (1.0, math.inf):
        _, observation = observe_on(device, Observe(top=5), q, k, k, scale=scale)
        assert observation.peak_at.tolist() == [[[5, 5, 5]]]
        assert observation.top_at[0, 0].tolist() == [[5, 18, 37, 0, 1]] * 3


def test_rows_see_fewer_keys_than_top(device: str) -> None:
    x = torch.randn(1, 1, 4, 3)
    _, observation = observe_on(device, Observe(top=3), x, x, x, mask=Causal(offset=-1))
    assert (observation.top_at[0, 0] >= 0).sum(-1).tolist() == [0, 1, 2, 3]
    assert torch.equal(observation.top == 0, observation.top_at < 0)
    assert torch.allclose(observation.top[0, 0, 1:].sum(-1).cpu(), torch.ones(3))


def test_real_queries(device: str) -> None:
    """Rows of padding count neither in the map nor in the means, per entry of the batch or for all entries."""
    q, k = torch.randn(3, 2, 23, 8), torch.randn(3, 2, 31, 8)
    real = torch.rand(3, 23) < 0.5
    for queries in ([23, 7, 0], real, real[:1]):
        observe = Observe(map=4, key_mass=True, profile=2, queries=queries)
        _, ours = observe_on(device, observe, q, k, k, mask=Padding([31, 9, 2]))
        _, theirs = regard.attention(
            q.double(), k.double(), k.double(), observe=observe, mask=Padding([31, 9, 2]), backend="reference"
        )
        assert torch.equal(ours.rows.cpu(), theirs.rows)
        for name in ("map", "key_mass", "profile"):
            assert torch.allclose(getattr(ours, name).cpu().double(), getattr(theirs, name), atol=1e-6), name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["query", "key"])
def test_rows_of_nan(tiny_tiles: None, device: str, where: str, bad: float) -> None:
    """A visible NaN, or a logit of +inf, makes the weights of its row NaN, and all means that contain them."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(2, 1, 19, 8, generator=generator) + 0.1 for _ in range(2))
    (q if where == "query" else k)[0, 0, 9] = bad
    real = torch.arange(19) != 11
    mask = Window(7) & regard.Dense(torch.rand(19, 19, generator=generator) < 0.7)
    for size in (3, 23):
        observe = Observe(map=size, key_mass=True, profile=2, top=3, sink=6, local=1, queries=real[None])
        _, ours = observe_on(device, observe, q, k, k, mask=mask)
        _, theirs = regard.attention(q, k, k, observe=observe, mask=mask, backend="reference")
        for name in (*FLOATS, *INTEGERS, "peak_at", "top_at"):
            if name == "groups":
                assert ours.groups is None and theirs.groups is None  # they were not asked for
                continue
            a, b = getattr(ours, name).cpu(), getattr(theirs, name)
            assert torch.allclose(a.double(), b.double(), atol=1e-5, equal_nan=True), name
        assert ours.map.isnan().any() and not ours.map.isnan().all()


def test_observables_are_detached_and_taken_before_dropout(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 3, requires_grad=True) for _ in range(3))
    out, dropped = observe_on(device, Observe(map=2), q, k, v, dropout=0.5)
    _, clean = observe_on(device, Observe(map=2), q, k, v)
    for field in fields(Observation):
        value = getattr(dropped, field.name)
        if isinstance(value, torch.Tensor):
            assert not value.requires_grad
            assert torch.allclose(value, getattr(clean, field.name)), field.name
    out.sum().backward()
    assert q.grad is not None


def test_some_heads(device: str) -> None:
    q, k = torch.randn(1, 6, 9, 4), torch.randn(1, 2, 9, 4)
    out, some = observe_on(device, Observe(map=3, heads=(4, 1)), q, k, k)
    whole_out, whole = observe_on(device, Observe(map=3), q, k, k)
    assert torch.allclose(out, whole_out, atol=1e-6)
    assert torch.allclose(some.map, whole.map[[4, 1]], atol=1e-6)


def test_a_grid_is_measured_by_the_reference(device: str) -> None:
    x = torch.randn(1, 2, 12, 4)
    observe = Observe(grid=(3, 4), profile=1)
    _, ours = observe_on(device, observe, x, x, x)
    _, theirs = regard.attention(x.double(), x.double(), x.double(), observe=observe, backend="reference")
    assert torch.allclose(ours.distance.cpu().double(), theirs.distance, atol=1e-5)
    assert torch.allclose(ours.profile.cpu().double(), theirs.profile, atol=1e-5)


@pytest.mark.parametrize("scale", [None, 0.0, math.inf])
def test_bins_are_the_references(tiny_tiles: None, device: str, scale: float | None) -> None:
    """Bins of all widths, empty ones too, that begin after the first key and end before the last one."""
    q, k = torch.randn(1, 2, 21, 8).round(), torch.randn(1, 1, 83, 8).round()
    saved = observe_saved(q, k, scale)
    edges = torch.tensor([3, 4, 4, 20, 21, 60, 77])
    row_max, row_sum = kernels.row_max_and_sum(q.to(device), k.to(device), to_scores(saved, device))
    masses = kernels.bin_masses(q.to(device), k.to(device), row_max, row_sum, to_scores(saved, device), edges)
    for head in range(2):
        weights = saved.weights(0, head, None, None)
        expected = torch.stack([weights[:, a:b].sum(-1) for a, b in pairwise(edges.tolist())], -1)
        assert torch.allclose(masses[0, head].cpu(), expected, atol=1e-5)


def observe_saved(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> SavedCall:
    observe = Observe(keep=True)
    _, observation = regard.attention(q, k, k, mask=Causal(), scale=scale, observe=observe, backend="reference")
    (saved,) = observation.saved_calls
    return saved


def to_scores(saved: SavedCall, device: str):
    return saved.scores._map_tensors(lambda x, name: x.to(device), ("hi",))


def test_exact_tiles_on_demand(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Observation.tile`` uses the kernel that ``auto`` chooses on a GPU."""
    from regard import _saved_call

    monkeypatch.setattr(_saved_call, "fast_kernel", lambda q: kernels)
    q, k = torch.randn(2, 2, 37, 8), torch.randn(2, 2, 53, 8)
    _, ours = observe_on(device, Observe(keep=True), q, k, k, mask=Causal())
    monkeypatch.setattr(_saved_call, "fast_kernel", lambda q: None)
    _, theirs = regard.attention(q, k, k, mask=Causal(), observe=Observe(keep=True), backend="reference")
    expected = theirs.tile(1, slice(3, 30), slice(5, 50), 7, batch=1)
    monkeypatch.setattr(_saved_call, "fast_kernel", lambda q: kernels)
    assert torch.allclose(ours.tile(1, slice(3, 30), slice(5, 50), 7, batch=1).cpu(), expected, atol=1e-6)


def test_bins_without_keys_are_empty(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map may have more bins than keys. No memory is read that was not written."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(5))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=generator).to(device) for _ in range(3))
    _, ours = regard.attention(q, k, v, observe=Observe(map=64), backend="triton")
    _, theirs = regard.attention(q, k, v, observe=Observe(map=64), backend="reference")
    torch.testing.assert_close(ours.map.cpu(), theirs.map.cpu(), rtol=1e-4, atol=1e-5)


def test_long_lists_of_top_keys_and_another_default_dtype(device: str) -> None:
    """More top keys than fit into registers are measured by the reference; observables stay float32."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 70, 8, generator=generator).to(device) for _ in range(3))
    _, ours = regard.attention(q, k, v, observe=Observe(top=66), backend="triton")
    _, theirs = regard.attention(q, k, v, observe=Observe(top=66), backend="reference")
    torch.testing.assert_close(ours.top.float(), theirs.top.float(), rtol=1e-4, atol=1e-6)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, other = regard.attention(q, k, v, observe=Observe(map=3, top=2, key_mass=True), backend="triton")
    finally:
        torch.set_default_dtype(before)
    assert other.entropy.dtype == other.map.dtype == other.top.dtype == torch.float32
