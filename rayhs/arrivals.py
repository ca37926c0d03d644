"""Waiting for staged samples: one poll of the staging directory serves every coroutine that waits."""

from __future__ import annotations

import asyncio

from rayhs.errors import SampleError
from rayhs.staging import StagingArea

_POLL_S = 0.003
HANDOVER_TIMEOUT_S = 300.0


class Arrivals:
    """Hands staged samples of one area to whoever waits for their key. One event loop only."""

    def __init__(self, area: StagingArea) -> None:
        self._area = area
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._poller: asyncio.Task[None] | None = None

    async def wait(self, key: str, timeout: float = HANDOVER_TIMEOUT_S) -> memoryview:
        """The staged file of ``key``, once it has arrived.

        Raises:
            SampleError: its failure was handed over, or nothing came within ``timeout`` seconds.
        """
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = arrived
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            async with asyncio.timeout(timeout):
                await arrived
        except TimeoutError:
            raise SampleError(
                f"no states: the engine answered, but none were handed over within {timeout:.0f} s"
            ) from None
        finally:
            self._waiting.pop(key, None)
        return self._area.take(key)

    async def _poll(self) -> None:
        while self._waiting:
            for key in self._area.arrivals() & self._waiting.keys():
                if not self._waiting[key].done():
                    self._waiting[key].set_result(None)
            await asyncio.sleep(_POLL_S)
