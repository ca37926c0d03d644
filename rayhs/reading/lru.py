"""A small cache for many threads that forgets what was used longest ago."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, cast

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: Any = None
        self.filled = False


class LruCache(Generic[K, V]):
    """Holds ``capacity`` values. A pickled copy starts empty."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: OrderedDict[K, _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of ``key``; many threads asking at once make it once. An error is not kept."""
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            if len(self._slots) > self._capacity:
                self._slots.popitem(last=False)
        with slot.lock:
            if not slot.filled:
                slot.value = make()
                slot.filled = True
            return cast("V", slot.value)

    def __reduce__(self) -> tuple[type[LruCache[K, V]], tuple[int]]:
        return type(self), (self._capacity,)
