"""Ray Data's threads in the driver: not interrupted in their middle, and ended before Ray is.

A KeyboardInterrupt inside of an iteration finds Ray Data's locks and queues as they are, and may leave it waiting for
ever. And a thread of Ray Data that outlives `ray.shutdown` joins Ray anew, or ends the whole process with exit code 1.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
_NAMES = ("StreamingExecutor", "iter_threaded", "rayhs-rows")


def iterated_apart(rows: Iterable[T], to_the_end: bool = False) -> Generator[T, None, None]:
    """The same rows, iterated in a thread; an interruption meets the caller's thread only, where it waits for them.

    Args:
        to_the_end: an iteration that is left goes on unseen; without it, it ends with its next row, and Ray Data
            kills the actors of the rest.

    Raises:
        Exception: what the iteration raised.
    """
    handed: queue.SimpleQueue[tuple[T] | Exception | None] = queue.SimpleQueue()
    unwanted = threading.Event()
    iteration = threading.Thread(target=_hand_on, args=(rows, handed, unwanted), name="rayhs-rows", daemon=True)
    iteration.start()
    try:
        while (item := handed.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item[0]
    finally:
        if not to_the_end:
            unwanted.set()


def _hand_on(
    rows: Iterable[T], handed: queue.SimpleQueue[tuple[T] | Exception | None], unwanted: threading.Event
) -> None:
    try:
        for row in rows:
            handed.put((row,))
            if unwanted.is_set():
                return
    except Exception as error:  # noqa: BLE001 - raised again where the rows are wanted
        handed.put(error)
    handed.put(None)


def end_ray_data(within: float) -> bool:
    """End every execution of Ray Data in this process; whether all its threads ended in so many seconds."""
    from ray.data._internal.execution.streaming_executor import StreamingExecutor
    from ray.exceptions import RayError

    deadline = time.monotonic() + within
    for thread in threading.enumerate():
        if isinstance(thread, StreamingExecutor):
            with contextlib.suppress(RayError):  # of a cluster that is gone
                thread.shutdown(force=False)
    for thread in threading.enumerate():
        if thread.name.startswith(_NAMES):
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.name.startswith(_NAMES) for thread in threading.enumerate())
