"""How an object's bytes are cut: close ranges joined for reading, buffers gathered into upload parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

import numpy as np

from rayhs.store.base import Ranges, short_answer

PART_BYTES = 8 << 20
_MAX_PARTS = 10_000  # S3's limit
_MERGE_GAP = 1 << 20  # a request costs more than this many bytes


def spans_of(ranges: Ranges) -> list[tuple[int, int]]:
    """Sorted ``(start, end)`` that cover the ranges, close ones in one.

    Done here because obstore, merging ranges itself, panics when the object is too short for one.
    """
    spans: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if length and spans and start - spans[-1][1] <= _MERGE_GAP:
            spans[-1] = (spans[-1][0], max(spans[-1][1], start + length))
        elif length:
            spans.append((start, start + length))
    return spans


def cut_out(
    where: str, spans: Sequence[tuple[int, int]], views: Sequence[memoryview], start: int, length: int
) -> memoryview:
    """The range out of the views of its spans; StoreError when it is not all there."""
    if length == 0:
        return memoryview(b"")
    span = bisect_right(spans, start, key=itemgetter(0)) - 1
    offset = start - spans[span][0]
    view = views[span][offset : offset + length]
    if view.nbytes != length:
        raise short_answer(where, start, length, view.nbytes)
    return view


class Watched:
    """An iterator that remembers whether it raised, to tell its errors from the store's."""

    def __init__(self, views: Iterator[memoryview]) -> None:
        self._views = views
        self.raised = False

    def __iter__(self) -> Watched:
        return self

    def __next__(self) -> memoryview:
        try:
            return next(self._views)
        except StopIteration:
            raise
        except BaseException:
            self.raised = True
            raise


def part_size(size: int) -> int:
    """Bytes of a part, for an object of ``size`` bytes."""
    smallest = -(-size // _MAX_PARTS)
    return max(PART_BYTES, -(-smallest // (1 << 20)) << 20)


def parts_of(views: Iterable[memoryview], size: int, part_bytes: int) -> Iterator[memoryview]:
    """Copy views into parts of ``part_bytes``: obstore keeps what it is given until it is sent."""
    left, filled = size, 0
    part = np.empty(min(part_bytes, left), np.uint8)
    for view in views:
        source = np.frombuffer(view, np.uint8)
        while source.size:
            count = min(source.size, part.size - filled)
            part[filled : filled + count] = source[:count]
            source, filled = source[count:], filled + count
            if filled == part.size:
                yield part.data
                left -= filled
                part, filled = np.empty(min(part_bytes, left), np.uint8), 0
