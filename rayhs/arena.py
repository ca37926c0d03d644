"""Staging memory that is allocated once: one file, mapped by the engine's worker and by the reader.

A file of its own for every sample costs more than the copy into it: each of its pages is zeroed and
mapped twice. Pages of the arena are mapped once, and can be registered with CUDA.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from pathlib import Path

from rayhs.errors import RayhsError

_ALIGN = 4096


class NoRoomNow(RayhsError):
    """The file system has no room at the moment, whatever the limit: others fill it too."""


def allocate_file(path: Path, nbytes: int) -> mmap.mmap:
    """Create a file of ``nbytes`` bytes whose pages are reserved, and map it.

    Raises:
        NoRoomNow: the file system has no room for it; nothing is left behind.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    except OSError as error:
        path.unlink()
        raise NoRoomNow(f"{path.parent}: {error.strerror} for {nbytes} bytes; free some of it") from None
    finally:
        os.close(descriptor)


class Arena:
    """The writer's side: memory handed out in pieces and taken back. One thread only."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.memory = memoryview(allocate_file(path, nbytes))
        self._used: list[tuple[int, int]] = []  # (start, end), ascending
        self._cursor = 0

    def allocate(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` free bytes; None where no gap is as large.

        Searched from the end of the last one: what was handed out together is taken back together,
        so that large gaps form behind.
        """
        size = -(-nbytes // _ALIGN) * _ALIGN
        first = bisect_left(self._used, (self._cursor, 0))
        order = [*range(first, len(self._used) + 1), *range(first)]
        for place in order:
            start = self._used[place - 1][1] if place else 0
            end = self._used[place][0] if place < len(self._used) else len(self.memory)
            if end - start >= size:
                self._used.insert(place, (start, start + size))
                self._cursor = start + size
                return start
        return None

    def free(self, offset: int) -> None:
        place = bisect_left(self._used, (offset, 0))
        assert self._used[place][0] == offset
        del self._used[place]
