"""Key/value caches for decoding: each token's keys and values are computed once and read at every later step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard._checks import check_integer
from regard._errors import RegardError, RegardTypeError


class KeyValueCache:
    """The keys ``[*B, G, m, D]`` and values ``[*B, G, m, E]`` of one attention layer, for inference.

    - Self-attention calls ``append``: it writes the new rows behind the old ones and returns views of all rows. The
      memory doubles when it is full, so t tokens cost O(t) copied rows in total. A view is valid until the next
      ``append``, ``crop`` or ``reorder``.
    - Cross-attention calls ``freeze`` once, with the keys and values of the context. Later calls read them and do not
      look at the context again; call ``reset`` before you use another context.
    - A cache writes in place and keeps no graph. Keys that need gradients are refused: decode under
      ``torch.no_grad()`` or ``torch.inference_mode()``.

    - ``capacity``: number of keys to reserve memory for at the start (default 0); the cache may grow beyond it.

    >>> cache = KeyValueCache()
    >>> k, v = cache.append(torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 5, 11))
    >>> k, v = cache.append(torch.ones(2, 3, 1, 7), torch.ones(2, 3, 1, 11))
    >>> len(cache), list(k.shape), list(v.shape)
    (6, [2, 3, 6, 7], [2, 3, 6, 11])
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = check_integer("capacity", capacity)
        self.in_rollback = False  # True inside ``rollback_on_error``, which restores this cache if a step raises
        self.reset()

    def reset(self) -> None:
        """Remove all keys and values and free their memory."""
        self._k: Tensor | None = None  # [*B, G, capacity, D]; rows from _length on are free
        self._v: Tensor | None = None  # [*B, G, capacity, E]
        self._length = 0
        self.frozen = False  # True for a context's keys, which never grow

    def __len__(self) -> int:
        """m, the number of keys in the cache."""
        return self._length

    def __bool__(self) -> bool:
        """True, even for an empty cache: ``if cache`` tests for None, not for the length."""
        return True

    def __repr__(self) -> str:
        if self._k is None:
            return "KeyValueCache(empty)"
        content = f"{self._length} keys, capacity {self._k.shape[-2]}"
        if self.frozen:
            content += ", frozen"
        return f"KeyValueCache({content})"

    def get(self) -> tuple[Tensor, Tensor]:
        """Views of all keys and all values in the cache."""
        if self._k is None or self._v is None:
            raise RegardError("the cache is empty: nothing was appended yet")
        return self._k.narrow(-2, 0, self._length), self._v.narrow(-2, 0, self._length)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``k [*B, G, t, D]`` and ``v [*B, G, t, E]``; return all keys and all values."""
        if self.frozen:
            raise RegardError(
                "this cache holds a context's keys (cross-attention) and cannot grow; self-attention needs its own"
            )
        _refuse_gradients(k, v)
        self._check_new_rows(k, v)

        # Allocate memory for the new rows first: the buffers may be full, or read-only outside inference mode.
        end = self._length + k.shape[-2]
        if self._k is None or self._v is None or end > self._k.shape[-2] or _is_read_only(self._k):
            self._reallocate(k, v, end)
        assert self._k is not None and self._v is not None
        self._k.narrow(-2, self._length, end - self._length).copy_(k)
        self._v.narrow(-2, self._length, end - self._length).copy_(v)
        self._length = end
        return self.get()

    def reserve_row(self, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """The buffers ``[B, G, ≥ m + 1, ·]``, with free memory for one more row; for the native decode step.

        The caller writes row m and then calls ``advance``. Returns None if the cache is empty, or if it holds another
        batch size or dtype.
        """
        if self._k is None or self._v is None or self.frozen or self._k.ndim != 4 or _is_read_only(self._k):
            return None
        if self._k.shape[0] != batch or self._k.dtype != dtype or not self._k.is_cpu:
            return None
        if self._length == self._k.shape[-2]:  # full
            self._reallocate(self._k, self._v, self._length + 1)
        return self._k, self._v

    def advance(self, rows: int) -> None:
        """Count rows that the caller wrote into the buffers of ``reserve_row``."""
        self._length += rows

    def freeze(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a context's keys and values without copying; nothing can be appended to them."""
        if self._k is not None:
            raise RegardError(f"this cache already holds {self._length} keys; cross-attention needs a cache of its own")
        _refuse_gradients(k, v)
        self._check_new_rows(k, v)
        self._k = k  # not copied: nothing writes to a frozen cache
        self._v = v
        self._length = k.shape[-2]
        self.frozen = True
        return k, v

    def crop(self, length: int) -> None:
        """Keep the first ``length`` keys and drop the later ones; the memory stays reserved."""
        if self.frozen:
            raise RegardError("this cache holds a context's keys (cross-attention), which cannot be cropped")
        if check_integer("length", length) > self._length:
            raise RegardError(f"length is {length}, but the cache holds {self._length} keys")
        self._length = length

    def reorder(self, index: Tensor) -> None:
        """Replace batch entry b by the old entry ``index[b]`` (beam search); the batch size may change."""
        if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
            kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise RegardTypeError(f"index must be a tensor of integers (int64 or int32), got {kind}")
        if index.ndim != 1:
            raise RegardError(f"index has shape {list(index.shape)}; it must be [batch], the old entry of each new one")
        if self._k is None or self._v is None:
            return
        if self._k.ndim < 4:
            raise RegardError(f"keys of shape {list(self._k.shape)} have no batch dimension to reorder")
        batch = self._k.shape[0]
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise RegardError(
                f"index goes from {int(index.min())} to {int(index.max())}; this cache has entries 0 … {batch - 1}"
            )
        self._k = self._select(self._k, index)
        self._v = self._select(self._v, index)

    def _select(self, buffer: Tensor, index: Tensor) -> Tensor:
        """Entries of a buffer, with the same capacity; only the rows in use are copied."""
        selected = buffer.new_empty(index.shape[0], *buffer.shape[1:])  # [new B, G, capacity, D]
        rows = buffer[..., : self._length, :]
        selected[..., : self._length, :] = rows.index_select(0, index.to(buffer.device))
        return selected

    def _check_new_rows(self, k: Tensor, v: Tensor) -> None:
        """Refuse rows that do not fit each other, or do not fit the rows in the cache."""
        if k.ndim < 3 or v.shape[:-1] != k.shape[:-1]:
            raise RegardError(f"k has shape {list(k.shape)} and v {list(v.shape)}, not [*B, G, t, D] and [*B, G, t, E]")
        if self._k is None or self._v is None:
            return
        for name, new, old in (("k", k, self._k), ("v", v, self._v)):
            if new.shape[:-2] != old.shape[:-2] or new.shape[-1] != old.shape[-1]:
                expected = ", ".join(map(str, [*old.shape[:-2], "t", old.shape[-1]]))
                raise RegardError(f"{name} has shape {list(new.shape)}, but this cache takes [{expected}]")
            if new.dtype != old.dtype or new.device != old.device:
                raise RegardError(
                    f"{name} is {new.dtype} on {new.device}, but this cache holds {old.dtype} on {old.device}"
                )

    def _reallocate(self, k: Tensor, v: Tensor, end: int) -> None:
        """Move to buffers for at least ``end`` keys, and at least twice the old capacity."""
        capacity = max(end, self.capacity)
        if self._k is not None:
            capacity = max(capacity, 2 * self._k.shape[-2])
        new_k = k.new_empty(*k.shape[:-2], capacity, k.shape[-1])  # [*B, G, capacity, D]
        new_v = v.new_empty(*v.shape[:-2], capacity, v.shape[-1])  # [*B, G, capacity, E]
        if self._length:
            new_k[..., : self._length, :], new_v[..., : self._length, :] = self.get()
        self._k = new_k
        self._v = new_v


@dataclass
class BlockCache:
    """The caches of one block: ``attention`` for self-attention, ``cross`` for cross-attention (empty if unused).

    >>> block, cache = regard.nn.make_block(6, heads=3, hidden=12), BlockCache()
    >>> with torch.no_grad():
    ...     y = block(torch.randn(2, 5, 6), mask=regard.Causal(), cache=cache)
    >>> len(cache.attention), len(cache.cross)
    (5, 0)
    """

    attention: KeyValueCache = field(default_factory=KeyValueCache)
    cross: KeyValueCache = field(default_factory=KeyValueCache)


class DecoderCache:
    """One ``BlockCache`` per block of a decoder; ``Decoder.new_cache`` creates one.

    - ``layers``: number of blocks.
    - ``capacity``: number of tokens to reserve memory for at the start (default 0).

    >>> decoder = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> cache = decoder.new_cache()
    >>> with torch.no_grad():
    ...     logits = decoder(torch.tensor([[3, 1, 4, 1, 5]]), cache=cache)
    >>> cache.length, len(cache.layers)
    (5, 2)
    >>> cache.crop(3)  # drop the last two tokens
    >>> cache.length
    3
    """

    def __init__(self, layers: int, capacity: int = 0) -> None:
        self.layers = [BlockCache(KeyValueCache(capacity)) for _ in range(check_integer("layers", layers, least=1))]

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""
        return len(self.layers[0].attention)

    def reset(self) -> None:
        """Remove everything, the context included."""
        for layer in self.layers:
            layer.attention.reset()
            layer.cross.reset()

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens; the context stays."""
        for layer in self.layers:
            layer.attention.crop(length)

    def reorder(self, index: Tensor) -> None:
        """Replace batch entry b, and its context, by the old entry ``index[b]``."""
        for layer in self.layers:
            layer.attention.reorder(index)
            layer.cross.reorder(index)

    def __repr__(self) -> str:
        return f"DecoderCache({len(self.layers)} layers, {self.length} tokens)"


def rollback_on_error(cache: KeyValueCache | BlockCache | DecoderCache | None) -> AbstractContextManager[None]:
    """A context manager that restores all parts of a cache if its body raises, so that the step can be repeated."""
    if cache is None:
        return nullcontext()
    if isinstance(cache, KeyValueCache):
        return _Rollback([cache])
    if isinstance(cache, BlockCache):
        return _Rollback([cache.attention, cache.cross])
    caches = []
    for layer in cache.layers:
        caches += [layer.attention, layer.cross]
    return _Rollback(caches)


class _Rollback(AbstractContextManager[None]):
    """Restores caches if the body raises; a nested rollback leaves this to the outermost one."""

    def __init__(self, caches: list[KeyValueCache]) -> None:
        # The outermost rollback restores: all caches of a decoder must go back to the same token.
        self.caches = [cache for cache in caches if not cache.in_rollback]

    def __enter__(self) -> None:
        self.before = [(cache, cache._k, cache._v, cache._length, cache.frozen) for cache in self.caches]
        for cache in self.caches:
            cache.in_rollback = True

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for cache, k, v, length, frozen in self.before:
            cache.in_rollback = False
            if error is not None:
                cache._k = k
                cache._v = v
                cache._length = length
                cache.frozen = frozen


def _refuse_gradients(k: Tensor, v: Tensor) -> None:
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RegardError(
            "a cache keeps no gradients, but k or v requires them: decode under torch.no_grad(), or train without one"
        )


def _is_read_only(buffer: Tensor) -> bool:
    """True for a buffer created in inference mode while that mode is off: torch refuses to write to it."""
    return buffer.is_inference() and not torch.is_inference_mode_enabled()
