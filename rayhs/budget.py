"""A budget of bytes that coroutines wait for, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """At most ``limit`` bytes reserved at any time.

    Strictly first come, first served: a large reservation is not overtaken by small ones for ever.
    One event loop only.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[None]:
        """Hold ``nbytes`` of the budget; waits for room. ``nbytes`` must not be over the limit."""
        if nbytes > self.limit:
            raise ValueError(f"{nbytes} bytes never fit a budget of {self.limit}")
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.cancelled() or not granted.done():
                self._waiting = deque(entry for entry in self._waiting if entry[1] is not granted)
            else:
                self.used -= nbytes
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.limit:
            nbytes, granted = self._waiting.popleft()
            if granted.cancelled():
                continue
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            granted.set_result(None)
