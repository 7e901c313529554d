"""A cache that is bounded in bytes and computes each value once, even if several threads request it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from cachetools import LRUCache

T = TypeVar("T")
Key = tuple[Any, ...]


class Cache:
    """Values by key. Beyond ``max_bytes``, the least recently used are dropped; a single larger value can stay."""

    def __init__(self, max_bytes: int) -> None:
        # Each entry is (value, bytes). cachetools refuses an entry above max_bytes, so larger sizes are cut to it.
        self._entries: LRUCache[Key, tuple[Any, int]] = LRUCache(max_bytes, lambda entry: min(entry[1], max_bytes))
        self._computing: set[Key] = set()
        self._changed = threading.Condition()

    def get(self, key: Key, size: Callable[[T], int], compute: Callable[[], T]) -> T:
        """Return the value of ``key``: from the cache, or from ``compute()``. ``size(value)`` returns its bytes."""
        with self._changed:
            # If another thread is computing this value, wait for it instead of computing it twice.
            while key in self._computing:
                self._changed.wait()
            if key in self._entries:
                cached: T = self._entries[key][0]
                return cached
            self._computing.add(key)
        try:
            value = compute()
            with self._changed:
                self._entries[key] = (value, size(value))
            return value
        finally:
            with self._changed:
                self._computing.discard(key)
                self._changed.notify_all()

    def drop(self, first: str) -> None:
        """Drop all values whose key, a tuple, has ``first`` as its first element."""
        with self._changed:
            for key in [key for key in self._entries if key[0] == first]:
                del self._entries[key]
