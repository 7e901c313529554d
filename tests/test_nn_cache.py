"""Key/value caches and layers that use one: room that doubles, pieces equal to the whole, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from support.cache_cases import F64, HEADS, INSIDE, D, N, close, rows

from regard._observables import Observe
from regard.masks import Causal, Padding, Window
from regard.nn import KeyValueCache, MultiHeadAttention
from regard.positions import Rotary

pytestmark = pytest.mark.usefixtures("full_tiles")
# --- the container -------------------------------------------------------------------------------------------------


def test_appends_and_returns_all_of_it() -> None:
    cache = KeyValueCache()
    assert len(cache) == 0
    for step, (t, first) in enumerate([(3, 0), (0, 3), (1, 3), (7, 4)]):
        k, v = cache.append(*rows(t, first))
        expected = rows(first + t)
        assert bool((k == expected[0]).all()) and bool((v == expected[1]).all()), step
        assert len(cache) == first + t
    assert repr(cache).startswith("KeyValueCache(11 keys, capacity ")


def test_room_doubles_so_copies_are_few() -> None:
    cache, moves, where = KeyValueCache(), 0, None
    for i in range(1000):
        k, _ = cache.append(*rows(1, i))
        moves += k.data_ptr() != where
        where = k.data_ptr()
    assert moves <= 11  # log2(1000) + 1
    assert bool((k == rows(1000)[0]).all())


def test_reserved_room_is_never_moved_and_may_be_outgrown() -> None:
    cache = KeyValueCache(capacity=5)
    places = {cache.append(*rows(1, i))[0].data_ptr() for i in range(5)}
    assert len(places) == 1
    k, _ = cache.append(*rows(2, 5))
    assert k.data_ptr() not in places and bool((k == rows(7)[0]).all())


def test_views_not_copies() -> None:
    cache = KeyValueCache(capacity=8)
    k, _ = cache.append(*rows(3))
    later, _ = cache.append(*rows(1, 3))
    assert k.data_ptr() == later.data_ptr()


def test_reset_and_crop() -> None:
    cache = KeyValueCache()
    cache.append(*rows(5))
    cache.crop(2)
    k, _ = cache.append(*rows(1, 2))
    assert len(cache) == 3 and bool((k == rows(3)[0]).all())
    cache.reset()
    assert len(cache) == 0 and repr(cache) == "KeyValueCache(empty)"
    cache.append(torch.zeros(1, 2, 3, 4, dtype=F64), torch.zeros(1, 2, 3, 4, dtype=F64))  # another shape is welcome now


def test_reorder_for_beams() -> None:
    cache = KeyValueCache()
    k, v = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 7)
    cache.append(k, v)
    cache.reorder(torch.tensor([2, 2, 0, 1]))
    more = torch.randn(4, 2, 1, 4), torch.randn(4, 2, 1, 7)
    k_all, v_all = cache.append(*more)
    assert bool((k_all[:, :, :5] == k[[2, 2, 0, 1]]).all()) and bool((v_all[:, :, :5] == v[[2, 2, 0, 1]]).all())
    assert bool((k_all[:, :, 5:] == more[0]).all())
    KeyValueCache().reorder(torch.tensor([0]))  # nothing held, nothing to do


def test_reorder_copies_what_is_held_and_keeps_the_room() -> None:
    cache = KeyValueCache(capacity=1000)
    cache.append(*rows(3))
    cache._k[..., 3:, :] = 7.0  # the room: nobody may read it, a copy would
    cache.reorder(torch.tensor([1], dtype=torch.int32))
    assert repr(cache) == "KeyValueCache(3 keys, capacity 1000)"
    assert not bool((cache._k[..., 3:, :] == 7.0).all())
    where = cache._k.data_ptr()
    k, _ = cache.append(*(x[:1] for x in rows(1, 3)))
    assert k.data_ptr() == where and bool((k == rows(4)[0][:1]).all())


def test_an_empty_cache_is_there() -> None:
    assert bool(KeyValueCache()) and len(KeyValueCache()) == 0


def test_inference_mode_and_no_grad_mix() -> None:
    cache = KeyValueCache(capacity=8)
    with torch.inference_mode():
        cache.append(*rows(2))
    with torch.no_grad():
        k, _ = cache.append(*rows(1, 2))
    with torch.inference_mode():
        k, _ = cache.append(*rows(1, 3))
    assert bool((k == rows(4)[0]).all())


def test_deep_copies_are_apart() -> None:
    cache = KeyValueCache()
    cache.append(*rows(3))
    twin = copy.deepcopy(cache)
    twin.append(*rows(1, 3))
    assert (len(cache), len(twin)) == (3, 4)


def test_refusals() -> None:
    cache = KeyValueCache()
    k, v = rows(3)
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.get()
    with pytest.raises(ValueError, match=r"k has shape \[2, 3, 3, 5\] and v \[2, 3, 2, 7\]"):
        cache.append(k, v[:, :, :2])
    cache.append(k, v)
    with pytest.raises(ValueError, match=r"k has shape \[1, 3, 3, 5\], but this cache takes \[2, 3, t, 5\]"):
        cache.append(k[:1], v[:1])
    with pytest.raises(ValueError, match=r"k is torch.float64 on cpu, but this cache holds torch.float32"):
        cache.append(k.double(), v.double())
    with pytest.raises(ValueError, match="length is 4, but the cache holds 3 keys"):
        cache.crop(4)
    with pytest.raises(ValueError, match="length must be at least 0"):
        cache.crop(-1)
    with pytest.raises(ValueError, match=r"keeps no gradients.*torch.no_grad"):
        cache.append(k.clone().requires_grad_(), v)
    with pytest.raises(ValueError, match="capacity must be at least 0"):
        KeyValueCache(-1)
    with pytest.raises(ValueError, match="already holds 3 keys; cross-attention needs a cache of its own"):
        cache.freeze(k, v)
    fixed = KeyValueCache()
    fixed.freeze(k, v)
    assert "frozen" in repr(fixed)
    for refused in (lambda: fixed.append(k, v), lambda: fixed.crop(1)):
        with pytest.raises(ValueError, match=r"holds a context's keys \(cross-attention\)"):
            refused()
    flat = KeyValueCache()
    flat.append(k[0], v[0])
    with pytest.raises(ValueError, match=r"\[3, 3, 5\] have no batch dimension to reorder"):
        flat.reorder(torch.tensor([0]))
    for index, error, message in (
        ([0, 1], TypeError, "index must be a tensor of integers .* got list"),
        (torch.tensor([0.0]), TypeError, r"index must be .* got torch.float32"),
        (torch.tensor([True, False]), TypeError, r"index must be .* got torch.bool"),
        (torch.tensor([[0]]), ValueError, r"index has shape \[1, 1\]; it must be \[batch\]"),
        (torch.tensor([0, 2]), ValueError, "index goes from 0 to 2; this cache has entries 0 … 1"),
        (torch.tensor([-1]), ValueError, "index goes from -1 to -1"),
    ):
        with pytest.raises(error, match=message):
            cache.reorder(index)


# --- in one layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[1] * N, [5, 1, 3, 2], [0, 7, 4]], ids=str)
@pytest.mark.parametrize("position", INSIDE)
@torch.no_grad()
def test_pieces_equal_the_whole(position: str, pieces: list[int]) -> None:
    torch.manual_seed(2)
    layer = MultiHeadAttention(D, HEADS, kv_heads=1, d_value=5, qkv_bias=True, position=INSIDE[position]()).to(F64)
    x, mask = torch.randn(2, N, D, dtype=F64), Causal() & Window(6)
    cache, parts = KeyValueCache(), []
    for piece in x.split(pieces, dim=1):
        parts.append(layer(piece, mask=mask, cache=cache))
    close(torch.cat(parts, dim=1), layer(x, mask=mask))
    assert len(cache) == N


@torch.no_grad()
def test_cross_attention_computes_the_context_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    layer = MultiHeadAttention(D, HEADS, d_context=7).to(F64)
    x, context, mask = torch.randn(2, N, D, dtype=F64), torch.randn(2, 5, 7, dtype=F64), Padding([5, 3])
    expected = layer(x, context, mask=mask)
    calls = []
    layer.k_proj.register_forward_hook(lambda *_: calls.append(1))
    cache = KeyValueCache()
    parts = [layer(piece, context, mask=mask, cache=cache) for piece in x.split(1, dim=1)]
    close(torch.cat(parts, dim=1), expected)
    assert len(calls) == 1 and len(cache) == 5
    with pytest.raises(
        ValueError, match=r"context has shape \[2, 4, 7\], but the cache holds keys of another context, \[2, 5\]"
    ):
        layer(x, context[:, :4], cache=cache)


@pytest.mark.parametrize("reserved", [0, 64])
@torch.no_grad()
def test_a_layers_failed_step_leaves_no_trace(reserved: int) -> None:
    torch.manual_seed(2)
    layer, x = MultiHeadAttention(D, HEADS, position=Rotary(4)).to(F64), torch.randn(1, N, D, dtype=F64)
    cache = KeyValueCache(reserved)
    layer(x[:, :4], mask=Causal(), cache=cache)
    with pytest.raises(ValueError, match="Padding has 5 keys"):
        layer(x[:, 4:], mask=Padding(torch.ones(1, 5, dtype=torch.bool)), cache=cache)
    assert len(cache) == 4
    close(layer(x[:, 4:], mask=Causal(), cache=cache), layer(x, mask=Causal())[:, 4:])
    cross = KeyValueCache()
    other = MultiHeadAttention(D, HEADS).to(F64)
    with pytest.raises(ValueError, match="Padding has 5 keys"):
        other(x, x[:, :3], mask=Padding(torch.ones(1, 5, dtype=torch.bool)), cache=cross)
    assert len(cross) == 0 and not cross.frozen
    close(other(x, x[:, :2], cache=cross), other(x, x[:, :2]))


@torch.no_grad()
def test_kept_weights_outlive_the_cache() -> None:
    torch.manual_seed(2)
    layer, x = MultiHeadAttention(D, HEADS).to(F64), torch.randn(1, N, D, dtype=F64)
    cache = KeyValueCache(capacity=64)
    layer(x[:, :4], cache=cache)
    _, seen = layer(x[:, 4:6], cache=cache, observe=Observe(keep=True))
    before = seen.weights(1).clone()
    cache.crop(2)
    layer(x[:, 6:], cache=cache)
    assert bool((seen.weights(1) == before).all())
    assert seen.saved_calls[0].k.untyped_storage().nbytes() == 6 * D * 8  # six keys, not the reserved room


def test_training_with_a_cache_is_refused() -> None:
    layer = MultiHeadAttention(D, HEADS)
    with pytest.raises(ValueError, match="keeps no gradients"):
        layer(torch.zeros(2, 5, D), cache=KeyValueCache())
