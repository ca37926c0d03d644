"""An object of a store as a seekable file of exact range reads, for pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rayhs.seekable import SeekableFile

if TYPE_CHECKING:
    from rayhs.store.base import Store


class RangeFile(SeekableFile):
    """Unbuffered: pyarrow asks for a footer or a column chunk at a time."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        super().__init__(size)
        self._store, self._name = store, name

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
