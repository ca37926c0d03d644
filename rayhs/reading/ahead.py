"""Reads that run ahead of the one who uses their answers: in order, and so many that memory stays bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_order(calls: Iterable[Callable[[], T]], ahead: int, threads: int) -> Generator[T, None, None]:
    """What ``calls`` return, one after the other; an error comes at its call's turn.

    Up to ``ahead`` answers are in memory or on their way besides the one in use. Closing it waits for the
    calls that have begun.
    """
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="rayhs-read")
    try:
        for call in calls:
            pending.append(pool.submit(call))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()  # not shutdown's cancel_futures: it fails where the interpreter is ending
        pool.shutdown()
