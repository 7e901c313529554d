"""Observables equal their definition on n × n weights; merging equals measuring at once; exact tiles."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import dense_attention
from support.cases import CHOICES, Case, build
from support.key_groups import GROUPS, weights_on_groups

import regard
from regard import Causal, Observe, Padding
from regard._observables import ROW_VALUES, Observation

D = torch.float64


def expected(case: Case, observe: Observe, real: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Every observable, straight from its definition."""
    _, A, lse, s = dense_attention.attention(case.q, case.k, case.v, **(case.options | {"dropout": 0.0}))
    B, H, n, m = A.shape
    see = s > -math.inf
    if math.isinf(case.options["scale"] or 0):  # keys that lost are visible too
        batch = torch.broadcast_shapes(case.q.shape[:-3], case.k.shape[:-3], case.v.shape[:-3])
        q4 = case.q.expand(*batch, *case.q.shape[-3:]).reshape(B, H, n, -1)
        bias = dense_attention.dense_bias(case.options["bias"], q4, batch, m)
        see = dense_attention.visible(case.options["mask"], bias, batch, H, n, m)
    offset = m - n if observe.offset is None else observe.offset
    i, j = torch.arange(n).unsqueeze(-1) + offset, torch.arange(m)
    line, placed = j - i, torch.ones(n, m, dtype=torch.bool)
    axes, distance = [line], line.abs().to(D)
    if observe.grid is not None:
        height, width = observe.grid
        first = m - height * width
        placed = (i >= first) & (i < m) & (j >= first)
        axes = [(j - first) // width - (i - first) // width, (j - first) % width - (i - first) % width]
        distance = torch.stack(axes).to(D).norm(dim=0)
    plogp = torch.where(A > 0, A * A.log(), 0)
    entropy = -plogp.sum(-1)
    if (sinks := case.options.get("sinks")) is not None:
        share = torch.exp(sinks.view(1, H, 1) - lse)
        entropy = entropy - torch.where(share > 0, share * share.log(), 0)
    peak, peak_at = torch.where(see, A, -1).max(-1) if m else (A.new_zeros(B, H, n) - 1, torch.zeros(B, H, n).long())
    some = see.any(-1)
    counted = some if real is None else some & real.unsqueeze(1)
    C = torch.where(counted.unsqueeze(-1), A, 0)
    rows = counted.sum((0, 2))
    result = {
        "lse": lse,
        "logit_max": s.amax(-1) if m else lse,
        "entropy": entropy,
        "peak": peak.clamp(min=0),
        "peak_at": torch.where(some, peak_at, -1),
        "offset": (A * line).sum(-1),
        "distance": torch.where(placed, A * distance, 0).sum(-1),
        "sink": A[..., : observe.sink].sum(-1),
        "local": torch.where(placed & (distance <= observe.local), A, 0).sum(-1),
        "visible": see.sum(-1),
        "counted": counted,
        "rows": rows,
        "key_mass": C.sum((0, 2)) / rows.clamp(min=1).unsqueeze(-1),
    }
    if observe.groups is not None:
        result["groups"] = weights_on_groups(A, observe.groups)
    if observe.map and n and m:
        pool_rows = torch.nn.functional.one_hot(torch.arange(n) * observe.map // n, observe.map).to(D)
        pool_keys = torch.nn.functional.one_hot(torch.arange(m) * observe.map // m, observe.map).to(D)
        result["map_rows"] = (counted.to(D).sum(0) @ pool_rows).long()
        result["map"] = (pool_rows.T @ C.sum(0) @ pool_keys) / result["map_rows"].clamp(min=1).unsqueeze(-1)
    if observe.profile is not None:
        radii = observe.profile_radii()
        sides = [2 * r + 1 for r in radii]
        total, seen_there = torch.zeros(H, *sides, dtype=D), torch.zeros(H, *sides, dtype=torch.int64)
        visible_counted = (see & counted.unsqueeze(-1)).sum(0)
        for place in torch.cartesian_prod(*[torch.arange(-r, r + 1) for r in radii]).reshape(-1, len(radii)):
            here = placed.clone()
            for axis, delta in zip(axes, place, strict=True):
                here &= axis == delta
            at = (slice(None), *[int(x) + r for x, r in zip(place, radii, strict=True)])
            total[at] = C.sum(0)[:, here].sum(-1)
            seen_there[at] = visible_counted[:, here].sum(-1)
        result["profile"], result["profile_rows"] = total / seen_there.clamp(min=1), seen_there
    if observe.top and m:
        order = torch.where(see, A, -1).sort(dim=-1, descending=True, stable=True).indices[..., : observe.top]
        there = see.gather(-1, order)
        result["top"] = torch.where(there, A.gather(-1, order), 0)
        result["top_at"] = torch.where(there, order, -1)
    return result


OBSERVE = st.builds(
    lambda map_, radius, top, sink, local, offset, grid, groups: Observe(
        *(map_, radius, True, top, sink, local, grid, offset), keep=True, groups=groups
    ),
    st.sampled_from([0, 1, 3, 8]),
    st.sampled_from([None, 0, 2, 30]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0, 1, 4]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([None, 0, 2, -1]),
    st.sampled_from([None, (2, 2), (1, 3)]),
    st.sampled_from([None, *GROUPS]),
)
CASES = st.builds(
    build,
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}),
    st.sampled_from([1, 2, 3, 7, 11]),
    st.sampled_from([4, 5, 7, 13, 29]),
    st.sampled_from([2, 3]),
    st.sampled_from([1, 3]),
    st.integers(0, 2**31),
)


@given(CASES, OBSERVE)
@settings(max_examples=150)
def test_every_observable_equals_its_definition(case: Case, observe: Observe) -> None:
    check_observables(case, observe)


@pytest.mark.full
@given(CASES, OBSERVE)
@settings(max_examples=2000, derandomize=False)
def test_every_observable_equals_its_definition_often(case: Case, observe: Observe) -> None:
    check_observables(case, observe)


def check_observables(case: Case, observe: Observe) -> None:
    torch.manual_seed(0)
    _, seen = regard.attention(case.q, case.k, case.v, observe=observe, **case.options)
    real = None
    if isinstance(case.options["mask"], regard.masks.Mask):
        real = case.options["mask"].real_queries(case.q.shape[-2], case.k.shape[-2])
        real = None if real is None else real.reshape(-1, case.q.shape[-2])
    for name, want in expected(case, observe, real).items():
        got = getattr(seen, name)
        if name == "top":
            want, got = (torch.nn.functional.pad(x, (0, observe.top - x.shape[-1])) for x in (want, got))
        if name == "top_at":
            want = torch.nn.functional.pad(want, (0, observe.top - want.shape[-1]), value=-1)
        assert got.shape == want.shape, name
        if name in ("peak_at", "top_at"):  # the same key, or one whose weight equals it to rounding
            A = dense_attention.attention(case.q, case.k, case.v, **(case.options | {"dropout": 0.0}))[1]
            a, b = ((x if name == "top_at" else x.unsqueeze(-1)) for x in (got, want))
            assert torch.equal(a < 0, b < 0)
            assert torch.allclose(A.gather(-1, a.clamp(min=0)), A.gather(-1, b.clamp(min=0)), atol=1e-12)
            continue
        close = torch.allclose(got.to(D), want.to(D), atol=1e-11, rtol=1e-11)
        assert close, (name, got, want)


@given(CASES)
@settings(max_examples=100)
def test_weights_and_tiles_are_exact(case: Case) -> None:
    torch.manual_seed(0)
    _, seen = regard.attention(case.q, case.k, case.v, observe=Observe(keep=True), **case.options)
    A = dense_attention.attention(case.q, case.k, case.v, **(case.options | {"dropout": 0.0}))[1]
    B, H, n, m = A.shape
    b, h = B - 1, H - 1
    assert torch.allclose(seen.weights(h, batch=b), A[b, h], atol=1e-12)
    rows, keys = [n - 1, 0], slice(1, m, 2)
    assert torch.allclose(seen.weights(h, rows, keys, batch=b), A[b, h][rows][:, keys], atol=1e-12)
    assert torch.allclose(seen.weights(h, -1, range(m), batch=b), A[b, h, -1:], atol=1e-12)
    exact = seen.tile(h, size=64, batch=b)
    assert torch.allclose(exact, torch.where(seen.counted[b, h].unsqueeze(-1), A[b, h], 0), atol=1e-12)


def test_a_tile_of_everything_is_the_map_and_zooming_is_exact() -> None:
    q, k, v = torch.randn(1, 2, 37, 5, dtype=D), torch.randn(1, 1, 53, 5, dtype=D), torch.randn(1, 1, 53, 5, dtype=D)
    _, seen = regard.attention(q, k, v, mask=Causal(), bias=regard.ALiBi(), observe=Observe(map=8, keep=True))
    for head in range(2):
        assert torch.allclose(seen.tile(head, size=8), seen.map[head], atol=1e-14)
    corner = seen.tile(1, slice(30, 37), slice(40, 53), size=4)
    assert corner.shape == (4, 4)
    pooled = seen.weights(1, slice(30, 37), slice(40, 53))
    assert torch.allclose(
        corner[0], torch.stack([pooled[:2, a:b].sum(1).mean() for a, b in ((0, 4), (4, 7), (7, 10), (10, 13))])
    )


def test_padding_rows_do_not_count() -> None:
    q, k, v = (torch.randn(2, 3, 7, 5, dtype=D) for _ in range(3))
    lengths = torch.tensor([3, 7])
    _, padded = regard.attention(q, k, v, mask=Padding(lengths), observe=Observe(map=2, key_mass=True))
    assert padded.rows.tolist() == [10, 10, 10]
    _, named = regard.attention(q, k, v, mask=Padding(lengths), observe=Observe(map=2, key_mass=True, queries=lengths))
    assert torch.equal(padded.map, named.map) and torch.equal(padded.counted, named.counted)
    real = torch.arange(7) < lengths.unsqueeze(-1)
    _, bools = regard.attention(q, k, v, mask=Padding(lengths), observe=Observe(map=2, key_mass=True, queries=real))
    assert torch.equal(padded.key_mass, bools.key_mass)
    _, cross = regard.attention(q[:, :, :5], k, v, mask=Padding(lengths), observe=Observe())
    assert cross.rows.tolist() == [10, 10, 10]  # n ≠ m: the padding speaks of keys alone
    entropy = padded.mean("entropy")
    assert torch.allclose(entropy, torch.where(padded.counted, padded.entropy, 0).sum((0, 2)) / 10)


def test_a_class_token_has_no_distance() -> None:
    q, k, v = (torch.randn(1, 2, 7, 5, dtype=D) for _ in range(3))
    _, seen = regard.attention(q, k, v, observe=Observe(grid=(2, 3), profile=(1, 2)))
    assert (seen.distance[:, :, 0] == 0).all() and seen.profile.shape == (2, 3, 5)
    assert torch.allclose(seen.mean("distance"), seen.distance[:, :, 1:].mean((0, 2)))
    assert torch.allclose(seen.mean("peak"), seen.peak.mean((0, 2)))


def parts(n: int, m: int, seed: int, **options) -> tuple[Observation, list[Observation]]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(5, 2, x, 3, generator=g, dtype=D) for x in (n, m, m))
    observe = Observe(map=3, profile=2, key_mass=True, top=2, keep=True)
    lengths = torch.tensor([m, 1, m - 1, 2, 0])
    calls = []
    for cut in (slice(0, 5), slice(0, 1), slice(1, 3), slice(3, 5)):
        _, seen = regard.attention(q[cut], k[cut], v[cut], mask=Padding(lengths[cut]) & Causal(), observe=observe)
        calls.append(seen)
    return calls[0], calls[1:]


def test_merging_batches_equals_measuring_them_at_once() -> None:
    whole, (first, *rest) = parts(7, 7, 0)
    merged = first.merge(*rest)
    for f in fields(Observation):
        a, b = getattr(whole, f.name), getattr(merged, f.name)
        if isinstance(a, torch.Tensor):
            assert a.shape == b.shape and torch.allclose(a.to(D), b.to(D), atol=1e-13), f.name
    assert torch.equal(merged.weights(1, batch=3), whole.weights(1, batch=3))
    assert torch.equal(merged.tile(1, size=3, batch=3), whole.tile(1, size=3, batch=3))


def test_unequal_lengths_merge_maps_and_profiles_only() -> None:
    a, b = parts(7, 7, 0)[0], parts(11, 11, 1)[0]
    merged = a.merge(b)
    assert merged.n is None and all(
        getattr(merged, name) is None for name in (*ROW_VALUES, "counted", "key_mass", "top", "groups")
    )
    assert torch.equal(merged.rows, a.rows + b.rows) and torch.equal(merged.map_rows, a.map_rows + b.map_rows)
    weight = a.map_rows.unsqueeze(-1)
    assert torch.allclose(merged.map * merged.map_rows.unsqueeze(-1), a.map * weight + b.map * b.map_rows.unsqueeze(-1))
    assert torch.allclose(merged.profile * merged.profile_rows, a.profile * a.profile_rows + b.profile * b.profile_rows)
    again = merged.merge(a)
    assert again.lse is None and torch.equal(again.rows, merged.rows + a.rows)
    with pytest.raises(ValueError, match="equal n"):
        merged.mean("entropy")
    with pytest.raises(ValueError, match="equal n"):
        merged.tile(0)


def test_observables_are_detached_and_taken_before_dropout() -> None:
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=D, requires_grad=True) for _ in range(3))
    out, dropped = regard.attention(q, k, v, dropout=0.5, observe=Observe(map=2, keep=True))
    _, clean = regard.attention(q, k, v, observe=Observe(map=2, keep=True))
    for f in fields(Observation):
        x = getattr(dropped, f.name)
        if isinstance(x, torch.Tensor):
            assert not x.requires_grad and torch.equal(x, getattr(clean, f.name))
    assert not dropped.weights(0).requires_grad
    out.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_observed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 2, 9, 4).to(dtype) for _ in range(3))
    out, seen = regard.attention(q, k, v, observe=Observe(map=2))
    exact = regard.attention(q.double(), k.double(), v.double(), observe=Observe(map=2))[1]
    assert out.dtype == dtype and seen.map.dtype == seen.entropy.dtype == torch.float32
    assert torch.allclose(seen.entropy.double(), exact.entropy, atol=1e-5) and torch.allclose(
        seen.map.double(), exact.map, atol=1e-6
    )


def test_rows_and_keys_in_every_spelling() -> None:
    q = torch.randn(1, 1, 5, 4)
    seen = regard.attention(q, q, q, observe=Observe(keep=True))[1]
    A = seen.weights(0)
    assert torch.equal(seen.weights(0, 3), A[3:4]) and torch.equal(seen.weights(0, -1), A[4:])
    assert torch.equal(seen.weights(0, torch.tensor(3)), A[3:4]) and torch.equal(seen.weights(0, np.int64(3)), A[3:4])
    assert torch.equal(seen.weights(0, [], 1), A[:0, :1]) and seen.weights(0, slice(0, 2, -1)).shape == (0, 5)
    assert torch.equal(seen.weights(0, slice(None, None, -2), range(1, 4)), A[[4, 2, 0]][:, 1:4])
    assert torch.equal(seen.weights(0, np.array([1, 0])), A[[1, 0]])


def test_kept_weights_of_every_grouped_head_and_batch_entry() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(2, 6, 3, 4, generator=g, dtype=D), *torch.randn(2, 2, 2, 7, 4, generator=g, dtype=D)
    bias = torch.randn(2, 6, 3, 7, generator=g, dtype=D)
    seen = regard.attention(q, k, v, bias=bias, observe=Observe(keep=True))[1]
    A = dense_attention.attention(q, k, v, bias=bias)[1]
    for b in range(2):
        for h in range(6):
            assert torch.allclose(seen.weights(h, batch=b), A[b, h], atol=1e-14)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_weights_and_second_pass_values_add_up_to_one_whatever_the_scores(backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 50, 64, generator=g) * 30, torch.randn(1, 2, 60, 64, generator=g) * 30
    seen = regard.attention(q, k, k, observe=Observe(keep=True, top=60, key_mass=True), backend=backend)[1]
    ones = torch.ones(2, 50)
    assert torch.allclose(seen.weights(0).sum(-1), ones[0], atol=1e-6)
    assert torch.allclose(seen.top[0].sum(-1), ones, atol=1e-6)
    assert torch.allclose(seen.key_mass.sum(-1), ones[:, 0], atol=1e-6)
    near = torch.tensor([[1.0, 1e-9], [1.0, 2e-9], [0.0, 0.0]]).view(1, 1, 3, 2)
    hard = regard.attention(torch.ones(1, 1, 1, 2), near, near, scale=math.inf, observe=Observe(keep=True))[1]
    assert hard.weights(0).sum().item() == 1


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("n", [1, 11, 37])
def test_rows_that_do_not_count_and_their_neighbours_in_registers_add_nothing(n: int, backend: str) -> None:
    """Huge scores of other rows, and NaN in padding, must not reach the sums over rows."""
    torch.manual_seed(5)
    observe = Observe(map=3, profile=2, key_mass=True, queries=torch.arange(n).unsqueeze(0) != 2)
    for factor in (1.0, 1e7):
        # All scores are negative: the row maximum of a neighbour is then far below the scores of an empty register.
        q = torch.rand(2, 4, n, 32) * factor
        k = -torch.rand(2, 4, n, 32) * factor
        without = regard.attention(q, k, k, observe=observe, backend=backend)[1]
        q[:, :, 2:3] = math.nan
        observation = regard.attention(q, k, k, observe=observe, backend=backend)[1]
        for name in ("key_mass", "map", "profile"):
            values = getattr(observation, name)
            assert values.isfinite().all() and values.min() >= 0
            if factor == 1:
                torch.testing.assert_close(values, getattr(without, name), rtol=0, atol=1e-6)
        torch.testing.assert_close(observation.key_mass.sum(-1), torch.ones(4), rtol=0, atol=1e-4)


def test_queries_named_for_a_batch_of_several_dimensions() -> None:
    q = torch.randn(3, 2, 1, 4, 2, dtype=D)
    flat = regard.attention(q, q, q, observe=Observe(queries=[1, 2, 3, 4, 1, 2]))[1]
    nested = regard.attention(q, q, q, observe=Observe(queries=torch.tensor([[1, 2], [3, 4], [1, 2]])))[1]
    column = regard.attention(q, q, q, observe=Observe(queries=torch.tensor([[1], [3], [2]])))[1]
    assert torch.equal(flat.counted, nested.counted)
    assert column.counted.sum((1, 2)).tolist() == [1, 1, 3, 3, 2, 2]
    with pytest.raises(ValueError, match=r"a batch of \[2, 3\], but q, k and v have \[3, 2\]"):
        regard.attention(q, q, q, observe=Observe(queries=torch.ones(2, 3, dtype=torch.int64)))


def test_kept_weights_of_hard_attention_search_all_keys(full_tiles) -> None:
    k = torch.zeros(1, 1, 5000, 1)
    k[..., [17, 4321], 0] = 1.0
    seen = regard.attention(torch.ones(1, 1, 2, 1), k, k, scale=math.inf, observe=Observe(keep=True))[1]
    assert seen.weights(0, 0).nonzero()[:, 1].tolist() == [17, 4321]
    assert seen.tile(0, keys=slice(0, 100), size=10)[0].tolist() == [0.0, 0.5] + [0.0] * 8


def test_top_and_peak_take_the_lowest_of_equal_keys_across_tiles() -> None:
    q = torch.ones(1, 1, 1, 1, dtype=D)
    k = torch.tensor([0.0, 2.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 0.0], dtype=D).view(1, 1, 12, 1)
    seen = regard.attention(q, k, k, observe=Observe(top=3))[1]
    assert seen.top_at.tolist() == [[[[1, 3, 9]]]] and seen.peak_at.item() == 1


def test_merging_with_named_queries() -> None:
    q = torch.randn(2, 1, 4, 3, dtype=D)
    whole = regard.attention(q, q, q, observe=Observe(map=2, key_mass=True, queries=[1, 3]))[1]
    parts = [
        regard.attention(x, x, x, observe=Observe(map=2, key_mass=True, queries=[c]))[1]
        for x, c in ((q[:1], 1), (q[1:], 3))
    ]
    merged = parts[0].merge(parts[1])
    assert torch.equal(merged.rows, whole.rows) and whole.rows.tolist() == [4]
    assert torch.allclose(merged.key_mass, whole.key_mass) and torch.allclose(merged.map, whole.map)


def test_queries_beyond_a_grid_have_no_distance_in_the_mean() -> None:
    q, k = torch.randn(1, 1, 3, 2, dtype=D), torch.randn(1, 1, 4, 2, dtype=D)
    seen = regard.attention(q, k, k, observe=Observe(grid=(2, 2), offset=2))[1]  # query 2 stands at 4, behind the grid
    assert torch.allclose(seen.mean("distance"), seen.distance[..., :2].mean((0, 2)))


def test_repr_names_shapes_and_prints_no_numbers() -> None:
    text = repr(seen_once(map=5, keep=True))
    assert "3 queries and 3 keys" in text and "map [2, 5, 5]" in text and "keeps q and k" in text and len(text) < 400


def seen_once(**options) -> Observation:
    q = torch.zeros(1, 2, 3, 4)
    return regard.attention(q, q, q, observe=Observe(**options))[1]


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: Observe(map=-1), ValueError, "Observe map must be at least 0, got -1"),
        (lambda: Observe(top=1.5), TypeError, "top"),
        (lambda: Observe(offset=0.5), TypeError, "offset"),
        (lambda: Observe(grid=(2,)), ValueError, "height, width"),
        (lambda: Observe(offset=2**63), ValueError, "offset must be at most"),
        (lambda: Observe(sink=2**40), ValueError, "sink must be at most"),
        (lambda: seen_once(keep=True).tile(9), ValueError, "head is 9; this observation has heads 0 … 1"),
        (lambda: seen_once(keep=True).weights(1.5), TypeError, "head must be an integer"),
        (lambda: seen_once(keep=True).weights(0, batch=0.5), TypeError, "batch must be an integer"),
        (lambda: seen_once().merge(3), TypeError, "merges with observations, got int"),
        (lambda: Observe(grid=5), ValueError, r"must be \(height, width\), got 5"),
        (lambda: seen_once(queries=[99]), ValueError, "Observe queries must be at most .* got 99"),
        (lambda: seen_once(queries="ab"), TypeError, "Observe queries must be"),
        (lambda: seen_once(keep=True).weights(0, "a"), TypeError, "rows must be"),
        (lambda: Observe(grid=(0, 2)), ValueError, "at least 1"),
        (lambda: Observe(profile=(1, 2)), ValueError, "needs grid"),
        (lambda: Observe(profile=-2), ValueError, "profile"),
        (lambda: seen_once(grid=(2, 2)), ValueError, "grid of 2 × 2"),
        (lambda: seen_once().weights(0), ValueError, "keep=True"),
        (lambda: seen_once(keep=True).weights(2), ValueError, "heads 0 … 1"),
        (lambda: seen_once(keep=True).weights(0, batch=1), ValueError, "0 … 0"),
        (lambda: seen_once(keep=True).weights(0, [3]), ValueError, "rows must be within 0 … 2"),
        (lambda: seen_once(keep=True).weights(0, [0.5]), TypeError, "rows must be"),
        (lambda: seen_once(keep=True).tile(0, size=0), ValueError, "size"),
        (lambda: seen_once().mean("colour"), ValueError, "'colour'"),
        (lambda: seen_once().merge(seen_once(map=2)), ValueError, "same Observe options"),
        (lambda: seen_once().merge(replace(seen_once(), rows=torch.zeros(3))), ValueError, "2 and 3"),
    ],
)
def test_bad_input_is_named(make, error, words: str) -> None:
    with pytest.raises(error, match=words):
        make()
