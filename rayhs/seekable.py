"""The position of a read-only file whose bytes are fetched, not streamed."""

from __future__ import annotations

import io


class SeekableFile(io.RawIOBase):
    """A readable file of ``size`` bytes; what a subclass reads begins at ``_position``."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Raises OSError for a place before the start, as files do."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position
