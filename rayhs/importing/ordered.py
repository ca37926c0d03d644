"""Many small reads at once, their results in order, a bounded number of them ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TypeVar

from rayhs.reading import ahead

THREADS = 16  # files may be on a network file system, where one read is mostly waiting
CHUNK = 64  # a future costs as much as reading a small file

A = TypeVar("A")
B = TypeVar("B")


def in_order(work: Callable[[A], B], items: Iterable[A], threads: int = THREADS, chunk: int = CHUNK) -> Iterator[B]:
    """``work`` of each item, in the order of ``items``, ``chunk`` of them a thread; what it raises comes out."""

    left = iter(items)
    parts = iter(lambda: list(islice(left, chunk)), [])
    with closing(ahead.in_order((partial(_each, work, part) for part in parts), 2 * threads, threads)) as done:
        for results in done:
            yield from results


def _each(work: Callable[[A], B], part: list[A]) -> list[B]:
    return [work(item) for item in part]
