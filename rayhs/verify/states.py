"""What verify learns as the bytes of an object pass by: its checksum, and the state of each sample's states."""

from __future__ import annotations

import numpy as np
import xxhash

from rayhs.codec import Array
from rayhs.errors import FormatError
from rayhs.store import Store

_CHUNK = 8 * 2**20
_NOT_FINITE = {
    # dtype: (unsigned view, the bits that are all set in what is not finite)
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float8_e4m3fn": (np.uint8, 0x7F),
}


class ObjectStream:
    """Reads an object front to back in chunks of 8 MiB and hashes it on the way."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self.size = size
        self._fetched = 0
        self._buffer = memoryview(b"")
        self._hash = xxhash.xxh3_128()

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return self.size - self._fetched + len(self._buffer)

    def read(self, count: int) -> memoryview:
        """The next ``count`` bytes; raises FormatError past the end."""
        if count > self.left:
            raise FormatError(f"ends {count - self.left} bytes early")
        if count <= len(self._buffer):
            part, self._buffer = self._buffer[:count], self._buffer[count:]
            return part
        joined = bytearray(self._buffer)
        self._buffer = memoryview(b"")
        while len(joined) < count:
            chunk = self._fetch()
            taken = min(len(chunk), count - len(joined))
            joined += chunk[:taken]
            self._buffer = chunk[taken:]
        return memoryview(joined)

    def finish(self) -> str:
        """Read what is left; the xxh3_128 of the whole object in hex."""
        while self._fetched < self.size:
            self._fetch()
        return self._hash.hexdigest()

    def _fetch(self) -> memoryview:
        length = min(_CHUNK, self.size - self._fetched)
        (chunk,) = self._store.get_ranges(self._name, [(self._fetched, length)])
        self._fetched += length
        self._hash.update(chunk)
        return memoryview(chunk)


def differs_from_checksum(store: Store, name: str, checksum: str) -> bool:
    """Whether the object's xxh3_128 is another (it is read whole); False where there is none."""
    size = store.size(name)
    return size is not None and ObjectStream(store, name, size).finish() != checksum


class SampleState:
    """What is learnt of one sample's states as their bytes pass by, a whole number of rows at a time."""

    def __init__(self, token_ids: Array) -> None:
        self._token_ids = token_ids
        self.hash = xxhash.xxh3_64()
        self.not_finite: set[int] = set()
        self.zero: set[int] = set()
        self.constant: set[int] = set()
        self._first: Array | None = None
        self._layer = 0

    def start_layer(self, layer: int, row_bytes: int) -> None:
        self._layer, self._row_bytes, self._first = layer, row_bytes, None
        self.zero.add(layer)
        # Equal tokens have equal states in many models; only different ones must differ.
        if len(np.unique(self._token_ids)) > 1:
            self.constant.add(layer)

    def update(self, data: Array, dtype: str) -> None:
        """``data``: bytes of whole rows of the current layer."""
        self.hash.update(data.data)
        kind, bits = _NOT_FINITE[dtype]
        if ((data.view(kind) & bits) == bits).any():
            self.not_finite.add(self._layer)
        if self._layer in self.zero and data.any():
            self.zero.discard(self._layer)
        if self._layer in self.constant:
            rows = data.reshape(-1, self._row_bytes)
            if self._first is None:
                self._first = rows[0].copy()
            if not (rows == self._first).all():
                self.constant.discard(self._layer)

    def add_scales(self, layer: int, scales: Array, largest: float) -> None:
        """``scales`` float32 `[tokens]` of a layer; those of all layers, in order, after all states."""
        self.hash.update(np.ascontiguousarray(scales).view(np.uint8).data)
        if not ((scales > 0) & (scales <= largest)).all():
            self.not_finite.add(layer)
        if (scales != scales[0]).any():
            self.constant.discard(layer)
