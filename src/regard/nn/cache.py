"""Keys and values of what was already read, so that decoding computes each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.shapes import integer

__all__ = ["BlockCache", "DecoderCache", "KeyValueCache"]


class KeyValueCache:
    """The keys ``[*B, G, m, D]`` and values ``[*B, G, m, E]`` of one attention layer, for inference.

    ``append`` writes new rows behind the old ones and returns views of all of them. Room is doubled when it runs out,
    so t tokens cost O(t) copied rows in all; ``capacity`` reserves room ahead (it may be outgrown). A returned view
    holds until the next ``append``, ``crop`` or ``reorder``.

    In cross-attention the context never grows: the layer stores its keys and values once (``fix``) and reads them from
    then on, whatever context it is given later: ``reset`` before another one. A cache writes in place and keeps no
    graph, so keys that need gradients are refused: decode under ``torch.no_grad()`` or ``torch.inference_mode()``.

    >>> cache = KeyValueCache()
    >>> k, v = cache.append(torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 5, 11))
    >>> k, v = cache.append(torch.ones(2, 3, 1, 7), torch.ones(2, 3, 1, 11))
    >>> len(cache), list(k.shape), list(v.shape)
    (6, [2, 3, 6, 7], [2, 3, 6, 11])
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = integer("capacity", capacity)
        self.held = False  # by someone who puts everything back if a step raises
        self.reset()

    def reset(self) -> None:
        """Forget everything, the reserved memory too."""
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._length = 0
        self.fixed = False

    def __len__(self) -> int:
        """m, the number of keys held."""
        return self._length

    def __bool__(self) -> bool:
        """A cache is there even while it is empty."""
        return True

    def __repr__(self) -> str:
        held = "empty" if self._k is None else f"{self._length} keys, room for {self._k.shape[-2]}"
        return f"KeyValueCache({held}{', fixed' if self.fixed else ''})"

    def get(self) -> tuple[Tensor, Tensor]:
        """Views of all keys and values held."""
        if self._k is None or self._v is None:
            raise ValueError("the cache is empty: nothing was appended yet")
        return self._k.narrow(-2, 0, self._length), self._v.narrow(-2, 0, self._length)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``k [*B, G, t, D]`` and ``v [*B, G, t, E]``; returns all keys and all values."""
        if self.fixed:
            raise ValueError(
                "this cache holds a context's keys (cross-attention) and does not grow; self-attention needs its own"
            )
        _no_gradients(k, v)
        self._fits(k, v)
        end = self._length + k.shape[-2]
        if self._k is None or self._v is None or end > self._k.shape[-2] or _sealed(self._k):
            self._move(k, v, end)
        assert self._k is not None and self._v is not None
        self._k.narrow(-2, self._length, end - self._length).copy_(k)
        self._v.narrow(-2, self._length, end - self._length).copy_(v)
        self._length = end
        return self.get()

    def room(self, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """The buffers ``[B, G, ≥ m + 1, ·]`` with room for one more row, for whoever writes it and then calls ``grow``.

        None while nothing was appended, and where another batch or dtype was.
        """
        if self._k is None or self._v is None or self.fixed or self._k.ndim != 4 or _sealed(self._k):
            return None
        if self._k.shape[0] != batch or self._k.dtype != dtype or not self._k.is_cpu:
            return None
        if self._length == self._k.shape[-2]:
            self._move(self._k, self._v, self._length + 1)
        return self._k, self._v

    def grow(self, rows: int) -> None:
        """Count rows that were written into ``room``."""
        self._length += rows

    def fix(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Hold these keys and values as they are; nothing can be appended to them."""
        if self._k is not None:
            raise ValueError(f"this cache already holds {self._length} keys; cross-attention needs a cache of its own")
        _no_gradients(k, v)
        self._fits(k, v)
        self._k, self._v, self._length, self.fixed = k, v, k.shape[-2], True
        return k, v

    def crop(self, length: int) -> None:
        """Keep the first ``length`` keys, as if the later ones had never been read; the memory stays reserved."""
        if self.fixed:
            raise ValueError("this cache holds a context's keys (cross-attention), which cannot be cropped")
        if integer("length", length) > self._length:
            raise ValueError(f"length is {length}, but the cache holds {self._length} keys")
        self._length = length

    def reorder(self, index: Tensor) -> None:
        """Batch entry b becomes what entry ``index[b]`` was: beams that survive (the batch may change its size)."""
        _check_index(index)
        if self._k is None or self._v is None:
            return
        if self._k.ndim < 4:
            raise ValueError(f"keys of shape {list(self._k.shape)} have no batch dimension to reorder")
        batch = self._k.shape[0]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise ValueError(
                f"index goes from {int(index.min())} to {int(index.max())}; this cache has entries 0 … {batch - 1}"
            )
        self._k, self._v = (self._selected(x, index.to(x.device)) for x in (self._k, self._v))

    def _selected(self, buffer: Tensor, index: Tensor) -> Tensor:
        """Entries of a buffer, with as much room as before; only what is held is copied."""
        room = buffer.new_empty(index.shape[0], *buffer.shape[1:])
        room[..., : self._length, :] = buffer[..., : self._length, :].index_select(0, index)
        return room

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """A step that raises leaves the cache as it was before, so that it can be tried again."""
        return _AllOrNothing((self,))

    def _fits(self, k: Tensor, v: Tensor) -> None:
        if k.ndim < 3 or v.shape[:-1] != k.shape[:-1]:
            raise ValueError(
                f"k has shape {list(k.shape)} and v {list(v.shape)}; they must be [*B, G, t, D] and [*B, G, t, E]"
            )
        if self._k is None or self._v is None:
            return
        for name, new, old in (("k", k, self._k), ("v", v, self._v)):
            if new.shape[:-2] != old.shape[:-2] or new.shape[-1] != old.shape[-1]:
                expected = [*old.shape[:-2], "t", old.shape[-1]]
                raise ValueError(
                    f"{name} has shape {list(new.shape)}, but this cache was begun with {expected}".replace("'", "")
                )
            if new.dtype != old.dtype or new.device != old.device:
                raise ValueError(
                    f"{name} is {new.dtype} on {new.device}, but this cache holds {old.dtype} on {old.device}"
                )

    def _move(self, k: Tensor, v: Tensor, end: int) -> None:
        """Move to buffers with room for at least ``end`` keys: twice the old room, and what was asked for."""
        room = max(end, self.capacity, 0 if self._k is None else 2 * self._k.shape[-2])
        new_k, new_v = (x.new_empty(*x.shape[:-2], room, x.shape[-1]) for x in (k, v))
        if self._length:
            new_k[..., : self._length, :], new_v[..., : self._length, :] = self.get()
        self._k, self._v = new_k, new_v


@dataclass
class BlockCache:
    """The caches of one block: ``own`` for self-attention, ``cross`` for cross-attention (unused without one).

    >>> block, cache = regard.nn.make_block(6, heads=3, hidden=12), BlockCache()
    >>> with torch.no_grad():
    ...     y = block(torch.randn(2, 5, 6), mask=regard.Causal(), cache=cache)
    >>> len(cache.own), len(cache.cross)
    (5, 0)
    """

    own: KeyValueCache = field(default_factory=KeyValueCache)
    cross: KeyValueCache = field(default_factory=KeyValueCache)

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """A step that raises leaves both as they were before."""
        return _AllOrNothing((self.own, self.cross))


class DecoderCache:
    """One ``BlockCache`` a block; ``length`` is the number of tokens read so far. ``Decoder.new_cache`` makes one.

    >>> decoder = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> cache = decoder.new_cache()
    >>> with torch.no_grad():
    ...     logits = decoder(torch.tensor([[3, 1, 4, 1, 5]]), cache=cache)
    >>> cache.length, len(cache.layers)
    (5, 2)
    >>> cache.crop(3)  # as if the last two had never been read
    >>> cache.length
    3
    """

    def __init__(self, layers: int, capacity: int = 0) -> None:
        self.layers = [BlockCache(KeyValueCache(capacity)) for _ in range(integer("layers", layers, least=1))]

    @property
    def length(self) -> int:
        """How many tokens every block has read."""
        return len(self.layers[0].own)

    def reset(self) -> None:
        """Forget everything, the context too."""
        for layer in self.layers:
            layer.own.reset()
            layer.cross.reset()

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens; the context stays."""
        for layer in self.layers:
            layer.own.crop(length)

    def reorder(self, index: Tensor) -> None:
        """Batch entry b becomes what entry ``index[b]`` was, its context included."""
        for layer in self.layers:
            layer.own.reorder(index)
            layer.cross.reorder(index)

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """A step that raises leaves every block's caches as they were before: none has read what another has not."""
        return _AllOrNothing([part for layer in self.layers for part in (layer.own, layer.cross)])

    def __repr__(self) -> str:
        return f"DecoderCache({len(self.layers)} layers, {self.length} tokens)"


class _AllOrNothing(AbstractContextManager[None]):
    """Caches as they were before, should anything raise; inside another one that holds them it has nothing to do."""

    def __init__(self, caches: Sequence[KeyValueCache]) -> None:
        self.caches = () if caches[0].held else caches

    def __enter__(self) -> None:
        self.before = [(cache, cache._k, cache._v, cache._length, cache.fixed) for cache in self.caches]
        for cache in self.caches:
            cache.held = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for cache, k, v, length, fixed in self.before:
            cache.held = False
            if kind is not None:
                cache._k, cache._v, cache._length, cache.fixed = k, v, length, fixed


def _no_gradients(k: Tensor, v: Tensor) -> None:
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise ValueError(
            "a key/value cache keeps no gradients, but k or v requires them: decode under torch.no_grad(), "
            "or train without a cache"
        )


def _check_index(index: Tensor) -> None:
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        given = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"index must be a tensor of whole numbers (int64 or int32), got {given}")
    if index.ndim != 1:
        raise ValueError(f"index has shape {list(index.shape)}; it must be [batch], the old entry of each new one")


def _sealed(buffer: Tensor) -> bool:
    """A buffer made in inference mode cannot be written outside it."""
    return buffer.is_inference() and not torch.is_inference_mode_enabled()
