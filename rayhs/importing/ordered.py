"""Many small reads at once, their results in order, a bounded number of them ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

THREADS = 16  # files may be on a network file system, where one read is mostly waiting
CHUNK = 64  # a future costs as much as reading a small file

A = TypeVar("A")
B = TypeVar("B")


def in_order(work: Callable[[A], B], items: Iterable[A], threads: int = THREADS, chunk: int = CHUNK) -> Iterator[B]:
    """``work`` of each item, in the order of ``items``, ``chunk`` of them a thread; what it raises comes out."""

    def run(part: list[A]) -> list[B]:
        return [work(item) for item in part]

    left = iter(items)
    pending: deque[Future[list[B]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="rayhs-import") as pool:
        try:
            while part := list(islice(left, chunk)):
                pending.append(pool.submit(run, part))
                if len(pending) > 2 * threads:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
