"""An object of a store as a seekable file of exact range reads, for pyarrow."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayhs.store.base import Store


class RangeFile(io.RawIOBase):
    """Unbuffered: pyarrow asks for a footer or a column chunk at a time."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._name, self._size = store, name, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1, /) -> Any:
        left = max(self._size - self._position, 0)
        length = left if size is None or size < 0 else min(size, left)
        (view,) = self._store.get_ranges(self._name, [(self._position, length)])
        self._position += length
        # pyarrow takes any buffer here, without a copy.
        return view

    def readinto(self, buffer: Any, /) -> int:
        view = self.read(len(buffer))
        buffer[: len(view)] = view
        return len(view)
