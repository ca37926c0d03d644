"""What an order to stop means to verbs that take long."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

P = ParamSpec("P")


@contextmanager
def terminable(on_progress: Callable[P, None]) -> Iterator[Callable[P, None]]:
    """SIGTERM is taken as Ctrl-C: shards are finished or handed back, and the exit code tells.

    Python drops an exception that strikes while it clears up behind an import or an object; the progress to be
    given to the verb raises it again.
    """
    ordered = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal ordered
        ordered = True
        raise KeyboardInterrupt

    def progress(*arguments: P.args, **named: P.kwargs) -> None:
        if ordered:
            raise KeyboardInterrupt
        on_progress(*arguments, **named)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield progress
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
