"""What an order to stop means to verbs that take long."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is taken as Ctrl-C: shards are finished or handed back, and the exit code tells."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
